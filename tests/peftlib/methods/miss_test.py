from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from peftlib.methods import method as method_lib
from peftlib.methods import miss
from tests.peftlib.methods import method_cases

_BLOCK = method_cases.renamed(('miss_block', 'miss_block'))


class MissTest(method_cases.MethodTestCase, parameterized.TestCase):
  @parameterized.parameters(
    {'rank': 4},
    {'rank': 5},
    {'rank': 4, 'form': 'mini', 'mini_rank': 2},
    {'rank': 4, 'form': 'bat'},
  )
  def test_laws(self, **fields):
    self.check_laws(miss.Miss(**fields))

  @parameterized.parameters(4, 5, 12)
  def test_formula(self, rank):
    def formula(x, w, v, _):
      update = np.stack([v['miss_block'][i % rank] for i in range(12)])
      return x @ (w + update)

    self.check_formula(miss.Miss(rank=rank), formula)

  def test_formula_of_bat(self):
    # Equation of the paper: W_b <- W_b + W_b B + B for each block of
    # (outputs, inputs), B the one of its row of blocks.
    def formula(x, w, v, _):
      w = w.T.copy()
      for i in range(0, 8, 4):
        block = v['miss_block'][i // 4]
        for j in range(0, 12, 4):
          part = w[i : i + 4, j : j + 4]
          w[i : i + 4, j : j + 4] = part + part @ block + block
      return x @ w.T

    self.check_formula(miss.Miss(rank=4, form='bat'), formula)

  @parameterized.parameters(
    ('miss', {'rank': 4}),
    ('miss_remainder', {'rank': 5}),
    ('miss_mini', {'rank': 4, 'form': 'mini', 'mini_rank': 2}),
    ('miss_bat', {'rank': 4, 'form': 'bat'}),
  )
  def test_golden(self, case, fields):
    self.check_golden(case, miss.Miss(**fields), _BLOCK)

  @parameterized.parameters(
    ({'rank': 13}, r'Miss.rank=13: mlp.kernel has 12 inputs only'),
    (
      {'rank': 4, 'form': 'mini', 'mini_rank': 3},
      r'Miss.mini_rank=3: does not divide the 8 outputs of mlp.kernel',
    ),
    (
      {'rank': 3, 'form': 'bat'},
      r'Miss.rank=3: does not divide mlp.kernel of \(12, 8\) into blocks',
    ),
  )
  def test_refuses_weights(self, fields, message):
    weight = method_lib.Weight((12,), (8,), label='mlp.kernel')
    with self.assertRaisesRegex(ValueError, message):
      miss.Miss(**fields).check(weight)

  @parameterized.parameters(
    ({'rank': 0}, r'Miss.rank=0: must be an int >= 1'),
    ({'mini_rank': 0}, r'Miss.mini_rank=0: must be an int >= 1'),
    ({'form': 'max'}, r"Miss.form='max': must be one of \('miss', 'mini'"),
    ({'form': 'bat', 'dropout': 0.1}, r'Miss.dropout=0.1: must be 0'),
  )
  def test_refuses_fields(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      miss.Miss(**fields)


if __name__ == '__main__':
  absltest.main()
