"""DoRA: the weight's direction moved by LoRA, its magnitude by itself."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from peftlib.methods import lora
from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dora(lora.Lora):
  """`m * (w + s * a @ b) / norm(w + s * a @ b)`, norms of columns.

  The norm counts as a constant in the gradient, as in section 4.3 of the paper.

  Example:
    >>> sorted(Dora(rank=4).variables(method.Weight((8,), (6,))))
    ['lora_a', 'lora_b', 'lora_magnitude']

  Attributes:
    rank_stabilized: Whether s is `alpha / sqrt(rank)`, as rsLoRA has it, and
      not `alpha / rank`.

  References:
    Liu et al., DoRA: Weight-Decomposed Low-Rank Adaptation, 2024.
  """

  name: ClassVar[str] = 'dora'
  linear_apply: ClassVar[bool] = True
  reads_weight: ClassVar[bool] = True
  starts_from_weight: ClassVar[bool] = True

  rank_stabilized: bool = False

  @property
  def scale(self) -> float:
    """The factor on the update."""
    if self.rank_stabilized:
      return self.alpha / math.sqrt(self.rank)
    return super().scale

  def __post_init__(self) -> None:
    super().__post_init__()
    method.check_field(
      self,
      'rank_stabilized',
      isinstance(self.rank_stabilized, bool),
      'True or False',
    )
    method.check_field(self, 'bias', not self.bias, 'False: DoRA has no bias')

  def variables(self, weight: method.Weight) -> dict[str, method.VariableSpec]:
    """LoRA's, and `lora_magnitude` (outputs,)."""
    return {
      **super().variables(weight),
      'lora_magnitude': method.VariableSpec((method.OUTPUTS,)),
    }

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """LoRA's start; the magnitude is the norm of each column."""
    v = super().init(key, weight, value)
    return {**v, 'lora_magnitude': self._norm(value, v)}

  def apply(
    self, x: jax.Array, op: method.FrozenOp, v: method.Variables
  ) -> jax.Array:
    """Scales the columns of base and update."""
    out = op(x)
    dropped = op.dropout(x)
    norm = jax.lax.stop_gradient(self._norm(op.weight, v))
    factor = v['lora_magnitude'] / norm
    delta = op.low_rank(dropped, v['lora_a'], v['lora_b']) * self.scale
    base = op(dropped)
    more = (factor - 1) * base + factor * delta
    return out + more.astype(out.dtype)

  def merge(self, value: jax.Array, v: method.Variables) -> jax.Array:
    """Scales the columns of the sum."""
    moved = value + v['lora_a'] @ v['lora_b'] * self.scale
    factor = v['lora_magnitude'] / self._norm(value, v)
    return (moved * factor).astype(value.dtype)

  def _norm(self, value: jax.Array, v: method.Variables) -> jax.Array:
    moved = value.astype(jnp.float32) + v['lora_a'] @ v['lora_b'] * self.scale
    norm = jnp.linalg.norm(moved, axis=0)
    # A column of zeros, e.g. of padding, stays what it is.
    return jnp.where(norm > 0, norm, 1.0)
