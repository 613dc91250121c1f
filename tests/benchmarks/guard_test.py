import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from tests.benchmarks import guard


class GuardTest(parameterized.TestCase):
  """The step has not become dearer."""

  @parameterized.parameters(*guard.BOUNDS)
  def test_counts_are_within_bounds(self, name):
    counts = dataclasses.asdict(guard.measure(**guard.OPTIONS[name]))
    for field, bound in dataclasses.asdict(guard.BOUNDS[name]).items():
      with self.subTest(field):
        self.assertLessEqual(
          counts[field],
          bound,
          f'{name}: {field} of the LoRA step has risen from at most {bound:,} to'
          f' {counts[field]:,}; if this is meant, record it in guard.BOUNDS and'
          ' say why.',
        )

  def test_no_gradient_of_a_frozen_weight(self):
    counts = guard.measure(remat='none')
    # One for all of the weights would add a third.
    self.assertBetween(
      counts.flops, guard.flops_by_hand(), 1.05 * guard.flops_by_hand()
    )


if __name__ == '__main__':
  absltest.main()
