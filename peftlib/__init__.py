"""Parameter-efficient fine-tuning of Flax NNX models, as pure functions."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from peftlib.adapters import adapter_filter
  from peftlib.adapters import adapter_names
  from peftlib.adapters import assign_rows
  from peftlib.adapters import remove_adapter
  from peftlib.adapters import rename_adapter
  from peftlib.adapters import set_active
  from peftlib.combining import combine_adapters
  from peftlib.combining import extract_adapter
  from peftlib.config import AdapterConfig
  from peftlib.config import LoraConfig
  from peftlib.config import Rule
  from peftlib.config import VirtualTokens
  from peftlib.initialization import initialize_eva
  from peftlib.initialization import initialize_loftq
  from peftlib.initialization import initialize_lora_ga
  from peftlib.injection import inject
  from peftlib.injection import with_dropout
  from peftlib.merging import merge_adapters
  from peftlib.merging import quantization_error
  from peftlib.merging import unmerge_adapters
  from peftlib.quantization import dequantize_base
  from peftlib.quantization import quantize_base
  from peftlib.slots import AdapterConstant
  from peftlib.slots import AdapterGate
  from peftlib.stacking import init_stacked_train_state
  from peftlib.stacking import make_stacked_train_step
  from peftlib.stacking import stack_adapters
  from peftlib.stacking import unstack_adapters
  from peftlib.training import TrainState
  from peftlib.training import init_train_state
  from peftlib.training import make_eval_step
  from peftlib.training import make_train_step
  from peftlib.training import saved_filter
  from peftlib.training import trainable_filter

__all__ = [
  'AdapterConfig',
  'AdapterConstant',
  'AdapterGate',
  'LoraConfig',
  'Rule',
  'TrainState',
  'VirtualTokens',
  'adapter_filter',
  'adapter_names',
  'assign_rows',
  'combine_adapters',
  'dequantize_base',
  'extract_adapter',
  'init_stacked_train_state',
  'init_train_state',
  'initialize_eva',
  'initialize_loftq',
  'initialize_lora_ga',
  'inject',
  'make_eval_step',
  'make_stacked_train_step',
  'make_train_step',
  'merge_adapters',
  'quantization_error',
  'quantize_base',
  'remove_adapter',
  'rename_adapter',
  'saved_filter',
  'set_active',
  'stack_adapters',
  'trainable_filter',
  'unmerge_adapters',
  'unstack_adapters',
  'with_dropout',
]

# Imported when first asked for: jax, flax and qwix take seconds, which the
# command line's --help and the demo's generator do without.
_MODULES = {
  'AdapterConfig': 'config',
  'AdapterConstant': 'slots',
  'AdapterGate': 'slots',
  'LoraConfig': 'config',
  'Rule': 'config',
  'TrainState': 'training',
  'VirtualTokens': 'config',
  'adapter_filter': 'adapters',
  'adapter_names': 'adapters',
  'assign_rows': 'adapters',
  'combine_adapters': 'combining',
  'dequantize_base': 'quantization',
  'extract_adapter': 'combining',
  'init_stacked_train_state': 'stacking',
  'init_train_state': 'training',
  'initialize_eva': 'initialization',
  'initialize_loftq': 'initialization',
  'initialize_lora_ga': 'initialization',
  'inject': 'injection',
  'make_eval_step': 'training',
  'make_stacked_train_step': 'stacking',
  'make_train_step': 'training',
  'merge_adapters': 'merging',
  'quantization_error': 'merging',
  'quantize_base': 'quantization',
  'remove_adapter': 'adapters',
  'rename_adapter': 'adapters',
  'saved_filter': 'training',
  'set_active': 'adapters',
  'stack_adapters': 'stacking',
  'trainable_filter': 'training',
  'unmerge_adapters': 'merging',
  'unstack_adapters': 'stacking',
  'with_dropout': 'injection',
}


def __getattr__(name: str) -> Any:
  if name not in _MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module = importlib.import_module(f'{__name__}.{_MODULES[name]}')
  value = globals()[name] = getattr(module, name)
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
