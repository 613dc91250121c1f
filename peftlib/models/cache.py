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
    keys: (L, B, num_kv_heads, T, head_dim), rotated already.
    values: (L, B, num_kv_heads, T, head_dim).
    segment_ids: int32 (B, T); -1 in slots not yet written, 0 for padding.
    next_slot: int32 (), the next slot to be written.
  """

  keys: jax.Array
  values: jax.Array
  segment_ids: jax.Array
  next_slot: jax.Array

  @property
  def length(self) -> int:
    """Number of slots, T."""
    return self.segment_ids.shape[1]


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
    config.num_kv_heads,
    length,
    config.head_dim,
  )
  dtype = config.compute_dtype if dtype is None else jnp.dtype(dtype)
  return Cache(
    keys=jnp.zeros(shape, dtype),
    values=jnp.zeros(shape, dtype),
    segment_ids=jnp.full((batch_size, length), -1, jnp.int32),
    next_slot=jnp.zeros((), jnp.int32),
  )


def extend(cache: Cache, *, batch_size: int, length: int) -> Cache:
  """A longer cache that begins with what is in this one.

  Args:
    cache: With one row, that is repeated, or with `batch_size` rows.
    batch_size: Rows of the result.
    length: Slots of the result, at least those of `cache`.

  Returns:
    The cache; its next slot is that of `cache`.

  Raises:
    ValueError: The sizes don't fit.
  """
  rows = cache.segment_ids.shape[0]
  if rows not in (1, batch_size):
    raise ValueError(f'batch_size={batch_size}: the cache has {rows} rows.')
  if length < cache.length:
    raise ValueError(f'length={length}: the cache has {cache.length} slots.')

  def widen(
    array: jax.Array, row_axis: int, slot_axis: int, fill: int
  ) -> jax.Array:
    shape = list(array.shape)
    shape[row_axis] = batch_size
    padding = [(0, 0)] * array.ndim
    padding[slot_axis] = (0, length - cache.length)
    return jnp.pad(
      jnp.broadcast_to(array, shape), padding, constant_values=fill
    )

  return Cache(
    keys=widen(cache.keys, 1, 3, 0),
    values=widen(cache.values, 1, 3, 0),
    segment_ids=widen(cache.segment_ids, 0, 1, -1),
    next_slot=cache.next_slot,
  )


def join_rows(caches: Cache) -> Cache:
  """Puts groups of rows that were filled one after the other into one cache.

  Args:
    caches: Leaves have a leading axis N, as `jax.lax.map` gives them; all
      groups are filled up to the same slot.

  Returns:
    A cache of N times the rows, in order.
  """

  def join(array: jax.Array, axis: int) -> jax.Array:
    array = jnp.moveaxis(array, 0, axis)
    shape = array.shape
    return array.reshape(
      *shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]
    )

  return Cache(
    keys=join(caches.keys, 1),
    values=join(caches.values, 1),
    segment_ids=join(caches.segment_ids, 0),
    next_slot=caches.next_slot[0],
  )
