"""Builds the wheel: what isn't said in pyproject.toml.

`transforms` is a name that a user's own folder may have, and Python would find
that one first. In the wheel the package therefore lives in peftlib, which
imports it as `peftlib.transforms`; the short name stands for the very same
modules, so that a class has one identity by either name.
"""

import ast
import pathlib
import shutil

import setuptools
from setuptools.command import build_py

_SHORT = 'transforms'
_LONG = 'peftlib.transforms'

# In the order of lines: the modules have to be there under their short names
# before anybody asks for one, or Python would load them a second time.
_ALIAS = '''\
"""The modules of `peftlib.transforms` under their short names."""

import importlib
import pkgutil
import sys

import peftlib.transforms

for _module in pkgutil.iter_modules(peftlib.transforms.__path__):
  sys.modules[f'transforms.{_module.name}'] = importlib.import_module(
    f'peftlib.transforms.{_module.name}'
  )
sys.modules['transforms'] = peftlib.transforms
'''


def with_long_names(source: str) -> str:
  """Returns a module's source with its imports by the package's long name.

  Args:
    source: Text of a Python file. Its lines keep their numbers.

  Raises:
    ValueError: It has `import transforms.x`, which binds the short name.
  """
  lines = source.splitlines(keepends=True)
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.ImportFrom):
      names, old, new = [node.module or ''], f'from {_SHORT}', f'from {_LONG}'
    elif isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
      old, new = f'import {_SHORT}', f'from peftlib import {_SHORT}'
    else:
      continue
    if not any(name.partition('.')[0] == _SHORT for name in names):
      continue
    if isinstance(node, ast.Import) and names != [_SHORT]:
      raise ValueError(
        f'line {node.lineno}: import {", ".join(names)}: write `from '
        f'{_SHORT} import ...`, which can be renamed in the wheel'
      )
    line = lines[node.lineno - 1]
    lines[node.lineno - 1] = line.replace(old, new, 1)
  return ''.join(lines)


def move_transforms(build: pathlib.Path) -> None:
  """Moves `transforms` into `peftlib` in a folder with both packages."""
  short, long = build / _SHORT, build / 'peftlib' / _SHORT
  shutil.rmtree(long, ignore_errors=True)
  (build / 'peftlib' / f'{_SHORT}.py').unlink()
  short.rename(long)
  for path in sorted((build / 'peftlib').rglob('*.py')):
    text = path.read_text('utf-8')
    path.write_text(with_long_names(text), 'utf-8')
  short.mkdir()
  (short / 'py.typed').touch()
  (short / '__init__.py').write_text(_ALIAS, 'utf-8')
  # Type checkers don't run the alias.
  modules = sorted(
    path.stem for path in long.glob('*.py') if not path.stem.startswith('_')
  )
  lines = [f'from {_LONG} import {name} as {name}' for name in modules]
  # What has the name of its module is the function, as at run time.
  lines.append(f'from {_LONG} import *')
  (short / '__init__.pyi').write_text('\n'.join([*lines, '']), 'utf-8')
  for name in modules:
    (short / f'{name}.pyi').write_text(f'from {_LONG}.{name} import *\n')


class BuildPy(build_py.build_py):
  """Moves `transforms`, except for an editable installation."""

  def run(self) -> None:
    """Copies the packages to the folder that becomes the wheel."""
    super().run()
    if not self.editable_mode:
      move_transforms(pathlib.Path(self.build_lib))


if __name__ == '__main__':
  setuptools.setup(cmdclass={'build_py': BuildPy})
