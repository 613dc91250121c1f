"""LoRA-FA: LoRA whose first factor is drawn once and frozen."""

import dataclasses
from typing import ClassVar

from peftlib.methods import lora
from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraFA(lora.Lora):
  """LoRA in which `b` alone is trained.

  Nothing of width `inputs` has to be kept for the gradient, and half of the
  optimizer's state goes.

  Example:
    >>> specs = LoraFA(rank=4).variables(method.Weight((8,), (6,)))
    >>> specs['lora_a'].trainable, specs['lora_b'].trainable
    (False, True)

  References:
    Zhang et al., LoRA-FA: Memory-efficient Low-rank Adaptation for Large
    Language Models Fine-tuning, 2023.
  """

  name: ClassVar[str] = 'lora_fa'

  def variables(self, weight: method.Weight) -> dict[str, method.VariableSpec]:
    """`lora_a` (inputs, rank), frozen, and `lora_b` (rank, outputs)."""
    specs = super().variables(weight)
    return {**specs, 'lora_a': specs['lora_a']._replace(trainable=False)}
