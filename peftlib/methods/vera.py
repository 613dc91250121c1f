"""VeRA: random projections, frozen and shared, between learned scales."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Vera(method.Method):
  """`x @ w + ((x @ a) * d) @ b * l`: only `d` and `l` are trained.

  Example:
    >>> specs = Vera(rank=4).variables(method.Weight((8,), (6,)))
    >>> [name for name, spec in specs.items() if spec.trainable]
    ['vera_lambda_b', 'vera_lambda_d']

  Attributes:
    rank: Rank of the projections, at least 1.
    projection_key: Seed of the projections: equal for all weights.
    projection_shape: Inputs and outputs of the projections, of which a weight
      uses the first ones: the largest of all weights that share them. None
      makes them of each weight's own size.
    d_initial: Start of `d`.

  References:
    Kopiczko et al., VeRA: Vector-based Random Matrix Adaptation, 2023.
  """

  name: ClassVar[str] = 'vera'
  reads_weight: ClassVar[bool] = False
  starts_from_weight: ClassVar[bool] = False

  rank: int = 256
  projection_key: int = 0
  projection_shape: tuple[int, int] | None = None
  d_initial: float = 0.1

  def __post_init__(self) -> None:
    super().__post_init__()
    method.check_positive(self, 'rank')
    method.check_field(
      self,
      'projection_key',
      method.is_int(self.projection_key),
      'an int',
    )
    shape = self.projection_shape
    method.check_field(
      self,
      'projection_shape',
      shape is None
      or (
        isinstance(shape, tuple)
        and len(shape) == 2
        and all(method.is_int(n) and n >= 1 for n in shape)
      ),
      'None or (inputs, outputs)',
    )
    method.check_field(
      self, 'd_initial', method.is_number(self.d_initial), 'a finite number'
    )

  def check(self, weight: method.Weight) -> None:
    """Refuses weights that are larger than the projections."""
    inputs, outputs = self._shape(weight)
    if weight.rows > inputs or weight.columns > outputs:
      raise ValueError(
        f'Vera.projection_shape={self.projection_shape}: smaller than'
        f' {weight.label} of ({weight.rows}, {weight.columns}).'
      )

  def variables(self, weight: method.Weight) -> dict[str, method.VariableSpec]:
    """`vera_lambda_b`, `vera_lambda_d`; frozen: `vera_a`, `vera_b`."""
    return {
      'vera_lambda_b': method.VariableSpec((method.OUTPUTS,)),
      'vera_lambda_d': method.VariableSpec((self.rank,)),
      'vera_a': method.VariableSpec((method.INPUTS, self.rank), False),
      'vera_b': method.VariableSpec((self.rank, method.OUTPUTS), False),
    }

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """Projections by `projection_key`, whatever the key; `l` zero."""
    inputs, outputs = self._shape(weight)
    a_key, b_key = jax.random.split(jax.random.key(self.projection_key))
    a = jax.nn.initializers.he_uniform()(a_key, (inputs, self.rank))
    b = jax.nn.initializers.he_uniform()(b_key, (self.rank, outputs))
    return {
      'vera_lambda_b': jnp.zeros(weight.columns),
      'vera_lambda_d': jnp.full(self.rank, self.d_initial),
      'vera_a': a[: weight.rows],
      'vera_b': b[:, : weight.columns],
    }

  def apply(
    self, x: jax.Array, op: method.FrozenOp, v: method.Variables
  ) -> jax.Array:
    """Adds the scaled projection."""
    out = op(x)
    a, b = self.factors(v)
    return out + op.low_rank(op.dropout(x), a, b).astype(out.dtype)

  def merge(self, value: jax.Array, v: method.Variables) -> jax.Array:
    """Adds the product."""
    a, b = self.factors(v)
    return (value + a @ b).astype(value.dtype)

  def factors(self, v: method.Variables) -> tuple[jax.Array, jax.Array]:
    """The projections, scaled."""
    return v['vera_a'] * v['vera_lambda_d'], v['vera_b'] * v['vera_lambda_b']

  def _shape(self, weight: method.Weight) -> tuple[int, int]:
    return self.projection_shape or (weight.rows, weight.columns)
