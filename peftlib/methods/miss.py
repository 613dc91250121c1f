"""MiSS: one small block, shared by all shards of the weight."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Miss(method.Method):
  """The rows of a block (rank, outputs), repeated down the weight, added to it.

  The start is zero, so that nothing is random.

  Example:
    >>> Miss(rank=4).variables(method.Weight((8,), (6,)))['miss_block'].axes
    (4, 'outputs')

  Attributes:
    rank: Height of the block, at most the number of inputs.
    form: 'miss'; 'mini', whose block (rank, mini_rank) is repeated along the
      outputs too; or 'bat', the batched form: (outputs / rank) blocks B, and
      the update W_b @ B + B for each block W_b of (rank, rank).
    mini_rank: Width of the block of 'mini'; divides the outputs.

  References:
    Kang and Yin, MiSS: Revisiting the Trade-off in LoRA with an Efficient
    Shard-Sharing Structure, 2024 (first called Bone).
  """

  name: ClassVar[str] = 'miss'
  linear_apply: ClassVar[bool] = True
  starts_from_weight: ClassVar[bool] = False

  rank: int = 64
  form: Literal['miss', 'mini', 'bat'] = 'miss'
  mini_rank: int = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    method.check_positive(self, 'rank')
    method.check_positive(self, 'mini_rank')
    forms = ('miss', 'mini', 'bat')
    method.check_field(self, 'form', self.form in forms, f'one of {forms}')
    if self.form == 'bat':
      method.check_no_dropout(self)

  def check(self, weight: method.Weight) -> None:
    """Refuses weights that the block doesn't fit."""
    if self.rank > weight.rows:
      raise ValueError(
        f'Miss.rank={self.rank}: {weight.label} has {weight.rows} inputs only.'
      )
    if self.form == 'mini' and weight.columns % self.mini_rank:
      raise ValueError(
        f'Miss.mini_rank={self.mini_rank}: does not divide the'
        f' {weight.columns} outputs of {weight.label}.'
      )
    if self.form == 'bat' and (
      weight.rows % self.rank or weight.columns % self.rank
    ):
      raise ValueError(
        f'Miss.rank={self.rank}: does not divide {weight.label} of'
        f" ({weight.rows}, {weight.columns}) into blocks, as 'bat' needs."
      )

  def variables(self, weight: method.Weight) -> dict[str, method.VariableSpec]:
    """`miss_block`."""
    axes: tuple[int | str, ...] = (self.rank, method.OUTPUTS)
    if self.form == 'mini':
      axes = (self.rank, self.mini_rank)
    elif self.form == 'bat':
      axes = (weight.columns // self.rank, self.rank, self.rank)
    return {'miss_block': method.VariableSpec(axes)}

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """Zeros."""
    shape = self.variables(weight)['miss_block'].shape(weight)
    return {'miss_block': jnp.zeros(shape)}

  def apply(
    self, x: jax.Array, op: method.FrozenOp, v: method.Variables
  ) -> jax.Array:
    """Sums the shards of the input, then multiplies by the block."""
    if self.form == 'bat':
      return super().apply(x, op, v)
    out = op(x)
    dropped = op.dropout(x)
    missing = -x.shape[-1] % self.rank
    padded = jnp.pad(dropped, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    shards = padded.reshape(*x.shape[:-1], -1, self.rank).sum(-2)
    block = self._block(v, out.shape[-1]).astype(x.dtype)
    return out + (shards @ block).astype(out.dtype)

  def merge(self, value: jax.Array, v: method.Variables) -> jax.Array:
    """Adds the repeated block."""
    rows, columns = value.shape
    if self.form != 'bat':
      block = self._block(v, columns)
      repeated = jnp.tile(block, (-(-rows // self.rank), 1))[:rows]
      return (value + repeated).astype(value.dtype)
    r, block = self.rank, v['miss_block']
    # Blocks of (outputs, inputs), as the paper multiplies them.
    w = value.T.reshape(columns // r, r, rows // r, r)
    update = jnp.einsum('oaib,obc->oaic', w, block) + block[:, :, None]
    return (value + update.reshape(columns, rows).T).astype(value.dtype)

  def _block(self, v: method.Variables, columns: int) -> jax.Array:
    if self.form == 'mini':
      return jnp.tile(v['miss_block'], (1, columns // self.mini_rank))
    return v['miss_block']
