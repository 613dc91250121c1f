"""Directories as HF peft writes them."""

import json
import pathlib

import numpy as np
from safetensors import numpy as safetensors_numpy


def write(folder, fields, tensors, prefix):
  """Writes an adapter of one module, whose tensors start with `prefix`."""
  folder = pathlib.Path(folder)
  folder.mkdir()
  (folder / 'adapter_config.json').write_text(json.dumps(fields))
  safetensors_numpy.save_file(
    {prefix + name: value for name, value in tensors.items()},
    folder / 'adapter_model.safetensors',
  )
  return folder


def draw(*shape):
  """Normal numbers, equal ones for equal sums of the shape."""
  return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)
