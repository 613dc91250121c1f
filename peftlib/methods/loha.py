"""LoHa: the product, element by element, of two low-rank matrices."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from peftlib.methods import initialization
from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Loha(method.Method):
  """`w + s * (a1 @ b1) * (a2 @ b2)`: up to rank * rank with twice the size.

  The factors have the layout of LyCORIS and HF peft: a (outputs, rank) and b
  (rank, inputs).

  Example:
    >>> Loha(rank=2).variables(method.Weight((8,), (6,)))['hada_w1_b'].axes
    (2, 'inputs')

  Attributes:
    rank: Rank of both matrices, at least 1.
    alpha: Numerator of the scale `alpha / rank`.

  References:
    Hyeon-Woo et al., FedPara: Low-Rank Hadamard Product for
    Communication-Efficient Federated Learning, 2021.
  """

  name: ClassVar[str] = 'loha'
  reads_weight: ClassVar[bool] = False
  starts_from_weight: ClassVar[bool] = False

  rank: int = 8
  alpha: float = 8.0

  def __post_init__(self) -> None:
    super().__post_init__()
    method.check_positive(self, 'rank')
    method.check_scale(self, 'alpha')
    method.check_no_dropout(self)

  @property
  def scale(self) -> float:
    """The factor on the update."""
    return self.alpha / self.rank

  def variables(self, weight: method.Weight) -> dict[str, method.VariableSpec]:
    """`hada_w1_a`, `hada_w1_b`, `hada_w2_a`, `hada_w2_b`."""
    a = method.VariableSpec((method.OUTPUTS, self.rank))
    b = method.VariableSpec((self.rank, method.INPUTS))
    return {'hada_w1_a': a, 'hada_w1_b': b, 'hada_w2_a': a, 'hada_w2_b': b}

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """Uniform as HF peft has them, the last one zero."""
    first, second, third = jax.random.split(key, 3)
    a, b = (weight.columns, self.rank), (self.rank, weight.rows)
    return {
      'hada_w1_a': initialization.kaiming(first, a, fan_in=self.rank),
      'hada_w1_b': initialization.kaiming(second, b, fan_in=weight.rows),
      'hada_w2_a': initialization.kaiming(third, a, fan_in=self.rank),
      'hada_w2_b': jnp.zeros(b),
    }

  def apply(
    self, x: jax.Array, op: method.FrozenOp, v: method.Variables
  ) -> jax.Array:
    """Adds the op with the update."""
    out = op(x)
    return out + op.using(self._update(v), x).astype(out.dtype)

  def merge(self, value: jax.Array, v: method.Variables) -> jax.Array:
    """Adds the update."""
    return (value + self._update(v)).astype(value.dtype)

  def _update(self, v: method.Variables) -> jax.Array:
    first = v['hada_w1_a'] @ v['hada_w1_b']
    return (first * (v['hada_w2_a'] @ v['hada_w2_b']) * self.scale).T
