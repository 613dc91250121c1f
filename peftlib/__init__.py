"""Parameter-efficient fine-tuning of Flax NNX models, as pure functions."""

from peftlib.config import LoraConfig
from peftlib.injection import inject
from peftlib.injection import with_dropout
from peftlib.quantization import dequantize_base
from peftlib.quantization import quantize_base
from peftlib.training import TrainState
from peftlib.training import init_train_state
from peftlib.training import make_eval_step
from peftlib.training import make_train_step
from peftlib.training import trainable_filter

__all__ = [
  'LoraConfig',
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
