"""LoRA that starts from two factors, neither zero, whose product is."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from peftlib.methods import lora
from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class OrthogonalLora(lora.Lora):
  """LoRA with `a` and `b` in subspaces orthogonal to each other.

  The update is zero, up to rounding, yet both factors have gradients from the
  first step.

  Example:
    >>> OrthogonalLora(rank=4).name
    'lora_orthogonal'

  References:
    'orthogonal' of HF peft's `init_lora_weights`.
  """

  name: ClassVar[str] = 'lora_orthogonal'

  def __post_init__(self) -> None:
    super().__post_init__()
    method.check_field(self, 'rank', self.rank % 2 == 0, 'even')

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """Random combinations of the odd and of the even rows of a rotation."""
    q_key, a_key, b_key = jax.random.split(key, 3)
    q, _ = jnp.linalg.qr(jax.random.normal(q_key, (self.rank, self.rank)))
    half = self.rank // 2
    a = jax.random.normal(a_key, (weight.rows, half)) @ q[0::2]
    b = q[1::2].T @ jax.random.normal(b_key, (half, weight.columns))
    return {'lora_a': a / 10, 'lora_b': b / 10}
