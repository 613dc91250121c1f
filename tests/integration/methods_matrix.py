"""What each registered method can do, found out by doing it.

`python -m tests.integration.methods_matrix` prints the table of README.md.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import sys
import tempfile
from typing import Any

from absl import app
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import peftlib
from peftlib import hf
from peftlib import methods
from peftlib import models
from tests.peftlib import scanned_model
import transforms

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Hyperparameters that fit the tiny model.
FIELDS: dict[str, dict[str, Any]] = {
  'ia3': {},
  'gralora': {'rank': 4, 'blocks': 2},
  'hira': {'rank': 2},
  'loha': {'rank': 2},
  'lokr': {'rank': 2, 'decompose_factor': 4},
  'miss': {'rank': 4},
  'oft': {'block_size': 4},
  'shira': {'rank': 1},
  'trainable_tokens': {'indices': (1, 5, 7)},
  'vera': {'rank': 4, 'projection_shape': (32, 32)},
}
_CONFIG = models.DecoderConfig(
  vocab_size=32,
  hidden_size=16,
  intermediate_size=32,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
)
# One whose outputs are more than its inputs, one whose are fewer.
_WEIGHTS = ('up_proj', 'down_proj')
_TOKENS = jnp.arange(12).reshape(2, 6) % 32
_KEY = jax.random.key(0)
_COLUMNS = (
  'scan',
  'quantized base',
  'stacked',
  'mixed batch',
  'merge',
  'HF in',
  'HF out',
)


@dataclasses.dataclass(frozen=True)
class Case:
  """A method in a scanned model, moved away from its start."""

  config: peftlib.AdapterConfig
  base: tuple[Any, Any]
  start: tuple[Any, Any]
  moved: tuple[Any, Any]


def make(name: str, model: nnx.Module) -> Case:
  """The case of a registered method in a model."""
  default = {'rank': 2, 'alpha': 4.0}
  fields = FIELDS.get(name, default)
  method = methods.by_name(name)(**fields)
  rule = peftlib.Rule(
    ('embed_tokens',) if name == 'trainable_tokens' else _WEIGHTS,
    method,
    weight_qtype='int8',
  )
  config = peftlib.AdapterConfig((rule,))
  base = nnx.split(model)
  # Weights as large as a trained model's, so that adapters show.
  base = (base[0], jax.tree.map(lambda x: x * 2 if x.ndim > 1 else x, base[1]))
  start = peftlib.inject(*base, config, _TOKENS, key=_KEY)
  return Case(config, base, start, (start[0], _moved(start[1], config)))


# Equal graphdefs, those of all bases and merged models too, compile once.
@functools.partial(jax.jit, static_argnums=0)
def _answer(graphdef: Any, state: nnx.State, tokens: jax.Array) -> jax.Array:
  return nnx.merge(graphdef, state, copy=True)(tokens)


def logits(split: tuple[Any, Any], tokens: jax.Array = _TOKENS) -> jax.Array:
  """What a model answers."""
  return _answer(*split, tokens)


def _moved(state: nnx.State, config: Any, seed: int = 0) -> nnx.State:
  trainable, rest = transforms.partition(
    state, peftlib.trainable_filter(config), ...
  )
  leaves, treedef = jax.tree.flatten(trainable)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  leaves = [
    x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)
  ]
  return transforms.merge(jax.tree.unflatten(treedef, leaves), rest)


def _close(a: Any, b: Any, tolerance: float) -> None:
  np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def scan(case: Case) -> None:
  """Starts as the base, moves, and every trainable variable has a gradient."""
  _close(logits(case.start), logits(case.base), 1e-4)
  assert np.abs(logits(case.moved) - logits(case.base)).max() > 1e-3
  graphdef, state = case.moved
  trainable, rest = transforms.partition(
    state, peftlib.trainable_filter(case.config), ...
  )

  def loss(trainable: nnx.State) -> jax.Array:
    return jnp.sum(logits((graphdef, transforms.merge(trainable, rest))) ** 2)

  for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(trainable)):
    assert float(jnp.abs(leaf).max()) > 0


def quantized_base(case: Case) -> None:
  """Answers as over the dequantized base."""
  config = case.config
  if config.rules[0].method.name == 'trainable_tokens':
    own = peftlib.Rule(_WEIGHTS, None, weight_qtype='int8')
    config = peftlib.AdapterConfig((own,))
  quantized = peftlib.quantize_base(*case.moved, config, _TOKENS)
  plain = peftlib.dequantize_base(*quantized, dtype=jnp.float32)
  _close(logits(quantized), logits(plain), 1e-4)


def stacked(case: Case) -> None:
  """Two adapters in one step: the losses of two runs."""
  graphdef, state = case.start
  own = [
    transforms.partition(
      _moved(state, case.config, seed),
      peftlib.trainable_filter(case.config),
      ...,
    )
    for seed in range(2)
  ]
  frozen = own[0][1]
  tx = optax.sgd(1e-2)
  batches = jnp.stack([_TOKENS, (_TOKENS * 3 + 1) % 32])

  def loss_fn(model: Any, batch: Any, rngs: Any) -> Any:
    del rngs
    return jnp.mean(model(batch) ** 2), {}

  keys = jax.random.split(_KEY, 2)
  together = peftlib.init_stacked_train_state(
    peftlib.stack_adapters([t for t, _ in own]), tx, keys=keys
  )
  step = peftlib.make_stacked_train_step(graphdef, loss_fn, tx)
  one = peftlib.make_train_step(graphdef, loss_fn, tx)
  apart = [
    peftlib.init_train_state(t, tx, key=k) for (t, _), k in zip(own, keys)
  ]
  for _ in range(2):
    together, metrics = step(together, frozen, batches)
    for i in range(2):
      apart[i], expected = one(apart[i], frozen, batches[i])
      _close(metrics['loss'][i], expected['loss'], 1e-5)


def mixed_batch(case: Case) -> None:
  """Rows with and without the adapter: as each by itself."""
  mixed = logits(
    peftlib.assign_rows(*case.moved, ['default'], jnp.array([-1, 0]))
  )
  off = peftlib.set_active(*case.moved, [])
  _close(mixed[0], logits(off)[0], 1e-5)
  _close(mixed[1], logits(case.moved)[1], 1e-5)


def merge(case: Case) -> None:
  """The merged model is a plain one and answers the same."""
  merged = peftlib.merge_adapters(*case.moved)
  assert merged[0] == case.base[0]
  _close(logits(merged), logits(case.moved), 1e-4)


def hf_out(case: Case) -> tuple[dict[str, Any], pathlib.Path]:
  """Is written as a directory of HF peft."""
  folder = pathlib.Path(tempfile.mkdtemp()) / 'adapter'
  hf.save_adapter(folder, *case.moved)
  return {}, folder


def hf_in(case: Case) -> None:
  """Comes back from one with the same answers."""
  _, folder = hf_out(case)
  loaded = hf.load_adapter(folder, *case.base)
  _close(logits((loaded.graphdef, loaded.state)), logits(case.moved), 1e-4)


CHECKS: dict[str, Callable[[Case], Any]] = {
  'scan': scan,
  'quantized base': quantized_base,
  'stacked': stacked,
  'mixed batch': mixed_batch,
  'merge': merge,
  'HF in': hf_in,
  'HF out': hf_out,
}


def row(name: str) -> list[str]:
  """The row of a method: yes, or no where it says that it can't."""
  case = make(name, scanned_model.Stack(rngs=nnx.Rngs(0)))
  # What HF peft saves is of a model that transformers has.
  decoder = make(name, models.Decoder(_CONFIG, rngs=nnx.Rngs(0)))
  cells = []
  for column in _COLUMNS:
    try:
      CHECKS[column](decoder if column.startswith('HF') else case)
      cells.append('yes')
    except (ValueError, TypeError) as e:
      if not str(e).startswith(('peftlib', type(e).__name__)):
        raise
      cells.append('no')
  return [f'`{name}`', *cells, _source(name)]


def _source(name: str) -> str:
  golden = np.load(ROOT / 'tests/golden/methods.npz')
  cases = {key.partition('/')[0] for key in golden.files}
  own = name.removeprefix('lora_') if name == 'lora_orthogonal' else name
  return 'HF peft' if own in cases else 'the paper'


def table() -> str:
  """The table as README.md has it."""
  head = ['`--method`', *_COLUMNS, 'checked against']
  lines = [head, ['---'] * len(head)]
  lines += [row(name) for name in methods.registry() if _is_ours(name)]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def _is_ours(name: str) -> bool:
  """Not a method that some other test has registered."""
  return methods.by_name(name).__module__.startswith('peftlib.')


def main(argv: list[str]) -> None:
  """Prints the table."""
  del argv
  jax.config.update('jax_disable_most_optimizations', True)
  sys.stdout.write(table() + '\n')


if __name__ == '__main__':
  app.run(main)
