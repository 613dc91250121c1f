"""A LoRA loop of one's own, held to what it may change."""

from absl.testing import absltest
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import optax

import peftlib
from peftlib import testing
import transforms
from transforms import testing as transforms_testing


class Model(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(4, 16, rngs=rngs)
    self.down = nnx.Linear(16, 1, rngs=rngs)

  def __call__(self, x):
    return self.down(nnx.relu(self.up(x)))


def loss_fn(model, batch, rngs):
  x, y = batch
  return jnp.mean((model(x) - y) ** 2), {}


class OwnLoopTest(absltest.TestCase):
  def test_trains_the_adapters_alone(self):
    key = jax.random.key(0)
    x = jax.random.normal(key, (32, 4))
    batch = x, jnp.sin(x.sum(-1, keepdims=True))
    config = peftlib.LoraConfig(rank=4, alpha=8.0)
    graphdef, before = peftlib.inject(
      *nnx.split(Model(nnx.Rngs(1))), config, x, key=key
    )
    lora = peftlib.trainable_filter(config)
    testing.assert_trainable(before, config, ['(up|down)/kernel_lora_[ab]'])
    trainable, frozen = transforms.partition(before, lora, ...)
    tx = optax.adam(1e-2)
    state = peftlib.init_train_state(trainable, tx, key=key)
    step = transforms_testing.assert_max_compilations(
      peftlib.make_train_step(graphdef, loss_fn, tx), 1
    )
    losses = []
    for _ in range(30):
      state, metrics = step(state, frozen, batch)
      losses.append(metrics['loss'])
    after = transforms.merge(state.trainable, frozen)
    transforms_testing.assert_only_changed(before, after, lora)
    chex.assert_tree_all_finite(losses)
    self.assertLess(losses[-1], 0.7 * losses[0])


if __name__ == '__main__':
  absltest.main()
