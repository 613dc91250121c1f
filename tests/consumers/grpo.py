"""Group-relative policy optimization: sample with the cache, score, update."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import peftlib
from tests.consumers import models
import transforms

VOCAB, PROMPTS, GROUP, BEGIN, LENGTH = 8, 8, 8, 2, 8
BETA, CLIP = 0.01, 0.2
CONFIG = peftlib.LoraConfig(
  module_path=('qkv', 'up', 'down', 'head'), rank=4, alpha=8.0
)


def make_sampler(graphdef):
  """A jitted function of the weights, as they are, that continues prompts."""

  @jax.jit
  def sample(trainable, memory, frozen, prompts, key):
    def go_on(memory, tokens, at, key):
      model = nnx.merge(graphdef, trainable, memory, frozen, copy=True)
      log_probs = jax.nn.log_softmax(model(tokens, at=at)[:, -1])
      token = jax.random.categorical(key, log_probs)
      chosen = jnp.take_along_axis(log_probs, token[:, None], axis=1)[:, 0]
      return nnx.state(model, nnx.Cache), token, chosen

    def body(carry, inputs):
      memory, token, chosen = go_on(carry[0], carry[1][:, None], *inputs)
      return (memory, token), (token, chosen)

    keys = jax.random.split(key, LENGTH - BEGIN)
    memory, token, chosen = go_on(memory, prompts, 0, keys[0])
    (memory, _), (tokens, more) = jax.lax.scan(
      body, (memory, token), (jnp.arange(BEGIN, LENGTH - 1), keys[1:])
    )
    new = jnp.concatenate([token[:, None], tokens.T], axis=1)
    old = jnp.concatenate([chosen[:, None], more.T], axis=1)
    return memory, jnp.concatenate([prompts, new], axis=1), old

  return sample


@jax.jit
def score(tokens):
  """Part of the new tokens that are odd where the one before is, or even."""
  alike = (tokens[:, 1:] - tokens[:, :-1]) % 2 == 0
  rewards = alike[:, BEGIN - 1 :].mean(axis=1).reshape(PROMPTS, GROUP)
  centred = rewards - rewards.mean(axis=1, keepdims=True)
  advantage = centred / (rewards.std(axis=1, keepdims=True) + 1e-4)
  return rewards.mean(), advantage.reshape(-1, 1)


def log_probs_of(model, tokens):
  losses = optax.softmax_cross_entropy_with_integer_labels(
    model(tokens[:, :-1]), tokens[:, 1:]
  )
  return -losses[:, BEGIN - 1 :]


def grpo_loss(policy, batch, rngs):
  del rngs
  reference = nnx.merge(*peftlib.set_active(*nnx.split(policy), []))
  new = log_probs_of(policy, batch['tokens'])
  ratio = jnp.exp(new - batch['old'])
  clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
  gain = jnp.minimum(ratio * batch['advantage'], clipped * batch['advantage'])
  behind = log_probs_of(reference, batch['tokens']) - new
  kl = jnp.exp(behind) - behind - 1
  moved = jnp.abs(ratio - 1).max()
  return -(gain - BETA * kl).mean(), {'kl': kl.mean(), 'moved': moved}


def run(steps: int = 20):
  rows = PROMPTS * GROUP
  model = models.Decoder(VOCAB, 16, 2, nnx.Rngs(0), cache=(rows, LENGTH))
  rng = np.random.default_rng(0)
  prompts = rng.integers(VOCAB, size=(PROMPTS, BEGIN)).repeat(GROUP, axis=0)
  prompts = jnp.asarray(prompts, jnp.int32)
  graphdef, state = peftlib.inject(
    *nnx.split(model), CONFIG, prompts, key=jax.random.key(0)
  )
  trainable, memory, base = transforms.partition(
    state, peftlib.trainable_filter(CONFIG), nnx.Cache, ...
  )
  frozen = transforms.merge(memory, base)
  tx = optax.adam(0.01)
  train_state = peftlib.init_train_state(trainable, tx, key=jax.random.key(1))
  step = peftlib.make_train_step(graphdef, grpo_loss, tx)
  keys = jax.random.split(jax.random.key(2), steps)
  sample = (
    make_sampler(graphdef)
    .lower(train_state.trainable, memory, base, prompts, keys[0])
    .compile()
  )

  history = []
  for key in keys:
    with jax.transfer_guard('disallow'):
      memory, tokens, old = sample(
        train_state.trainable, memory, base, prompts, key
      )
      reward, advantage = score(tokens)
      batch = {'tokens': tokens, 'old': old, 'advantage': advantage}
      train_state, first = step(train_state, frozen, batch)
      train_state, second = step(train_state, frozen, batch)
    history.append({'reward': reward, 'first': first, 'second': second})
  return {
    'history': jax.tree.map(lambda *x: np.stack(x), *history),
    'sampler_arguments': (train_state.trainable, memory, base, prompts, key),
    'sampler_memory': sample.memory_analysis(),
    'base': model,
    'frozen': frozen,
    'tokens': tokens,
  }
