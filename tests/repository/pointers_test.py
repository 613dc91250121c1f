"""Each public function says which file uses it, and that file does."""

import inspect
import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized

import peftlib
from tests.consumers import distillation
from tests.consumers import dpo
from tests.consumers import federated
from tests.consumers import grpo
from tests.consumers import own_step
from tests.consumers import population
import transforms

_ROOT = pathlib.Path(__file__).parents[2]
_POINTER = re.compile(r'^Used in: (\S+)\.$', re.MULTILINE)
_LOOPS = (distillation, dpo, federated, grpo, own_step, population)
_PACKAGES = {'peftlib': peftlib, 'transforms': transforms}
_FILES = {
  *(f'{loop.__name__.replace(".", "/")}.py' for loop in _LOOPS),
  *(str(p.relative_to(_ROOT)) for p in _ROOT.glob('peftlib/guide/*.md')),
}
_FUNCTIONS = [
  (package.__name__, name)
  for package in _PACKAGES.values()
  for name in package.__all__
  if inspect.isfunction(getattr(package, name))
]


class PointersTest(parameterized.TestCase):
  @parameterized.parameters(*_FUNCTIONS)
  def test_file_uses_the_function(self, package, name):
    function = getattr(_PACKAGES[package], name)
    paths = _POINTER.findall(inspect.getdoc(function) or '')
    self.assertLen(paths, 1, msg=f'{package}.{name}: "Used in: FILE."')
    self.assertIn(paths[0], _FILES)
    text = (_ROOT / paths[0]).read_text('utf-8')
    self.assertRegex(text, rf'\b{package}\.{name}\b')

  def test_functions_were_found(self):
    self.assertIn(('peftlib', 'inject'), _FUNCTIONS)
    self.assertIn(('transforms', 'mesh_context'), _FUNCTIONS)


if __name__ == '__main__':
  absltest.main()
