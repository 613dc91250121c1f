from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from peftlib.methods import method as method_lib
from peftlib.methods import shira
from tests.peftlib.methods import method_cases


def _from_peft(tensors):
  # peft's matrices are (outputs, inputs), so its pairs are the other way round.
  out = {'shira_weight': tensors['shira_weight']}
  if 'shira_indices' in tensors:
    out['shira_indices'] = tensors['shira_indices'][::-1]
  return out


class ShiraTest(method_cases.MethodTestCase, parameterized.TestCase):
  @parameterized.parameters('linear', 'embedding')
  def test_laws(self, kind):
    self.check_laws(shira.Shira(rank=2), kind=kind)

  def test_formula(self):
    def formula(x, w, v, _):
      update = np.zeros_like(w)
      for i, j, value in zip(*v['shira_indices'], v['shira_weight']):
        update[i, j] += value
      return x @ (w + update)

    self.check_formula(
      shira.Shira(rank=2), formula, constants=('shira_indices',)
    )

  def test_golden(self):
    self.check_golden('shira', shira.Shira(rank=2), _from_peft)

  @parameterized.parameters((12, 8, 4), (12, 8, 2), (300, 500, 10), (7, 1, 0))
  def test_entries_are_different_and_anywhere(self, rows, columns, rank):
    method = shira.Shira(rank=max(rank, 1))
    weight = method_lib.Weight((rows,), (columns,))
    if not rank:
      with self.assertRaisesRegex(
        ValueError,
        r'Shira.rank=1: weight has 7 entries, fewer than .* = 8',
      ):
        method.check(weight)
      return
    v = method.init(jax.random.key(0), weight, np.zeros((rows, columns)))
    inputs, outputs = np.asarray(v['shira_indices'])
    self.assertLen(set(zip(inputs, outputs)), rank * (rows + columns))
    self.assertGreaterEqual(min(inputs.min(), outputs.min()), 0)
    self.assertLess(inputs.max(), rows)
    self.assertLess(outputs.max(), columns)
    for indices, size in ((inputs, rows), (outputs, columns)):
      self.assertLen(set(indices), size)

  def test_entries_follow_from_the_key(self):
    method = shira.Shira(rank=2)
    weight, value = method_cases.weight_of()
    init = lambda seed: np.asarray(
      method.init(jax.random.key(seed), weight, value)['shira_indices']
    )
    np.testing.assert_array_equal(init(0), init(0))
    self.assertFalse(np.array_equal(init(0), init(1)))

  def test_each_entry_is_about_as_likely(self):
    method = shira.Shira(rank=2)
    weight, value = method_cases.weight_of()
    init = method_cases.jit(
      jax.vmap(lambda key: method.init(key, weight, value))
    )
    v = init(jax.random.split(jax.random.key(0), 2000))
    counts = np.zeros((12, 8))
    inputs, outputs = np.asarray(v['shira_indices']).swapaxes(0, 1)
    np.add.at(counts, (inputs, outputs), 1 / 2000)
    # 96 entries in 40 stretches: of two or of three.
    self.assertBetween(counts.min(), 1 / 3 - 0.05, 1 / 3)
    self.assertBetween(counts.max(), 1 / 2, 1 / 2 + 0.05)


if __name__ == '__main__':
  absltest.main()
