"""Writing decoders as Hugging Face Llama directories."""

from __future__ import annotations

from collections.abc import Iterator
import json
import os
import shutil
import tempfile
from typing import Any, Protocol

from flax import nnx
import jax
import numpy as np
from safetensors import numpy as safetensors_numpy

from peftlib import _checks
from peftlib.models import config as config_lib
from peftlib.models import naming


class SavesItself(Protocol):
  """What is saved along with the model: a `peftlib.data.Tokenizer`."""

  def save(self, directory: str) -> None:
    """Writes files into an existing directory."""


def save_directory(
  directory: str | os.PathLike[str],
  config: config_lib.DecoderConfig,
  state: nnx.State[Any, Any],
  *,
  tokenizer: SavesItself | None = None,
  max_shard_bytes: int = 2_000_000_000,
) -> None:
  """Writes a directory that transformers and `peftlib.models.load` read.

  It holds `config.json` and `model.safetensors`, or its shards and their index.
  The directory appears whole or not at all.

  Args:
    directory: Where to; nothing, or an empty directory, may be there.
    config: The decoder's configuration.
    state: Its variables: base weights alone, not quantized. Values are written
      in the dtype that they have.
    tokenizer: Is told to save itself into the directory too.
    max_shard_bytes: Above this the weights are split into several files. About
      as much host memory is used.

  Raises:
    TypeError: `state` isn't an `nnx.State`.
    FileExistsError: Something is at `directory`.
    ValueError: A variable is missing, unexpected, or of another shape than the
      configuration says.
  """
  _checks.check_state('peftlib.models.save_directory', 'state', state)
  directory = os.path.abspath(os.fspath(directory))
  if os.path.lexists(directory) and not (
    os.path.isdir(directory) and not os.listdir(directory)
  ):
    raise FileExistsError(
      f'{directory} exists and is not an empty directory; give another one.'
    )
  targets = naming.targets(config)
  weights = _checked_weights(config, state, targets)
  parent = os.path.dirname(directory)
  os.makedirs(parent, exist_ok=True)
  temporary = tempfile.mkdtemp(
    prefix=f'.{os.path.basename(directory)}.', dir=parent
  )
  try:
    # mkdtemp lets nobody else in; a model is as public as any other new file.
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(temporary, 0o777 & ~umask)
    hf_config = config.to_hf() | {
      'torch_dtype': next(iter(weights.values())).dtype.name
    }
    _write_json(os.path.join(temporary, 'config.json'), hf_config)
    _write_weights(temporary, weights, targets, max_shard_bytes)
    if tokenizer is not None:
      tokenizer.save(temporary)
    for entry in os.scandir(temporary):
      _sync(entry.path)
    _sync(temporary)
    os.replace(temporary, directory)
    _sync(parent)
  except BaseException:
    shutil.rmtree(temporary, ignore_errors=True)
    raise


def _sync(path: str) -> None:
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _write_json(path: str, value: Any) -> None:
  with open(path, 'w', encoding='utf-8') as file:
    json.dump(value, file, indent=2)
    file.write('\n')


def _checked_weights(
  config: config_lib.DecoderConfig,
  state: nnx.State[Any, Any],
  targets: dict[str, naming.Target],
) -> dict[tuple[Any, ...], jax.Array]:
  """The state's arrays by path, if they are those of the configuration."""
  expected: dict[tuple[Any, ...], tuple[int, ...]] = {}
  for target in targets.values():
    shape = target.shape[::-1] if target.transposed else target.shape
    stack = () if target.layer is None else (config.num_layers,)
    expected[target.path] = stack + shape
  weights: dict[tuple[Any, ...], jax.Array] = {}
  for path, variable in nnx.to_flat_state(state):
    name = '.'.join(map(str, path))
    if path not in expected:
      raise ValueError(
        f'Unexpected variable {name} ({type(variable).__name__}): only base '
        'weights can be saved; merge adapters and dequantize first.'
      )
    if variable.shape != expected[path]:
      raise ValueError(
        f'Variable {name} has shape {variable.shape}, expected '
        f'{expected[path]}.'
      )
    weights[path] = variable.get_value()
  for path, shape in expected.items():
    if path not in weights:
      raise ValueError(
        f'Variable {".".join(map(str, path))} of shape {shape} is missing.'
      )
  return weights


def _shards(
  weights: dict[tuple[Any, ...], jax.Array],
  targets: dict[str, naming.Target],
  max_bytes: int,
) -> Iterator[list[str]]:
  """Tensor names, in groups that stay below `max_bytes` where they can."""
  group: list[str] = []
  size = 0
  for name, target in targets.items():
    itemsize = weights[target.path].dtype.itemsize
    num_bytes = int(np.prod(target.shape, dtype=np.int64)) * itemsize
    if group and size + num_bytes > max_bytes:
      yield group
      group, size = [], 0
    group.append(name)
    size += num_bytes
  yield group


def _write_weights(
  directory: str,
  weights: dict[tuple[Any, ...], jax.Array],
  targets: dict[str, naming.Target],
  max_shard_bytes: int,
) -> None:
  groups = list(_shards(weights, targets, max_shard_bytes))
  weight_map: dict[str, str] = {}
  total = 0
  for i, group in enumerate(groups):
    file_name = 'model.safetensors'
    if len(groups) > 1:
      file_name = f'model-{i + 1:05}-of-{len(groups):05}.safetensors'
    tensors = {}
    for name in group:
      target = targets[name]
      values = weights[target.path]
      if target.layer is not None:
        values = values[target.layer]
      array = np.asarray(values)
      tensors[name] = np.ascontiguousarray(
        array.T if target.transposed else array
      )
      total += array.nbytes
      weight_map[name] = file_name
    safetensors_numpy.save_file(
      tensors,
      os.path.join(directory, file_name),
      # transformers refuses files without it.
      metadata={'format': 'pt'},
    )
  if len(groups) > 1:
    _write_json(
      os.path.join(directory, 'model.safetensors.index.json'),
      {'metadata': {'total_size': total}, 'weight_map': weight_map},
    )
