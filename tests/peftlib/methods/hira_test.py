from absl.testing import absltest
from absl.testing import parameterized

from peftlib.methods import hira
from tests.peftlib.methods import method_cases


class HiraTest(method_cases.MethodTestCase, parameterized.TestCase):
  @parameterized.parameters('linear', 'embedding')
  def test_laws(self, kind):
    self.check_laws(hira.Hira(rank=4), kind=kind)

  def test_formula(self):
    self.check_formula(
      hira.Hira(rank=4),
      lambda x, w, v, _: x @ (w + w * (v['hira_a'] @ v['hira_b'])),
    )

  def test_golden(self):
    self.check_golden(
      'hira',
      hira.Hira(rank=4),
      method_cases.transposed(('hira_A', 'hira_a'), ('hira_B', 'hira_b')),
    )

  def test_refuses_a_rank_below_one(self):
    with self.assertRaisesRegex(ValueError, 'Hira.rank=-1: must be an int'):
      hira.Hira(rank=-1)


if __name__ == '__main__':
  absltest.main()
