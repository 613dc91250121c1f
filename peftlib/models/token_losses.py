"""Cross entropy of tokens whose logits are never all there at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp
import numpy as np

# Positions whose logits are there at once: enough for the head's product to run
# at full speed, and so many of each row at least, since rows may lie on
# different devices. Twice as many in half precision, since the head's weight
# may be converted for each chunk (`peftlib.bfloat16`, from 256 on).
_CHUNK, _CHUNK_OF_ROW = 128, 32


def token_losses(
  head: Callable[[jax.Array], jax.Array],
  hidden: jax.Array,
  targets: jax.Array,
  *,
  whole: bool = False,
) -> jax.Array:
  """Cross entropy of each target, from what goes into a model's head.

  A position's loss is a scalar, so that its gradient is known up to a factor as
  soon as its logits are: it is computed with them, chunk by chunk, and the
  logits are dropped. The products are those of the plain way. Where what the
  head reads is itself differentiated, the plain way is taken, since its
  gradient would have to be summed over the chunks.

  Example:
    >>> import jax.numpy as jnp
    >>> hidden = jnp.array([[[0.0, jnp.log(3.0)]]])
    >>> token_losses(lambda x: x, hidden, jnp.array([[1]])).round(4)
    Array([[0.2877]], dtype=float32)

  Args:
    head: Gives float32 logits (N, vocabulary) of `hidden` as (N, D), each row
      by itself.
    hidden: Floats (B, K, D).
    targets: int32 (B, K), indices into the vocabulary.
    whole: Whether `hidden` is one chunk. For heads that compute something large
      from their weights at each call.

  Returns:
    float32 (B, K).
  """
  rows, length, width = hidden.shape
  if not rows * length:
    return jnp.zeros((rows, length), jnp.float32)
  size = max(_CHUNK * 4 // hidden.dtype.itemsize // rows, _CHUNK_OF_ROW)
  if whole:
    size = length
  # Equal chunks: the last is padded by less than one position a chunk.
  count = -(-length // size)
  size = -(-length // count)
  # Traced here: its module may be watched while it runs, and the rules of
  # differentiation are applied later. Each of the two is for its own shape.
  abstract = lambda n: jax.ShapeDtypeStruct((rows * n, width), hidden.dtype)
  at_once, weights = jax.closure_convert(head, abstract(length))
  by_chunk, weights_of_chunk = jax.closure_convert(head, abstract(size))

  def plain(
    hidden: jax.Array, targets: jax.Array, weights: list[jax.Array]
  ) -> jax.Array:
    logits = at_once(hidden.reshape(-1, width), *weights)
    return _cross_entropy(logits, targets.reshape(-1)).reshape(rows, length)

  def chunked(
    one: Callable[[jax.Array, jax.Array], Any],
    hidden: jax.Array,
    targets: jax.Array,
  ) -> Any:
    """`one` of each chunk's (N, D) and (N,), put together as (B, K, ...)."""
    padding = count * size - length

    def split(x: jax.Array) -> jax.Array:
      x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
      x = x.reshape(rows, count, size, *x.shape[2:]).swapaxes(0, 1)
      return x.reshape(count, rows * size, *x.shape[3:])

    def join(x: jax.Array) -> jax.Array:
      x = x.reshape(count, rows, size, *x.shape[2:]).swapaxes(0, 1)
      return x.reshape(rows, count * size, *x.shape[3:])[:, :length]

    out = jax.lax.map(lambda x: one(*x), (split(hidden), split(targets)))
    return jax.tree.map(join, out)

  @jax.custom_jvp
  def losses(
    hidden: jax.Array,
    targets: jax.Array,
    weights: list[jax.Array],
    weights_of_chunk: list[jax.Array],
  ) -> jax.Array:
    del weights
    return chunked(
      lambda x, t: _cross_entropy(by_chunk(x, *weights_of_chunk), t),
      hidden,
      targets,
    )

  def differentiated(primals: Any, tangents: Any) -> Any:
    hidden, targets, weights, weights_of_chunk = primals
    moved, _, weights_moved, _ = tangents
    if not all(isinstance(t, SymbolicZero) for t in weights_moved):
      return jax.jvp(
        lambda hidden, weights: plain(hidden, targets, weights),
        (hidden, weights),
        jax.tree.map(_instantiated, (moved, weights_moved)),
      )

    def one(x: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
      logits, pull_back = jax.vjp(lambda x: by_chunk(x, *weights_of_chunk), x)
      loss, gradient = _with_gradient(logits, targets)
      return loss, pull_back(gradient)[0]

    loss, gradient = chunked(one, hidden, targets)
    change = gradient.astype(jnp.float32) * moved.astype(jnp.float32)
    return loss, jnp.sum(change, axis=-1)

  losses.defjvp(differentiated, symbolic_zeros=True)
  return losses(hidden, targets, weights, weights_of_chunk)


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
  picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
  return jax.nn.logsumexp(logits, axis=1) - picked


def _with_gradient(
  logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Losses (N,) and their gradients with respect to the logits."""
  tokens = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
  picked = jnp.take_along_axis(logits, targets[:, None], axis=1)
  normalizers = jax.nn.logsumexp(logits, axis=1, keepdims=True)
  # A comparison is fused into the softmax; a scatter is a pass of its own.
  gradient = jnp.exp(logits - normalizers) - (tokens == targets[:, None])
  return (normalizers - picked)[:, 0], gradient


def _instantiated(tangent: Any) -> Any:
  if isinstance(tangent, SymbolicZero):
    return np.zeros(tangent.shape, tangent.dtype)
  return tangent
