"""(IA)3: one learned factor for each input or output."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ia3(method.Method):
  """`(x * l) @ w` in feed-forward layers, `(x @ w) * l` in others.

  The factor is on the op alone; HF peft has it on a bias too.

  Example:
    >>> Ia3().variables(method.Weight((8,), (6,)))['ia3_l'].axes
    ('outputs',)

  Attributes:
    feedforward: Whether the inputs are scaled instead of the outputs: what the
      paper does in the second layer of a feed-forward block.

  References:
    Liu et al., Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper
    than In-Context Learning, 2022.
  """

  name: ClassVar[str] = 'ia3'
  linear_apply: ClassVar[bool] = True
  starts_from_weight: ClassVar[bool] = False

  feedforward: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    method.check_no_dropout(self)

  def variables(self, weight: method.Weight) -> dict[str, method.VariableSpec]:
    """`ia3_l` (inputs,) or (outputs,)."""
    axis = method.INPUTS if self.feedforward else method.OUTPUTS
    return {'ia3_l': method.VariableSpec((axis,))}

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """Ones."""
    return {'ia3_l': jnp.ones(self.variables(weight)['ia3_l'].shape(weight))}

  def apply(
    self, x: jax.Array, op: method.FrozenOp, v: method.Variables
  ) -> jax.Array:
    """Scales input or output."""
    factor = v['ia3_l']
    if self.feedforward:
      return op((x * factor).astype(x.dtype))
    out = op(x)
    return (out * factor).astype(out.dtype)

  def merge(self, value: jax.Array, v: method.Variables) -> jax.Array:
    """Scales rows or columns."""
    factor = v['ia3_l'][:, None] if self.feedforward else v['ia3_l']
    return (value * factor).astype(value.dtype)
