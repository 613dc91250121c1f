"""Distributions that adapter variables are drawn from."""

import math
from typing import Any

import jax
from jax.nn import initializers
import jax.numpy as jnp


def kaiming(
  key: jax.Array,
  shape: tuple[int, ...],
  dtype: Any = jnp.float32,
  *,
  fan_in: int | None = None,
) -> jax.Array:
  """Uniform in +-1/sqrt(fan_in): what HF peft draws `lora_A` from.

  That is torch's `kaiming_uniform_(a=sqrt(5))`, its default for linear layers.

  Args:
    key: PRNG key.
    shape: Shape of the variable.
    dtype: Its dtype.
    fan_in: Number of inputs; None takes the first axis.
  """
  bound = 1 / math.sqrt(shape[0] if fan_in is None else fan_in)
  return jax.random.uniform(key, shape, dtype, -bound, bound)


def gaussian(rank: int) -> initializers.Initializer:
  """Normal with standard deviation 1 / rank: HF peft's 'gaussian'."""
  return initializers.normal(1 / rank)
