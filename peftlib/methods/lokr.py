"""LoKr: a Kronecker product of a small and a low-rank matrix."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from peftlib.methods import initialization
from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lokr(method.Method):
  """`w + s * kron(w1, w2)`.

  Inputs and outputs are each split into two factors. `w1` has the smaller ones
  and is whole, `w2` the larger ones and has two factors of this rank where that
  is smaller than whole. The layout is that of LyCORIS and HF peft, (outputs,
  inputs).

  Example:
    >>> v = Lokr(rank=2, decompose_factor=4).variables(
    ...   method.Weight((80,), (32,))
    ... )
    >>> v['lokr_w1'].axes, v['lokr_w2_a'].axes, v['lokr_w2_b'].axes
    ((4, 4), (8, 2), (2, 20))

  Attributes:
    rank: Rank of a factor that is split, at least 1.
    alpha: Numerator of the scale `alpha / rank`.
    decompose_factor: The smaller factor of inputs and outputs, where it divides
      them; -1 takes factors near the square root.
    decompose_both: Whether `w1` is split too, where that is smaller.

  References:
    Yeh et al., Navigating Text-To-Image Customization: From LyCORIS
    Fine-Tuning to Model Evaluation, 2023.
  """

  name: ClassVar[str] = 'lokr'
  reads_weight: ClassVar[bool] = False
  starts_from_weight: ClassVar[bool] = False

  rank: int = 8
  alpha: float = 8.0
  decompose_factor: int = -1
  decompose_both: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    method.check_positive(self, 'rank')
    method.check_scale(self, 'alpha')
    method.check_no_dropout(self)
    method.check_field(
      self,
      'decompose_factor',
      method.is_int(self.decompose_factor)
      and (self.decompose_factor == -1 or self.decompose_factor >= 1),
      '-1 or an int >= 1',
    )

  @property
  def scale(self) -> float:
    """The factor on the update."""
    return self.alpha / self.rank

  def variables(self, weight: method.Weight) -> dict[str, method.VariableSpec]:
    """`lokr_w1` and `lokr_w2`, each whole or as `_a` and `_b`."""
    out_small, out_large = _factors(weight.columns, self.decompose_factor)
    in_small, in_large = _factors(weight.rows, self.decompose_factor)
    split_first = (
      self.decompose_both and self.rank < max(out_small, in_small) / 2
    )
    split_second = self.rank < max(out_large, in_large) / 2
    return {
      **self._matrix('lokr_w1', out_small, in_small, split_first),
      **self._matrix('lokr_w2', out_large, in_large, split_second),
    }

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """`w1` or its first factor zero, the others uniform as HF peft has them."""
    v = {}
    for i, (name, spec) in enumerate(self.variables(weight).items()):
      shape = spec.shape(weight)
      if name in ('lokr_w1', 'lokr_w1_a'):
        v[name] = jnp.zeros(shape)
      else:
        v[name] = initialization.kaiming(
          jax.random.fold_in(key, i), shape, fan_in=shape[1]
        )
    return v

  def apply(
    self, x: jax.Array, op: method.FrozenOp, v: method.Variables
  ) -> jax.Array:
    """Adds the op with the update."""
    out = op(x)
    return out + op.using(self._update(v), x).astype(out.dtype)

  def merge(self, value: jax.Array, v: method.Variables) -> jax.Array:
    """Adds the update."""
    return (value + self._update(v)).astype(value.dtype)

  def _matrix(
    self, name: str, outputs: int, inputs: int, split: bool
  ) -> dict[str, method.VariableSpec]:
    if not split:
      return {name: method.VariableSpec((outputs, inputs))}
    return {
      f'{name}_a': method.VariableSpec((outputs, self.rank)),
      f'{name}_b': method.VariableSpec((self.rank, inputs)),
    }

  def _update(self, v: method.Variables) -> jax.Array:
    first, second = (
      v[name] if name in v else v[f'{name}_a'] @ v[f'{name}_b']
      for name in ('lokr_w1', 'lokr_w2')
    )
    return (jnp.kron(first, second) * self.scale).T


def _factors(size: int, wanted: int) -> tuple[int, int]:
  """Two factors of `size`, the smaller one first unless `wanted` divides it.

  Without that, divisors are tried upwards while their sum with the other one
  falls and they are not above `wanted`.
  """
  if wanted > 0 and size % wanted == 0:
    return wanted, size // wanted
  limit = size if wanted == -1 else wanted
  small, large = 1, size
  for divisor in range(2, size + 1):
    if size % divisor:
      continue
    other = size // divisor
    if small >= large or divisor + other > 1 + size or divisor > limit:
      break
    small, large = divisor, other
  return min(small, large), max(small, large)
