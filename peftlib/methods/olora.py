"""OLoRA: LoRA that starts from an orthonormal basis of the weight."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from peftlib.methods import lora
from peftlib.methods import method
from peftlib.methods import pissa


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Olora(lora.Lora):
  """LoRA that starts from the QR decomposition of the weight.

  `b` gets the first columns of Q of the (outputs, inputs) matrix, `a` the first
  rows of R; what is left over is frozen.

  Example:
    >>> Olora(rank=4, alpha=4).residual
    True

  References:
    Büyükakyüz, OLoRA: Orthonormal Low-Rank Adaptation of Large Language Models,
    2024.
  """

  name: ClassVar[str] = 'olora'
  starts_from_weight: ClassVar[bool] = True

  @property
  def residual(self) -> bool:
    """The frozen weight becomes what is left over."""
    return True

  def check(self, weight: method.Weight) -> None:
    """Refuses weights of a smaller rank."""
    super().check(weight)
    pissa.check_rank(self, self.rank, weight)

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """First columns of Q, first rows of R."""
    q, r = jnp.linalg.qr(value.T)
    return {'lora_a': r[: self.rank].T, 'lora_b': q[:, : self.rank].T}
