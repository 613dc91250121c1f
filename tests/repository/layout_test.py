"""What is in the repository, and what never may be."""

import ast
import pathlib
import re
import subprocess

from absl.testing import absltest

_ROOT = pathlib.Path(__file__).resolve().parents[2]

_TOP_LEVEL = {
  '.bazelignore',
  '.bazelrc',
  '.ci',
  '.gitignore',
  '.python-version',
  'BUILD',
  'CHANGELOG.md',
  'LICENSE',
  'Makefile',
  'README.md',
  'WORKSPACE',
  'peftlib',
  'pyproject.toml',
  'requirements.lock',
  'setup.py',
  'tests',
  'transforms',
}
_MAX_BYTES = 1_000_000

# Absolute paths of somebody's machine and hosts of package registries: what is
# committed has to work, and to read the same, anywhere.
_PRIVATE = re.compile(
  r'(?<![\w.~$})-])/(?:root|work|tmp|home/\w+|Users/\w+)/'
  r'|pypi\.org|pythonhosted\.org|registry\.npmjs|deb\.debian'
)
_SKIPS = {
  'SkipTest',
  'expectedFailure',
  'importorskip',
  'skip',
  'skipIf',
  'skipTest',
  'skipUnless',
  'skipif',
  'xfail',
}


def _tracked() -> list[pathlib.Path]:
  output = subprocess.run(
    ['git', 'ls-files', '-z'],
    cwd=_ROOT,
    capture_output=True,
    check=True,
    text=True,
  ).stdout
  paths = [pathlib.Path(name) for name in output.split('\0') if name]
  return [path for path in paths if (_ROOT / path).is_file()]


class LayoutTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.tracked = _tracked()
    self.assertIn(pathlib.Path('pyproject.toml'), self.tracked)

  def _tests(self):
    return [path for path in self.tracked if path.match('*_test.py')]

  def test_top_level(self):
    self.assertEqual(
      {path.parts[0] for path in self.tracked} - _TOP_LEVEL, set()
    )

  def test_no_large_file(self):
    large = [
      f'{path}: {size} bytes'
      for path in self.tracked
      if (size := (_ROOT / path).stat().st_size) > _MAX_BYTES
    ]
    self.assertEqual(large, [])

  def test_no_machine_path_and_no_registry_host(self):
    found = []
    for path in self.tracked:
      try:
        text = (_ROOT / path).read_text()
      except UnicodeDecodeError:
        continue
      found += [
        f'{path}:{number}: {match.group()}'
        for number, line in enumerate(text.splitlines(), 1)
        if (match := _PRIVATE.search(line))
      ]
    self.assertEqual(found, [])

  def test_pattern_for_machine_paths(self):
    for text in ('"/home/' + 'me/x"', 'open(/tmp' + '/x)', 'pypi' + '.org'):
      self.assertRegex(text, _PRIVATE)
    for text in ('~/work/x', 'a/tmp/b', '$HOME/root/x', '/usr/bin/env'):
      self.assertNotRegex(text, _PRIVATE)

  def test_no_test_is_skipped(self):
    found = []
    for path in self._tests():
      for node in ast.walk(ast.parse((_ROOT / path).read_text())):
        name = getattr(node, 'attr', None) or getattr(node, 'id', None)
        if isinstance(node, ast.Attribute | ast.Name) and name in _SKIPS:
          found.append(f'{path}:{node.lineno}: {name}')
    self.assertEqual(found, [])

  def test_every_module_has_its_test(self):
    missing = [
      str(path)
      for path in self.tracked
      if path.parts[0] in ('peftlib', 'transforms')
      and path.suffix == '.py'
      and not path.name.startswith('_')
      and not (_ROOT / 'tests' / path.parent / f'{path.stem}_test.py').exists()
    ]
    self.assertEqual(missing, [])

  def test_every_test_file_runs_by_itself(self):
    end = "\n\nif __name__ == '__main__':\n  absltest.main()\n"
    missing = [
      str(path)
      for path in self._tests()
      if not (_ROOT / path).read_text().endswith(end)
    ]
    self.assertEqual(missing, [])

  def test_one_conftest_and_one_bzl(self):
    def named(pattern):
      return [str(path) for path in self.tracked if path.match(pattern)]

    self.assertEqual(named('conftest.py'), ['tests/conftest.py'])
    self.assertEqual(named('*.bzl'), ['.ci/bazel/defs.bzl'])


if __name__ == '__main__':
  absltest.main()
