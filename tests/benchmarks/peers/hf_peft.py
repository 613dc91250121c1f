"""HF peft with transformers and torch, as its users run it.

usage: python tests/benchmarks/peers/hf_peft.py SPEC

Fields of the spec, in JSON: `case` ('step', 'chats', 'load', 'generate'),
`folder` (see material.py), and those that the functions below read.
"""

import json
import pathlib
import sys
import time

import numpy as np
import peft
import tokenizers
import torch
from torch.nn import functional
import transformers

# The checkout; this file is run by its path.
sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))

from tests.benchmarks import worker


def _model(spec, adapter=True):
  model = transformers.AutoModelForCausalLM.from_pretrained(
    pathlib.Path(spec['folder'], 'model'),
    dtype=getattr(torch, spec.get('dtype', 'float32')),
    attn_implementation='sdpa',
  )
  if spec.get('remat'):
    model.gradient_checkpointing_enable({'use_reentrant': False})
    model.enable_input_require_grads()
  if adapter:
    model = peft.PeftModel.from_pretrained(
      model, pathlib.Path(spec['folder'], 'adapter'), is_trainable=True
    )
  return model.to(_device(spec))


def _device(spec):
  return spec.get('device', 'cpu')


def _optimizer(model, learning_rate):
  # optax.adamw's decay and epsilon.
  return torch.optim.AdamW(
    [p for p in model.parameters() if p.requires_grad],
    lr=learning_rate,
    weight_decay=1e-4,
    eps=1e-8,
  )


def step(spec):
  """Training steps on `rows` rows of `length` tokens, loss on all."""
  tokens = np.load(pathlib.Path(spec['folder'], 'tokens.npy'))
  model = _model(spec).train()
  optimizer = _optimizer(model, spec['learning_rate'])
  forward = torch.compile(model) if spec.get('compile') else model
  batches = worker.batches(tokens, spec)

  def work():
    batch = torch.from_numpy(next(batches).astype(np.int64))
    start = time.perf_counter()
    batch = batch.to(_device(spec))
    logits = forward(input_ids=batch[:, :-1], use_cache=False).logits
    loss = functional.cross_entropy(
      logits.flatten(0, 1).float(), batch[:, 1:].flatten()
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.item()
    return {'seconds': time.perf_counter() - start, 'loss': loss}

  return work


def chats(spec):
  """One pass over chats in batches, padded by transformers' collator."""
  rows = json.loads(pathlib.Path(spec['folder'], 'chats.json').read_text())
  features = [
    {
      'input_ids': row['ids'],
      'attention_mask': [1] * len(row['ids']),
      'labels': [
        i if counts else -100
        for i, counts in zip(row['ids'], row['has_loss'], strict=True)
      ],
    }
    for row in rows
  ]
  model = _model(spec).train()
  # The collator wants one, to pad with its token; what else it has is idle.
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(
      tokenizers.models.WordLevel({'<pad>': 0}, '<pad>')
    ),
    pad_token='<pad>',
  )
  collate = transformers.DataCollatorForSeq2Seq(tokenizer)
  optimizer = _optimizer(model, spec['learning_rate'])

  def work():
    start, total, count = time.perf_counter(), 0.0, 0
    for at in range(0, len(features), spec['rows']):
      batch = collate(features[at : at + spec['rows']]).to(_device(spec))
      loss = model(**batch, use_cache=False).loss
      loss.backward()
      optimizer.step()
      optimizer.zero_grad()
      learnt = int((batch['labels'][:, 1:] != -100).sum())
      total, count = total + loss.item() * learnt, count + learnt
    return {
      'seconds': time.perf_counter() - start,
      'loss': total / count,
      'loss_tokens': count,
    }

  return work


def load(spec):
  """Reads the model, from `source`: 'gguf' or 'safetensors'."""

  def work():
    start = time.perf_counter()
    if spec['source'] == 'gguf':
      model = transformers.AutoModelForCausalLM.from_pretrained(
        spec['folder'], gguf_file='model.gguf', dtype=torch.float32
      ).to(_device(spec))
    else:
      model = _model(spec, adapter=False)
    # A memory map isn't read yet.
    sum(p.sum() for p in model.parameters()).item()
    return {'seconds': time.perf_counter() - start}

  return work


def generate(spec):
  """Generates greedily with a cache: `new` tokens after `prompt`."""
  tokens = np.load(pathlib.Path(spec['folder'], 'tokens.npy'))
  model = _model(spec).eval()
  shape = (spec['rows'], spec['prompt'])
  prompt = torch.from_numpy(
    tokens[: shape[0] * shape[1]].reshape(shape).astype(np.int64)
  ).to(_device(spec))

  def work():
    start = time.perf_counter()
    with torch.inference_mode():
      out = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=spec['new'],
        min_new_tokens=spec['new'],
        do_sample=False,
      )
    return {
      'seconds': time.perf_counter() - start,
      'tokens': out[:, shape[1] :].tolist(),
    }

  return work


if __name__ == '__main__':
  transformers.logging.set_verbosity_error()
  worker.serve(
    {'step': step, 'chats': chats, 'load': load, 'generate': generate},
    torch.cuda.max_memory_allocated if torch.cuda.is_available() else None,
  )
