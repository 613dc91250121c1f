"""Which Hugging Face tensor is which part of the decoder's state."""

from __future__ import annotations

from typing import NamedTuple

from peftlib.models import config as config_lib

_NORMS = ('input_layernorm', 'post_attention_layernorm')


class Target(NamedTuple):
  """The place of one tensor of a checkpoint in the decoder's state.

  Attributes:
    path: Path of the variable.
    layer: Index on the variable's leading axis; None if it isn't stacked.
    shape: Shape of the tensor in the checkpoint.
    transposed: The state has it transposed.
  """

  path: tuple[str, ...]
  layer: int | None
  shape: tuple[int, ...]
  transposed: bool


def targets(config: config_lib.DecoderConfig) -> dict[str, Target]:
  """All tensors that a checkpoint of this configuration has.

  Args:
    config: The decoder's configuration.

  Returns:
    Targets by Hugging Face name, in the order of the model.
  """
  hidden = config.hidden_size
  width = config.num_heads * config.head_dim
  kv_width = config.num_kv_heads * config.head_dim
  inner = config.intermediate_size
  projections = {
    ('self_attn', 'q_proj'): (width, hidden, config.attention_bias),
    ('self_attn', 'k_proj'): (kv_width, hidden, config.attention_bias),
    ('self_attn', 'v_proj'): (kv_width, hidden, config.attention_bias),
    ('self_attn', 'o_proj'): (hidden, width, config.attention_bias),
    ('mlp', 'gate_proj'): (inner, hidden, config.mlp_bias),
    ('mlp', 'up_proj'): (inner, hidden, config.mlp_bias),
    ('mlp', 'down_proj'): (hidden, inner, config.mlp_bias),
  }
  table = config.vocab_size, hidden
  result = {
    'model.embed_tokens.weight': Target(
      ('embed_tokens', 'embedding'), None, table, False
    )
  }
  for i in range(config.num_layers):
    prefix = f'model.layers.{i}'
    for norm in _NORMS:
      result[f'{prefix}.{norm}.weight'] = Target(
        ('layers', norm, 'scale'), i, (hidden,), False
      )
    for (block, name), (fan_out, fan_in, bias) in projections.items():
      path = ('layers', block, name)
      result[f'{prefix}.{block}.{name}.weight'] = Target(
        (*path, 'kernel'), i, (fan_out, fan_in), True
      )
      if bias:
        result[f'{prefix}.{block}.{name}.bias'] = Target(
          (*path, 'bias'), i, (fan_out,), False
        )
  result['model.norm.weight'] = Target(
    ('norm', 'scale'), None, (hidden,), False
  )
  if not config.tie_embeddings:
    result['lm_head.weight'] = Target(('lm_head', 'kernel'), None, table, True)
  return result
