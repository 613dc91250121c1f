from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from peftlib.methods import loha
from tests.peftlib.methods import method_cases

_NAMES = ('hada_w1_a', 'hada_w1_b', 'hada_w2_a', 'hada_w2_b')


class LohaTest(method_cases.MethodTestCase, parameterized.TestCase):
  @parameterized.parameters('linear', 'embedding')
  def test_laws(self, kind):
    self.check_laws(loha.Loha(rank=3, alpha=6), kind=kind)

  def test_formula(self):
    def formula(x, w, v, _):
      one = v['hada_w1_a'] @ v['hada_w1_b']
      two = v['hada_w2_a'] @ v['hada_w2_b']
      return x @ (w.T + 6 / 3 * one * two).T

    self.check_formula(loha.Loha(rank=3, alpha=6), formula)

  def test_golden(self):
    self.check_golden(
      'loha',
      loha.Loha(rank=3, alpha=6),
      method_cases.renamed(*((name, name) for name in _NAMES)),
    )

  def test_start_has_the_spread_of_peft(self):
    weight, value = method_cases.weight_of(600, 400)
    v = loha.Loha(rank=4).init(jax.random.key(0), weight, value)
    for name, fan_in in zip(_NAMES[:3], (4, 600, 4), strict=True):
      self.assertLessEqual(np.abs(v[name]).max(), fan_in**-0.5)
      self.assertGreater(np.abs(v[name]).max(), 0.99 * fan_in**-0.5)
    np.testing.assert_array_equal(v['hada_w2_b'], np.zeros((4, 600)))

  @parameterized.parameters(
    ({'rank': 0}, r'Loha.rank=0: must be an int >= 1'),
    ({'alpha': 0}, r'Loha.alpha=0: must be a finite number > 0'),
    ({'dropout': 0.1}, r'Loha.dropout=0.1: must be 0'),
  )
  def test_refuses(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      loha.Loha(**fields)


if __name__ == '__main__':
  absltest.main()
