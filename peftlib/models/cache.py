"""Functional key-value cache of the decoder."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import typing as jax_typing
import jax.numpy as jnp

from peftlib.models import config as config_lib


class Cache(NamedTuple):
  """Keys and values of what a batch has seen so far.

  All rows write to the same slots, whatever their lengths: which slots of a row
  are real is told by `segment_ids`. So prompts padded on either side, and
  continued from there, see just their own tokens.

  Attributes:
    keys: (L, B, T, num_kv_heads, head_dim), rotated already.
    values: (L, B, T, num_kv_heads, head_dim).
    segment_ids: int32 (B, T); -1 in slots not yet written, 0 for padding.
    index: int32 (), the next slot to be written.
  """

  keys: jax.Array
  values: jax.Array
  segment_ids: jax.Array
  index: jax.Array

  @property
  def length(self) -> int:
    """Number of slots, T."""
    return self.keys.shape[2]


def init_cache(
  config: config_lib.DecoderConfig,
  batch_size: int,
  length: int,
  dtype: jax_typing.DTypeLike | None = None,
) -> Cache:
  """An empty cache.

  Writing beyond `length` cannot be noticed under `jit`: the caller makes the
  cache long enough for prompt and continuation.

  Args:
    config: Configuration of the decoder that will fill it.
    batch_size: Rows, B.
    length: Slots, T.
    dtype: Dtype of keys and values; the compute dtype by default.

  Returns:
    The cache.

  Raises:
    ValueError: `batch_size` or `length` is less than one.
  """
  for name, value in (('batch_size', batch_size), ('length', length)):
    if value < 1:
      raise ValueError(f'{name}={value}: expected at least 1.')
  shape = (
    config.num_layers,
    batch_size,
    length,
    config.num_kv_heads,
    config.head_dim,
  )
  dtype = config.compute_dtype if dtype is None else jnp.dtype(dtype)
  return Cache(
    keys=jnp.zeros(shape, dtype),
    values=jnp.zeros(shape, dtype),
    segment_ids=jnp.full((batch_size, length), -1, jnp.int32),
    index=jnp.zeros((), jnp.int32),
  )
