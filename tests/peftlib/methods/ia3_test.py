from absl.testing import absltest
from absl.testing import parameterized

from peftlib.methods import ia3
from tests.peftlib.methods import method_cases


def _from_peft(tensors):
  return {'ia3_l': tensors['ia3_l'].reshape(-1)}


class Ia3Test(method_cases.MethodTestCase, parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_laws(self, feedforward):
    self.check_laws(ia3.Ia3(feedforward=feedforward))

  def test_formula(self):
    self.check_formula(ia3.Ia3(), lambda x, w, v, _: (x @ w) * v['ia3_l'][None])

  def test_formula_of_feedforward(self):
    self.check_formula(
      ia3.Ia3(feedforward=True), lambda x, w, v, _: (x * v['ia3_l'][None]) @ w
    )

  @parameterized.parameters(('ia3', False), ('ia3_feedforward', True))
  def test_golden(self, case, feedforward):
    self.check_golden(case, ia3.Ia3(feedforward=feedforward), _from_peft)

  def test_refuses_dropout(self):
    with self.assertRaisesRegex(ValueError, 'Ia3.dropout=0.1: must be 0'):
      ia3.Ia3(dropout=0.1)


if __name__ == '__main__':
  absltest.main()
