"""Which exceptions are the user's to mend, and how they are shown."""

import traceback

_OWN = 'peftlib.'


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
