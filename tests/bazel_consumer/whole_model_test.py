"""The training step alone, on a whole model without adapters."""

from absl.testing import absltest
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import optax

from peftlib import training


def loss_fn(model, batch, rngs):
  return jnp.sum(model(batch)), {}


class WholeModelTest(absltest.TestCase):
  def test_one_step_of_gradient_descent(self):
    graphdef, params = nnx.split(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
    tx = optax.sgd(0.5)
    state = training.init_train_state(params, tx, key=jax.random.key(0))
    step = training.make_train_step(graphdef, loss_fn, tx)
    state, _ = step(state, nnx.State({}), jnp.array([[1.0, 2.0]]))
    # The gradient of a linear layer's output is its input, and 1.
    chex.assert_trees_all_close(
      state.trainable['kernel'][...],
      params['kernel'][...] - 0.5 * jnp.array([[1.0], [2.0]]),
    )
    chex.assert_trees_all_close(state.trainable['bias'][...], jnp.array([-0.5]))

  def test_comes_from_the_dependency(self):
    self.assertIn('.runfiles/', training.__file__)


if __name__ == '__main__':
  absltest.main()
