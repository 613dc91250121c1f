"""Asks Bazel who needs what and who may see it, in our workspace and outside.

usage: python tests/bazel_consumer/graph_check.py BAZEL
"""

import pathlib
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

_CONSUMER = pathlib.Path(__file__).resolve().parent
_WORKSPACE = _CONSUMER.parents[1]
_bazel = 'bazel'


def _query(expression: str, workspace: pathlib.Path = _CONSUMER) -> list[str]:
  result = subprocess.run(
    [_bazel, 'query', '--noimplicit_deps', '--order_output=full', expression],
    cwd=workspace,
    capture_output=True,
    text=True,
  )
  if result.returncode:
    raise RuntimeError(f'{expression}: {result.stderr}')
  return result.stdout.split()


def _needs(target: str) -> set[str]:
  """The packages of the index that a target needs."""
  found = _query(f'deps({target}) intersect @peftlib_python//:all')
  return {label.partition(':')[2] for label in found}


class GraphTest(parameterized.TestCase):
  @parameterized.parameters(
    '@peftlib_repo//transforms',
    '@peftlib_repo//transforms:filtering',
    '@peftlib_repo//transforms:testing',
    '//:transforms_test',
  )
  def test_transforms_need_little(self, target):
    needs = _needs(target)
    self.assertIn('flax', needs)
    self.assertEqual(needs - {'absl', 'chex', 'flax', 'jax', 'numpy'}, set())

  def test_training_needs_no_checkpoints(self):
    needs = _needs('@peftlib_repo//peftlib:training')
    self.assertContainsSubset({'optax', 'qwix'}, needs)
    self.assertNoCommonElements(needs, {'orbax', 'tokenizers', 'safetensors'})

  def test_the_library_needs_nothing_of_the_command_line(self):
    needs = _needs('@peftlib_repo//peftlib')
    self.assertEqual(
      needs - {'chex', 'flax', 'jax', 'numpy', 'optax', 'orbax', 'qwix'}, set()
    )
    self.assertIn('orbax', _needs('@peftlib_repo//peftlib:checkpoint'))
    self.assertEmpty(
      _query(
        'deps(@peftlib_repo//peftlib) intersect @peftlib_repo//peftlib/cli:all'
      )
    )

  @parameterized.parameters(
    ('peftlib:peftlib', True),
    ('peftlib:training', True),
    ('peftlib:testing', True),
    ('peftlib/hf:hf', True),
    ('peftlib/methods:methods', True),
    ('transforms:transforms', True),
    ('transforms:scan_axis', True),
    ('peftlib:_checks', False),
    ('peftlib:interception', False),
    ('peftlib/cli:finetune', False),
    ('transforms:_leaves', False),
    ('tests/peftlib:toy_models', False),
  )
  def test_visible(self, target, expected):
    seen = _query(f'visible(//:own_loop_test, @peftlib_repo//{target})')
    self.assertEqual(bool(seen), expected)

  def test_every_test_file_has_one_target(self):
    tests = _query('tests(//...)', _WORKSPACE)
    files = [
      path.relative_to(_WORKSPACE)
      for path in (_WORKSPACE / 'tests').rglob('*_test.py')
      if not path.is_relative_to(_CONSUMER)
    ]
    self.assertCountEqual(
      tests, [f'//{path.parent.as_posix()}:{path.stem}' for path in files]
    )


if __name__ == '__main__':
  _bazel = sys.argv.pop(1)
  absltest.main()
