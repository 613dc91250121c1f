import doctest
import importlib
import pkgutil

from absl.testing import absltest
from absl.testing import parameterized

from peftlib import methods

_MODULES = sorted(
  module.name for module in pkgutil.iter_modules(methods.__path__)
)


class DoctestTest(parameterized.TestCase):
  @parameterized.parameters(*_MODULES)
  def test_examples_of(self, name):
    module = importlib.import_module(f'peftlib.methods.{name}')
    result = doctest.testmod(module)
    self.assertEqual(result.failed, 0)
    # Plain distributions need none.
    self.assertEqual(result.attempted > 0, name != 'initialization')


if __name__ == '__main__':
  absltest.main()
