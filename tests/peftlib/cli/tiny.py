"""A model and data so small that whole runs of the commands take seconds."""

import json
import os
import pathlib
from unittest import mock
import warnings

from absl import logging
import jax
import numpy as np
from safetensors import numpy as safetensors_numpy
import tokenizers
from tokenizers import decoders
from tokenizers import models as tokenizers_models
from tokenizers import pre_tokenizers

from peftlib import data
from peftlib import models
from peftlib.models import naming

TEMPLATE = (
  "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n'"
  " + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = models.DecoderConfig(
  vocab_size=264,
  hidden_size=32,
  intermediate_size=64,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  tie_embeddings=True,
)
NAMES = ('Ada', 'Ben', 'Cleo', 'Dan', 'Eve', 'Finn', 'Gus', 'Hal')


def make_tokenizer(template: str | None = TEMPLATE) -> data.Tokenizer:
  """A tokenizer of bytes and the two tokens of a chat."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(
    tokenizers_models.BPE(
      vocab={c: i for i, c in enumerate(alphabet)}, merges=[]
    )
  )
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(['<|im_start|>', '<|im_end|>'])
  end = backend.token_to_id('<|im_end|>')
  return data.Tokenizer(backend, template, None, (end,), end)


def write_model(directory: pathlib.Path, *, seed: int = 0) -> str:
  """Writes a Hugging Face directory with random weights."""
  directory.mkdir(parents=True)
  make_tokenizer().save(directory)
  (directory / 'config.json').write_text(json.dumps(CONFIG.to_hf()))
  rng = np.random.default_rng(seed)
  tensors = {}
  for name, target in naming.targets(CONFIG).items():
    value = rng.normal(0.0, 0.1, target.shape)
    if 'norm' in name:
      value = np.ones(target.shape)
    tensors[name] = value.astype(np.float32)
  safetensors_numpy.save_file(tensors, directory / 'model.safetensors')
  return str(directory)


def write_rows(path: pathlib.Path, count: int = 24) -> str:
  """Writes rows whose lengths differ."""
  path.write_text(
    ''.join(
      json.dumps(
        {
          'prompt': f'{NAMES[i % 8]} {"very " * (i % 3)}{i}',
          'completion': NAMES[i % 8].lower(),
        }
      )
      + '\n'
      for i in range(count)
    )
  )
  return str(path)


def finetune_flags(
  model: str, rows: str, output: pathlib.Path, *more: str
) -> list[str]:
  """A command line of a short run; later flags win."""
  return [
    'peftlib',
    'finetune',
    f'--model={model}',
    f'--data={rows}',
    '--eval_data=',
    f'--output={output}',
    '--rank=2',
    '--tile_size=16',
    '--length=64',
    '--steps=6',
    '--warmup_steps=2',
    '--checkpoint_every=2',
    '--dropout=0.1',
    '--module_path=.*(q|v)_proj',
    *more,
  ]


def prepare(test_class) -> None:
  """Readies a class of tests that run commands in this process.

  Optimizations, which take longer than such programs run, are left out. So are
  reports of libraries, as `peftlib.__main__.main` does.
  """
  name = 'jax_disable_most_optimizations'
  test_class.addClassCleanup(jax.config.update, name, jax.config.values[name])
  jax.config.update(name, True)
  test_class.addClassCleanup(logging.set_verbosity, logging.get_verbosity())
  logging.set_verbosity(logging.ERROR)
  # Tables are as wide as the terminal, whatever runs the tests says of it.
  test_class.enterClassContext(mock.patch.dict(os.environ, COLUMNS='120'))
  # Python hides other modules' deprecations from users, unittest does not.
  test_class.enterClassContext(warnings.catch_warnings())
  warnings.simplefilter('ignore', DeprecationWarning)
