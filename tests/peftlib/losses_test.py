from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlib import losses


class _Model:
  """Gives fixed logits at the positions asked for, and notes the call."""

  def __init__(self, logits):
    self.logits = jnp.asarray(logits, jnp.float32)
    self.call = None

  def __call__(self, tokens, *, positions, segment_ids, logits_at):
    self.call = (tokens, positions, segment_ids)
    return jnp.take_along_axis(self.logits, logits_at[..., None], axis=1)


def _batch(weights):
  return {
    'tokens': jnp.array([[5, 6, 7, 0]]),
    'positions': jnp.array([[0, 1, 0, 0]]),
    'segment_ids': jnp.array([[1, 1, 2, 0]]),
    'loss_positions': jnp.array([[0, 2, 0]]),
    'targets': jnp.array([[1, 0, 0]]),
    'loss_weights': jnp.array([weights], jnp.float32),
  }


# Probabilities of two tokens at each of the four places.
_P = np.array([[[0.2, 0.8], [0.5, 0.5], [0.4, 0.6], [0.1, 0.9]]])


class CausalLmLossTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('even', [1, 1, 0], -(np.log(0.8) + np.log(0.4)) / 2, 2),
    ('weighted', [1, 0.5, 0], -(np.log(0.8) + 0.5 * np.log(0.4)) / 1.5, 1.5),
    ('padding', [0, 0, 0], 0.0, 0),
    # Less than one token in all: not blown up to a whole one.
    ('little', [0.5, 0, 0], -0.5 * np.log(0.8), 0.5),
  )
  def test_value(self, weights, loss, tokens):
    model = _Model(np.log(_P) + 3.0)
    batch = _batch(weights)
    call = lambda b: losses.causal_lm_loss(model, b, nnx.Rngs(0))
    for f in (call, jax.jit(call)):
      got, metrics = f(batch)
      self.assertAlmostEqual(float(got), loss, places=5)
      self.assertEqual(list(metrics), ['tokens'])
      self.assertEqual(float(metrics['tokens']), tokens)
      self.assertEqual((got.shape, got.dtype), ((), jnp.float32))
    abstract, _ = jax.eval_shape(call, batch)
    self.assertEqual((abstract.shape, abstract.dtype), ((), jnp.float32))

  def test_what_the_model_gets(self):
    model, batch = _Model(np.log(_P)), _batch([1, 1, 0])
    losses.causal_lm_loss(model, batch, nnx.Rngs(0))
    chex.assert_trees_all_equal(
      model.call, (batch['tokens'], batch['positions'], batch['segment_ids'])
    )


if __name__ == '__main__':
  absltest.main()
