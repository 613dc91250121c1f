"""What an installation has and needs."""

import ast
import importlib
import importlib.util
import pathlib
import subprocess
import sys
import tomllib

from absl.testing import absltest
from absl.testing import parameterized

from tests.repository import import_graph
from tests.wheel import typed

_ROOT = import_graph.ROOT
# By the name that is imported, where it isn't the distribution's.
_NAMES = {'absl-py': 'absl', 'orbax-checkpoint': 'orbax'}
# A dependency of jax, which goes with its version.
_WITH_JAX = {'ml_dtypes'}


def _load_setup():
  spec = importlib.util.spec_from_file_location('setup', _ROOT / 'setup.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _installed(*extras):
  """What pip installs, by the names that are imported."""
  project = tomllib.loads((_ROOT / 'pyproject.toml').read_text())['project']
  asked = list(project['dependencies'])
  for extra in extras:
    asked += project['optional-dependencies'][extra]
  names = {requirement.partition('>=')[0] for requirement in asked}
  return {_NAMES.get(name, name) for name in names} | _WITH_JAX


def _needed(*modules):
  """What modules and all that they import need from elsewhere."""
  todo, seen = [pathlib.Path(module) for module in modules], set()
  needed = set()
  while todo:
    path = todo.pop()
    if path not in seen:
      seen.add(path)
      needed.update(import_graph.requirements(_ROOT, path))
      todo += import_graph.files(_ROOT, path)
  return needed


class RequirementsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('transforms', ['transforms/__init__.py', 'transforms/testing.py'], []),
    (
      'library',
      [
        'peftlib/__init__.py',
        'peftlib/checkpoint.py',
        'peftlib/generation.py',
        'peftlib/initialization/__init__.py',
        'peftlib/losses.py',
        'peftlib/methods/__init__.py',
        'peftlib/testing.py',
      ],
      [],
    ),
    ('hf', ['peftlib/hf/__init__.py'], ['hf']),
    ('command_line', ['peftlib/__main__.py'], ['cli']),
  )
  def test_installation_has_what_is_imported(self, modules, extras):
    self.assertEqual(_needed(*modules) - _installed(*extras), set())

  def test_nothing_is_installed_for_nobody(self):
    needed = _needed(
      *(
        path
        for path in import_graph.python_files(_ROOT)
        if path.parts[0] != 'tests'
      )
    )
    # Chex is for the users' own assertions.
    self.assertEqual(_installed('cli', 'hf') - needed, {'chex'})


class WheelTest(parameterized.TestCase):
  @parameterized.parameters(
    ('from transforms import a\n', 'from peftlib.transforms import a\n'),
    ('from transforms.a import b', 'from peftlib.transforms.a import b'),
    ('import transforms\n', 'from peftlib import transforms\n'),
    ('import transforms as t', 'from peftlib import transforms as t'),
    (
      'def f():\n  from transforms import a  # transforms\n',
      'def f():\n  from peftlib.transforms import a  # transforms\n',
    ),
    ('"""\nfrom transforms import a\n"""', None),
    ('from peftlib import transforms\nimport transformers\n', None),
    ('from transformers import x\n', None),
  )
  def test_imports_by_the_long_name(self, source, expected):
    self.assertEqual(_load_setup().with_long_names(source), expected or source)

  def test_moved_modules_are_the_same_by_both_names(self):
    root = pathlib.Path(self.create_tempdir().full_path)
    for path, text in {
      'peftlib/__init__.py': '',
      'peftlib/transforms.py': 'alias of the checkout',
      'peftlib/user.py': 'from transforms import a\n',
      'transforms/__init__.py': (
        'from transforms import a\nfrom transforms import b as lib\nb = lib.b\n'
      ),
      'transforms/a.py': 'class A: pass\n',
      'transforms/b.py': 'from transforms import a\ndef b(): pass\n',
      'transforms/c.py': '',
    }.items():
      (root / path).parent.mkdir(exist_ok=True)
      (root / path).write_text(text)
    _load_setup().move_transforms(root)
    for first in ('transforms.a', 'peftlib.user', 'transforms.c'):
      script = (
        f'import {first}, transforms, peftlib.user, transforms.b\n'
        'from transforms import a, b, c\n'
        'import peftlib.transforms.c\n'
        'assert transforms is peftlib.transforms\n'
        'assert a is peftlib.transforms.a is peftlib.user.a\n'
        'assert c is peftlib.transforms.c\n'
        'assert b is peftlib.transforms.b and b.__name__ == "b"\n'
        'print(a.A.__module__, b.__module__)\n'
      )
      with self.subTest(first):
        result = subprocess.run(
          [sys.executable, '-P', '-S', '-c', script],
          env={'PYTHONPATH': str(root)},
          capture_output=True,
          text=True,
        )
        self.assertEqual(
          (result.stdout, result.stderr),
          ('peftlib.transforms.a peftlib.transforms.b\n', ''),
        )
    self.assertEqual(
      (root / 'transforms' / '__init__.pyi').read_text(),
      'from peftlib.transforms import a as a\n'
      'from peftlib.transforms import b as b\n'
      'from peftlib.transforms import c as c\n'
      'from peftlib.transforms import *\n',
    )

  def test_import_that_cannot_be_renamed(self):
    with self.assertRaisesRegex(
      ValueError, r'line 2: import transforms\.a: write `from transforms'
    ):
      _load_setup().with_long_names('\nimport transforms.a\n')


class TypesTest(absltest.TestCase):
  def test_every_public_name_is_shown_to_the_type_checker(self):
    source = pathlib.Path(typed.__file__).read_text('utf-8')
    shown = {}
    modules = {}
    for node in ast.walk(ast.parse(source)):
      if isinstance(node, ast.Import):
        modules |= {a.name: a.name for a in node.names}
      elif isinstance(node, ast.ImportFrom):
        modules |= {
          a.asname or a.name: f'{node.module}.{a.name}' for a in node.names
        }
      elif isinstance(node, ast.Attribute):
        shown.setdefault(node.value.id, []).append(node.attr)
    self.assertLen(modules, 11)
    for name, module in modules.items():
      public = importlib.import_module(module).__all__
      self.assertCountEqual(shown[name], public, module)


if __name__ == '__main__':
  absltest.main()
