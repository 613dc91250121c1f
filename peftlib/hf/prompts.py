"""Prefix and prompt tuning: one tensor for the whole model."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlib import config as config_lib
from peftlib import injection

TYPES = {'PREFIX_TUNING': 'prefix', 'PROMPT_TUNING': 'prompt'}
TENSOR = 'prompt_embeddings'

# How the start was drawn, and where peft keeps it: nothing of what it computes.
_NEUTRAL = frozenset(
  {
    'auto_mapping',
    'base_model_name_or_path',
    'encoder_hidden_size',
    'inference_mode',
    'init_weights',
    'peft_type',
    'peft_version',
    'prompt_tuning_init',
    'prompt_tuning_init_text',
    'revision',
    'tokenizer_kwargs',
    'tokenizer_name_or_path',
  }
)


def load(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  fields: Mapping[str, Any],
  tensors: Mapping[str, np.ndarray],
  adapter: str,
) -> tuple[nnx.GraphDef[Any], nnx.State, config_lib.AdapterConfig]:
  """Puts the virtual tokens of an adapter directory into a decoder."""
  function = 'peftlib.hf.load_adapter'
  model = nnx.merge(graphdef, state, copy=True)
  kind = TYPES[fields['peft_type']]
  expected = fields_of(model, kind, fields.get('num_virtual_tokens', 0))
  refused = [
    f'{name}={value!r}: {_right(name, expected)}'
    for name, value in sorted(fields.items())
    if name not in _NEUTRAL
    and value != expected.get(name)
    and not projected(name, fields)
  ]
  if refused:
    raise ValueError(
      f'{function}: {fields["peft_type"]} with {"; ".join(refused)}.'
    )
  if set(tensors) != {TENSOR}:
    raise ValueError(
      f'{function}: {fields["peft_type"]} has the tensor {TENSOR!r} alone;'
      f' found {sorted(tensors)}.'
    )
  length = fields['num_virtual_tokens']
  config = config_lib.AdapterConfig(
    virtual_tokens=config_lib.VirtualTokens(kind=kind, length=length)
  )
  graphdef, state = injection.inject(
    graphdef, state, config, key=jax.random.key(0), adapter=adapter
  )
  values = _variables(kind, model.config, tensors[TENSOR])
  flat = []
  for path, variable in nnx.to_flat_state(state):
    value = values.get(str(path[-1]))
    if value is not None and isinstance(variable, nnx.LoRAParam):
      if value.shape != variable.get_value().shape:
        raise ValueError(
          f'{function}: {TENSOR} has shape {tensors[TENSOR].shape}; the fields'
          f' and the model make it ({length}, {_width(kind, model.config)}).'
        )
      variable = variable.replace(jnp.asarray(value))
    flat.append((path, variable))
  return graphdef, nnx.from_flat_state(flat), config


def save(
  model: nnx.Module, state: nnx.State[Any, Any], adapter: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
  """Fields and tensor of a decoder's virtual tokens; None if it has none."""
  found = {
    str(path[-1]): np.asarray(variable.get_value())
    for path, variable in nnx.to_flat_state(state)
    if isinstance(variable, nnx.LoRAParam)
    and path[-1] in ('prompt', 'prefix_key', 'prefix_value')
    and variable.get_metadata().get('adapter') == adapter
  }
  if not found:
    return None
  if 'prompt' in found:
    tensor, kind = found['prompt'], 'prompt'
  else:
    # (layers, tokens, heads, width) of both, by turns of layers.
    both = np.stack([found['prefix_key'], found['prefix_value']], 1)
    tensor = both.transpose(2, 0, 1, 3, 4).reshape(both.shape[2], -1)
    kind = 'prefix'
  types = {own: name for name, own in TYPES.items()}
  fields = {
    'peft_type': types[kind],
    'inference_mode': True,
    **fields_of(model, kind, tensor.shape[0]),
  }
  return fields, {TENSOR: tensor}


def projected(name: str, fields: Mapping[str, Any]) -> bool:
  """Whether a field is of a projection that the saved tensor is behind of.

  peft saves what its encoder makes of the prefix, and never runs that again
  in inference mode.
  """
  return name == 'prefix_projection' and bool(fields.get('inference_mode'))


def fields_of(model: nnx.Module, kind: str, length: int) -> dict[str, Any]:
  """What the fields have to be for a decoder."""
  config = model.config  # type: ignore[attr-defined]
  fields = {
    'task_type': 'CAUSAL_LM',
    'num_layers': config.num_layers,
    'num_virtual_tokens': length,
    'num_transformer_submodules': 1,
    'modules_to_save': None,
  }
  if kind == 'prompt':
    return {
      **fields,
      'token_dim': config.hidden_size,
      'num_attention_heads': config.num_heads,
    }
  return {
    **fields,
    'token_dim': config.num_kv_heads * config.head_dim,
    'num_attention_heads': config.num_kv_heads,
    'prefix_projection': False,
  }


def _variables(kind: str, config: Any, tensor: np.ndarray) -> dict[str, Any]:
  if kind == 'prompt':
    return {'prompt': tensor}
  shape = (-1, config.num_layers, 2, config.num_kv_heads, config.head_dim)
  if tensor.size % int(np.prod(shape[1:])):
    return {'prefix_key': tensor, 'prefix_value': tensor}
  both = tensor.reshape(shape).transpose(2, 1, 0, 3, 4)
  return {'prefix_key': both[0], 'prefix_value': both[1]}


def _width(kind: str, config: Any) -> int:
  if kind == 'prompt':
    return int(config.hidden_size)
  return int(config.num_layers * 2 * config.num_kv_heads * config.head_dim)


def _right(name: str, expected: Mapping[str, Any]) -> str:
  if name in expected:
    return f'the model needs {expected[name]!r}'
  return 'not a field that is known'
