from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from peftlib.methods import initialization
from tests.peftlib.methods import method_cases


class InitializationTest(parameterized.TestCase):
  @parameterized.parameters((None, 300), (4, 4))
  def test_kaiming_is_uniform_in_the_root_of_the_inputs(self, fan_in, inputs):
    x = initialization.kaiming(jax.random.key(0), (300, 40), fan_in=fan_in)
    bound = inputs**-0.5
    self.assertEqual((x.shape, x.dtype), ((300, 40), jnp.float32))
    self.assertLessEqual(np.abs(x).max(), bound)
    self.assertAlmostEqual(float(np.std(x)), bound / 3**0.5, delta=0.02 * bound)

  def test_kaiming_has_the_bound_of_peft(self):
    start = method_cases.golden('lora')['start/lora_A']
    self.assertLessEqual(np.abs(start).max(), 12**-0.5)
    self.assertGreater(np.abs(start).max(), 0.9 * 12**-0.5)

  def test_gaussian(self):
    x = initialization.gaussian(8)(jax.random.key(0), (300, 8), jnp.float32)
    self.assertAlmostEqual(float(np.std(x)), 1 / 8, delta=0.01)
    self.assertAlmostEqual(float(np.mean(x)), 0, delta=0.01)


if __name__ == '__main__':
  absltest.main()
