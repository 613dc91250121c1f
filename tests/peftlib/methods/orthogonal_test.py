from absl.testing import absltest
import jax
import numpy as np

from peftlib.methods import orthogonal
from tests.peftlib.methods import method_cases


class OrthogonalLoraTest(method_cases.MethodTestCase):
  def test_laws(self):
    self.check_laws(orthogonal.OrthogonalLora(rank=4, alpha=6))

  def test_golden(self):
    self.check_golden(
      'orthogonal',
      orthogonal.OrthogonalLora(rank=4, alpha=6),
      method_cases.transposed(('lora_A', 'lora_a'), ('lora_B', 'lora_b')),
    )

  def test_start_has_the_spread_of_peft(self):
    weight, value = method_cases.weight_of(600, 400)
    v = orthogonal.OrthogonalLora(rank=8).init(jax.random.key(0), weight, value)
    # Half of the rows of a rotation: each element of variance 4 / 8 / 100.
    for name in ('lora_a', 'lora_b'):
      self.assertAlmostEqual(float(np.std(v[name])), 0.5**0.5 / 10, delta=4e-3)
    np.testing.assert_allclose(v['lora_a'] @ v['lora_b'], 0, atol=1e-6)

  def test_refuses_an_odd_rank(self):
    with self.assertRaisesRegex(
      ValueError, 'OrthogonalLora.rank=3: must be even'
    ):
      orthogonal.OrthogonalLora(rank=3)


if __name__ == '__main__':
  absltest.main()
