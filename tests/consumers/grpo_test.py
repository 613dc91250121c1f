from absl.testing import absltest
from flax import nnx
import jax
import numpy as np

from tests.consumers import grpo
from tests.consumers import harness


class GrpoTest(harness.LeakCheckedTestCase):
  loop = grpo

  def test_reward_rises(self):
    reward = self.result()['history']['reward']
    self.assertBetween(reward[0], 0.4, 0.7)
    self.assertGreater(reward[-3:].mean(), 0.9)

  def test_reward_is_what_it_says(self):
    result = self.result()
    tokens = np.asarray(result['tokens'])
    self.assertEqual(tokens.shape, (grpo.PROMPTS * grpo.GROUP, grpo.LENGTH))
    alike = [
      row[i] % 2 == row[i - 1] % 2
      for row in tokens.tolist()
      for i in range(grpo.BEGIN, grpo.LENGTH)
    ]
    self.assertAlmostEqual(
      float(result['history']['reward'][-1]), np.mean(alike), places=5
    )

  def test_sampler_and_step_agree_on_the_probabilities(self):
    history = self.result()['history']
    # With the cache, token by token, against all at once without it.
    self.assertLess(history['first']['moved'].max(), 1e-4)
    # Only after an update is the policy another one.
    self.assertGreater(history['second']['moved'].min(), 1e-2)

  def test_starts_at_the_reference(self):
    kl = self.result()['history']['first']['kl']
    self.assertLess(kl[0], 1e-9)
    self.assertGreater(kl[1:].min(), 1e-3)

  def test_the_sampler_gets_the_weights_themselves(self):
    result = self.result()
    # All that it needs are arguments: none of it is compiled in.
    given = sum(x.nbytes for x in jax.tree.leaves(result['sampler_arguments']))
    self.assertEqual(result['sampler_memory'].argument_size_in_bytes, given)
    base = dict(nnx.to_flat_state(nnx.state(result['base'])))
    for path, variable in nnx.to_flat_state(result['sampler_arguments'][2]):
      self.assertIs(variable.get_raw_value(), base[path].get_raw_value())
    for path, variable in nnx.to_flat_state(result['frozen']):
      self.assertIs(variable.get_raw_value(), base[path].get_raw_value())

  def test_the_cache_is_the_callers(self):
    result = self.result()
    cache = np.asarray(result['sampler_arguments'][1]['memory'].get_value())
    written = np.abs(cache).max(axis=(0, 1, 2, 4)) > 0
    # The last token is sampled, never read.
    self.assertEqual(written.tolist(), [True] * (grpo.LENGTH - 1) + [False])
    self.assertFalse(np.asarray(result['frozen']['memory'].get_value()).any())


if __name__ == '__main__':
  absltest.main()
