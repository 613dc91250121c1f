"""Holds the table of methods in README.md to what the methods do."""

from absl.testing import absltest
from absl.testing import parameterized
import chex

from peftlib import methods
from tests.integration import methods_matrix

chex.set_n_cpu_devices(8)


class MethodsMatrixTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.readme = (methods_matrix.ROOT / 'README.md').read_text('utf-8')

  @parameterized.parameters(*methods.registry())
  def test_row(self, name):
    row = f'| {" | ".join(methods_matrix.row(name))} |\n'
    self.assertIn(
      row,
      self.readme,
      'Write the table anew: python -m tests.integration.methods_matrix',
    )

  def test_no_row_of_a_method_that_is_gone(self):
    rows = [
      line.split('`')[1]
      for line in self.readme.splitlines()
      if line.startswith('| `') and line.endswith((' HF peft |', 'paper |'))
    ]
    self.assertEqual(rows, list(methods.registry()))


if __name__ == '__main__':
  absltest.main()
