"""What the Python files import, of each other and from elsewhere."""

import ast
from collections.abc import Iterator
import pathlib
import sys

# Through the links that Bazel runs tests from: the checkout is the subject.
ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ('peftlib', 'tests', 'transforms')

# Folders with files that run elsewhere: scripts beside golden data are part of
# it, those of interop and the benchmarks' peers have environments of their own,
# and the consumer is a workspace of its own.
_ELSEWHERE = {'golden', 'interop', 'peers', 'bazel_consumer'}
# Imported by a name that is put together, or by what README.md has in it.
_HIDDEN = {
  'peftlib/__main__.py': [
    f'peftlib.cli.{command}'
    for command in (
      'evaluate',
      'export',
      'finetune',
      'generate',
      'inspect',
      'merge',
    )
  ],
  'tests/integration/readme_test.py': ['peftlib', 'transforms'],
}


def python_files(root: pathlib.Path) -> list[pathlib.Path]:
  """Returns our Python files, relative to `root`, in order."""
  return sorted(
    path.relative_to(root)
    for package in PACKAGES
    for path in (root / package).rglob('*.py')
    if path.name != 'conftest.py' and not _ELSEWHERE & set(path.parts)
  )


def imported(source: str) -> Iterator[tuple[str, str]]:
  """Yields (module, name) of each import; name is '' for a plain import."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      yield from ((alias.name, '') for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield from ((node.module or '', alias.name) for alias in node.names)


def started(source: str) -> Iterator[tuple[str, str]]:
  """Yields, as `imported`, what the processes that a file starts import.

  That is what the scripts in its strings import, and what follows `-m`.
  """
  if ('subprocess', '') not in imported(source):
    return
  for node in ast.walk(ast.parse(source)):
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
      continue
    if all(part.isidentifier() for part in node.value.split('.')):
      yield node.value, ''
      yield f'{node.value}.__main__', ''
    try:
      yield from imported(node.value)
    except (SyntaxError, ValueError):
      continue


def label(path: pathlib.Path) -> str:
  """Returns the label of a Python file's target."""
  folder = path.parent.as_posix()
  return f'//{folder}:{target_name(path)}'


def target_name(path: pathlib.Path) -> str:
  """Returns the name of a Python file's target within its folder."""
  return path.parent.name if path.name == '__init__.py' else path.stem


def requirements(root: pathlib.Path, path: pathlib.Path) -> list[str]:
  """Returns the top-level names that a file imports from elsewhere."""
  tops = {
    module.partition('.')[0]
    for module, _ in imported((root / path).read_text())
  }
  return sorted(tops - set(PACKAGES) - sys.stdlib_module_names)


def _file(root: pathlib.Path, module: str, name: str) -> pathlib.Path | None:
  # `from a.b import c` means module c if there is one, else a name of a.b.
  stem = pathlib.Path(*module.split('.'))
  for candidate in (stem / name if name else stem, stem):
    for path in (candidate.with_suffix('.py'), candidate / '__init__.py'):
      if (root / path).is_file():
        return path
  return None


def files(root: pathlib.Path, path: pathlib.Path) -> set[pathlib.Path]:
  """Returns the files of ours that a file imports."""
  source = (root / path).read_text()
  hidden = [(module, '') for module in _HIDDEN.get(path.as_posix(), ())]
  found = set()
  for module, name in [*imported(source), *hidden]:
    if module.partition('.')[0] in PACKAGES:
      file = _file(root, module, name)
      if file is None:
        raise FileNotFoundError(f'{path}: {module} {name} is no file of ours')
      found.add(file)
  # The library's own processes would be dependencies in a circle.
  for module, name in started(source) if path.parts[0] == 'tests' else ():
    if module.partition('.')[0] in PACKAGES:
      found.add(_file(root, module, name))
  return found - {None, path}


def deps(root: pathlib.Path, path: pathlib.Path) -> list[str]:
  """Returns the labels of the files of ours that a file imports."""
  return sorted(map(label, files(root, path)), key=lambda x: x.split(':'))
