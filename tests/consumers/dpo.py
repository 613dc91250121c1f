"""Direct preference optimization, with the base as its own reference."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import peftlib
from tests.consumers import models
import transforms

VOCAB, LENGTH, PAIRS = 16, 6, 32
BETA = 0.5


def preferences(seed: int) -> dict[str, jax.Array]:
  """Pairs with the same beginning: even endings are liked, odd ones aren't."""
  rng = np.random.default_rng(seed)
  begin = rng.integers(VOCAB, size=(PAIRS, LENGTH // 2))
  end = 2 * rng.integers(VOCAB // 2, size=(2, PAIRS, LENGTH // 2))
  pairs = {'chosen': end[0], 'rejected': end[1] + 1}
  return {
    name: jnp.asarray(np.concatenate([begin, ending], axis=1), jnp.int32)
    for name, ending in pairs.items()
  }


def log_likelihood(model, tokens):
  """Of each row's second half, given what comes before it."""
  losses = optax.softmax_cross_entropy_with_integer_labels(
    model(tokens[:, :-1]), tokens[:, 1:]
  )
  return -losses[:, LENGTH // 2 - 1 :].sum(axis=1)


def dpo_loss(policy, batch, rngs):
  del rngs
  base = peftlib.set_active(*nnx.split(policy), [])
  reference = nnx.merge(*base)
  gains = {
    name: log_likelihood(policy, batch[name])
    - log_likelihood(reference, batch[name])
    for name in ('chosen', 'rejected')
  }
  margin = BETA * (gains['chosen'] - gains['rejected'])
  return -jax.nn.log_sigmoid(margin).mean(), {
    'accuracy': (margin > 0).mean(),
    'reference': log_likelihood(reference, batch['chosen']).mean(),
  }


def run(steps: int = 30):
  key = jax.random.key(0)
  model = models.ExpertLM(VOCAB, 16, 4, nnx.Rngs(0))
  config = peftlib.LoraConfig(module_path='up|down|head', rank=4, alpha=8.0)
  batch = preferences(0)
  graphdef, state = peftlib.inject(
    *nnx.split(model), config, batch['chosen'], key=key
  )
  trainable, frozen = transforms.partition(
    state, peftlib.trainable_filter(config), ...
  )
  tx = optax.adam(0.02)
  train_state = peftlib.init_train_state(trainable, tx, key=key)
  step = peftlib.make_train_step(graphdef, dpo_loss, tx)
  compiled = step.lower(train_state, frozen, batch).compile()

  history = []
  for _ in range(steps):
    with jax.transfer_guard('disallow'):
      train_state, metrics = compiled(train_state, frozen, batch)
    history.append(metrics)
  held_out = peftlib.make_eval_step(graphdef, dpo_loss)(
    train_state.trainable, frozen, preferences(1)
  )
  return {
    'history': jax.tree.map(lambda *x: np.stack(x), *history),
    'held_out': held_out,
    'model': nnx.merge(graphdef, train_state.trainable, frozen),
    'base': model,
    'batch': batch,
    'train_state': train_state,
    'frozen': frozen,
    'memory': compiled.memory_analysis(),
  }
