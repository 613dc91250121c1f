"""SHiRA: a sparse update at entries chosen at random."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Shira(method.Method):
  """`w + s`, where `s` has as many entries as a LoRA of this rank.

  Example:
    >>> specs = Shira(rank=2).variables(method.Weight((8,), (6,)))
    >>> specs['shira_weight'].axes, specs['shira_indices'].axes
    ((28,), (2, 28))

  Attributes:
    rank: Sets the number of entries: rank * (inputs + outputs).

  References:
    Bhardwaj et al., Sparse High Rank Adapters, 2024; the random mask.
  """

  name: ClassVar[str] = 'shira'
  reads_weight: ClassVar[bool] = False
  starts_from_weight: ClassVar[bool] = False

  rank: int = 32

  def __post_init__(self) -> None:
    super().__post_init__()
    method.check_positive(self, 'rank')
    method.check_no_dropout(self)

  def check(self, weight: method.Weight) -> None:
    """Refuses weights with fewer entries than the update would have."""
    if self._entries(weight) > weight.rows * weight.columns:
      raise ValueError(
        f'Shira.rank={self.rank}: {weight.label} has'
        f' {weight.rows * weight.columns} entries, fewer than rank * (inputs +'
        f' outputs) = {self._entries(weight)}.'
      )

  def variables(self, weight: method.Weight) -> dict[str, method.VariableSpec]:
    """`shira_weight` (n,); `shira_indices` (2, n): input and output of each."""
    count = self._entries(weight)
    return {
      'shira_weight': method.VariableSpec((count,)),
      'shira_indices': method.VariableSpec((2, count), False, 'int32'),
    }

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """Zeros, at entries drawn without replacement, spread evenly."""
    count = self._entries(weight)
    # One of each of `count` equal stretches, in the order of HF peft, whose
    # matrices are (outputs, inputs). To shuffle all entries would take more
    # memory than the weight; their numbers may not fit an int32.
    size = weight.rows * weight.columns
    ends = np.arange(count + 1, dtype=np.int64) * size // count
    output, first = np.divmod(ends[:-1], weight.rows)
    place = first.astype(np.int32) + jax.random.randint(
      key, (count,), 0, np.diff(ends).astype(np.int32)
    )
    indices = jnp.stack(
      [place % weight.rows, output.astype(np.int32) + place // weight.rows]
    )
    return {'shira_weight': jnp.zeros(count), 'shira_indices': indices}

  def apply(
    self, x: jax.Array, op: method.FrozenOp, v: method.Variables
  ) -> jax.Array:
    """Adds the op with the update."""
    out = op(x)
    shape = jax.eval_shape(lambda: op.weight).shape
    update = self.merge(jnp.zeros(shape, jnp.float32), v)
    return out + op.using(update, x).astype(out.dtype)

  def merge(self, value: jax.Array, v: method.Variables) -> jax.Array:
    """Adds the entries."""
    inputs, outputs = v['shira_indices']
    return value.at[inputs, outputs].add(v['shira_weight'].astype(value.dtype))

  def _entries(self, weight: method.Weight) -> int:
    return self.rank * (weight.rows + weight.columns)
