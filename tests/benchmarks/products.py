"""The floor under a step: the products with the base's weights alone."""

from collections.abc import Callable
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peftlib import models


def shapes(config: models.DecoderConfig) -> dict[tuple[int, int], int]:
  """Shapes (inputs, outputs) of a decoder's weights, and how many there are."""
  hidden, inner = config.hidden_size, config.intermediate_size
  width = config.num_heads * config.head_dim
  kv_width = config.num_kv_heads * config.head_dim
  of_layer = [
    *[(hidden, width), (hidden, kv_width), (hidden, kv_width)],
    *[(width, hidden), (hidden, inner), (hidden, inner), (inner, hidden)],
  ]
  counts = {(hidden, config.vocab_size): 1}
  for shape in of_layer:
    counts[shape] = counts.get(shape, 0) + config.num_layers
  return counts


def measure(
  config: models.DecoderConfig, tokens: int, *, repeats: int = 2
) -> dict[str, Any]:
  """Times `jnp.dot` of every weight, forward and back to the activations.

  The gradient of the loss needs no more of a frozen weight. Each weight may lie
  in memory as the product likes it best: the faster of both layouts counts.

  Args:
    config: The decoder.
    tokens: Rows of the left sides.
    repeats: Of each product; their median counts.

  Returns:
    `seconds` of a whole step's products, one after the other, and `flops`.
  """
  rng = np.random.default_rng(0)

  def draw(*shape: int) -> jax.Array:
    return jnp.asarray(rng.random(shape, np.float32))

  dot, dot_transposed = jax.jit(jnp.dot), jax.jit(lambda x, w: jnp.dot(x, w.T))
  seconds, flops = 0.0, 0
  for (inputs, outputs), count in shapes(config).items():
    x, dy = draw(tokens, inputs), draw(tokens, outputs)
    w, w_transposed = draw(inputs, outputs), draw(outputs, inputs)
    for left, right, right_transposed in (
      (x, w, w_transposed),
      (dy, w_transposed, w),
    ):
      seconds += count * min(
        _median(dot, left, right, repeats=repeats),
        _median(dot_transposed, left, right_transposed, repeats=repeats),
      )
      flops += count * 2 * tokens * inputs * outputs
  return {'seconds': seconds, 'flops': flops}


def _median(
  function: Callable[..., jax.Array], *operands: jax.Array, repeats: int
) -> float:
  function(*operands).block_until_ready()
  found = []
  for _ in range(repeats):
    start = time.perf_counter()
    function(*operands).block_until_ready()
    found.append(time.perf_counter() - start)
  return statistics.median(found)
