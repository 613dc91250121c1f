"""`transforms` stands on its own: on jax, flax and chex, not on peftlib."""

import ast
import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

# Through the links that Bazel runs tests from: the checkout is the subject.
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_ALLOWED = {'chex', 'flax', 'jax', 'numpy', 'transforms'}

# Imports every module of the package while the named others can't be. Flax
# imports optax and orbax for itself: that has happened before, and is forgotten.
_IMPORT_ALL = """
import importlib, sys
import chex, flax.nnx
blocked = {'peftlib', 'qwix', 'optax', 'orbax'}
class Blocker:
  def find_spec(self, name, path=None, target=None):
    if name.partition('.')[0] in blocked:
      raise ModuleNotFoundError(f'{name} is blocked', name=name)
sys.meta_path.insert(0, Blocker())
for name in [n for n in sys.modules if n.partition('.')[0] in blocked]:
  del sys.modules[name]
for name in sys.argv[1:]:
  importlib.import_module(name)
print('imported', len(sys.argv) - 1)
"""


def _imports(path):
  """Yields (line, top-level package) of each import, nested ones too."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, alias.name.partition('.')[0]
    elif isinstance(node, ast.ImportFrom):
      yield node.lineno, (node.module or '').partition('.')[0]


class LayeringTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.modules = sorted((_ROOT / 'transforms').rglob('*.py'))
    self.assertNotEmpty(self.modules)

  def test_transforms_imports_only_what_it_may(self):
    wrong = [
      f'{path.relative_to(_ROOT)}:{line} imports {package}'
      for path in self.modules
      for line, package in _imports(path)
      if package not in _ALLOWED and package not in sys.stdlib_module_names
    ]
    self.assertEqual(wrong, [])

  def test_transforms_can_be_imported_without_peftlib_and_its_needs(self):
    names = [
      '.'.join(path.relative_to(_ROOT).with_suffix('').parts).removesuffix(
        '.__init__'
      )
      for path in self.modules
    ]
    result = subprocess.run(
      [sys.executable, '-c', _IMPORT_ALL, *names],
      cwd=_ROOT,
      capture_output=True,
      text=True,
    )
    self.assertEqual(result.returncode, 0, result.stderr)
    self.assertEqual(result.stdout.strip(), f'imported {len(names)}')

  @parameterized.parameters('peftlib', 'qwix', 'optax', 'orbax.checkpoint')
  def test_import_blocker_blocks(self, name):
    # Otherwise the test above would pass whatever transforms imports.
    result = subprocess.run(
      [sys.executable, '-c', _IMPORT_ALL, name],
      cwd=_ROOT,
      capture_output=True,
      text=True,
    )
    self.assertNotEqual(result.returncode, 0)
    self.assertIn('is blocked', result.stderr)


if __name__ == '__main__':
  absltest.main()
