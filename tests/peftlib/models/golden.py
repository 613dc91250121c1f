"""Where the golden models lie, and a tiny configuration for the rest."""

import json
import pathlib
from typing import Any

from flax import nnx
import gguf
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors_numpy

from peftlib.models import config as config_lib
from peftlib.models import decoder

GOLDEN = pathlib.Path(__file__).parents[2] / 'golden'
CASES = (
  'llama_tiny',
  *sorted(f'llama/{p.name}' for p in (GOLDEN / 'llama').iterdir()),
)


def directory(case: str) -> pathlib.Path:
  """The Hugging Face directory of a case."""
  return GOLDEN / case


def expected(case: str) -> dict[str, np.ndarray]:
  """`input_ids` and `logits` that transformers computed."""
  return safetensors_numpy.load_file(directory(case) / 'golden.safetensors')


def tiny_config(**overrides: Any) -> config_lib.DecoderConfig:
  """Grouped heads, three layers, untied."""
  fields = {
    'vocab_size': 37,
    'hidden_size': 16,
    'intermediate_size': 24,
    'num_layers': 3,
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 6,
  }
  return config_lib.DecoderConfig(**{**fields, **overrides})


def tiny_model(
  config: config_lib.DecoderConfig | None = None, seed: int = 0
) -> tuple[nnx.GraphDef[decoder.Decoder], nnx.State]:
  """A random decoder, split, with weights large enough to make a difference."""
  graphdef, state = nnx.split(
    decoder.Decoder(config or tiny_config(), rngs=nnx.Rngs(seed))
  )
  rng = np.random.default_rng(seed)
  flat = [
    (path, v.replace(jnp.asarray(rng.normal(0, 0.3, v.shape), v.dtype)))
    if path[-1] != 'scale'
    else (path, v)
    for path, v in nnx.to_flat_state(state)
  ]
  return graphdef, nnx.from_flat_state(flat)


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
  """What llama.cpp's convert_hf_to_gguf.py does to q and k of Llama models."""
  return (
    weights.reshape(
      num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:]
    )
    .swapaxes(1, 2)
    .reshape(weights.shape)
  )


_GGUF_NAMES = {
  'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k',
  'self_attn.v_proj': 'attn_v',
  'self_attn.o_proj': 'attn_output',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
  'input_layernorm': 'attn_norm',
  'post_attention_layernorm': 'ffn_norm',
}


def write_gguf(
  path: str,
  case: str,
  *,
  qtypes: dict[str, gguf.GGMLQuantizationType] | None = None,
  metadata: dict[str, int | str] | None = None,
) -> None:
  """Writes a golden model as llama.cpp's converter would.

  Args:
    path: The file to be written.
    case: Name of the golden model.
    qtypes: Storage type by GGUF tensor name; float32 by default.
    metadata: Additional or other values, uint32 or strings.
  """
  config = config_lib.DecoderConfig.from_hf(
    json.loads((directory(case) / 'config.json').read_text())
  )
  writer = gguf.GGUFWriter(path, 'llama')
  writer.add_block_count(config.num_layers)
  writer.add_context_length(config.max_position_embeddings)
  writer.add_embedding_length(config.hidden_size)
  writer.add_feed_forward_length(config.intermediate_size)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_value_length(config.head_dim)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_layer_norm_rms_eps(config.rms_norm_eps)
  writer.add_vocab_size(config.vocab_size)
  writer.add_token_list([f't{i}' for i in range(config.vocab_size)])
  if config.rope_scaling.rope_type == 'linear':
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config.rope_scaling.factor)
  for key, value in (metadata or {}).items():
    if isinstance(value, str):
      writer.add_string(key, value)
    else:
      writer.add_uint32(key, value)
  weights = safetensors_numpy.load_file(directory(case) / 'model.safetensors')
  for name, values in weights.items():
    stem, _, kind = name.removeprefix('model.').rpartition('.')
    if stem.startswith('layers.'):
      _, layer, part = stem.split('.', 2)
      if part == 'self_attn.q_proj':
        values = permute(values, config.num_heads)
      elif part == 'self_attn.k_proj':
        values = permute(values, config.num_kv_heads)
      gguf_name = f'blk.{layer}.{_GGUF_NAMES[part]}.{kind}'
    else:
      gguf_name = {
        'embed_tokens': 'token_embd',
        'norm': 'output_norm',
        'lm_head': 'output',
      }[stem] + f'.{kind}'
    qtype = (qtypes or {}).get(gguf_name)
    if qtype is None:
      writer.add_tensor(gguf_name, np.ascontiguousarray(values))
    else:
      writer.add_tensor(
        gguf_name, gguf.quantize(values, qtype), raw_dtype=qtype
      )
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
