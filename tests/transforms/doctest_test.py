"""Every public name has an example, and the examples are true."""

import doctest
import importlib
import inspect
import pkgutil

from absl.testing import absltest
from absl.testing import parameterized

import transforms

_MODULES = sorted(
  module.name
  for module in pkgutil.iter_modules(transforms.__path__)
  if not module.name.startswith('_')
)


class DoctestTest(parameterized.TestCase):
  @parameterized.parameters(*_MODULES)
  def test_examples(self, name):
    module = importlib.import_module(f'transforms.{name}')
    results = doctest.testmod(module)
    self.assertEqual(results.failed, 0)
    self.assertGreater(results.attempted, 0)

  @parameterized.parameters(*transforms.__all__)
  def test_every_function_has_an_example(self, name):
    public = getattr(transforms, name)
    self.assertTrue(public.__doc__)
    if name != 'Difference':
      self.assertIn('>>> ', inspect.getdoc(public))

  def test_names_are_sorted(self):
    self.assertEqual(list(transforms.__all__), sorted(transforms.__all__))


if __name__ == '__main__':
  absltest.main()
