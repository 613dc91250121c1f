"""Federated averaging with differential privacy.

Each client sees two classes of four and trains its own adapter. The server
gets the changes of `b` alone (`a` is frozen and common), so that the average of
the adapters is the average of the updates of the weights.
"""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import peftlib
from peftlib import methods
from tests.consumers import models
import transforms

CLIENTS, CLASSES, SIZE = 4, 4, 8
LOCAL_STEPS = 4
CONFIG = peftlib.AdapterConfig(
  (peftlib.Rule('.*', methods.LoraFA(rank=4, alpha=8.0)),)
)


def images(classes, seed: int, count: int = 32) -> dict[str, jax.Array]:
  """A bright bar across: high or low, upright or flat."""
  rng = np.random.default_rng(seed)
  label = rng.choice(classes, size=count)
  pixels = 0.3 * rng.normal(size=(count, SIZE, SIZE, 1))
  for image, kind in zip(pixels, label):
    bar = image if kind < 2 else image.swapaxes(0, 1)
    bar[rng.integers(1, 3) + 4 * (kind % 2)] += 1.0 + kind % 2
  return {'x': jnp.asarray(pixels, jnp.float32), 'label': jnp.asarray(label)}


def loss_fn(model, batch, rngs):
  del rngs
  logits = model(batch['x'])
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, batch['label']
  )
  accuracy = (logits.argmax(axis=1) == batch['label']).mean()
  return losses.mean(), {'accuracy': accuracy}


def run(steps: int = 24, noise: float = 0.02, clip: float = 5.0):
  model = models.Convolutions(8, CLASSES, nnx.Rngs(0))
  graphdef, state = peftlib.inject(
    *nnx.split(model),
    CONFIG,
    jnp.zeros((1, SIZE, SIZE, 1)),
    key=jax.random.key(0),
  )
  shared, frozen = transforms.partition(
    state, peftlib.trainable_filter(CONFIG), ...
  )
  client_tx = optax.adam(0.03)
  client_step = peftlib.make_train_step(graphdef, loss_fn, client_tx)
  server_tx = optax.chain(
    optax.contrib.differentially_private_aggregate(clip, noise, key=1),
    optax.sgd(1.0),
  )
  server_state = server_tx.init(shared)
  data = [images([i, (i + 1) % CLASSES], seed=i) for i in range(CLIENTS)]
  keys = jax.random.split(jax.random.key(2), CLIENTS)

  @jax.jit
  def server_step(shared, server_state, clients):
    # What a client learned is minus its gradient, one row a client.
    rows = jax.tree.map(
      lambda before, *after: before - jnp.stack(after), shared, *clients
    )
    updates, server_state = server_tx.update(rows, server_state, shared)
    return optax.apply_updates(shared, updates), server_state

  start, rounds = shared, []
  for _ in range(steps):
    clients = []
    for batch, key in zip(data, keys):
      client = peftlib.init_train_state(shared, client_tx, key=key)
      for _ in range(LOCAL_STEPS):
        with jax.transfer_guard('disallow'):
          client, _ = client_step(client, frozen, batch)
      clients.append(client.trainable)
    before = shared
    with jax.transfer_guard('disallow'):
      shared, server_state = server_step(shared, server_state, clients)
    rounds.append((before, clients, shared))

  evaluate = peftlib.make_eval_step(graphdef, loss_fn)
  held_out = images(range(CLASSES), seed=99, count=200)
  return {
    'rounds': rounds,
    'before': evaluate(start, frozen, held_out),
    'after': evaluate(shared, frozen, held_out),
    'each_alone': [evaluate(c, frozen, held_out) for c in rounds[-1][1]],
    'graphdef': graphdef,
    'frozen': frozen,
    'base': model,
  }
