"""What all competitors of a benchmark work on, made once into a folder.

model.gguf         the demo model as it came (a link)
model/             the same in float32 safetensors, as transformers reads it
adapter/           a fresh LoRA of rank 16 on all linear layers, as peft's
tokens.npy         int32 (N,): the demo's chats in a row
chats.json         rows of 8 to 512 tokens, which of them have a loss
"""

import json
import math
import os
import pathlib
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np

import peftlib
from peftlib import data
from peftlib import hf
from peftlib import models
from peftlib.demo import assets
from peftlib.demo import orders

LORA = peftlib.LoraConfig(module_path='.*_proj', rank=16, alpha=32.0)
# Of the demo; 129,046 tokens.
_NUM_ROWS = 2_000
_NUM_CHATS = 16
_SHORTEST, _LONGEST = 8, 512


def make(folder: pathlib.Path) -> None:
  """Writes all of it, or nothing where the folder exists.

  Args:
    folder: Where to. It appears only when it is complete.
  """
  if folder.exists():
    return
  partial = folder.with_name(folder.name + '.partial')
  shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True)
  gguf = os.fspath(assets.model_path())
  model = models.load(gguf)
  models.save_directory(partial / 'model', model.config, model.state)
  graphdef, state = peftlib.inject(
    model.graphdef,
    model.state,
    LORA,
    jnp.zeros((1, 8), jnp.int32),
    key=jax.random.key(0),
  )
  hf.save_adapter(partial / 'adapter', graphdef, state)
  (partial / 'model.gguf').symlink_to(gguf)
  rows = _demo_rows(gguf)
  np.save(partial / 'tokens.npy', np.concatenate([r.tokens for r in rows]))
  (partial / 'chats.json').write_text(json.dumps(_chats(rows)))
  partial.rename(folder)


def _demo_rows(gguf: str) -> list[data.Encoded]:
  tokenizer = data.Tokenizer.from_path(gguf)
  rows = orders.make_rows('train', _NUM_ROWS)
  return [
    data.encode_row(data.parse_row(json.dumps(row)), tokenizer) for row in rows
  ]


def _chats(rows: list[data.Encoded]) -> list[dict[str, list[int]]]:
  """Chats of several turns, as many of 8 to 16 tokens as of 256 to 512."""
  rng = random.Random(0)
  chats = []
  for _ in range(_NUM_CHATS):
    length = round(
      math.exp(rng.uniform(math.log(_SHORTEST), math.log(_LONGEST)))
    )
    ids: list[int] = []
    has_loss: list[int] = []
    while len(ids) < length:
      turn = rng.choice(rows)
      ids += turn.tokens.tolist()
      has_loss += turn.loss_mask.astype(int).tolist()
    # The end, which is an answer; nothing predicts the first token.
    chats.append(
      {'ids': ids[-length:], 'has_loss': [0, *has_loss[1 - length :]]}
    )
  return chats
