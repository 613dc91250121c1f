import contextlib
import io
import pathlib
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from peftlib import __main__ as command_line
from peftlib.cli import evaluate
from peftlib.cli import generate

_ROOT = pathlib.Path(__file__).resolve().parents[2]

_HELP = """
import sys
from peftlib import __main__ as command_line
for argv in (['--help'], ['finetune', '--help'], ['finetune', '--rank=x']):
  command_line.run(['peftlib', *argv])
heavy = {'jax', 'flax', 'numpy', 'grain', 'matplotlib', 'rich', 'tokenizers'}
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


_COMMANDS = ('finetune', 'evaluate', 'generate', 'merge', 'export', 'inspect')


def run(*arguments):
  """Returns the exit status, standard output and standard error."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = command_line.run(['peftlib', *arguments])
  return status, out.getvalue(), err.getvalue()


class MainTest(parameterized.TestCase):
  @parameterized.parameters('--help', '-h', 'help')
  def test_help(self, argument):
    status, out, err = run(argument)
    self.assertEqual((status, err), (0, ''))
    for name in _COMMANDS:
      self.assertRegex(out, rf'(?m)^  {name} +[A-Z]')

  @parameterized.parameters(*_COMMANDS)
  def test_help_of_a_command(self, name):
    status, out, err = run(name, '--rank=0', '--help')
    self.assertEqual((status, err), (0, ''))
    self.assertStartsWith(out, f'peftlib {name} [flags]: ')
    self.assertIn('\n  --model=...  (a path; default: SmolLM2', out)

  def test_help_and_wrong_flags_need_no_heavy_import(self):
    result = subprocess.run(
      [sys.executable, '-c', _HELP], cwd=_ROOT, capture_output=True, text=True
    )
    self.assertEqual(
      result.stderr,
      'peftlib finetune: --rank=x: must be an integer >= 1\n[]\n',
    )
    self.assertEqual(result.returncode, 0)

  @parameterized.parameters(
    ([], 'no command given; expected one of finetune, evaluate, generate,'
     ' merge, export, inspect; see peftlib --help'),
    (['finetun'], "'finetun' is no command; did you mean finetune?"),
    (['xyz'], "'xyz' is no command; expected one of finetune, evaluate,"
     ' generate, merge, export, inspect'),
    (['--rank=3'], "'--rank=3' is no command; expected one of finetune,"
     ' evaluate, generate, merge, export, inspect; see peftlib --help'),
  )  # fmt: skip
  def test_no_such_command(self, arguments, message):
    self.assertEqual(run(*arguments), (2, '', f'peftlib: {message}\n'))

  def test_version(self):
    self.assertRegex(
      run('--version')[1], r'^peftlib (\d+\.\d+\.\d+|unknown)\n$'
    )

  def test_wrong_flag(self):
    self.assertEqual(
      run('finetune', '--rnak=3'),
      (
        2,
        '',
        'peftlib finetune: --rnak: there is no such flag; did you mean'
        ' --rank?\n',
      ),
    )

  def call(self, error, *more):
    """Runs a command whose module raises."""
    argv = ['generate', f'--model={__file__}', '--prompt=x', *more]
    with mock.patch.object(generate, 'run', side_effect=error):
      return run(*argv)

  def test_system_error_is_one_line(self):
    error = FileNotFoundError(2, 'No such file or directory', 'x')
    self.assertEqual(
      self.call(error),
      (2, '', 'peftlib generate: x: No such file or directory\n'),
    )

  def test_package_of_the_extra_that_is_missing(self):
    error = ModuleNotFoundError('No module named gguf', name='gguf.constants')
    self.assertEqual(
      self.call(error),
      (
        2,
        '',
        'peftlib generate: gguf is not installed; run: pip install'
        " 'peftlib[cli]'\n",
      ),
    )

  def test_debug_shows_the_traceback(self):
    error = FileNotFoundError(2, 'No such file or directory', 'x')
    with self.assertRaises(FileNotFoundError):
      self.call(error, '--debug')

  @parameterized.parameters(ValueError, KeyError, TypeError, ImportError)
  def test_bug_keeps_its_traceback(self, error):
    with self.assertRaises(error):
      self.call(error('a bug'))

  def test_interrupt(self):
    self.assertEqual(
      self.call(KeyboardInterrupt()),
      (130, '', 'peftlib generate: interrupted\n'),
    )

  def test_options_are_handed_on(self):
    with mock.patch.object(evaluate, 'run', return_value=0) as command:
      status, _, _ = run(
        'evaluate', f'--model={__file__}', f'--data={__file__}', '--length=9'
      )
    self.assertEqual(status, 0)
    ((options,), _) = command.call_args
    self.assertEqual((options.model, options.length), (__file__, 9))

  def test_as_a_program(self):
    result = subprocess.run(
      [sys.executable, '-m', 'peftlib', 'generate', '--top_p=2'],
      cwd=_ROOT,
      capture_output=True,
      text=True,
    )
    self.assertEqual(
      (result.returncode, result.stdout, result.stderr),
      (
        2,
        '',
        'peftlib generate: --top_p=2: must be a number > 0 and <= 1\n',
      ),
    )


if __name__ == '__main__':
  absltest.main()
