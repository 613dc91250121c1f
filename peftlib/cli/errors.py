"""Which exceptions are the user's to mend, and how they are shown."""

import traceback

# In an installed wheel the second is a part of the first.
_OWN = ('peftlib.', 'transforms.')
# What the extra `cli` of pyproject.toml installs, as it is imported.
_EXTRA = {
  'filelock',
  'gguf',
  'grain',
  'jinja2',
  'matplotlib',
  'rich',
  'safetensors',
  'tokenizers',
}


class UserError(Exception):
  """Something the user can mend; the text says what and how, in one line."""


def is_user_error(error: BaseException) -> bool:
  """Whether an exception is about what the user gave, not about a bug.

  That is a `UserError`, anything the operating system refused, and a
  `ValueError` that a module of this package raised itself: those are the
  checks of input. One from inside a library means that we called it wrongly.

  Args:
    error: An exception that has been raised.

  Returns:
    Whether it is.
  """
  if isinstance(error, UserError | OSError):
    return True
  return isinstance(error, ValueError) and _raiser(error).startswith(_OWN)


def missing_extra(error: BaseException) -> str | None:
  """What to install, if that is why a command can't run.

  Example:
    >>> print(missing_extra(ModuleNotFoundError(name='rich.table')))
    rich is not installed; run: pip install 'peftlib[cli]'
    >>> print(missing_extra(ModuleNotFoundError(name='jax')))
    None

  Args:
    error: What the command raised.

  Returns:
    One line; None if it is about something else.
  """
  name = error.name if isinstance(error, ModuleNotFoundError) else None
  top = (name or '').partition('.')[0]
  if top not in _EXTRA:
    return None
  return f"{top} is not installed; run: pip install 'peftlib[cli]'"


def one_line(error: BaseException) -> str:
  """The text of an exception, its lines joined.

  Args:
    error: The exception.

  Returns:
    One line: what follows the first is separated by semicolons.
  """
  if isinstance(error, OSError) and error.strerror and error.filename:
    return f'{error.filename}: {error.strerror}'
  lines = [line.strip() for line in str(error).splitlines()]
  first, *rest = [line for line in lines if line] or [type(error).__name__]
  return f'{first} {"; ".join(rest)}' if rest else first


def _raiser(error: BaseException) -> str:
  """Name of the module whose code raised the exception."""
  frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
  return str(frames[-1].f_globals.get('__name__', '')) if frames else ''
