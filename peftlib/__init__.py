"""Parameter-efficient fine-tuning of Flax NNX models, as pure functions."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from peftlib.config import AdapterConfig
  from peftlib.config import LoraConfig
  from peftlib.config import Rule
  from peftlib.injection import inject
  from peftlib.injection import with_dropout
  from peftlib.quantization import dequantize_base
  from peftlib.quantization import quantize_base
  from peftlib.slots import AdapterConstant
  from peftlib.slots import AdapterGate
  from peftlib.training import TrainState
  from peftlib.training import init_train_state
  from peftlib.training import make_eval_step
  from peftlib.training import make_train_step
  from peftlib.training import trainable_filter

__all__ = [
  'AdapterConfig',
  'AdapterConstant',
  'AdapterGate',
  'LoraConfig',
  'Rule',
  'TrainState',
  'dequantize_base',
  'init_train_state',
  'inject',
  'make_eval_step',
  'make_train_step',
  'quantize_base',
  'trainable_filter',
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
  'dequantize_base': 'quantization',
  'init_train_state': 'training',
  'inject': 'injection',
  'make_eval_step': 'training',
  'make_train_step': 'training',
  'quantize_base': 'quantization',
  'trainable_filter': 'training',
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
