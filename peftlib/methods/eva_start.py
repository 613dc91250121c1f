"""EVA: `lora_a` from the directions in which a layer's inputs vary most."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from peftlib.methods import method


class Moments(NamedTuple):
  """Sums over a layer's inputs; those of several batches add up.

  Attributes:
    number: Number of inputs.
    total: Their sum, (rows,).
    gram: Sum of their outer products, (rows, rows).
  """

  number: jax.Array
  total: jax.Array
  gram: jax.Array


def moments(x: jax.Array) -> Moments:
  """The sums over one batch of inputs.

  Example:
    >>> one, two = moments(jnp.ones((4, 3))), moments(jnp.zeros((2, 3)))
    >>> float(jax.tree.map(jnp.add, one, two).number)
    6.0

  Args:
    x: Inputs of a layer, (..., rows), of any floating-point dtype.
  """
  rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
  return Moments(
    jnp.float32(rows.shape[0]),
    rows.sum(0),
    jnp.matmul(rows.T, rows, precision='highest'),
  )


def eva(of: Moments, *, rank: int, whiten: bool = False) -> jax.Array:
  """The start of `lora_a`: principal components of a layer's inputs.

  `lora_b` starts at zero, so that the model is the base's. The components are
  those of HF peft's incremental SVD, up to sign; all layers get the same rank.

  Example:
    >>> x = jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.1]])
    >>> jnp.abs(eva(moments(x), rank=1)).round(1).T
    Array([[1., 0.]], dtype=float32)

  Args:
    of: From `moments`, of at least `rank` inputs.
    rank: How many components.
    whiten: Whether each is divided by the root of its singular value.

  Returns:
    (rows, rank), in f32.

  Raises:
    ValueError: If `rank` is not from 1 to the number of rows.

  References:
    Paischer et al., Parameter Efficient Fine-tuning via Explained Variance
    Adaptation, 2024.
  """
  size = of.total.shape[0]
  method.check_argument(
    'peftlib.methods.eva',
    'rank',
    rank,
    method.is_int(rank) and 1 <= rank <= size,
    f'an int from 1 to {size}',
  )
  centered = of.gram - jnp.outer(of.total, of.total) / of.number
  squares, vectors = jnp.linalg.eigh(centered)
  components = vectors[:, ::-1][:, :rank]
  if whiten:
    values = jnp.sqrt(jnp.maximum(squares[::-1][:rank], 0))
    components = components / jnp.sqrt(values)
  return components
