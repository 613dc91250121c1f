"""Data: JSON lines, tokenizers, chat templates, loss masks, packing."""

from peftlib.data.chat import Encoded, encode_prompt, encode_row
from peftlib.data.packing import (
  PackingStats,
  build_sequence,
  choose_loss_length,
  first_fit,
  fit,
  round_up,
  stack,
)
from peftlib.data.pipeline import Batch, Pipeline, encode_rows, make_pipeline
from peftlib.data.reading import Row, parse_row, read_jsonl
from peftlib.data.tokenizer import Tokenizer

__all__ = [
  'Batch',
  'Encoded',
  'PackingStats',
  'Pipeline',
  'Row',
  'Tokenizer',
  'build_sequence',
  'choose_loss_length',
  'encode_prompt',
  'encode_row',
  'encode_rows',
  'first_fit',
  'fit',
  'make_pipeline',
  'parse_row',
  'read_jsonl',
  'round_up',
  'stack',
]
