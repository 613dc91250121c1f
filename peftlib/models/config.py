"""Configuration of the decoder, and its readings from GGUF and HF files."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from jax import typing as jax_typing
import jax.numpy as jnp
import numpy as np

_ROPE_TYPES = ('none', 'linear', 'llama3')
_REMATS = ('none', 'dots', 'full')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """How rotary frequencies are stretched for contexts beyond training.

  Fields have the names and the meaning of `rope_scaling` in a Hugging Face
  `config.json`.

  Attributes:
    rope_type: 'none', 'linear' (every frequency divided by `factor`) or
      'llama3' (long wavelengths divided by `factor`, short ones kept, those in
      between interpolated).
    factor: The divisor, at least 1.
    low_freq_factor: 'llama3' only: wavelengths longer than
      `original_max_position_embeddings / low_freq_factor` are divided.
    high_freq_factor: 'llama3' only: wavelengths shorter than
      `original_max_position_embeddings / high_freq_factor` are kept.
    original_max_position_embeddings: 'llama3' only: the context length of the
      pretraining.

  Raises:
    ValueError: A field is out of range, or `rope_type` is not known.
  """

  rope_type: str = 'none'
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position_embeddings: int = 8192

  def __post_init__(self) -> None:
    if self.rope_type not in _ROPE_TYPES:
      raise ValueError(
        f'rope_type={self.rope_type!r} is not supported; expected one of '
        f'{", ".join(map(repr, _ROPE_TYPES))}.'
      )
    if not self.factor >= 1:
      raise ValueError(f'factor={self.factor!r}: expected at least 1.')
    if self.rope_type == 'llama3':
      if not 0 < self.low_freq_factor < self.high_freq_factor:
        raise ValueError(
          f'low_freq_factor={self.low_freq_factor!r}, high_freq_factor='
          f'{self.high_freq_factor!r}: expected 0 < low < high.'
        )
      if self.original_max_position_embeddings < 1:
        raise ValueError(
          'original_max_position_embeddings='
          f'{self.original_max_position_embeddings!r}: expected at least 1.'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
  """What a `Decoder` looks like. Immutable, hashable, validates itself.

  Field names are those of `transformers.LlamaConfig` where both have the field.

  Attributes:
    vocab_size: Rows of the embedding table.
    hidden_size: Width of the residual stream.
    intermediate_size: Width of the SwiGLU feed-forward layer.
    num_layers: Number of decoder layers.
    num_heads: Query heads.
    num_kv_heads: Key and value heads; divides `num_heads`.
    head_dim: Width of one head, even.
    rope_theta: Base of the rotary frequencies.
    rope_scaling: Stretching of the rotary frequencies.
    rms_norm_eps: Epsilon of the RMS norms.
    tie_embeddings: The output head is the embedding table.
    attention_bias: The four attention projections have a bias.
    mlp_bias: The three feed-forward projections have a bias.
    max_position_embeddings: Context length the model was trained for; not
      enforced.
    dtype: Dtype of the computation (softmax, norm statistics and logits are
      float32 always).
    param_dtype: Dtype that parameters are kept in.
    remat: What of a layer the backward pass computes again (`jax.checkpoint`):
      'none' of it, 'full' for all of it, or 'dots' for all but the products
      with weights, whose results are kept. No effect where there is no
      gradient.

  Raises:
    ValueError: A field is out of range.

  Example:
    >>> config = DecoderConfig(
    ...   vocab_size=64,
    ...   hidden_size=16,
    ...   intermediate_size=32,
    ...   num_layers=2,
    ...   num_heads=4,
    ...   num_kv_heads=2,
    ...   head_dim=4,
    ... )
    >>> config.rope_theta
    10000.0
  """

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 10000.0
  rope_scaling: RopeScaling = RopeScaling()
  rms_norm_eps: float = 1e-6
  tie_embeddings: bool = False
  attention_bias: bool = False
  mlp_bias: bool = False
  max_position_embeddings: int = 2048
  dtype: jax_typing.DTypeLike = 'float32'
  param_dtype: jax_typing.DTypeLike = 'float32'
  remat: str = 'dots'

  def __post_init__(self) -> None:
    for name in (
      'vocab_size',
      'hidden_size',
      'intermediate_size',
      'num_layers',
      'num_heads',
      'num_kv_heads',
      'head_dim',
      'max_position_embeddings',
    ):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f'{name}={value!r}: expected a positive int.')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_kv_heads={self.num_kv_heads} does not divide '
        f'num_heads={self.num_heads}.'
      )
    if self.head_dim % 2:
      raise ValueError(
        f'head_dim={self.head_dim}: rotary embeddings need an even width.'
      )
    for name in ('rope_theta', 'rms_norm_eps'):
      value = getattr(self, name)
      if not (value > 0 and math.isfinite(value)):
        raise ValueError(f'{name}={value!r}: expected a positive number.')
    if self.remat not in _REMATS:
      raise ValueError(
        f'remat={self.remat!r} is not supported; expected one of '
        f'{", ".join(map(repr, _REMATS))}.'
      )
    for name in ('dtype', 'param_dtype'):
      # np.dtype('float32') and jnp.float32 hash differently: keep one form, so
      # that equal configurations are equal.
      value = jnp.dtype(getattr(self, name))
      if not jnp.issubdtype(value, jnp.floating):
        raise ValueError(f'{name}={value.name!r}: expected a float dtype.')
      object.__setattr__(self, name, value)

  @property
  def compute_dtype(self) -> np.dtype:
    """`dtype` as a `numpy.dtype`."""
    return jnp.dtype(self.dtype)

  @classmethod
  def from_hf(
    cls, config: Mapping[str, Any], **overrides: Any
  ) -> DecoderConfig:
    """Reads the dict of a Hugging Face `config.json`.

    Both spellings of the rotary settings are read: `rope_theta` with
    `rope_scaling`, and `rope_parameters` of transformers 5.

    Args:
      config: The parsed file, with `model_type` 'llama'.
      **overrides: Fields of `DecoderConfig` that replace those of the file,
        `dtype` for instance.

    Returns:
      The configuration.

    Raises:
      ValueError: Something in the file asks for what the decoder doesn't do,
        or a required key is missing.
    """
    return cls(**{**_hf_fields(config), **overrides})

  @classmethod
  def from_gguf(
    cls, metadata: Mapping[str, Any], *, tie_embeddings: bool, **overrides: Any
  ) -> DecoderConfig:
    """Reads the metadata of a GGUF file.

    Args:
      metadata: Key-value pairs of the file, `general.architecture` 'llama'.
      tie_embeddings: GGUF has no key for it: the file lacks `output.weight`.
      **overrides: Fields of `DecoderConfig` that replace those of the file.

    Returns:
      The configuration. Biases are not in the metadata either: give
      `attention_bias` and `mlp_bias` as overrides.

    Raises:
      ValueError: Something in the file asks for what the decoder doesn't do,
        or a required key is missing.
    """
    fields = _gguf_fields(metadata)
    fields['tie_embeddings'] = tie_embeddings
    return cls(**{**fields, **overrides})

  def to_hf(self) -> dict[str, Any]:
    """The dict of a `config.json` that transformers (4 and 5) reads.

    Returns:
      JSON-able dict; `from_hf` reads it back to an equal configuration, except
      for `dtype` and `remat` which no checkpoint has.
    """
    scaling = None
    if self.rope_scaling.rope_type == 'linear':
      scaling = {'rope_type': 'linear', 'factor': self.rope_scaling.factor}
    elif self.rope_scaling.rope_type == 'llama3':
      scaling = dataclasses.asdict(self.rope_scaling)
    return {
      'architectures': ['LlamaForCausalLM'],
      'model_type': 'llama',
      'vocab_size': self.vocab_size,
      'hidden_size': self.hidden_size,
      'intermediate_size': self.intermediate_size,
      'num_hidden_layers': self.num_layers,
      'num_attention_heads': self.num_heads,
      'num_key_value_heads': self.num_kv_heads,
      'head_dim': self.head_dim,
      'hidden_act': 'silu',
      'rope_theta': self.rope_theta,
      'rope_scaling': scaling,
      'rms_norm_eps': self.rms_norm_eps,
      'tie_word_embeddings': self.tie_embeddings,
      'attention_bias': self.attention_bias,
      'mlp_bias': self.mlp_bias,
      'max_position_embeddings': self.max_position_embeddings,
      'torch_dtype': jnp.dtype(self.param_dtype).name,
    }


def _required(config: Mapping[str, Any], key: str, where: str) -> Any:
  value = config.get(key)
  if value is None:
    raise ValueError(f'{where} lacks {key!r}.')
  return value


# Keys that change what the model computes, with the values that change nothing.
_HF_NEUTRAL: dict[str, tuple[Any, ...]] = {
  'hidden_act': ('silu', 'swish'),
  'sliding_window': (None,),
  'partial_rotary_factor': (None, 1.0),
  'attn_logit_softcapping': (None,),
  'final_logit_softcapping': (None,),
  'quantization_config': (None,),
  'num_local_experts': (None,),
  'embedding_multiplier': (None, 1.0),
  'residual_multiplier': (None, 1.0),
  'logits_scaling': (None, 1.0),
  'pretraining_tp': (None, 0, 1),
}


def _hf_fields(config: Mapping[str, Any]) -> dict[str, Any]:
  """Reads a `config.json` into keyword arguments of `DecoderConfig`."""
  model_type = config.get('model_type')
  if model_type != 'llama':
    raise ValueError(
      f"model_type={model_type!r} is not supported; expected 'llama'."
    )
  for key, neutral in _HF_NEUTRAL.items():
    if key in config and config[key] not in neutral:
      raise ValueError(
        f'{key}={config[key]!r} is not supported; expected '
        f'{" or ".join(map(repr, neutral))}.'
      )

  def get(key: str) -> Any:
    return _required(config, key, 'The configuration')

  hidden, heads = get('hidden_size'), get('num_attention_heads')
  head_dim = config.get('head_dim')
  if head_dim is None:
    if hidden % heads:
      raise ValueError(
        f'num_attention_heads={heads} does not divide hidden_size={hidden}, '
        "and the configuration lacks 'head_dim'."
      )
    head_dim = hidden // heads
  rope = dict(config.get('rope_parameters') or config.get('rope_scaling') or {})
  theta = rope.pop('rope_theta', None) or config.get('rope_theta') or 10000.0
  kv_heads = config.get('num_key_value_heads')
  return {
    'vocab_size': get('vocab_size'),
    'hidden_size': hidden,
    'intermediate_size': get('intermediate_size'),
    'num_layers': get('num_hidden_layers'),
    'num_heads': heads,
    'num_kv_heads': heads if kv_heads is None else kv_heads,
    'head_dim': head_dim,
    'rope_theta': float(theta),
    'rope_scaling': _hf_rope_scaling(rope),
    'rms_norm_eps': float(config.get('rms_norm_eps', 1e-6)),
    'tie_embeddings': bool(config.get('tie_word_embeddings', False)),
    'attention_bias': bool(config.get('attention_bias', False)),
    'mlp_bias': bool(config.get('mlp_bias', False)),
    'max_position_embeddings': config.get('max_position_embeddings', 2048),
  }


def _hf_rope_scaling(rope: dict[str, Any]) -> RopeScaling:
  """Reads `rope_scaling` (without its `rope_theta`)."""
  # Configurations from before 2024 spell it `type`.
  rope_type = rope.pop('rope_type', None) or rope.pop('type', None)
  rope.pop('type', None)
  if rope.get('partial_rotary_factor') == 1.0:
    rope.pop('partial_rotary_factor')
  if rope_type in (None, 'default'):
    rope_type = 'none'
  known = {
    'none': (),
    'linear': ('factor',),
    'llama3': (
      'factor',
      'low_freq_factor',
      'high_freq_factor',
      'original_max_position_embeddings',
    ),
  }
  if rope_type not in known:
    raise ValueError(
      f'rope_scaling: rope_type={rope_type!r} is not supported; expected '
      "'default', 'linear' or 'llama3'."
    )
  for key, value in rope.items():
    if key not in known[rope_type]:
      raise ValueError(
        f'rope_scaling: {key}={value!r} is not supported with '
        f'rope_type={rope_type!r}.'
      )
  for key in known[rope_type]:
    _required(rope, key, f'rope_scaling of type {rope_type!r}')
  return RopeScaling(rope_type=rope_type, **rope)


def _gguf_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
  """Reads GGUF metadata into keyword arguments of `DecoderConfig`."""
  arch = metadata.get('general.architecture')
  if arch != 'llama':
    raise ValueError(
      f"general.architecture={arch!r} is not supported; expected 'llama'."
    )

  def get(key: str) -> Any:
    return _required(metadata, f'llama.{key}', 'The GGUF metadata')

  hidden, heads = get('embedding_length'), get('attention.head_count')
  kv_heads = metadata.get('llama.attention.head_count_kv', heads)
  for key, value in (('head_count', heads), ('head_count_kv', kv_heads)):
    if not isinstance(value, int):
      raise ValueError(
        f'llama.attention.{key}={value!r} is not supported; expected one int '
        'for all layers.'
      )
  head_dim = metadata.get('llama.attention.key_length', hidden // heads)
  for key, expected in (
    ('attention.value_length', head_dim),
    ('rope.dimension_count', head_dim),
    ('expert_count', 0),
    ('attention.sliding_window', 0),
  ):
    value = metadata.get(f'llama.{key}', expected)
    if value != expected:
      raise ValueError(
        f'llama.{key}={value!r} is not supported; expected {expected}.'
      )
  rope_type = metadata.get('llama.rope.scaling.type', 'none')
  scaling = RopeScaling()
  if rope_type == 'linear':
    scaling = RopeScaling(
      rope_type='linear', factor=float(get('rope.scaling.factor'))
    )
  elif rope_type != 'none':
    raise ValueError(
      f'llama.rope.scaling.type={rope_type!r} is not supported; expected '
      "'none' or 'linear'."
    )
  vocab = metadata.get('llama.vocab_size')
  if vocab is None:
    vocab = len(_required(metadata, 'tokenizer.ggml.tokens', 'The GGUF file'))
  return {
    'vocab_size': vocab,
    'hidden_size': hidden,
    'intermediate_size': get('feed_forward_length'),
    'num_layers': get('block_count'),
    'num_heads': heads,
    'num_kv_heads': kv_heads,
    'head_dim': head_dim,
    'rope_theta': float(metadata.get('llama.rope.freq_base', 10000.0)),
    'rope_scaling': scaling,
    'rms_norm_eps': float(get('attention.layer_norm_rms_epsilon')),
    'max_position_embeddings': get('context_length'),
  }
