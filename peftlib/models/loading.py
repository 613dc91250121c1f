"""Loading pretrained decoders from GGUF files and Hugging Face directories."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent import futures
import difflib
import math
import os
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax import typing as jax_typing
import jax.numpy as jnp
import numpy as np

from peftlib import config as peft_config
from peftlib import quantization
from peftlib.models import config as config_lib
from peftlib.models import decoder
from peftlib.models import fingerprinting
from peftlib.models import gguf_files
from peftlib.models import hf_files
from peftlib.models import naming

# XLA:CPU takes over a numpy buffer without copying it from this alignment on.
_ALIGNMENT = 64

# Elements at least that a thread copies; it takes longer than its start.
_PART = 2**16


class LoadedModel(NamedTuple):
  """A pretrained model, split.

  Attributes:
    graphdef: Static half of `nnx.split`.
    state: The variables.
    config: The decoder's configuration.
    fingerprint: `peftlib.models.fingerprint` of the weights as they were read,
      before any quantization.
  """

  graphdef: nnx.GraphDef[decoder.Decoder]
  state: nnx.State[Any, Any]
  config: config_lib.DecoderConfig
  fingerprint: str


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
  remat: str = 'dots',
  quantize: peft_config.Config | None = None,
) -> LoadedModel:
  """Loads a Llama model.

  Tensors are read one after the other into the buffers that become the model's
  arrays: beyond the model, host memory holds one tensor at a time.

  Args:
    path: A GGUF file, or a Hugging Face directory with `config.json` and
      `model.safetensors` or its shards.
    dtype: Dtype of the computation.
    param_dtype: Dtype that the parameters are converted to.
    remat: What the backward pass computes again: 'none', 'dots' or 'full', as
      `DecoderConfig` says.
    quantize: What to quantize and how, as for `peftlib.quantize_base`, whose
      result this is: each weight as soon as it is read, so that the base is
      never in memory whole in floating point. None quantizes nothing.

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
  quantizers: Mapping[tuple[str, ...], Any] = {}
  if quantize is not None:
    tokens = jax.ShapeDtypeStruct((1, 8), 'int32')
    graphdef, abstract, quantizers = quantization.plan_base(
      graphdef, abstract, quantize, tokens
    )
  with futures.ThreadPoolExecutor() as pool:
    arrays, samples = _read_arrays(
      checkpoint, targets, config, quantizers, _Copier(pool)
    )
  variables = {
    variable_path: variable.replace(arrays[variable_path])
    for variable_path, variable in nnx.to_flat_state(abstract)
  }
  return LoadedModel(
    graphdef,
    nnx.from_flat_state(variables),
    config,
    fingerprinting.of_samples(samples),
  )


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
  quantizers: Mapping[tuple[str, ...], Any],
  copy: _Copier,
) -> tuple[dict[tuple[Any, ...], jax.Array], dict[str, Any]]:
  """Reads all tensors into arrays by variable path, and samples of them."""
  dtype = np.dtype(config.param_dtype)
  reading: dict[tuple[str, ...], _Stack | _QuantizedStack] = {}
  arrays: dict[tuple[Any, ...], jax.Array] = {}
  samples: dict[str, _Samples] = {}
  for name, values in checkpoint.tensors():
    target = targets[name]
    path = target.path
    if target.transposed:
      values = values.T
    count = None if target.layer is None else config.num_layers
    if path not in reading:
      samples['.'.join(path)] = _Samples(count, values.shape, dtype)
      if path in quantizers:
        reading[path] = _QuantizedStack(count, dtype, quantizers[path])
      else:
        reading[path] = _Stack(count, values.shape, dtype, copy)
    layer = target.layer or 0
    kept = reading[path].add(layer, values)
    samples['.'.join(path)].add(layer, kept)
    if reading[path].left == 0:
      arrays |= {(*path, *n): a for n, a in reading.pop(path).arrays().items()}
    # Not kept while the next tensor is read.
    del values, kept
  return arrays, {name: (s.shape, s.values) for name, s in samples.items()}


class _Stack:
  """The buffer that becomes an array, filled layer by layer."""

  def __init__(
    self,
    count: int | None,
    shape: tuple[int, ...],
    dtype: np.dtype,
    copy: _Copier,
  ) -> None:
    self.left = count or 1
    self._stacked = count is not None
    self._copy = copy
    self._buffer = _aligned_empty((self.left, *shape), dtype)

  def add(self, layer: int, values: np.ndarray) -> np.ndarray:
    """Takes a layer; returns it in the dtype of the parameters."""
    self._copy(self._buffer[layer], values)
    self.left -= 1
    return self._buffer[layer]

  def arrays(self) -> dict[tuple[str, ...], jax.Array]:
    """The one array, all layers of it."""
    buffer = self._buffer if self._stacked else self._buffer[0]
    return {(): jax.device_put(buffer)}


class _QuantizedStack:
  """Layers that are quantized one by one."""

  def __init__(self, count: int | None, dtype: np.dtype, quantize: Any) -> None:
    self.left = count or 1
    self._stacked = count is not None
    self._dtype = dtype
    self._quantize = quantize
    self._layers: list[Any] = [None] * self.left

  def add(self, layer: int, values: np.ndarray) -> np.ndarray:
    """Takes a layer; returns it in the dtype of the parameters."""
    values = values.astype(self._dtype)
    # Waited for: else all layers would be in memory until their turn comes.
    self._layers[layer] = jax.block_until_ready(self._quantize(values))
    self.left -= 1
    return values

  def arrays(self) -> dict[tuple[str, ...], jax.Array]:
    """Values, scales and so on, by their names in the State."""
    whole = self._layers[0]
    if self._stacked:
      whole = jax.tree.map(lambda *x: jnp.stack(x), *self._layers)
    return {
      ('array', *(entry.name for entry in path)): part
      for path, part in jax.tree.leaves_with_path(whole)
    }


class _Samples:
  """The values of a weight that its fingerprint looks at."""

  def __init__(
    self, count: int | None, shape: tuple[int, ...], dtype: np.dtype
  ) -> None:
    self._size = math.prod(shape)
    self.shape = shape if count is None else (count, *shape)
    self._indices = fingerprinting.sampled_indices(math.prod(self.shape))
    self.values = np.empty(len(self._indices), dtype)

  def add(self, layer: int, values: np.ndarray) -> None:
    """Picks those of a layer."""
    mine = self._indices // self._size == layer
    index = np.unravel_index(self._indices[mine] % self._size, values.shape)
    self.values[mine] = values[index]


class _Copier:
  """Fills arrays, large ones by several threads.

  Where memory is fresh, most of the time goes to the kernel, which provides it
  page by page to the thread that touches it.
  """

  def __init__(self, pool: futures.Executor) -> None:
    self._pool = pool
    self._threads = os.cpu_count() or 1

  def __call__(self, target: np.ndarray, values: np.ndarray) -> None:
    parts = max(1, min(self._threads, target.size // _PART))
    targets = np.array_split(target, parts)
    sources = np.array_split(values, parts)
    others = self._pool.map(_assign, targets[1:], sources[1:])
    _assign(targets[0], sources[0])
    # Raises what they raised.
    list(others)


def _assign(target: np.ndarray, values: np.ndarray) -> None:
  target[...] = values


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
  size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
  raw = np.empty(size + _ALIGNMENT, np.uint8)
  start = -raw.ctypes.data % _ALIGNMENT
  return raw[start : start + size].view(dtype).reshape(shape)
