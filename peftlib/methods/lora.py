"""LoRA: a low-rank update beside the frozen weight."""

import dataclasses
from typing import ClassVar

import jax
from jax.nn import initializers
import jax.numpy as jnp

from peftlib.methods import method

# One object, so that methods made without an initializer compare equal.
_HE_UNIFORM = initializers.he_uniform()


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora(method.Method):
  """LoRA: `x @ w + alpha / rank * x @ a @ b`.

  Example:
    >>> Lora(rank=8, alpha=16).scale
    2.0

  Attributes:
    rank: Rank r of the update, at least 1.
    alpha: Numerator of the scale.
    a_initializer: Initializer of `a`, called with (key, shape, dtype).
    b_initializer: Initializer of `b`; zeros make the start output equal to
      the base.
    bias: Whether the update has a bias, scaled as it is. No weight can stand
      for that, so such an adapter can't be merged.

  References:
    Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021.
  """

  name: ClassVar[str] = 'lora'
  reads_weight: ClassVar[bool] = False
  starts_from_weight: ClassVar[bool] = False

  rank: int = 16
  alpha: float = 32.0
  a_initializer: initializers.Initializer = _HE_UNIFORM
  b_initializer: initializers.Initializer = initializers.zeros
  bias: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    method.check_positive(self, 'rank')
    method.check_scale(self, 'alpha')

  @property
  def scale(self) -> float:
    """The factor on the update."""
    return self.alpha / self.rank

  def check(self, weight: method.Weight) -> None:
    """Refuses a bias where the weight isn't a linear layer's."""
    if self.bias and weight.kind != 'linear':
      raise ValueError(
        f'{type(self).__name__}.bias=True: {weight.label} is of kind'
        f' {weight.kind!r}; a bias is for linear layers.'
      )

  def check_merge(self, weight: method.Weight) -> None:
    """Refuses a bias."""
    if self.bias:
      raise ValueError(
        f'{type(self).__name__}.bias=True: the adapter of {weight.label} has a'
        ' bias, for which no weight can stand.'
      )

  def variables(self, weight: method.Weight) -> dict[str, method.VariableSpec]:
    """`lora_a` (inputs, rank), `lora_b` (rank, outputs), `lora_bias`."""
    specs = {
      'lora_a': method.VariableSpec((method.INPUTS, self.rank)),
      'lora_b': method.VariableSpec((self.rank, method.OUTPUTS)),
    }
    if self.bias:
      specs['lora_bias'] = method.VariableSpec((method.OUTPUTS,))
    return specs

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """Draws `a` and `b` by their initializers.

    The default ones of a table that is looked up are those of HF peft: `a`
    zero, `b` normal.
    """
    a_key, b_key = jax.random.split(key)
    a = (weight.rows, self.rank)
    b = (self.rank, weight.columns)
    dtype = jnp.dtype(self.dtype)
    a_init, b_init = self.a_initializer, self.b_initializer
    defaults = (_HE_UNIFORM, initializers.zeros)
    if weight.kind == 'embedding' and (a_init, b_init) == defaults:
      # A row of `a` is seen only with its token: drawn, most would stay as
      # they are, and `b` move by what few tokens say.
      a_init, b_init = initializers.zeros, initializers.normal(1.0)
    v = {'lora_a': a_init(a_key, a, dtype), 'lora_b': b_init(b_key, b, dtype)}
    return {**v, 'lora_bias': jnp.zeros(weight.columns)} if self.bias else v

  def apply(
    self, x: jax.Array, op: method.FrozenOp, v: method.Variables
  ) -> jax.Array:
    """Adds the scaled update to the base's output."""
    out = op(x)
    delta = op.low_rank(op.dropout(x), *self._scaled(v))
    if self.bias:
      delta = delta + (v['lora_bias'] * self.scale).astype(delta.dtype)
    return out + delta.astype(out.dtype)

  def factors(self, v: method.Variables) -> tuple[jax.Array, jax.Array] | None:
    """`a` and the scaled `b`; None with a bias."""
    return None if self.bias else self._scaled(v)

  def merge(self, value: jax.Array, v: method.Variables) -> jax.Array:
    """Adds the scaled product to the weight."""
    delta = v['lora_a'] @ v['lora_b'] * self.scale
    return (value + delta.astype(value.dtype)).astype(value.dtype)

  def _scaled(self, v: method.Variables) -> tuple[jax.Array, jax.Array]:
    # A factor is smaller than what it makes of the tokens.
    return v['lora_a'], v['lora_b'] * self.scale
