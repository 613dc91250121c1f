"""Tests for benchmarks.bars."""

from absl.testing import absltest
from absl.testing import parameterized

from tests.benchmarks import bars


class BarsTest(parameterized.TestCase):
  @parameterized.parameters(
    (0.9, 1.0, 0.9, False, True),
    (0.91, 1.0, 0.9, False, False),
    (3.0, 2.0, 1.5, True, True),
    (2.9, 2.0, 1.5, True, False),
    (12.0, 4.0, 3.0, False, True),
  )
  def test_met(self, ours, peer, bar, at_least, expected):
    row = bars.Row('w', 's', ours, bar, peer, 'peer', at_least=at_least)
    self.assertEqual(row.met, expected)

  def test_markdown(self):
    rows = [
      bars.Row('step', 's', 2.0, 0.5, 2.5, 'peft', spread=0.03),
      bars.Row('rate', 'tokens/s', 30.0, 1.2, 10.0, 'peft', at_least=True),
      bars.Row('rate', 'tokens/s', 10.0, 1.5, 10.0, 'peft', at_least=True),
      bars.Row('near', 's', 1.0003, 1.0, 1.0, 'peft'),
      bars.Row('nothing', 'us', -0.001, 0.2, 1.0, 'nnx.jit'),
      bars.Row('load', 's', 0.8, 1.0),
      bars.Row('host', 'us', 6874.9, 0.2, 62806.4, 'nnx.jit'),
    ]
    self.assertEqual(
      bars.markdown(rows),
      '| work | measure | ours | peer | ratio | bar | met |\n'
      '| --- | --- | --- | --- | --- | --- | --- |\n'
      '| step | s | 2 ± 3% | 2.5 (peft) | 0.80x | ≤ 0.5x | no, by 60% |\n'
      '| rate | tokens/s | 30 | 10 (peft) | 3.00x | ≥ 1.2x | yes |\n'
      '| rate | tokens/s | 10 | 10 (peft) | 1.00x | ≥ 1.5x | no, by 50% |\n'
      '| near | s | 1 | 1 (peft) | 1.00x | ≤ 1x | no, by 0.03% |\n'
      '| nothing | us | -0.001 | 1 (nnx.jit) | 0.00x | ≤ 0.2x | yes |\n'
      '| load | s | 0.8 |  |  | ≤ 1 | yes |\n'
      '| host | us | 6,875 | 62,806 (nnx.jit) | 0.11x | ≤ 0.2x | yes |',
    )


if __name__ == '__main__':
  absltest.main()
