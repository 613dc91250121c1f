"""Hugging Face Llama directories, read tensor by tensor, and written."""

from __future__ import annotations

import collections
from collections.abc import Iterator
import json
import os
from typing import Any

import ml_dtypes  # noqa: F401  Registers bfloat16 with numpy.
import numpy as np
import safetensors

from peftlib.models import config as config_lib

_CONFIG = 'config.json'
_INDEX = 'model.safetensors.index.json'
_SINGLE = 'model.safetensors'
_FLOATS = ('F64', 'F32', 'F16', 'BF16')

# Files are mapped, and their pages count as memory of the process until the
# file is closed: it is opened anew after so many bytes.
_MAPPED_BYTES = 1 << 25

# Buffers of old checkpoints that follow from the configuration.
_IGNORED_SUFFIX = '.rotary_emb.inv_freq'


def _read_json(path: str) -> dict[str, Any]:
  with open(path, encoding='utf-8') as file:
    try:
      value = json.load(file)
    except ValueError as error:
      raise ValueError(f'{path}: not valid JSON: {error}') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path}: expected a JSON object.')
  return value


class HfCheckpoint:
  """A directory with `config.json` and `model.safetensors` or its shards.

  Attributes:
    path: The directory.
    shapes: Shape of every tensor by name.
  """

  def __init__(self, path: str):
    """Reads names and shapes, no tensor.

    Args:
      path: The directory.

    Raises:
      FileNotFoundError: `config.json` or the weights aren't there.
      ValueError: A tensor is in two shards, or of a dtype that is no float, or
        the index names other tensors than its shards hold.
    """
    self.path = path
    config_path = os.path.join(path, _CONFIG)
    if not os.path.isfile(config_path):
      raise FileNotFoundError(
        f'{path}: no {_CONFIG}; expected a Hugging Face model directory.'
      )
    self._config = _read_json(config_path)
    self._files, indexed = self._find_files()
    self.shapes: dict[str, tuple[int, ...]] = {}
    for name in self._files:
      self._read_shapes(name)
    if indexed is not None:
      for name in sorted(indexed ^ self.shapes.keys()):
        has, lacks = ('index', 'shards')
        if name not in indexed:
          has, lacks = lacks, has
        raise ValueError(f'{path}: {name} is in the {has}, not in the {lacks}.')
    self.shapes = {
      name: shape
      for name, shape in self.shapes.items()
      if not name.endswith(_IGNORED_SUFFIX)
    }

  def _find_files(self) -> tuple[list[str], set[str] | None]:
    """The weight files, and the tensors an index says are in them."""
    if os.path.isfile(os.path.join(self.path, _INDEX)):
      index = _read_json(os.path.join(self.path, _INDEX))
      weight_map = index.get('weight_map')
      if not isinstance(weight_map, dict):
        raise ValueError(f"{self.path}/{_INDEX}: lacks 'weight_map'.")
      files = sorted(set(weight_map.values()))
      for name in files:
        if not os.path.isfile(os.path.join(self.path, name)):
          raise FileNotFoundError(
            f'{self.path}: no {name}, which {_INDEX} names.'
          )
      return files, set(weight_map)
    if os.path.isfile(os.path.join(self.path, _SINGLE)):
      return [_SINGLE], None
    raise FileNotFoundError(
      f'{self.path}: neither {_SINGLE} nor {_INDEX} is there; weights in '
      'other formats (.bin) are not read.'
    )

  def _open(self, name: str) -> Any:
    path = os.path.join(self.path, name)
    try:
      return safetensors.safe_open(path, 'np')
    except safetensors.SafetensorError as error:
      raise ValueError(f'{path}: not a safetensors file: {error}') from error

  def _read_shapes(self, file_name: str) -> None:
    with self._open(file_name) as file:
      for name in file.keys():
        entry = file.get_slice(name)
        if name in self.shapes:
          raise ValueError(f'{self.path}: {name} is in two shards.')
        if entry.get_dtype() not in _FLOATS:
          raise ValueError(
            f'{self.path}: {name} has dtype {entry.get_dtype()}; expected one '
            f'of {", ".join(_FLOATS)}.'
          )
        self.shapes[name] = tuple(entry.get_shape())

  def config(self, **overrides: Any) -> config_lib.DecoderConfig:
    """The decoder's configuration.

    Args:
      **overrides: Fields that replace those of the file.

    Returns:
      The configuration.

    Raises:
      ValueError: The file asks for what the decoder doesn't do.
    """
    try:
      return config_lib.DecoderConfig.from_hf(self._config, **overrides)
    except ValueError as error:
      raise ValueError(
        f'{os.path.join(self.path, _CONFIG)}: {error}'
      ) from error

  def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values, one tensor in memory at a time.

    Yields:
      Pairs of the name and the array in the file's dtype, (out, in) for a
      projection.
    """
    for file_name in self._files:
      with self._open(file_name) as file:
        names = [name for name in file.keys() if name in self.shapes]
      left = collections.deque(names)
      while left:
        mapped = 0
        with self._open(file_name) as file:
          while left and mapped < _MAPPED_BYTES:
            name = left.popleft()
            values = file.get_tensor(name)
            mapped += values.nbytes
            yield name, values
            del values
