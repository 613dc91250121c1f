from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from peftlib.methods import lokr
from peftlib.methods import method as method_lib
from tests.peftlib.methods import method_cases

_NAMES = (
  *('lokr_w1', 'lokr_w1_a', 'lokr_w1_b'),
  *('lokr_w2', 'lokr_w2_a', 'lokr_w2_b'),
)
_CASES = {
  'lokr': {'rank': 2},
  'lokr_split': {'rank': 1, 'decompose_factor': 2},
  'lokr_both': {'rank': 1, 'decompose_factor': 3, 'decompose_both': True},
}


class LokrTest(method_cases.MethodTestCase, parameterized.TestCase):
  @parameterized.product(
    fields=list(_CASES.values()), kind=('linear', 'embedding')
  )
  def test_laws(self, fields, kind):
    self.check_laws(lokr.Lokr(alpha=6, **fields), kind=kind)

  @parameterized.parameters(*_CASES.values())
  def test_formula(self, **fields):
    def formula(x, w, v, _):
      one = v.get('lokr_w1')
      if one is None:
        one = v['lokr_w1_a'] @ v['lokr_w1_b']
      two = v.get('lokr_w2')
      if two is None:
        two = v['lokr_w2_a'] @ v['lokr_w2_b']
      return x @ (w.T + 6 / fields['rank'] * np.kron(one, two)).T

    self.check_formula(lokr.Lokr(alpha=6, **fields), formula)

  @parameterized.parameters(*_CASES)
  def test_golden(self, case):
    self.check_golden(
      case,
      lokr.Lokr(alpha=6, **_CASES[case]),
      method_cases.renamed(*((name, name) for name in _NAMES)),
    )

  def test_factors_are_those_of_peft(self):
    for size, wanted, small, large in method_cases.golden_table('lokr_factors'):
      with self.subTest(f'{size} by {wanted}'):
        # The widths of both whole matrices show them.
        specs = lokr.Lokr(rank=10**6, decompose_factor=int(wanted)).variables(
          method_lib.Weight((int(size),), (6,))
        )
        self.assertEqual(
          (specs['lokr_w1'].axes[1], specs['lokr_w2'].axes[1]), (small, large)
        )

  @parameterized.parameters(
    ({'rank': 0}, r'Lokr.rank=0: must be an int >= 1'),
    ({'alpha': 0}, r'Lokr.alpha=0: must be a finite number > 0'),
    ({'dropout': 0.1}, r'Lokr.dropout=0.1: must be 0'),
    ({'decompose_factor': 0}, r'Lokr.decompose_factor=0: must be -1 or an int'),
  )
  def test_refuses(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      lokr.Lokr(**fields)


if __name__ == '__main__':
  absltest.main()
