"""Loading pretrained decoders from GGUF files and Hugging Face directories."""

from __future__ import annotations

import difflib
import os
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax import typing as jax_typing
import numpy as np

from peftlib.models import config as config_lib
from peftlib.models import decoder
from peftlib.models import gguf_files
from peftlib.models import hf_files
from peftlib.models import naming

# XLA:CPU takes over a numpy buffer without copying it from this alignment on.
_ALIGNMENT = 64


class LoadedModel(NamedTuple):
  """A pretrained model, split.

  Attributes:
    graphdef: Static half of `nnx.split`.
    state: The variables.
    config: The decoder's configuration.
  """

  graphdef: nnx.GraphDef[decoder.Decoder]
  state: nnx.State
  config: config_lib.DecoderConfig


def open_checkpoint(
  path: str | os.PathLike[str],
) -> gguf_files.GgufCheckpoint | hf_files.HfCheckpoint:
  """Opens a GGUF file or a Hugging Face directory, reading no tensor.

  Args:
    path: The file or the directory.

  Returns:
    The checkpoint.

  Raises:
    FileNotFoundError: Nothing is there.
    ValueError: What is there is neither.
  """
  path = os.fspath(path)
  if os.path.isdir(path):
    return hf_files.HfCheckpoint(path)
  if not os.path.exists(path):
    raise FileNotFoundError(
      f'{path}: no such file or directory; expected a GGUF file or a Hugging '
      'Face model directory.'
    )
  return gguf_files.GgufCheckpoint(path)


def load(
  path: str | os.PathLike[str],
  *,
  dtype: jax_typing.DTypeLike = 'float32',
  param_dtype: jax_typing.DTypeLike = 'float32',
  remat: bool = False,
) -> LoadedModel:
  """Loads a Llama model.

  Tensors are read one after the other into the buffers that become the model's
  arrays: beyond the model, host memory holds one tensor at a time.

  Args:
    path: A GGUF file, or a Hugging Face directory with `config.json` and
      `model.safetensors` or its shards.
    dtype: Dtype of the computation.
    param_dtype: Dtype that the parameters are converted to.
    remat: Recompute each layer in the backward pass.

  Returns:
    The model; its arrays are on the default device.

  Raises:
    FileNotFoundError: Nothing is at `path`, or a file is missing there.
    ValueError: The architecture isn't supported, or a tensor is missing,
      unexpected, or of another shape than the configuration says. Nothing has
      been allocated then.

  Example:
    >>> model = load('SmolLM2-135M-Instruct.gguf')  # doctest: +SKIP
    >>> logits = nnx.merge(model.graphdef, model.state)(
    ...   tokens
    ... )  # doctest: +SKIP
  """
  checkpoint = open_checkpoint(path)
  config = checkpoint.config(dtype=dtype, param_dtype=param_dtype, remat=remat)
  targets = naming.targets(config)
  _check_shapes(os.fspath(path), checkpoint.shapes, targets)
  graphdef, abstract = nnx.split(
    nnx.eval_shape(lambda: decoder.Decoder(config, rngs=nnx.Rngs(0)))
  )
  arrays = _read_arrays(checkpoint, targets, config)
  variables = {
    variable_path: variable.replace(arrays[variable_path])
    for variable_path, variable in nnx.to_flat_state(abstract)
  }
  return LoadedModel(graphdef, nnx.from_flat_state(variables), config)


def _check_shapes(
  path: str,
  shapes: dict[str, tuple[int, ...]],
  targets: dict[str, naming.Target],
) -> None:
  """Raises ValueError unless the tensors are those the configuration has."""
  problems = []
  for name, target in targets.items():
    if name not in shapes:
      problems.append(f'missing tensor {name} of shape {target.shape}')
    elif shapes[name] != target.shape:
      problems.append(
        f'tensor {name} has shape {shapes[name]}, expected {target.shape}'
      )
  for name in shapes:
    if name not in targets:
      near = difflib.get_close_matches(name, targets, 1)
      hint = f' (near: {near[0]})' if near else ''
      problems.append(f'unexpected tensor {name} of shape {shapes[name]}{hint}')
  if problems:
    more = '' if len(problems) <= 5 else f'; and {len(problems) - 5} more'
    raise ValueError(f'{path}: {"; ".join(problems[:5])}{more}.')


def _read_arrays(
  checkpoint: gguf_files.GgufCheckpoint | hf_files.HfCheckpoint,
  targets: dict[str, naming.Target],
  config: config_lib.DecoderConfig,
) -> dict[tuple[Any, ...], jax.Array]:
  """Reads all tensors into arrays by variable path."""
  dtype = np.dtype(config.param_dtype)
  buffers: dict[tuple[str, ...], np.ndarray] = {}
  awaited: dict[tuple[str, ...], int] = {}
  for target in targets.values():
    awaited[target.path] = awaited.get(target.path, 0) + 1
  arrays: dict[tuple[Any, ...], jax.Array] = {}
  for name, values in checkpoint.tensors():
    target = targets[name]
    if target.transposed:
      values = values.T
    if target.path not in buffers:
      stack = () if target.layer is None else (config.num_layers,)
      buffers[target.path] = _aligned_empty(stack + values.shape, dtype)
    index = () if target.layer is None else target.layer
    buffers[target.path][index] = values
    awaited[target.path] -= 1
    if not awaited[target.path]:
      arrays[target.path] = jax.device_put(buffers.pop(target.path))
  return arrays


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
  raw = np.empty(size + _ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % _ALIGNMENT
  return raw[start : start + size].view(dtype).reshape(shape)
