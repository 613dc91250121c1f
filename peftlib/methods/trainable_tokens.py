"""Trainable tokens: some rows of an embedding, trained whole."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainableTokens(method.Method):
  """Replaces the rows of a table that belong to some tokens.

  For new tokens, or the few that a task is about. A head that is tied to the
  table has the new rows too.

  Example:
    >>> TrainableTokens(indices=(3, 7)).variables(
    ...   method.Weight((128,), (16,), 'embedding')
    ... )['trainable_tokens'].axes
    (2, 'outputs')

  Attributes:
    indices: Ids of the tokens, each once.
  """

  name: ClassVar[str] = 'trainable_tokens'
  reads_weight: ClassVar[bool] = False

  indices: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    super().__post_init__()
    method.check_no_dropout(self)
    method.check_field(
      self,
      'indices',
      isinstance(self.indices, tuple)
      and bool(self.indices)
      and all(method.is_int(i) and i >= 0 for i in self.indices)
      and len(set(self.indices)) == len(self.indices),
      'a tuple of different token ids',
    )

  def check(self, weight: method.Weight) -> None:
    """Refuses what isn't a table, or too short."""
    if weight.kind != 'embedding':
      raise ValueError(
        f'TrainableTokens: {weight.label} is of kind {weight.kind!r}, not a'
        ' table that is looked up by token.'
      )
    if max(self.indices) >= weight.rows:
      raise ValueError(
        f'TrainableTokens.indices has {max(self.indices)}: {weight.label} has'
        f' {weight.rows} rows.'
      )

  def variables(self, weight: method.Weight) -> dict[str, method.VariableSpec]:
    """`trainable_tokens` (tokens, outputs)."""
    return {
      'trainable_tokens': method.VariableSpec(
        (len(self.indices), method.OUTPUTS)
      )
    }

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """The rows as they are."""
    return {'trainable_tokens': value[jnp.array(self.indices)]}

  def apply(
    self, x: jax.Array, op: method.FrozenOp, v: method.Variables
  ) -> jax.Array:
    """Replaces what was looked up; a tied head has the merged table."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
      return super().apply(x, op, v)
    out = op(x)
    found = x[..., None] == jnp.array(self.indices)
    rows = v['trainable_tokens'].astype(out.dtype)[found.argmax(-1)]
    return jnp.where(found.any(-1, keepdims=True), rows, out)

  def merge(self, value: jax.Array, v: method.Variables) -> jax.Array:
    """Puts the rows into the table."""
    rows = v['trainable_tokens'].astype(value.dtype)
    return value.at[jnp.array(self.indices)].set(rows)
