"""PiSSA: LoRA that starts from the weight's largest singular values."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from peftlib.methods import lora
from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pissa(lora.Lora):
  """LoRA on the principal part of the weight; what is left over is frozen.

  Example:
    >>> Pissa(rank=4, alpha=4).residual
    True

  References:
    Meng et al., PiSSA: Principal Singular Values and Singular Vectors
    Adaptation of Large Language Models, 2024.
  """

  name: ClassVar[str] = 'pissa'
  starts_from_weight: ClassVar[bool] = True

  @property
  def residual(self) -> bool:
    """The frozen weight becomes what is left over."""
    return True

  def check(self, weight: method.Weight) -> None:
    """Refuses weights of a smaller rank."""
    super().check(weight)
    check_rank(self, self.rank, weight)

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """The largest singular values, their roots in both factors."""
    u, s, vt = jnp.linalg.svd(value, full_matrices=False)
    root = jnp.sqrt(s[: self.rank] / self.scale)
    return {
      'lora_a': u[:, : self.rank] * root,
      'lora_b': root[:, None] * vt[: self.rank],
    }


def check_rank(of: object, rank: int, weight: method.Weight) -> None:
  """Raises ValueError where a weight has no such rank."""
  if rank > min(weight.rows, weight.columns):
    raise ValueError(
      f'{type(of).__name__}.rank={rank}: {weight.label} of ({weight.rows},'
      f' {weight.columns}) has a smaller one.'
    )
