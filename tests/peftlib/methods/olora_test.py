from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from peftlib.methods import method as method_lib
from peftlib.methods import olora
from tests.peftlib.methods import method_cases


class OloraTest(method_cases.MethodTestCase, parameterized.TestCase):
  @parameterized.parameters('linear', 'embedding')
  def test_laws(self, kind):
    self.check_laws(olora.Olora(rank=4, alpha=6), kind=kind)

  def test_golden(self):
    self.check_golden(
      'olora',
      olora.Olora(rank=4, alpha=6),
      method_cases.transposed(('lora_A', 'lora_a'), ('lora_B', 'lora_b')),
    )

  def test_start_is_of_the_qr_decomposition(self):
    data = method_cases.golden('olora')
    weight, _ = method_cases.weight_of()
    method = olora.Olora(rank=4, alpha=6)
    w = data['weight'].T
    v = method.init(jax.random.key(0), weight, w)
    np.testing.assert_allclose(
      v['lora_a'] @ v['lora_b'],
      (data['start/lora_B'] @ data['start/lora_A']).T,
      rtol=1e-4,
      atol=1e-5,
    )
    np.testing.assert_allclose(
      w - (method.merge(w, v) - w), data['frozen'].T, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
      v['lora_b'] @ v['lora_b'].T, np.eye(4), atol=1e-5
    )

  def test_refuses_a_larger_rank_than_the_weight_has(self):
    weight = method_lib.Weight((12,), (8,), label='mlp.kernel')
    olora.Olora(rank=8).check(weight)
    with self.assertRaisesRegex(
      ValueError,
      r'Olora.rank=9: mlp.kernel of \(12, 8\) has a smaller one',
    ):
      olora.Olora(rank=9).check(weight)


if __name__ == '__main__':
  absltest.main()
