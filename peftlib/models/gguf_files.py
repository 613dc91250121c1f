"""GGUF files of the Llama architecture, read tensor by tensor.

The header is parsed here: `gguf.GGUFReader` makes a numpy array of every token
and merge, which for a vocabulary of 49152 takes seconds and 100 MB. Types and
dequantization are those of the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Iterator
import importlib.metadata
import re
import struct
from typing import Any, NamedTuple

import gguf
import numpy as np

from peftlib.models import config as config_lib

_SCALARS = {
  gguf.GGUFValueType.UINT8: 'B',
  gguf.GGUFValueType.INT8: 'b',
  gguf.GGUFValueType.UINT16: 'H',
  gguf.GGUFValueType.INT16: 'h',
  gguf.GGUFValueType.UINT32: 'I',
  gguf.GGUFValueType.INT32: 'i',
  gguf.GGUFValueType.FLOAT32: 'f',
  gguf.GGUFValueType.BOOL: '?',
  gguf.GGUFValueType.UINT64: 'Q',
  gguf.GGUFValueType.INT64: 'q',
  gguf.GGUFValueType.FLOAT64: 'd',
}

# Rows are dequantized in pieces, since the `gguf` package needs several times
# the memory of what it gives back.
_CHUNK_ELEMENTS = 1 << 20

_TOP_NAMES = {
  'token_embd': 'model.embed_tokens',
  'output_norm': 'model.norm',
  'output': 'lm_head',
}
_LAYER_NAMES = {
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'ffn_norm': 'post_attention_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}


class TensorInfo(NamedTuple):
  """Where a tensor lies in the file.

  Attributes:
    name: GGUF's name of it.
    shape: In numpy's order, the slowest axis first.
    qtype: How its values are stored.
    offset: Byte position in the file.
    num_bytes: Bytes in the file.
  """

  name: str
  shape: tuple[int, ...]
  qtype: gguf.GGMLQuantizationType
  offset: int
  num_bytes: int


class Header(NamedTuple):
  """What a GGUF file says before its first tensor.

  Attributes:
    metadata: Key-value pairs; arrays as lists.
    tensors: In the order of the file.
  """

  metadata: dict[str, Any]
  tensors: tuple[TensorInfo, ...]


class _Cursor:
  """Reads little-endian values from a buffer, one after the other."""

  def __init__(self, data: memoryview):
    self._data = data
    self.position = 0

  def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
    values = struct.unpack_from(f'<{count}{code}', self._data, self.position)
    self.position += struct.calcsize(f'<{count}{code}')
    return values

  def string(self) -> str:
    (size,) = self.scalars('Q')
    end = self.position + size
    if end > len(self._data):
      raise struct.error('string beyond the end of the file')
    value = bytes(self._data[self.position : end]).decode('utf-8', 'replace')
    self.position = end
    return value

  def value(self, kind: int) -> Any:
    value_type = gguf.GGUFValueType(kind)
    if value_type == gguf.GGUFValueType.STRING:
      return self.string()
    if value_type == gguf.GGUFValueType.ARRAY:
      item_kind, count = *self.scalars('I'), *self.scalars('Q')
      if item_kind in _SCALARS:
        return list(self.scalars(_SCALARS[item_kind], count))
      return [self.value(item_kind) for _ in range(count)]
    return self.scalars(_SCALARS[value_type])[0]


def read_header(path: str) -> Header:
  """Reads metadata and tensor positions of a GGUF file, version 2 or 3.

  The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

  Args:
    path: The file.

  Returns:
    The header.

  Raises:
    ValueError: It isn't a little-endian GGUF file of version 2 or 3, or it ends
      early.
    OSError: It can't be read.
  """
  with open(path, 'rb') as file:
    if file.read(4) != b'GGUF':
      raise ValueError(
        f'{path}: not a GGUF file (it does not begin with GGUF).'
      )
  data = np.memmap(path, np.uint8, mode='r')
  cursor = _Cursor(memoryview(data))
  try:
    _, version = cursor.scalars('I', 2)
    if version not in (2, 3):
      raise ValueError(
        f'{path}: GGUF version {version} is not supported; expected 2 or 3, '
        'little-endian.'
      )
    num_tensors, num_pairs = cursor.scalars('Q', 2)
    metadata = {}
    for _ in range(num_pairs):
      key = cursor.string()
      metadata[key] = cursor.value(*cursor.scalars('I'))
    raw = []
    for _ in range(num_tensors):
      name = cursor.string()
      dims = cursor.scalars('Q', *cursor.scalars('I'))
      raw.append((name, dims[::-1], *cursor.scalars('I'), *cursor.scalars('Q')))
  except struct.error as error:
    raise ValueError(
      f'{path}: the file is cut off within its header ({error}).'
    ) from error
  alignment = metadata.get('general.alignment', gguf.GGUF_DEFAULT_ALIGNMENT)
  start = -(-cursor.position // alignment) * alignment
  tensors = []
  for name, shape, kind, offset in raw:
    if kind not in gguf.GGMLQuantizationType:
      raise ValueError(
        f'{path}: {name} has tensor type {kind}, which the gguf package '
        f'{importlib.metadata.version("gguf")} does not know.'
      )
    qtype = gguf.GGMLQuantizationType(kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    num_bytes = int(np.prod(shape, dtype=np.int64)) // block * block_bytes
    info = TensorInfo(name, shape, qtype, start + offset, num_bytes)
    if info.offset + info.num_bytes > data.size:
      raise ValueError(
        f'{path}: {name} ends at byte {info.offset + info.num_bytes}, the file '
        f'has {data.size}: it is cut off.'
      )
    tensors.append(info)
  return Header(metadata, tuple(tensors))


def _hf_name(name: str) -> str:
  """The Hugging Face name, or the name itself where there is none."""
  stem, _, kind = name.rpartition('.')
  if stem in _TOP_NAMES:
    return f'{_TOP_NAMES[stem]}.{kind}'
  match = re.fullmatch(r'blk\.(\d+)\.(\w+)', stem)
  if match and match[2] in _LAYER_NAMES:
    return f'model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{kind}'
  return name


def _dequantize(path: str, info: TensorInfo) -> np.ndarray:
  """float32 values of a tensor, dequantized a few rows at a time."""
  # Read, not mapped: mapped pages stay in memory until the file is closed.
  data = np.fromfile(path, np.uint8, info.num_bytes, offset=info.offset)
  rows = data.reshape(int(np.prod(info.shape[:-1], dtype=np.int64)), -1)
  out = np.empty((rows.shape[0], info.shape[-1]), np.float32)
  step = max(1, _CHUNK_ELEMENTS // max(1, info.shape[-1]))
  for i in range(0, rows.shape[0], step):
    out[i : i + step] = gguf.dequantize(
      np.ascontiguousarray(rows[i : i + step]), info.qtype
    )
  return out.reshape(info.shape)


def _undo_permutation(weights: np.ndarray, num_heads: int) -> np.ndarray:
  """Puts rotary pairs (2i, 2i+1) back to (i, i + head_dim/2).

  llama.cpp reorders the rows of q and k for its rotary kernel; the inverse is
  the one of `transformers.modeling_gguf_pytorch_utils.LlamaTensorProcessor`.
  """
  shape = weights.shape
  pairs = weights.reshape(num_heads, shape[0] // num_heads // 2, 2, *shape[1:])
  return pairs.swapaxes(1, 2).reshape(shape)


class GgufCheckpoint:
  """A GGUF file as named tensors in Hugging Face's names and layout.

  Attributes:
    path: The file.
    header: Its header.
    shapes: Shape of every tensor by Hugging Face name; a tensor that has no
      such name keeps GGUF's.
  """

  def __init__(self, path: str):
    """Reads the header, no tensor.

    Args:
      path: The file.

    Raises:
      ValueError: Not a readable GGUF file.
      OSError: It can't be read.
    """
    self.path = path
    self.header = read_header(path)
    self.shapes = {
      _hf_name(info.name): info.shape for info in self.header.tensors
    }

  def config(self, **overrides: Any) -> config_lib.DecoderConfig:
    """The decoder's configuration.

    Args:
      **overrides: Fields that replace those of the file.

    Returns:
      The configuration; ties and biases are read from the tensors' names.

    Raises:
      ValueError: The file asks for what the decoder doesn't do.
    """
    fields = {
      'attention_bias': any(
        '_proj.bias' in n and 'attn' in n for n in self.shapes
      ),
      'mlp_bias': any('_proj.bias' in n and 'mlp' in n for n in self.shapes),
      **overrides,
    }
    try:
      return config_lib.DecoderConfig.from_gguf(
        self.header.metadata,
        tie_embeddings='lm_head.weight' not in self.shapes,
        **fields,
      )
    except ValueError as error:
      raise ValueError(f'{self.path}: {error}') from error

  def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 values, one tensor in memory at a time.

    Yields:
      Pairs of the Hugging Face name and the array, (out, in) for a projection.
    """
    metadata = self.header.metadata
    num_heads = metadata['llama.attention.head_count']
    num_kv_heads = metadata.get('llama.attention.head_count_kv', num_heads)
    for info in self.header.tensors:
      values = _dequantize(self.path, info)
      if '.attn_q.' in info.name:
        values = _undo_permutation(values, num_heads)
      elif '.attn_k.' in info.name:
        values = _undo_permutation(values, num_kv_heads)
      yield _hf_name(info.name), values
      del values
