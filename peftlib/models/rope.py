"""Rotary position embeddings, in the half-split order of Hugging Face."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from peftlib.models import config as config_lib


def inverse_frequencies(config: config_lib.DecoderConfig) -> np.ndarray:
  """Angle per position of each pair of a head's dimensions.

  Args:
    config: Gives `head_dim`, `rope_theta` and `rope_scaling`.

  Returns:
    float32 array of shape (head_dim / 2,). Scaling 'llama3' is that of
    `transformers.modeling_rope_utils._compute_llama3_parameters`.
  """
  exponents = np.arange(0, config.head_dim, 2, dtype=np.float32)
  freqs = (1.0 / config.rope_theta ** (exponents / config.head_dim)).astype(
    np.float32
  )
  scaling = config.rope_scaling
  if scaling.rope_type == 'linear':
    return (freqs / np.float32(scaling.factor)).astype(np.float32)
  if scaling.rope_type == 'llama3':
    wavelengths = 2 * np.pi / freqs
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings / wavelengths
    # 0 where a wavelength is so long that it is divided, 1 where it is kept.
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    freqs = (1 - keep) * freqs / scaling.factor + keep * freqs
  return freqs.astype(np.float32)


def angles(
  positions: jax.Array, config: config_lib.DecoderConfig
) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines for `rotate`.

  Args:
    positions: int32 (..., S).
    config: Gives the frequencies and the compute dtype.

  Returns:
    Two arrays of the compute dtype, shape (..., S, 1, head_dim / 2); the axis
    of size one stands for the heads.
  """
  freqs = inverse_frequencies(config)
  theta = positions.astype(jnp.float32)[..., None, None] * freqs
  dtype = config.compute_dtype
  return jnp.cos(theta).astype(dtype), jnp.sin(theta).astype(dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates the dimension pairs (i, i + head_dim / 2) of each head.

  Args:
    x: (..., S, heads, head_dim).
    cos: From `angles`.
    sin: From `angles`.

  Returns:
    Array of the shape of `x`.
  """
  first, second = jnp.split(x, 2, axis=-1)
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
