from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from tests.consumers import harness


class HarnessTest(parameterized.TestCase):
  """The checks that the loops pass do fail where something is wrong."""

  def test_leaks(self):
    kept = []

    @jax.jit
    def step(x):
      kept.append(x + 1)
      return x

    with self.assertRaisesRegex(Exception, 'Leaked'):
      with harness.CHECKS['leaks']():
        step(jnp.ones(2))

  def test_nans(self):
    with self.assertRaisesRegex(FloatingPointError, 'nan'):
      with harness.CHECKS['nans']():
        jax.jit(jnp.log)(-jnp.ones(2)).block_until_ready()

  def test_transfers(self):
    step = jax.jit(jnp.sin)
    with self.assertRaisesRegex(Exception, 'Disallowed host-to-device'):
      with jax.transfer_guard('disallow'):
        step(np.ones(2, np.float32))

  def test_eight_devices(self):
    self.assertLen(jax.devices('cpu'), 8)


if __name__ == '__main__':
  absltest.main()
