"""LoRA-GA: a LoRA whose first step is near that of full fine-tuning."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from peftlib.methods import method

Direction = Literal['ArBr', 'A2rBr', 'ArB2r', 'random']
Scale = Literal['stable', 'weight_svd', 'gd_scale', 'unit']


def lora_ga(
  value: jax.Array,
  gradient: jax.Array,
  *,
  rank: int,
  scaling: float,
  direction: Direction = 'ArB2r',
  scale: Scale = 'stable',
  stable_gamma: float = 16.0,
  key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """The start of `lora_a` and `lora_b` from the gradient of the weight.

  The frozen weight has to become `value - scaling * a @ b`, as with PiSSA. As
  HF peft's, with an exact SVD. Pure, to be mapped over a stack of layers.

  Example:
    >>> a, b = lora_ga(jnp.ones((6, 4)), jnp.eye(6, 4), rank=2, scaling=2.0)
    >>> a.shape, b.shape
    ((6, 2), (2, 4))

  Args:
    value: The weight, (rows, columns).
    gradient: Gradient of the loss with respect to it, e.g. over one batch.
    rank: Of the LoRA; twice as many singular vectors are needed.
    scaling: The factor with which the adapter adds `a @ b`, alpha / rank.
    direction: Which of the first 2 * rank singular vectors go to `a` and to
      `b`: every second one ('ArBr'), the second and the first half ('A2rBr'),
      the first and the second half ('ArB2r'), or a random half to both.
    scale: How `b` is scaled: for a variance that doesn't depend on the number
      of outputs ('stable'), to the largest singular value of the weight
      ('weight_svd'), both factors by 1 / scaling ('gd_scale'), or not ('unit').
    stable_gamma: What 'stable' divides by, as its root.
    key: PRNG key of 'random'.

  Returns:
    `a` (rows, rank) and `b` (rank, columns), in f32.

  Raises:
    ValueError: If an argument is out of range.

  References:
    Wang et al., LoRA-GA: Low-Rank Adaptation with Gradient Approximation, 2024.
  """
  what = 'peftlib.methods.lora_ga'
  most = min(value.shape) // 2
  positive = lambda x: method.is_number(x) and x > 0
  for name, given, ok, right in (
    ('gradient', gradient.shape, gradient.shape == value.shape, value.shape),
    (
      'rank',
      rank,
      method.is_int(rank) and 1 <= rank <= most,
      f'an int from 1 to {most}, half of the smaller side of the weight',
    ),
    ('scaling', scaling, positive(scaling), 'a finite number > 0'),
    (
      'direction',
      direction,
      direction in get_args(Direction),
      f'one of {get_args(Direction)}',
    ),
    ('scale', scale, scale in get_args(Scale), f'one of {get_args(Scale)}'),
    (
      'stable_gamma',
      stable_gamma,
      positive(stable_gamma),
      'a finite number > 0',
    ),
    (
      'key',
      key,
      key is not None or direction != 'random',
      "a PRNG key for direction='random'",
    ),
  ):
    method.check_argument(what, name, given, ok, str(right))
  u, s, vt = jnp.linalg.svd(gradient.astype(jnp.float32), full_matrices=False)
  of_a, of_b = _chosen(rank, direction, key)
  a, largest, b = u[:, of_a], s[of_b][0], s[of_b][:, None] * vt[of_b]
  if scale == 'stable':
    b = b * (value.shape[1] ** 0.25 / stable_gamma**0.5)
  elif scale == 'weight_svd':
    norm = jnp.linalg.norm(value.astype(jnp.float32), ord=2)
    b = b * jnp.where(largest > 0, norm / jnp.where(largest > 0, largest, 1), 1)
  elif scale == 'gd_scale':
    a, b = a / scaling, b / scaling
  return a, b


def _chosen(
  rank: int, direction: Direction, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  every = jnp.arange(2 * rank)
  if direction == 'ArBr':
    return every[1::2], every[::2]
  if direction == 'A2rBr':
    return every[rank:], every[:rank]
  if direction == 'ArB2r':
    return every[:rank], every[rank:]
  assert key is not None
  some = jax.random.permutation(key, 2 * rank)[:rank]
  return some, some
