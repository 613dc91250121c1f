"""GraLoRA: a grid of small LoRAs that exchange what they know."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from peftlib.methods import initialization
from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gralora(method.Method):
  """LoRA in `blocks` x `blocks` blocks of the weight, each of rank / blocks.

  Example:
    >>> v = Gralora(rank=4, blocks=2).variables(method.Weight((8,), (6,)))
    >>> v['gralora_a'].axes, v['gralora_b'].axes
    ((2, 4, 4), (2, 4, 3))

  Attributes:
    rank: Rank of a row of blocks; a multiple of `blocks`.
    alpha: Numerator of the scale `alpha / (rank + hybrid_rank)`.
    blocks: Number of blocks on each side; divides inputs and outputs.
    hybrid_rank: Rank of a plain LoRA beside the grid; 0 for none.

  References:
    Jung et al., GraLoRA: Granular Low-Rank Adaptation for Parameter-Efficient
    Fine-Tuning, 2025.
  """

  name: ClassVar[str] = 'gralora'
  linear_apply: ClassVar[bool] = True
  reads_weight: ClassVar[bool] = False
  starts_from_weight: ClassVar[bool] = False

  rank: int = 32
  alpha: float = 64.0
  blocks: int = 2
  hybrid_rank: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    method.check_positive(self, 'blocks')
    method.check_field(
      self,
      'rank',
      method.is_int(self.rank)
      and self.rank >= 1
      and self.rank % self.blocks == 0,
      f'a multiple of blocks={self.blocks}',
    )
    method.check_field(
      self,
      'hybrid_rank',
      method.is_int(self.hybrid_rank) and self.hybrid_rank >= 0,
      'an int >= 0',
    )
    method.check_scale(self, 'alpha')

  @property
  def scale(self) -> float:
    """The factor on the update."""
    return self.alpha / (self.rank + self.hybrid_rank)

  def check(self, weight: method.Weight) -> None:
    """Refuses weights that the blocks don't divide."""
    if weight.rows % self.blocks or weight.columns % self.blocks:
      raise ValueError(
        f'Gralora.blocks={self.blocks}: does not divide {weight.label} of'
        f' ({weight.rows}, {weight.columns}).'
      )

  def variables(self, weight: method.Weight) -> dict[str, method.VariableSpec]:
    """`gralora_a` and `gralora_b`; `gralora_general_a`, `_b` of the hybrid."""
    n = self.blocks
    specs = {
      'gralora_a': method.VariableSpec((n, weight.rows // n, self.rank)),
      'gralora_b': method.VariableSpec((n, self.rank, weight.columns // n)),
    }
    if self.hybrid_rank:
      specs['gralora_general_a'] = method.VariableSpec(
        (method.INPUTS, self.hybrid_rank)
      )
      specs['gralora_general_b'] = method.VariableSpec(
        (self.hybrid_rank, method.OUTPUTS)
      )
    return specs

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """First factors uniform as HF peft has them, second ones zero."""
    own_key, general_key = jax.random.split(key)
    shapes = {
      name: spec.shape(weight) for name, spec in self.variables(weight).items()
    }
    v = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    v['gralora_a'] = initialization.kaiming(
      own_key, shapes['gralora_a'], fan_in=shapes['gralora_a'][1]
    )
    if self.hybrid_rank:
      v['gralora_general_a'] = initialization.kaiming(
        general_key, shapes['gralora_general_a']
      )
    return v

  def apply(
    self, x: jax.Array, op: method.FrozenOp, v: method.Variables
  ) -> jax.Array:
    """Adds the update of the grid, and of the LoRA beside it."""
    out = op(x)
    dropped = op.dropout(x)
    delta = self._update(dropped, v)
    if self.hybrid_rank:
      delta += op.low_rank(
        dropped, v['gralora_general_a'], v['gralora_general_b']
      )
    return out + (delta * self.scale).astype(out.dtype)

  def merge(self, value: jax.Array, v: method.Variables) -> jax.Array:
    """Adds the update, block by block."""
    n, part = self.blocks, self.rank // self.blocks
    a = v['gralora_a'].reshape(n, -1, n, part)
    b = v['gralora_b'].reshape(n, n, part, -1)
    delta = jnp.einsum('nijs,jnso->nijo', a, b).reshape(value.shape)
    if self.hybrid_rank:
      delta += v['gralora_general_a'] @ v['gralora_general_b']
    return (value + delta * self.scale).astype(value.dtype)

  def _update(self, x: jax.Array, v: method.Variables) -> jax.Array:
    n, lead = self.blocks, x.shape[:-1]
    a, b = v['gralora_a'].astype(x.dtype), v['gralora_b'].astype(x.dtype)
    low = jnp.einsum('...ni,nir->...nr', x.reshape(*lead, n, -1), a)
    # Part j of each block of inputs goes to block j of the outputs.
    low = low.reshape(*lead, n, n, self.rank // n).swapaxes(-3, -2)
    low = low.reshape(*lead, n, self.rank)
    return jnp.einsum('...jr,jro->...jo', low, b).reshape(*lead, -1)
