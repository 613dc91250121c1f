"""What a compiled LoRA step costs, in counts that don't depend on the machine.

usage: python -m tests.benchmarks.guard

Prints the counts of each case beside its bounds in `BOUNDS`. guard_test.py
fails where one is above: whoever makes the step dearer on purpose records the
new count here and says why in the commit.
"""

import dataclasses
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import optax

import peftlib
from peftlib import losses
from peftlib import models
import transforms
from transforms import testing

# All sizes differ, so that a shape in the program tells what it is of.
CONFIG = models.DecoderConfig(
  vocab_size=331,
  hidden_size=88,
  intermediate_size=216,
  num_layers=3,
  num_heads=8,
  num_kv_heads=4,
  head_dim=10,
  tie_embeddings=False,
)
ROWS, LENGTH, RANK = 4, 64, 8
_MOVED = re.compile(r'= \w+\[([\d,]+)\]\S* (?:convert|copy|transpose)\(')


@dataclasses.dataclass(frozen=True)
class Counts:
  """What XLA says of one step.

  Attributes:
    flops: Floating-point operations; XLA counts a layer of a scan once.
    temp_bytes: Memory beyond arguments and results.
    moved: Instructions that cast, copy or transpose something of the shape of
      a frozen weight, or of one layer of it.
  """

  flops: int
  temp_bytes: int
  moved: int


OPTIONS: dict[str, dict[str, Any]] = {
  'f32': {},
  'f32, nothing computed again': {'remat': 'none'},
  'f32, layers computed again': {'remat': 'full'},
  'nf4': {'weight_qtype': 'nf4', 'tile_size': 8},
  'int8': {'weight_qtype': 'int8', 'tile_size': 8},
}
# Measured with jax 0.12.0.1 on a CPU, and 3% more for flops and memory.
BOUNDS = {
  'f32': Counts(142_900_000, 5_690_000, 0),
  'f32, nothing computed again': Counts(136_000_000, 13_520_000, 0),
  'f32, layers computed again': Counts(179_100_000, 4_330_000, 0),
  # Each weight is dequantized once forward and once backward.
  'nf4': Counts(143_600_000, 5_880_000, 21),
  'int8': Counts(143_200_000, 5_650_000, 14),
}


def flops_by_hand() -> int:
  """Products of a step that computes no gradient of a frozen weight.

  Forward, and backward to the activations; a layer and one of the loss's two
  chunks of positions once, as XLA counts.
  """
  tokens = ROWS * LENGTH
  width = CONFIG.num_heads * CONFIG.head_dim
  kv_width = CONFIG.num_kv_heads * CONFIG.head_dim
  hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
  shapes = [
    *[(hidden, width), (hidden, kv_width), (hidden, kv_width)],
    *[(width, hidden), (hidden, inner), (hidden, inner), (inner, hidden)],
  ]
  head = hidden * CONFIG.vocab_size // 2
  frozen = 2 * 2 * tokens * (sum(a * b for a, b in shapes) + head)
  # Forward, to the activations, to the adapter.
  adapters = 3 * 2 * tokens * RANK * sum(a + b for a, b in shapes)
  # Scores and mixing: forward, and two gradients each.
  attention = 2 * 3 * 2 * ROWS * LENGTH * LENGTH * width
  return frozen + adapters + attention


def measure(**options: Any) -> Counts:
  """Compiles a step, runs it four times, and counts.

  Args:
    **options: `remat`, and fields of `peftlib.LoraConfig`.
  """
  remat = options.pop('remat', CONFIG.remat)
  decoder = models.Decoder(
    dataclasses.replace(CONFIG, remat=remat), rngs=nnx.Rngs(0)
  )
  tokens = jnp.zeros((ROWS, LENGTH), jnp.int32)
  config = peftlib.LoraConfig(
    module_path='.*_proj', rank=RANK, alpha=16.0, **options
  )
  graphdef, state = peftlib.inject(
    *nnx.split(decoder), config, tokens, key=jax.random.key(0)
  )
  if config.weight_qtype is not None:
    graphdef, state = peftlib.quantize_base(graphdef, state, config, tokens)
  trainable, frozen = transforms.partition(
    state, peftlib.trainable_filter(config), ...
  )
  tx = optax.sgd(0.1)
  train_state = peftlib.init_train_state(trainable, tx, key=jax.random.key(1))
  step = peftlib.make_train_step(graphdef, losses.causal_lm_loss, tx)
  batch = _batch(tokens)
  program = step.lower(train_state, frozen, batch).compile()
  shapes = {
    shape
    for leaf in jax.tree.leaves(frozen)
    if leaf.ndim > 1
    for shape in (leaf.shape, leaf.shape[1:], leaf.shape[:-3:-1])
  }
  moved = sum(
    tuple(map(int, dims.split(','))) in shapes
    for dims in _MOVED.findall(program.as_text())
  )
  once = testing.assert_max_compilations(step, 1)
  for i in range(4):
    train_state, _ = once(train_state, frozen, _batch(tokens + i))
  return Counts(
    flops=int(program.cost_analysis()['flops']),
    temp_bytes=program.memory_analysis().temp_size_in_bytes,
    moved=moved,
  )


def _batch(tokens: jax.Array) -> dict[str, jax.Array]:
  seen = tokens[:, :-1]
  places = jnp.broadcast_to(jnp.arange(seen.shape[1]), seen.shape)
  return {
    'tokens': seen,
    'positions': places,
    'segment_ids': jnp.ones_like(seen),
    'loss_positions': places,
    'targets': tokens[:, 1:],
    'loss_weights': jnp.ones(seen.shape),
  }


def main() -> None:
  """Prints counts and bounds."""
  print(f'products by hand, none of them twice: {flops_by_hand():,}')
  for name, bound in BOUNDS.items():
    print(f'{name}: {measure(**OPTIONS[name])}; at most {bound}')


if __name__ == '__main__':
  main()
