"""HiRA: a low-rank factor on the elements of the weight."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from peftlib.methods import initialization
from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hira(method.Method):
  """`w + w * (a @ b)`, element by element: an update of high rank.

  Example:
    >>> sorted(Hira(rank=4).variables(method.Weight((8,), (6,))))
    ['hira_a', 'hira_b']

  Attributes:
    rank: Rank of the factor, at least 1.

  References:
    Huang et al., HiRA: Parameter-Efficient Hadamard High-Rank Adaptation for
    Large Language Models, 2025.
  """

  name: ClassVar[str] = 'hira'
  starts_from_weight: ClassVar[bool] = False

  rank: int = 32

  def __post_init__(self) -> None:
    super().__post_init__()
    method.check_positive(self, 'rank')

  def variables(self, weight: method.Weight) -> dict[str, method.VariableSpec]:
    """`hira_a` (inputs, rank) and `hira_b` (rank, outputs)."""
    return {
      'hira_a': method.VariableSpec((method.INPUTS, self.rank)),
      'hira_b': method.VariableSpec((self.rank, method.OUTPUTS)),
    }

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """`a` uniform as HF peft has it, `b` zero."""
    return {
      'hira_a': initialization.kaiming(key, (weight.rows, self.rank)),
      'hira_b': jnp.zeros((self.rank, weight.columns)),
    }

  def apply(
    self, x: jax.Array, op: method.FrozenOp, v: method.Variables
  ) -> jax.Array:
    """Adds the op with the update."""
    out = op(x)
    update = op.weight * (v['hira_a'] @ v['hira_b'])
    return out + op.using(update, op.dropout(x)).astype(out.dtype)

  def merge(self, value: jax.Array, v: method.Variables) -> jax.Array:
    """Adds the update."""
    update = value * (v['hira_a'] @ v['hira_b'])
    return (value + update).astype(value.dtype)
