from absl.testing import absltest
from flax import nnx
import jax
import numpy as np

from tests.consumers import dpo
from tests.consumers import harness


def _bytes(tree):
  return sum(x.nbytes for x in jax.tree.leaves(tree))


class DpoTest(harness.LeakCheckedTestCase):
  loop = dpo

  def test_starts_at_the_reference(self):
    first = jax.tree.map(lambda x: x[0], self.result()['history'])
    # Policy and reference are the same then: -log sigmoid(0).
    self.assertAlmostEqual(float(first['loss']), np.log(2), places=6)
    self.assertEqual(first['accuracy'], 0)

  def test_learns_the_preference(self):
    result = self.result()
    self.assertLess(result['history']['loss'][-1], 0.1)
    self.assertEqual(result['history']['accuracy'][-1], 1)
    self.assertGreater(result['held_out']['accuracy'], 0.9)

  def test_reference_is_the_base_throughout(self):
    result = self.result()
    chosen = result['batch']['chosen']
    log_probs = jax.nn.log_softmax(result['base'](chosen[:, :-1]))
    targets = np.asarray(chosen[:, 1:])
    picked = np.take_along_axis(np.asarray(log_probs), targets[..., None], 2)
    expected = picked[:, dpo.LENGTH // 2 - 1 :, 0].sum(axis=1).mean()
    np.testing.assert_allclose(
      result['history']['reference'], expected, rtol=1e-5
    )

  def test_every_base_array_is_the_one_that_was_there(self):
    result = self.result()
    before = dict(nnx.to_flat_state(nnx.state(result['base'])))
    after = dict(nnx.to_flat_state(result['frozen']))
    for path, variable in before.items():
      self.assertIs(variable.get_raw_value(), after[path].get_raw_value())

  def test_one_copy_of_the_base_goes_into_the_step(self):
    result = self.result()
    state, frozen, batch = (
      _bytes(result[name]) for name in ('train_state', 'frozen', 'batch')
    )
    self.assertEqual(
      result['memory'].argument_size_in_bytes, state + frozen + batch
    )


if __name__ == '__main__':
  absltest.main()
