"""LoftQ: a quantized weight and the LoRA that makes up for its error."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from peftlib.methods import method


class LoftQ(NamedTuple):
  """A weight in two parts: `base + scale * a @ b` is near it.

  Attributes:
    a: (rows, rank), the start of `lora_a`.
    b: (rank, columns), the start of `lora_b`.
    base: (rows, columns), what the quantized weight dequantizes to.
  """

  a: jax.Array
  b: jax.Array
  base: jax.Array


def loftq(
  value: jax.Array,
  quantize_dequantize: Callable[[jax.Array], jax.Array],
  *,
  rank: int,
  scale: float = 1.0,
  iterations: int = 1,
) -> LoftQ:
  """Splits a weight into one that is quantized and a low-rank one.

  Alternates between quantizing what the low-rank part leaves and taking the
  largest singular values of what the quantized part leaves. Pure, to be mapped
  over a stack of layers.

  Example:
    >>> halves = lambda w: jnp.round(w * 2) / 2
    >>> parts = loftq(jnp.eye(4) * 1.2, halves, rank=4)
    >>> bool(jnp.allclose(parts.base + parts.a @ parts.b, jnp.eye(4) * 1.2))
    True

  Args:
    value: The weight, (rows, columns).
    quantize_dequantize: What is left of a matrix when it is quantized.
    rank: Rank of the low-rank part.
    scale: The factor with which the adapter adds `a @ b`, alpha / rank. HF peft
      leaves it out, which is right for alpha = rank alone.
    iterations: How often to alternate, at least 1.

  Raises:
    ValueError: If `rank`, `scale` or `iterations` is out of range.

  References:
    Li et al., LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language
    Models, 2023.
  """
  what = 'peftlib.methods.loftq'
  method.check_argument(
    what,
    'rank',
    rank,
    method.is_int(rank) and 1 <= rank <= min(value.shape),
    f'an int from 1 to {min(value.shape)}',
  )
  method.check_argument(
    what,
    'scale',
    scale,
    method.is_number(scale) and scale > 0,
    'a finite number > 0',
  )
  method.check_argument(
    what,
    'iterations',
    iterations,
    method.is_int(iterations) and iterations >= 1,
    'an int >= 1',
  )
  value = value.astype(jnp.float32)
  left = value
  for _ in range(iterations):
    base = quantize_dequantize(left).astype(jnp.float32)
    a, b = low_rank(value - base, rank=rank, scale=scale)
    left = value - scale * a @ b
  return LoftQ(a, b, base)


def low_rank(
  matrix: jax.Array, *, rank: int, scale: float
) -> tuple[jax.Array, jax.Array]:
  """The factors of the nearest matrix of this rank: `scale * a @ b`.

  Args:
    matrix: (rows, columns), f32.
    rank: From 1 to the smaller side.
    scale: What the adapter multiplies with.

  Returns:
    `a` (rows, rank) and `b` (rank, columns), of equal singular values.
  """
  u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
  root = jnp.sqrt(s[:rank] / scale)
  return u[:, :rank] * root, root[:, None] * vt[:rank]
