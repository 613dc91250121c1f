"""What an adapter is: its rank, where it goes, what happens to the base."""

import dataclasses
import math
import re
from typing import Any

import jax
from jax.nn import initializers
import jax.numpy as jnp

WEIGHT_QTYPES: dict[str, Any] = {
  'nf4': 'nf4',
  'int4': jnp.int4,
  'int8': jnp.int8,
  'fp8': jnp.float8_e4m3fn,
}

# One object, so that configs made without an initializer compare equal.
_HE_UNIFORM = initializers.he_uniform()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
  """How LoRA (or QLoRA) is applied to a model.

  The fields carry the names and the meaning of `qwix.LoraRule`. The config is
  hashable: it is part of what identifies an injected graphdef.

  Example:
    >>> config = LoraConfig(module_path='.*(q_proj|v_proj)', rank=8, alpha=16)
    >>> config.scale
    2.0

  Attributes:
    module_path: Regular expression that has to match the whole path of a
      module, its parts joined by '/', e.g. 'layers/self_attn/q_proj'.
    rank: Rank r of the update, at least 1.
    alpha: Numerator of the scale: the update is `alpha / rank * x @ a @ b`.
    dropout: Probability with which an element of the adapter's input is
      zeroed in training, in [0, 1).
    weight_qtype: None to leave the base alone, or the type that
      `quantize_base` stores it in: 'nf4', 'int8', 'int4' or 'fp8' (e4m3).
    tile_size: Number of neighbours on the contracted axis that share a scale;
      None is one scale per output channel. Divides the contracted width.
    weight_calibration_method: How scales are found; see
      `qwix.QuantizationRule`.
    lora_a_initializer: Initializer of `a`, called with (key, shape, dtype).
    lora_b_initializer: Initializer of `b`; zeros make the start output equal
      to the base.
    dtype: Floating-point dtype in which `a` and `b` are kept, whatever the
      base's is.

  Raises:
    ValueError: If a field is out of range; the text names field and value.

  References:
    Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021;
    Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
  """

  module_path: str = '.*'
  rank: int = 16
  alpha: float = 32.0
  dropout: float = 0.0
  weight_qtype: str | None = None
  tile_size: int | None = None
  weight_calibration_method: str = 'absmax'
  lora_a_initializer: jax.nn.initializers.Initializer = _HE_UNIFORM
  lora_b_initializer: jax.nn.initializers.Initializer = initializers.zeros
  dtype: str = 'float32'

  def __post_init__(self) -> None:
    try:
      re.compile(self.module_path)
    except re.error as e:
      raise ValueError(
        f'LoraConfig.module_path={self.module_path!r} is not a regular'
        f' expression: {e}.'
      ) from e
    _check(self, 'rank', _is_int(self.rank) and self.rank >= 1, 'an int >= 1')
    _check(
      self,
      'alpha',
      _is_number(self.alpha) and self.alpha > 0,
      'a finite number > 0',
    )
    _check(
      self,
      'dropout',
      _is_number(self.dropout) and 0 <= self.dropout < 1,
      'a number in [0, 1)',
    )
    _check(
      self,
      'weight_qtype',
      self.weight_qtype is None or self.weight_qtype in WEIGHT_QTYPES,
      f'None or one of {sorted(WEIGHT_QTYPES)}',
    )
    _check(
      self,
      'tile_size',
      self.tile_size is None
      or (_is_int(self.tile_size) and self.tile_size >= 1),
      'None or an int >= 1',
    )
    _check(
      self,
      'tile_size',
      self.tile_size is None or self.weight_qtype is not None,
      'None where weight_qtype is None: there is nothing to tile',
    )
    _check(self, 'dtype', _is_float_dtype(self.dtype), 'a floating-point dtype')

  @property
  def scale(self) -> float:
    """The factor `alpha / rank` on the update."""
    return self.alpha / self.rank


def _check(config: LoraConfig, field: str, ok: bool, right: str) -> None:
  if not ok:
    raise ValueError(
      f'LoraConfig.{field}={getattr(config, field)!r}: must be {right}.'
    )


def _is_int(x: Any) -> bool:
  return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
  return (
    isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
  )


def _is_float_dtype(x: Any) -> bool:
  try:
    return jnp.issubdtype(jnp.dtype(x), jnp.floating)
  except TypeError:
    return False
