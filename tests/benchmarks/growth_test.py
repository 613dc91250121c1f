"""Tests for benchmarks.growth."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from tests.benchmarks import growth


class GrowthTest(parameterized.TestCase):
  @parameterized.parameters(0.0, 1.0, 1.5, 2.0)
  def test_exponent_of_a_power(self, power):
    values = [2, 4, 16, 128]
    measured = [3.0 * value**power for value in values]
    self.assertAlmostEqual(growth.exponent(values, measured), power)

  def test_draws(self):
    one = {
      'values': [1, 2, 4],
      'seconds': [1.0, 2.0, 4.0],
      'peak_bytes': [1e9, 1e9, 2e9],
      'exponent_time': 1.0,
      'exponent_memory': 0.5,
    }
    path = pathlib.Path(self.create_tempdir(), 'growth.png')
    growth.draw({'length': one, 'rank': one}, path)
    self.assertEqual(path.read_bytes()[:8], b'\x89PNG\r\n\x1a\n')


if __name__ == '__main__':
  absltest.main()
