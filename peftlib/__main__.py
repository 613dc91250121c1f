"""Entry point: `peftlib COMMAND [flags]`, or `python -m peftlib`."""

from collections.abc import Callable, Sequence
import difflib
import importlib
import importlib.metadata
import os
import sys
from typing import Any, NamedTuple

from absl import app
from absl import flags as absl_flags
from absl import logging

from peftlib.cli import errors
from peftlib.cli import flags
from peftlib.cli import malloc
from peftlib.cli import options

_WRONG_INPUT = 2
_INTERRUPTED = 130


class _Command(NamedTuple):
  """A command; its module is imported only when it runs."""

  summary: str
  options: type[Any]
  check: Callable[[Any, frozenset[str]], Any]


_COMMANDS = {
  'finetune': _Command(
    'Fine-tune a model with LoRA or QLoRA, or as a whole.',
    options.Finetune,
    options.check_finetune,
  ),
  'evaluate': _Command(
    'Loss and exact match of a model, with or without an adapter.',
    options.Evaluate,
    options.check_evaluate,
  ),
  'generate': _Command(
    'Answer a prompt, or continue a text.',
    options.Generate,
    options.check_generate,
  ),
  'merge': _Command(
    'Write a model with the adapter in its weights.',
    options.Merge,
    options.check_merge,
  ),
  'export': _Command(
    'Write an adapter as HF peft reads it.',
    options.Export,
    options.check_export,
  ),
  'inspect': _Command(
    'Show which modules of a model would be trained.',
    options.Inspect,
    options.check_inspect,
  ),
}
_HELP = ('--help', '-help', '-h')


def main() -> None:
  """Runs the command line and exits with its status."""
  if sys.argv[1:2] and sys.argv[1] in _COMMANDS:
    if malloc.wanted(os.environ):
      malloc.restart()
  app.run(run, flags_parser=_parse_globals)


def run(argv: Sequence[str]) -> int:
  """Runs one command.

  Args:
    argv: The program's name, the command, its flags.

  Returns:
    The exit status: 0; 2 after one line about what was wrong in the input; 130
    if interrupted.
  """
  name, *arguments = list(argv[1:]) or ['']
  if name in (*_HELP, 'help'):
    print(_usage())
    return 0
  if name == '--version':
    print(f'peftlib {_version()}')
    return 0
  if name not in _COMMANDS:
    return _fail('peftlib', _unknown_command(name))
  command = _COMMANDS[name]
  if any(argument in _HELP for argument in arguments):
    print(f'peftlib {name} [flags]: {command.summary}\n')
    print(flags.usage(command.options))
    return 0
  debug = any(a in ('--debug', '--debug=true') for a in arguments)
  try:
    parsed, given = flags.parse(command.options, arguments)
    checked = command.check(parsed, given)
    module = importlib.import_module(f'peftlib.cli.{name}')
    return int(module.run(checked))
  except KeyboardInterrupt:
    return _fail(f'peftlib {name}', 'interrupted', _INTERRUPTED)
  except BrokenPipeError:
    # Nobody reads on, as with `| head`; keep Python from trying at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except Exception as e:
    missing = errors.missing_extra(e)
    if missing and not debug:
      return _fail(f'peftlib {name}', missing)
    if debug or not errors.is_user_error(e):
      raise
    return _fail(f'peftlib {name}', errors.one_line(e))


def _parse_globals(argv: Sequence[str]) -> list[str]:
  """Readies absl, whose global flags are not those of our commands."""
  absl_flags.FLAGS(argv[:1])
  # Orbax reports on a checkpoint in dozens of lines otherwise.
  logging.set_verbosity(logging.ERROR)
  return list(argv)


def _fail(who: str, message: str, status: int = _WRONG_INPUT) -> int:
  print(f'{who}: {message}', file=sys.stderr)
  return status


def _unknown_command(name: str) -> str:
  known = ', '.join(_COMMANDS)
  if not name or name.startswith('-'):
    given = f'{name!r} is no command' if name else 'no command given'
    return f'{given}; expected one of {known}; see peftlib --help'
  near = difflib.get_close_matches(name, _COMMANDS, n=1)
  hint = f'did you mean {near[0]}?' if near else f'expected one of {known}'
  return f'{name!r} is no command; {hint}'


def _version() -> str:
  try:
    return importlib.metadata.version('peftlib')
  except importlib.metadata.PackageNotFoundError:
    # Run from a checkout that isn't installed.
    return 'unknown'


def _usage() -> str:
  lines = [
    'Parameter-efficient fine-tuning of language models.',
    '',
    'peftlib COMMAND [flags]',
    '',
    *(f'  {name:10}{c.summary}' for name, c in _COMMANDS.items()),
    '',
    'peftlib COMMAND --help lists the flags of a command.',
  ]
  return '\n'.join(lines)


if __name__ == '__main__':
  main()
