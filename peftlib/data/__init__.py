"""Data: JSON lines, tokenizers, chat templates, loss masks, packing."""

from peftlib.data.chat import Encoded
from peftlib.data.chat import encode_prompt
from peftlib.data.chat import encode_row
from peftlib.data.packing import PackingStats
from peftlib.data.packing import build_sequence
from peftlib.data.packing import choose_loss_length
from peftlib.data.packing import first_fit
from peftlib.data.packing import fit
from peftlib.data.packing import round_up
from peftlib.data.packing import stack
from peftlib.data.pipeline import Batch
from peftlib.data.pipeline import Pipeline
from peftlib.data.pipeline import encode_rows
from peftlib.data.pipeline import make_pipeline
from peftlib.data.reading import Row
from peftlib.data.reading import parse_row
from peftlib.data.reading import read_jsonl
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
