"""A training step by hand, under whichever optimizer.

The model has more than parameters: a stream of random numbers, batch
statistics, a metric, and activations that it records.
"""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import peftlib
from tests.consumers import models
import transforms

INPUTS, CLASSES = 8, 4
CONFIG = peftlib.LoraConfig(rank=4, alpha=8.0)
# What a forward pass changes by itself.
USER_STATE = (nnx.RngState, nnx.BatchStat, nnx.metrics.MetricState)


def factor(path, leaf):
  del leaf
  return 'b' if jax.tree_util.keystr(path).count('lora_b') else 'a'


def only_last(params):
  last = lambda path, leaf: 'last' in jax.tree_util.keystr(path)
  return jax.tree_util.tree_map_with_path(last, params)


OPTIMIZERS = {
  'multi_transform': optax.multi_transform(
    {'a': optax.adam(0.01), 'b': optax.adam(0.05)},
    lambda params: jax.tree_util.tree_map_with_path(factor, params),
  ),
  'masked': optax.chain(
    optax.masked(optax.set_to_zero(), only_last), optax.adam(0.05)
  ),
  'multi_steps': optax.MultiSteps(
    optax.adam(0.1), every_k_schedule=2
  ).gradient_transformation(),
  'apply_if_finite': optax.apply_if_finite(optax.adam(0.05), 3),
  'schedule_free': optax.contrib.schedule_free_adamw(0.05, warmup_steps=5),
}


def make_data(seed: int) -> dict[str, jax.Array]:
  """Points around one centre a class."""
  rng = np.random.default_rng(seed)
  centres = np.random.default_rng(0).normal(size=(CLASSES, INPUTS))
  label = rng.integers(CLASSES, size=64)
  x = centres[label] + 0.5 * rng.normal(size=(64, INPUTS))
  return {'x': jnp.asarray(x, jnp.float32), 'label': jnp.asarray(label)}


def make_step(graphdef, tx):
  def loss_fn(trainable, user, frozen, batch):
    model = nnx.merge(graphdef, trainable, user, frozen, copy=True)
    model.train()
    logits = model(batch['x'])
    loss = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch['label']
    ).mean()
    user, recorded = transforms.partition(
      transforms.exclude(nnx.split(model)[1], nnx.Param),
      USER_STATE,
      nnx.Intermediate,
    )
    return loss, (user, recorded['hidden'].get_value()[0])

  @jax.jit
  def step(trainable, opt_state, user, frozen, batch):
    (loss, (user, hidden)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
      trainable, user, frozen, batch
    )
    updates, opt_state = tx.update(grads, opt_state, trainable)
    trainable = optax.apply_updates(trainable, updates)
    return trainable, opt_state, user, {'loss': loss, 'hidden': hidden}

  return step


def run(steps: int = 30, optimizer: str = 'multi_transform'):
  model = models.Noisy(INPUTS, 16, CLASSES, nnx.Rngs(0))
  batch = make_data(1)
  graphdef, state = peftlib.inject(
    *nnx.split(model), CONFIG, batch['x'], key=jax.random.key(0)
  )
  trainable, user, frozen = transforms.partition(
    state, peftlib.trainable_filter(CONFIG), USER_STATE, ...
  )
  tx = OPTIMIZERS[optimizer]
  opt_state = tx.init(trainable)
  step = make_step(graphdef, tx)

  start, history = (trainable, user), []
  for _ in range(steps):
    with jax.transfer_guard('disallow'):
      trainable, opt_state, user, metrics = step(
        trainable, opt_state, user, frozen, batch
      )
    history.append(metrics)
  return {
    'history': jax.tree.map(lambda *x: np.stack(x), *history),
    'start': start,
    'end': (trainable, user),
    'opt_state': opt_state,
    'frozen': frozen,
    'graphdef': graphdef,
    'base': model,
  }
