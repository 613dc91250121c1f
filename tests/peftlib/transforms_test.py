import importlib
import subprocess
import sys

from absl.testing import absltest

from peftlib import transforms as by_long_name
import transforms

_LONG_NAME_FIRST = """
import peftlib.transforms.filtering as long
from transforms import filtering
import transforms
assert long is filtering is transforms.filtering
print('the same')
"""


class TransformsTest(absltest.TestCase):
  def test_is_the_same_package(self):
    self.assertIs(by_long_name, transforms)
    self.assertIs(sys.modules['peftlib.transforms'], transforms)

  def test_has_the_same_modules(self):
    for name in ('filtering', 'scan_axis', '_leaves'):
      self.assertIs(
        importlib.import_module(f'peftlib.transforms.{name}'),
        importlib.import_module(f'transforms.{name}'),
      )

  def test_by_the_long_name_first(self):
    result = subprocess.run(
      [sys.executable, '-c', _LONG_NAME_FIRST], capture_output=True, text=True
    )
    self.assertEqual((result.stdout, result.stderr), ('the same\n', ''))


if __name__ == '__main__':
  absltest.main()
