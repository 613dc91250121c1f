"""Writes the BUILD files from what the Python files import.

`make bazel-files` (this with --write) brings them up to date; without --write
it prints what would change and exits with 1. bazel_files_test.py fails as long
as there is something.
"""

import argparse
import ast
import pathlib
import sys

# A script's own folder is on Python's path, not the one that it is started in.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from tests.repository import import_graph

_HEADER = '"""Written by `make bazel-files`; do not edit."""\n'

# Modules that users import though no `__init__` re-exports what is in them.
_PUBLIC = {'checkpoint', 'generation', 'losses', 'testing', 'transforms'}
_COMMAND_LINE = {'cli', 'demo'}

# Processes that share the cases of a test file, where one took more than 100
# seconds on two cores with ten processes more than they have room for.
_SHARDS = {
  'tests/integration/methods_matrix_test.py': 4,
  'tests/peftlib/generation_test.py': 4,
  'tests/peftlib/injection_test.py': 2,
  'tests/peftlib/stacking_test.py': 3,
  'tests/peftlib/training_test.py': 3,
}

# Read by their path, not imported: a test that mentions them has them as data.
_DATA = {
  'golden': '//tests/golden',
  'README.md': '//:README.md',
  'peftlib/guide': '//peftlib/guide',
}


def data(root: pathlib.Path, path: pathlib.Path) -> list[str]:
  """Returns the labels of the files that a test mentions."""
  if not path.name.endswith('_test.py'):
    return []
  source = (root / path).read_text()
  return sorted(v for mark, v in _DATA.items() if mark in source)


def is_public(root: pathlib.Path, path: pathlib.Path) -> bool:
  """Whether a file is of the API: a package, what it re-exports, and so on."""
  top, *folders = path.parent.parts
  if top == 'tests' or _COMMAND_LINE & set(folders):
    return False
  if path.name.startswith('_') and path.name != '__init__.py':
    return False
  if top == 'transforms' or path.name == '__init__.py':
    return True
  if not folders and path.stem in _PUBLIC:
    return True
  package = path.parent / '__init__.py'
  return (root / package).exists() and (
    path in import_graph.files(root, package)
  )


def visibility(root: pathlib.Path, path: pathlib.Path) -> list[str]:
  """Returns who may depend on a file's target."""
  if is_public(root, path):
    return ['//visibility:public']
  top = path.parts[0]
  return [f'//{p}:__subpackages__' for p in sorted({top, 'tests'})]


def optimized(root: pathlib.Path) -> tuple[str, ...]:
  """Returns the test files that conftest.py has XLA optimize."""
  path = root / 'tests' / 'conftest.py'
  tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
  for node in tree.body:
    if isinstance(node, ast.Assign) and node.targets[0].id == '_OPTIMIZED':
      return ast.literal_eval(node.value)
  return ()


def _rule(rule: str, **attributes: str | int | list[str]) -> str:
  lines = [f'{rule}(']
  for key, value in attributes.items():
    if isinstance(value, str):
      lines.append(f'    {key} = "{value}",')
    elif isinstance(value, int):
      lines.append(f'    {key} = {value},')
    elif len(value) == 1:
      lines.append(f'    {key} = ["{value[0]}"],')
    elif value:
      lines += [f'    {key} = [', *(f'        "{v}",' for v in value), '    ],']
  return '\n'.join([*lines, ')\n'])


def build_files(root: pathlib.Path) -> dict[pathlib.Path, str]:
  """Returns the text of each BUILD file, by its path relative to `root`."""
  rules: dict[pathlib.Path, list[str]] = {}
  slow_to_run = optimized(root)
  for path in import_graph.python_files(root):
    test = path.name.endswith('_test.py')
    more: dict[str, int | list[str]] = {}
    if not test:
      more['visibility'] = visibility(root, path)
    if path.as_posix() in _SHARDS:
      more['shard_count'] = _SHARDS[path.as_posix()]
    if path.as_posix() in slow_to_run:
      more['optimized'] = True
    rules.setdefault(path.parent, []).append(
      _rule(
        'peft_test' if test else 'peft_library',
        name=import_graph.target_name(path),
        srcs=[path.name],
        **more,
        data=data(root, path),
        requirements=import_graph.requirements(root, path),
        deps=import_graph.deps(root, path),
      )
    )
  files = {}
  for folder, texts in rules.items():
    names = sorted({text.partition('(')[0] for text in texts})
    symbols = ', '.join(f'"{name}"' for name in names)
    load = f'load("//.ci/bazel:defs.bzl", {symbols})\n'
    files[folder / 'BUILD'] = '\n'.join([_HEADER, load, *texts])
  return files


def main(argv: list[str]) -> int:
  """Compares or, with --write, writes; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--write', action='store_true')
  args = parser.parse_args(argv)
  stale = False
  for path, text in build_files(import_graph.ROOT).items():
    target = import_graph.ROOT / path
    if not target.exists() or target.read_text() != text:
      stale = True
      print(f'{"wrote" if args.write else "stale:"} {path}')
      if args.write:
        target.write_text(text)
  return int(stale and not args.write)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
