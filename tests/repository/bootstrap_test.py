"""What the bootstrap says when it can't make the environment."""

import ast
import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys
import tomllib
import types

from absl.testing import absltest
from absl.testing import parameterized

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SCRIPT = _ROOT / '.ci' / 'bootstrap.py'


def _load() -> types.ModuleType:
  spec = importlib.util.spec_from_file_location('bootstrap', _SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


bootstrap = _load()


def _run(*command, **env):
  # `make test` runs this: a make below it would say `make[1]`.
  inherited = {k: v for k, v in os.environ.items() if not k.startswith('MAKE')}
  return subprocess.run(
    command,
    cwd=_ROOT,
    env={**inherited, **env},
    capture_output=True,
    text=True,
  )


class BootstrapTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.venv = self.folder / 'venv'

  def _bootstrap(self, *args, **env):
    return _run(
      sys.executable, str(_SCRIPT), f'--venv={self.venv}', *args, **env
    )

  def test_old_python_is_one_line(self):
    # A sitecustomize is what an old interpreter would be, without having one.
    (self.folder / 'sitecustomize.py').write_text(
      "import sys\nsys.version_info = (3, 11, 2, 'final', 0)\n"
    )
    result = self._bootstrap('--packages=x', PYTHONPATH=str(self.folder))
    self.assertEqual(result.returncode, 2)
    self.assertEqual(result.stdout, '')
    self.assertEqual(
      result.stderr,
      'Python 3.12 or newer is needed, this is 3.11.2: install it, or name '
      'one: make PYTHON=/path/to/python3.12\n',
    )
    self.assertFalse(self.venv.exists())

  @parameterized.parameters(
    ((2, 7, 18), True), ((3, 11, 9), True), ((3, 12, 0), False), ((4, 0), False)
  )
  def test_version(self, version, wrong):
    self.assertEqual(bootstrap.version_problem(version) is not None, wrong)

  def test_parses_in_old_pythons(self):
    # As far back as the parser can be told to go.
    ast.parse(_SCRIPT.read_text(), feature_version=(3, 6))

  def test_no_disk_space_is_one_line(self):
    result = self._bootstrap('--packages=x', f'--space={10**18}')
    self.assertEqual(result.returncode, 2)
    self.assertEqual(result.stdout, '')
    self.assertRegex(
      result.stderr,
      r'\ANot enough disk space: 1000000000\.0 GB are needed in '
      rf'{self.folder}, \d+\.\d GB are free; make room there and run this '
      r'again\.\n\Z',
    )
    self.assertFalse(self.venv.exists())

  @parameterized.parameters(True, False)
  def test_never_removes_the_python_that_it_needs(self, runs_it):
    _run(sys.executable, '-m', 'venv', '--without-pip', str(self.venv))
    own = self.venv / 'bin' / 'python'
    result = _run(
      *(str(own) if runs_it else sys.executable, str(_SCRIPT), '--packages=x'),
      *(f'--venv={self.venv}', f'--python={own}', '--space=0'),
    )
    self.assertEqual(result.returncode, 2)
    self.assertEqual(result.stdout, '')
    self.assertEqual(
      result.stderr,
      f'Cannot make {os.path.realpath(self.venv)} anew with its own Python'
      f' ({own}): name one outside of it: make PYTHON=/path/to/python3.12\n',
    )
    self.assertTrue(own.exists())

  def test_what_a_link_points_to_is_left_alone(self):
    other = self.folder / 'other'
    other.mkdir()
    (other / 'file').touch()
    self.venv.symlink_to(other)
    result = self._bootstrap('--packages=x', '--space=0')
    self.assertEqual(result.returncode, 2)
    self.assertEqual(result.stdout, '')
    self.assertEqual(
      result.stderr,
      f'{self.venv} is a symbolic link, to {other}, which is left alone:'
      ' remove the link.\n',
    )
    self.assertTrue((other / 'file').exists())

  def test_index_that_does_not_answer_is_one_line(self):
    # Port 9 of the loopback interface: closed, so nothing leaves the machine.
    (self.folder / 'lock').write_text(
      'absl-py==2.5.1 --hash=sha256:' + 64 * '0' + '\n'
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith('PIP_')}
    env.update(
      PIP_INDEX_URL='http://127.0.0.1:9/simple', PIP_CONFIG_FILE=os.devnull
    )
    result = subprocess.run(
      [
        *(sys.executable, str(_SCRIPT), f'--venv={self.venv}', '--space=0'),
        f'--lock={self.folder / "lock"}',
      ],
      env=env,
      cwd=_ROOT,
      capture_output=True,
      text=True,
    )
    self.assertEqual(result.returncode, 2)
    self.assertEqual(
      result.stderr,
      'The package index cannot be reached: check the network, or name a '
      'mirror in PIP_INDEX_URL, and run this again; details in '
      f'{self.venv}/bootstrap.log.\n',
    )
    self.assertIn(
      'Connection refused', (self.venv / 'bootstrap.log').read_text()
    )
    # Nothing says that this environment is done.
    self.assertEqual(list(self.venv.glob('.stamp*')), [])

  @parameterized.named_parameters(
    (
      'full',
      'ERROR: Could not install packages due to an OSError: [Errno 28] No '
      'space left on device\n',
      r'\AThe disk is full: about 2\.0 GB are needed',
    ),
    (
      'hash',
      'ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS '
      'FILE.\n',
      r'\AA downloaded package differs from the one in the lock',
    ),
    (
      'no_index',
      "WARNING: Retrying after connection broken by 'NewConnectionError("
      "...)'\nERROR: Could not find a version that satisfies the requirement "
      'x\nERROR: No matching distribution found for x\n',
      r'\AThe package index cannot be reached',
    ),
    (
      'no_package',
      'ERROR: Could not find a version that satisfies the requirement x\n'
      'ERROR: No matching distribution found for x\n',
      r'\AThe package index does not have .*: ERROR: No matching distribution '
      r'found for x \(',
    ),
    (
      'no_venv',
      'The virtual environment was not created successfully because ensurepip '
      'is not available.\n',
      r'\AThis Python cannot make virtual environments',
    ),
    ('other', 'ERROR: it broke\n', r'\Apip failed: ERROR: it broke \(details'),
    ('silent', '', r'\Apip failed: no reason given \(details in log\)\.'),
  )
  def test_diagnosis(self, output, expected):
    line = bootstrap.diagnose(output, 'pip', 'log')
    self.assertRegex(line, expected)
    self.assertNotIn('\n', line)

  def test_second_run_does_nothing_unless_the_first_was_cut_short(self):
    # `pip` is what every new environment has, so this asks no index.
    def run():
      return self._bootstrap('--packages=pip', '--space=0', PIP_NO_INDEX='1')

    first = run()
    self.assertEqual(first.returncode, 0, first.stderr)
    self.assertStartsWith(first.stdout, 'Installing pip into')
    marker = self.venv / 'marker'
    marker.touch()
    second = run()
    self.assertEqual((second.returncode, second.stdout), (0, ''))
    self.assertTrue(marker.exists())

    # The stamp is written last.
    (self.venv / '.stamp-packages').unlink()
    third = run()
    self.assertEqual(third.returncode, 0, third.stderr)
    self.assertStartsWith(third.stdout, 'Installing pip into')
    self.assertFalse(marker.exists())

  def test_make_passes_the_one_line_on(self):
    result = _run('make', 'venv', f'PYTHON={self.folder}/none')
    self.assertEqual(result.returncode, 2)
    lines = result.stderr.splitlines()
    self.assertEqual(
      lines[0],
      'No Python found: install Python 3.12, or name one: '
      'make PYTHON=/path/to/python3.12',
    )
    # Make's own last word can't be had without.
    self.assertLen(lines, 2)
    self.assertStartsWith(lines[1], 'make: ***')


class LockTest(absltest.TestCase):
  def test_every_requirement_has_a_version_and_a_hash(self):
    text = (_ROOT / 'requirements.lock').read_text().replace('\\\n', ' ')
    lines = [line for line in text.splitlines() if line[:1] not in '# ']
    self.assertGreater(len(lines), 50)
    for line in lines:
      self.assertRegex(line, r'^[a-z0-9-]+==\S+ .*--hash=sha256:[0-9a-f]{64}')

  def test_names_no_host(self):
    text = (_ROOT / 'requirements.lock').read_text()
    self.assertNotIn('://', text)
    self.assertNotRegex(text, r'(?m)^-')

  def test_holds_what_the_project_asks_for(self):
    project = tomllib.loads((_ROOT / 'pyproject.toml').read_text())['project']
    extras = project['optional-dependencies']
    asked = [*project['dependencies'], *itertools.chain(*extras.values())]
    asked.remove('peftlib[cli,hf]')
    text = (_ROOT / 'requirements.lock').read_text()
    for requirement in asked:
      name, _, bound = requirement.partition('>=')
      with self.subTest(name):
        locked = next(
          line.split()[0].partition('==')[2]
          for line in text.splitlines()
          if line.startswith(f'{name}==')
        )
        low, _, high = bound.partition(',<')
        self.assertGreaterEqual(_version(locked), _version(low))
        if high:
          self.assertLess(_version(locked), _version(high))


def _version(text):
  return tuple(int(part) for part in text.split('.'))


class OldestTest(absltest.TestCase):
  """`make oldest-flax-test` has what pyproject.toml admits."""

  def test_pin_is_the_lower_bound(self):
    project = tomllib.loads((_ROOT / 'pyproject.toml').read_text())
    (bound,) = [
      d for d in project['project']['dependencies'] if d.startswith('flax')
    ]
    pin = (_ROOT / '.ci' / 'oldest.txt').read_text()
    low = bound.partition(',')[0]
    self.assertIn(low.replace('>=', '==') + ' ', pin)

  def test_ci_runs_it(self):
    self.assertIn('oldest-flax-test', (_ROOT / '.ci' / 'run').read_text())


if __name__ == '__main__':
  absltest.main()
