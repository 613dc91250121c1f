"""rsLoRA: LoRA with a scale that keeps its strength at any rank."""

import dataclasses
import math
from typing import ClassVar

from peftlib.methods import lora
from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class RsLora(lora.Lora):
  """LoRA scaled by `alpha / sqrt(rank)`.

  Example:
    >>> RsLora(rank=16, alpha=8).scale
    2.0

  References:
    Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with
    LoRA, 2023.
  """

  name: ClassVar[str] = 'rslora'

  @property
  def scale(self) -> float:
    """The factor on the update."""
    return self.alpha / math.sqrt(self.rank)
