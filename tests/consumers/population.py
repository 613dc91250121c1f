"""Eight adapters with learning rates of their own, trained as one."""

import pathlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import peftlib
from peftlib import hf
from tests.consumers import models
import transforms

VOCAB, LAYERS = 12, 2
RATES = np.logspace(-4, -1, 8, dtype=np.float32)
ADAPTED = ('attention/query', 'up', 'down')
CONFIG = peftlib.LoraConfig(module_path=ADAPTED, rank=4, alpha=8.0)


def sequences(seed: int, rows: int = 16) -> jax.Array:
  """Rows of numbers that rise by two or by three."""
  rng = np.random.default_rng(seed)
  start = rng.integers(VOCAB, size=(rows, 1))
  rise = rng.integers(2, 4, size=(rows, 1))
  return jnp.asarray((start + rise * np.arange(8)) % VOCAB, jnp.int32)


def loss_fn(model, tokens, rngs):
  del rngs
  losses = optax.softmax_cross_entropy_with_integer_labels(
    model(tokens[:, :-1]), tokens[:, 1:]
  )
  return losses.mean(), {}


def places() -> dict[str, hf.Place]:
  """Where the modules of the exported model are in ours."""
  found = {}
  for layer in range(LAYERS):
    for name in ADAPTED:
      theirs = f'layers.{layer}.{name.replace("/", ".")}'
      path = ('blocks', *name.split('/'))
      found[theirs] = hf.Place(theirs, path, 'kernel', layer, True)
  return found


def run(directory: pathlib.Path, steps: int = 40):
  base, base_state = nnx.split(
    models.Transformer(VOCAB, 16, LAYERS, nnx.Rngs(0))
  )
  tokens = sequences(0)
  keys = jax.random.split(jax.random.key(0), len(RATES))

  adapters = []
  for key in keys:
    graphdef, state = peftlib.inject(base, base_state, CONFIG, tokens, key=key)
    adapter, frozen = transforms.partition(
      state, peftlib.trainable_filter(CONFIG), ...
    )
    adapters.append(adapter)

  tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.0)
  population = peftlib.init_stacked_train_state(
    peftlib.stack_adapters(adapters), tx, keys=keys
  )
  population = optax.tree.set(population, learning_rate=jnp.asarray(RATES))
  # All see the same batch.
  step = peftlib.make_stacked_train_step(graphdef, loss_fn, tx, batch_axis=None)

  history = []
  for _ in range(steps):
    with jax.transfer_guard('disallow'):
      population, metrics = step(population, frozen, tokens)
    history.append(metrics)

  evaluate = peftlib.make_eval_step(graphdef, loss_fn)
  scores = jax.vmap(evaluate, in_axes=(0, None, None))(
    population.trainable, frozen, sequences(1)
  )['loss']
  best = int(np.argmin(scores))
  chosen = transforms.merge(
    peftlib.unstack_adapters(population.trainable)[best], frozen
  )
  hf.save_adapter(directory, graphdef, chosen, places=places())
  return {
    'history': jax.tree.map(lambda *x: np.stack(x), *history),
    'scores': np.asarray(scores),
    'best': best,
    'first': adapters[best],
    'tuned': (graphdef, chosen),
    'base': (base, base_state),
    'loss_fn': loss_fn,
    'batch': tokens,
  }
