"""The BUILD files say what the Python files import."""

import ast
import pathlib
import sys
import tempfile

from absl.testing import absltest

from peftlib import __main__ as command_line
from peftlib import methods
from tests.repository import bazel_files
from tests.repository import import_graph

_ROOT = import_graph.ROOT
# A workspace of its own, written by hand.
_CONSUMER = _ROOT / 'tests' / 'bazel_consumer'


def _targets(build: pathlib.Path, prefix: str = 'peft_'):
  """Returns {name: keyword arguments} of the rules in a BUILD file."""
  calls = {}
  for node in ast.walk(ast.parse(build.read_text())):
    if isinstance(node, ast.Call) and node.func.id.startswith(prefix):
      kwargs = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
      calls[kwargs['name']] = {'rule': node.func.id, **kwargs}
  return calls


class BazelFilesTest(absltest.TestCase):
  def test_build_files_are_those_of_the_generator(self):
    stale = [
      str(path)
      for path, text in bazel_files.build_files(_ROOT).items()
      if not (_ROOT / path).exists() or (_ROOT / path).read_text() != text
    ]
    self.assertEqual(stale, [], 'run: make bazel-files')

  def test_every_test_file_has_a_test_target(self):
    # Read from the files, not from the generator, which might forget one.
    for path in (_ROOT / 'tests').rglob('*_test.py'):
      if path.is_relative_to(_CONSUMER):
        continue
      with self.subTest(path.relative_to(_ROOT)):
        target = _targets(path.parent / 'BUILD')[path.stem]
        self.assertEqual(target['rule'], 'peft_test')
        self.assertEqual(target['srcs'], [path.name])

  def test_every_import_of_ours_has_its_dep(self):
    for path in import_graph.python_files(_ROOT):
      target = _targets(_ROOT / path.parent / 'BUILD')[
        import_graph.target_name(path)
      ]
      for node in ast.walk(ast.parse((_ROOT / path).read_text())):
        if not isinstance(node, ast.ImportFrom):
          continue
        for alias in node.names:
          module = pathlib.Path(*node.module.split('.'), f'{alias.name}.py')
          if not (_ROOT / module).is_file():
            continue
          with self.subTest(f'{path}:{node.lineno}'):
            self.assertIn(
              f'//{module.parent.as_posix()}:{module.stem}',
              target.get('deps', []),
            )

  def test_generator_on_a_small_tree(self):
    with tempfile.TemporaryDirectory() as name:
      root = pathlib.Path(name)
      for path, text in {
        'peftlib/__init__.py': 'from peftlib.a import f\n',
        'peftlib/a.py': 'import os\nimport jax.numpy\nf = 1\n',
        'peftlib/b/__init__.py': '',
        'peftlib/b/c.py': 'from peftlib import a\n',
        'tests/peftlib/a_test.py': (
          'import peftlib\n'
          'def test():\n'
          '  from peftlib.b import c\n'
          "  open('golden/x')\n"
        ),
      }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
      files = bazel_files.build_files(root)
    self.assertEqual(
      sorted(map(str, files)),
      ['peftlib/BUILD', 'peftlib/b/BUILD', 'tests/peftlib/BUILD'],
    )
    self.assertEqual(
      files[pathlib.Path('tests/peftlib/BUILD')],
      '"""Written by `make bazel-files`; do not edit."""\n\n'
      'load("//.ci/bazel:defs.bzl", "peft_test")\n\n'
      'peft_test(\n'
      '    name = "a_test",\n'
      '    srcs = ["a_test.py"],\n'
      '    data = ["//tests/golden"],\n'
      '    deps = [\n'
      '        "//peftlib:peftlib",\n'
      '        "//peftlib/b:c",\n'
      '    ],\n'
      ')\n',
    )
    self.assertIn(
      '    name = "peftlib",\n'
      '    srcs = ["__init__.py"],\n'
      '    visibility = ["//visibility:public"],\n'
      '    deps = ["//peftlib:a"],\n',
      files[pathlib.Path('peftlib/BUILD')],
    )
    self.assertIn(
      '    name = "a",\n'
      '    srcs = ["a.py"],\n'
      '    visibility = ["//visibility:public"],\n'
      '    requirements = ["jax"],\n',
      files[pathlib.Path('peftlib/BUILD')],
    )

  def test_what_a_test_starts_is_a_dep(self):
    with tempfile.TemporaryDirectory() as name:
      root = pathlib.Path(name)
      for path, text in {
        'peftlib/__init__.py': '',
        'peftlib/__main__.py': '',
        'peftlib/a.py': '',
        'tests/a_test.py': (
          'import subprocess, sys\n'
          'subprocess.run([sys.executable, "-m", "peftlib"])\n'
          'subprocess.run(["python", "-c", "from peftlib import a"])\n'
          'subprocess.run(["peftlib.none", "import peftlib.none"])\n'
        ),
        'tests/b_test.py': 'x = "peftlib", "from peftlib import a"\n',
      }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
      self.assertEqual(
        import_graph.deps(root, pathlib.Path('tests/a_test.py')),
        ['//peftlib:__main__', '//peftlib:a', '//peftlib:peftlib'],
      )
      self.assertEqual(
        import_graph.deps(root, pathlib.Path('tests/b_test.py')), []
      )

  def test_commands_of_the_command_line_are_its_deps(self):
    found = _targets(_ROOT / 'peftlib' / 'BUILD')['__main__']['deps']
    for name in command_line._COMMANDS:
      self.assertIn(f'//peftlib/cli:{name}', found)

  def test_internals_are_visible_to_ours_alone(self):
    for target, expected in (
      ('peftlib:training', ['//visibility:public']),
      ('peftlib:checkpoint', ['//visibility:public']),
      ('peftlib:peftlib', ['//visibility:public']),
      ('peftlib/hf:hf', ['//visibility:public']),
      ('peftlib/methods:lora', ['//visibility:public']),
      ('transforms:filtering', ['//visibility:public']),
      (
        'transforms:_leaves',
        ['//tests:__subpackages__', '//transforms:__subpackages__'],
      ),
      *(
        (t, ['//peftlib:__subpackages__', '//tests:__subpackages__'])
        for t in (
          'peftlib:_checks',
          'peftlib:interception',
          'peftlib/hf:bridges',
          'peftlib/cli:cli',
          'peftlib/cli:finetune',
          'peftlib/demo:orders',
        )
      ),
      ('tests/peftlib:toy_models', ['//tests:__subpackages__']),
    ):
      with self.subTest(target):
        folder, name = target.split(':')
        targets = _targets(_ROOT / folder / 'BUILD')
        self.assertEqual(targets[name]['visibility'], expected)

  def test_deps_of_the_consumer_are_its_imports(self):
    targets = _targets(_CONSUMER / 'BUILD', 'py_')
    tests = sorted(_CONSUMER.glob('*_test.py'))
    self.assertEqual(sorted(targets), [path.stem for path in tests])
    for path in tests:
      expected = set()
      for module, name in import_graph.imported(path.read_text()):
        top = module.partition('.')[0]
        if top in sys.stdlib_module_names:
          continue
        if top not in import_graph.PACKAGES:
          expected.add(f'@peftlib_python//:{top}')
        elif name:
          expected.add(f'@peftlib_repo//{module}:{name}')
        else:
          expected.add(f'@peftlib_repo//{module}')
      with self.subTest(path.name):
        self.assertCountEqual(targets[path.stem]['deps'], expected)

  def test_no_package_needs_the_test_of_another(self):
    # Tests are visible in their own package alone: what several need is a
    # module that is none.
    for path in (_ROOT / 'tests').rglob('BUILD'):
      if path.is_relative_to(_CONSUMER):
        continue
      own = path.parent.relative_to(_ROOT).as_posix()
      for name, target in _targets(path).items():
        with self.subTest(f'{own}:{name}'):
          tests = [d for d in target.get('deps', ()) if d.endswith('_test')]
          others = [d for d in tests if d.partition(':')[0] != f'//{own}']
          self.assertEqual(others, [])

  def test_what_is_sharded_is_there(self):
    for name, count in bazel_files._SHARDS.items():
      path = _ROOT / name
      with self.subTest(name):
        target = _targets(path.parent / 'BUILD')[path.stem]
        self.assertEqual(target['shard_count'], count)
        # A shard without a case is a process for nothing. What is a case for
        # each method counts as so many.
        cases = path.read_text().count('  def test')
        if path.stem == 'methods_matrix_test':
          cases += len(methods.registry()) - 1
        self.assertGreaterEqual(cases, count)

  def test_what_conftest_optimizes_is_optimized(self):
    found = {
      path.parent / f'{name}.py'
      for path in (_ROOT / 'tests').rglob('BUILD')
      if not path.is_relative_to(_CONSUMER)
      for name, target in _targets(path).items()
      if target.get('optimized')
    }
    self.assertEqual(
      found,
      {
        _ROOT / 'tests' / 'benchmarks' / 'guard_test.py',
        _ROOT / 'tests' / 'integration' / 'qlora_test.py',
        _ROOT / 'tests' / 'peftlib' / 'foreign_models_test.py',
      },
    )

  def test_import_of_a_missing_module_is_an_error(self):
    with tempfile.TemporaryDirectory() as name:
      root = pathlib.Path(name)
      (root / 'peftlib').mkdir()
      (root / 'peftlib' / 'a.py').write_text('from peftlib import nothing\n')
      with self.assertRaisesRegex(FileNotFoundError, 'peftlib/a.py.*nothing'):
        bazel_files.build_files(root)


if __name__ == '__main__':
  absltest.main()
