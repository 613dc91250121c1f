"""Parameter-efficient fine-tuning of Flax NNX models, as pure functions."""

from peftlib.config import LoraConfig
from peftlib.injection import inject, with_dropout
from peftlib.quantization import dequantize_base, quantize_base
from peftlib.training import (
  TrainState,
  init_train_state,
  make_eval_step,
  make_train_step,
  trainable_filter,
)

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
