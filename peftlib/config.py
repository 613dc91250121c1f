"""What an adapter is: its method, where it goes, what happens to the base."""

import dataclasses
import re
from typing import Any

import jax
from jax.nn import initializers
import jax.numpy as jnp

from peftlib.methods import lora
from peftlib.methods import method as method_lib

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
    module_path: Which modules: a regular expression that has to match the
      whole path, its parts joined by '/', e.g. 'layers/self_attn/q_proj', or
      names or a preset, as in `Rule`.
    rank: Rank r of the update, at least 1.
    alpha: Numerator of the scale: the update is `alpha / rank * x @ a @ b`.
    dropout: Probability with which an element of the adapter's input is
      zeroed in training, in [0, 1).
    weight_qtype: None to leave the base alone, or the type that
      `quantize_base` stores it in: 'nf4', 'int8', 'int4' or 'fp8' (e4m3).
    tile_size: Number of neighbours on the contracted axis that share a scale;
      None is one scale per output channel. Divides the contracted width.
    double_quantize: Whether the scales are quantized too: to int8, in blocks
      of at most 256 (QLoRA's double quantization).
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

  module_path: str | tuple[str, ...] = '.*'
  rank: int = 16
  alpha: float = 32.0
  dropout: float = 0.0
  weight_qtype: str | None = None
  tile_size: int | None = None
  double_quantize: bool = False
  weight_calibration_method: str = 'absmax'
  lora_a_initializer: jax.nn.initializers.Initializer = _HE_UNIFORM
  lora_b_initializer: jax.nn.initializers.Initializer = initializers.zeros
  dtype: str = 'float32'

  def __post_init__(self) -> None:
    _check_pattern(self, 'module_path')
    _check(
      self,
      'rank',
      method_lib.is_int(self.rank) and self.rank >= 1,
      'an int >= 1',
    )
    _check(
      self,
      'alpha',
      method_lib.is_number(self.alpha) and self.alpha > 0,
      'a finite number > 0',
    )
    _check(
      self,
      'dropout',
      method_lib.is_number(self.dropout) and 0 <= self.dropout < 1,
      'a number in [0, 1)',
    )
    _check_quantization(self)
    _check(
      self,
      'dtype',
      method_lib.is_float_dtype(self.dtype),
      'a floating-point dtype',
    )

  @property
  def scale(self) -> float:
    """The factor `alpha / rank` on the update."""
    return self.alpha / self.rank

  @property
  def method(self) -> lora.Lora:
    """The method that the fields describe."""
    return lora.Lora(
      rank=self.rank,
      alpha=self.alpha,
      dropout=self.dropout,
      a_initializer=self.lora_a_initializer,
      b_initializer=self.lora_b_initializer,
      dtype=self.dtype,
    )

  @property
  def rules(self) -> tuple['Rule', ...]:
    """The one rule that the fields describe."""
    return (
      Rule(
        self.module_path,
        self.method,
        weight_qtype=self.weight_qtype,
        tile_size=self.tile_size,
        double_quantize=self.double_quantize,
        weight_calibration_method=self.weight_calibration_method,
      ),
    )

  @property
  def train(self) -> tuple[str, ...]:
    """Patterns of variables that are trained whole: none."""
    return ()

  @property
  def virtual_tokens(self) -> 'VirtualTokens | None':
    """Virtual tokens: none."""
    return None


@dataclasses.dataclass(frozen=True)
class Rule:
  """Which weights get which adapter, and how they are stored.

  Example:
    >>> from peftlib import methods
    >>> rule = Rule(('q_proj', 'v_proj'), methods.Lora(rank=8), layers=(0, 2))

  Attributes:
    module_path: Which modules: a regular expression that has to match the
      whole path, its parts joined by '/' (of the module, or of the weight
      itself: 'layers/mlp/up_proj/kernel'); a tuple of names, of which one has
      to be the path's end; or a preset that goes by what weights do:
      'all-linear' (every linear layer but the output head), 'attention' (those
      in modules that contract two activations, and in their submodules) and
      'mlp' (the others). A module that contracts two activations for another
      purpose (an outer product, a mixture that weighs its experts' outputs by
      an einsum) counts as attention too: `exclude` leaves it out, and
      `inspect` shows what is meant.
    method: The method; None only quantizes.
    exclude: Which of them not; a regular expression or a tuple of names.
    layers: Which layers of a scanned stack; None is all. The others get no
      parameters.
    weight_qtype: None to leave the base alone, or the type that
      `quantize_base` stores it in: 'nf4', 'int8', 'int4' or 'fp8' (e4m3).
    tile_size: Number of neighbours on the contracted axis that share a scale;
      None is one scale per output channel. Divides the contracted width.
    double_quantize: Whether the scales are quantized too: to int8, in blocks
      of at most 256 (QLoRA's double quantization).
    weight_calibration_method: How scales are found; see
      `qwix.QuantizationRule`.

  Raises:
    ValueError: If a field is out of range; the text names field and value.
  """

  module_path: str | tuple[str, ...]
  method: method_lib.Method | None = None
  _: dataclasses.KW_ONLY
  exclude: str | tuple[str, ...] = ()
  layers: tuple[int, ...] | None = None
  weight_qtype: str | None = None
  tile_size: int | None = None
  double_quantize: bool = False
  weight_calibration_method: str = 'absmax'

  def __post_init__(self) -> None:
    for field in ('module_path', 'exclude'):
      _check_pattern(self, field)
    _check(
      self,
      'method',
      self.method is None or isinstance(self.method, method_lib.Method),
      'None or a peftlib.methods.Method, e.g. Lora(rank=8)',
    )
    _check(
      self,
      'layers',
      self.layers is None
      or (
        isinstance(self.layers, tuple)
        and all(method_lib.is_int(i) and i >= 0 for i in self.layers)
        and list(self.layers) == sorted(set(self.layers))
        and bool(self.layers)
      ),
      'None or a tuple of layer numbers that rise, from 0',
    )
    _check_quantization(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VirtualTokens:
  """Learned tokens before the first one.

  Example:
    >>> VirtualTokens(kind='prefix', length=20).stddev
    0.02

  Attributes:
    kind: 'prefix' for keys and values of their own in each layer (Li and
      Liang, 2021: prefix tuning), 'prompt' for embeddings that go through all
      layers (Lester et al., 2021: prompt tuning).
    length: Number of tokens, at least 1.
    stddev: Standard deviation of the normal distribution that they start from.
  """

  kind: str
  length: int
  stddev: float = 0.02

  def __post_init__(self) -> None:
    _check(
      self, 'kind', self.kind in ('prefix', 'prompt'), "'prefix' or 'prompt'"
    )
    method_lib.check_positive(self, 'length')
    _check(
      self,
      'stddev',
      method_lib.is_number(self.stddev) and self.stddev >= 0,
      'a finite number >= 0',
    )


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
  """Adapters by several rules, and what is trained besides.

  Example:
    >>> from peftlib import methods
    >>> config = AdapterConfig(
    ...   (
    ...     Rule('attention', methods.Lora(rank=8)),
    ...     Rule('mlp', methods.Lora(rank=16)),
    ...   ),
    ...   train=('norm/scale',),
    ... )

  Attributes:
    rules: For each weight the first rule that means it (and, in a stack, each
      of its layers) is the one that counts.
    train: Variables of the base that are trained whole, by the ends of their
      paths or of their modules': 'lm_head', 'bias', 'norm/scale'.
    virtual_tokens: Prefix or prompt tuning, or None.

  Raises:
    ValueError: If there is neither a rule nor anything to train.
  """

  rules: tuple[Rule, ...] = ()
  train: tuple[str, ...] = ()
  virtual_tokens: VirtualTokens | None = None

  def __post_init__(self) -> None:
    _check(
      self,
      'rules',
      isinstance(self.rules, tuple)
      and all(isinstance(rule, Rule) for rule in self.rules),
      'a tuple of peftlib.Rule',
    )
    _check(
      self,
      'train',
      isinstance(self.train, tuple)
      and all(isinstance(name, str) and name for name in self.train),
      'a tuple of names',
    )
    _check(
      self,
      'virtual_tokens',
      self.virtual_tokens is None
      or isinstance(self.virtual_tokens, VirtualTokens),
      'None or a peftlib.VirtualTokens',
    )
    if not self.rules and not self.train and self.virtual_tokens is None:
      raise ValueError(
        'AdapterConfig: no rules, nothing to train, no virtual tokens: there'
        ' would be nothing to do.'
      )


Config = LoraConfig | AdapterConfig


def _check(config: Any, field: str, ok: bool, right: str) -> None:
  method_lib.check_field(config, field, ok, right)


def _check_pattern(config: Any, field: str) -> None:
  pattern = getattr(config, field)
  if not isinstance(pattern, str):
    _check(
      config,
      field,
      isinstance(pattern, tuple)
      and all(isinstance(name, str) and name for name in pattern),
      'a regular expression or a tuple of names',
    )
    return
  try:
    re.compile(pattern)
  except re.error as e:
    raise ValueError(
      f'{type(config).__name__}.{field}={pattern!r} is not a regular'
      f' expression: {e}.'
    ) from e


def _check_quantization(config: Any) -> None:
  _check(
    config,
    'weight_qtype',
    config.weight_qtype is None or config.weight_qtype in WEIGHT_QTYPES,
    f'None or one of {sorted(WEIGHT_QTYPES)}',
  )
  _check(
    config,
    'tile_size',
    config.tile_size is None
    or (method_lib.is_int(config.tile_size) and config.tile_size >= 1),
    'None or an int >= 1',
  )
  _check(
    config,
    'tile_size',
    config.tile_size is None or config.weight_qtype is not None,
    'None where weight_qtype is None: there is nothing to tile',
  )
  _check(
    config,
    'double_quantize',
    isinstance(config.double_quantize, bool)
    and (config.weight_qtype is not None or not config.double_quantize),
    'a bool, and False where weight_qtype is None',
  )
