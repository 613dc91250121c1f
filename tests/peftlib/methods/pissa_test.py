from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from peftlib.methods import method as method_lib
from peftlib.methods import pissa
from tests.peftlib.methods import method_cases


class PissaTest(method_cases.MethodTestCase, parameterized.TestCase):
  @parameterized.parameters('linear', 'embedding')
  def test_laws(self, kind):
    self.check_laws(pissa.Pissa(rank=4, alpha=6), kind=kind)

  def test_golden(self):
    self.check_golden(
      'pissa',
      pissa.Pissa(rank=4, alpha=6),
      method_cases.transposed(('lora_A', 'lora_a'), ('lora_B', 'lora_b')),
    )

  def test_start_is_the_largest_singular_values(self):
    data = method_cases.golden('pissa')
    weight, _ = method_cases.weight_of()
    method = pissa.Pissa(rank=4, alpha=6)
    w = data['weight'].T
    v = method.init(jax.random.key(0), weight, w)
    # Signs and turns of the factors are free, their product is not.
    np.testing.assert_allclose(
      v['lora_a'] @ v['lora_b'],
      (data['start/lora_B'] @ data['start/lora_A']).T,
      rtol=1e-4,
      atol=1e-5,
    )
    np.testing.assert_allclose(
      w - (method.merge(w, v) - w), data['frozen'].T, rtol=1e-4, atol=1e-5
    )
    s = np.linalg.svd(w, compute_uv=False)[:4]
    np.testing.assert_allclose(
      np.linalg.norm(v['lora_a'], axis=0), np.sqrt(s / 1.5), rtol=1e-5
    )
    np.testing.assert_allclose(
      np.linalg.norm(v['lora_b'], axis=1), np.sqrt(s / 1.5), rtol=1e-5
    )

  def test_refuses_a_larger_rank_than_the_weight_has(self):
    weight = method_lib.Weight((12,), (8,), label='mlp.kernel')
    pissa.Pissa(rank=8).check(weight)
    with self.assertRaisesRegex(
      ValueError,
      r'Pissa.rank=9: mlp.kernel of \(12, 8\) has a smaller one',
    ):
      pissa.Pissa(rank=9).check(weight)


if __name__ == '__main__':
  absltest.main()
