"""Flags from the fields of a dataclass, with errors that say what is right.

The fields are made by `text`, `integer`, `number`, `boolean`, `choice` and
`texts`. Each command has absl flags of its own, so that equal names of two
commands, or of another program's flags, don't meet.
"""

from collections.abc import Callable, Sequence
import dataclasses
import difflib
import math
import re
import shutil
import textwrap
from typing import Any, cast

from absl import flags

from peftlib.cli import errors

_KEY = 'peftlib_flag'


@dataclasses.dataclass(frozen=True)
class _Spec:
  """What a field's flag is like.

  Attributes:
    help: One or two sentences.
    convert: From text to the value; raises ValueError.
    right: What the text should be, for messages.
    shown: The default, for `--help`.
    boolean: Whether `--name` and `--noname` are understood.
  """

  help: str
  convert: Callable[[str], Any]
  right: str
  shown: str | None
  boolean: bool = False


class _Parser(flags.ArgumentParser[Any]):
  """Lets absl convert a value by a `_Spec`."""

  def __init__(self, spec: _Spec) -> None:
    super().__init__()
    self._spec = spec
    self.syntactic_help = spec.right

  def parse(self, argument: Any) -> Any:
    if not isinstance(argument, str):
      return argument
    try:
      return self._spec.convert(argument)
    except ValueError as e:
      near = str(e) if str(e).startswith('did you mean') else ''
      hint = f'; {near}' if near else ''
      raise ValueError(f'must be {self._spec.right}{hint}') from e


def text(
  default: str | None, help: str, *, right: str = 'text', shown: str = ''
) -> Any:
  """A field whose flag takes any text that isn't empty."""

  def convert(value: str) -> str:
    if not value:
      raise ValueError
    return value

  return _field(default, _Spec(help, convert, right, shown or default))


def texts(default: Sequence[str], help: str) -> Any:
  """A field whose flag takes several texts, separated by commas; may be empty.

  The field is a tuple.
  """

  def convert(value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(',') if part.strip())

  spec = _Spec(help, convert, 'texts separated by commas', ','.join(default))
  return _field(tuple(default), spec)


def integer(
  default: int | None, help: str, *, low: int, high: int | None = None
) -> Any:
  """A field whose flag takes an integer from `low` up to `high`."""

  def convert(value: str) -> int:
    number = int(value)
    if number < low or (high is not None and number > high):
      raise ValueError
    return number

  right = f'an integer >= {low}'
  if high is not None:
    right = f'an integer from {low} to {high}'
  return _field(default, _Spec(help, convert, right, _shown(default)))


def number(
  default: float | None,
  help: str,
  *,
  above: float | None = None,
  low: float | None = None,
  high: float | None = None,
  below: float | None = None,
) -> Any:
  """A field whose flag takes a finite number within the bounds given."""

  def convert(value: str) -> float:
    number = float(value)
    fits = (
      math.isfinite(number)
      and (above is None or number > above)
      and (low is None or number >= low)
      and (high is None or number <= high)
      and (below is None or number < below)
    )
    if not fits:
      raise ValueError
    return number

  bounds = [
    f'{sign} {bound}'
    for sign, bound in (('>', above), ('>=', low), ('<=', high), ('<', below))
    if bound is not None
  ]
  right = ' '.join(['a number', ' and '.join(bounds)]).strip()
  return _field(default, _Spec(help, convert, right, _shown(default)))


def boolean(default: bool | None, help: str, *, shown: str = '') -> Any:
  """A field whose flag is `--name`, `--noname` or `--name=true|false`."""
  words = {'true': True, 't': True, '1': True}
  words |= {'false': False, 'f': False, '0': False}

  def convert(value: str) -> bool:
    if value.lower() not in words:
      raise ValueError
    return words[value.lower()]

  shown = shown or str(default).lower()
  return _field(default, _Spec(help, convert, 'true or false', shown, True))


def choice(
  default: str | None, help: str, *, of: Sequence[str], shown: str = ''
) -> Any:
  """A field whose flag takes one of a few words."""

  def convert(value: str) -> str:
    if value not in of:
      near = difflib.get_close_matches(value, of, n=1)
      raise ValueError(f'did you mean {near[0]}?' if near else '')
    return value

  right = f'one of {", ".join(of)}'
  return _field(default, _Spec(help, convert, right, shown or default))


def parse[Options](
  cls: type[Options], arguments: Sequence[str]
) -> tuple[Options, frozenset[str]]:
  """Parses arguments into a dataclass of fields made in this module.

  Args:
    cls: The dataclass.
    arguments: What follows the command on the command line.

  Returns:
    The options, and the names of the flags that were given.

  Raises:
    errors.UserError: A flag is unknown or its value is wrong, or an argument is
      no flag.
  """
  values = _define(cls)
  try:
    rest = values(['peftlib', *arguments])[1:]
  except flags.UnrecognizedFlagError as e:
    raise errors.UserError(_unknown(e.flagname, list(values))) from e
  except flags.IllegalFlagValueError as e:
    # absl says 'flag --name=value: why'.
    raise errors.UserError(str(e).removeprefix('flag ')) from e
  except flags.Error as e:
    # A flag at the end of the line that lacks its value.
    raise errors.UserError(str(e)) from e
  if rest:
    raise errors.UserError(
      f'unexpected argument {rest[0]!r}; expected flags, as --name=value'
    )
  fields = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
  given = frozenset(name for name in fields if values[name].present)
  return cls(**{name: values[name].value for name in fields}), given


def usage(cls: type[Any]) -> str:
  """Describes the flags of a dataclass, for `--help`.

  Args:
    cls: The dataclass; the fields of each class that it inherits from are a
      section under the first line of that class's docstring.

  Returns:
    Several lines.
  """
  width = min(shutil.get_terminal_size().columns, 100)
  parts = []
  for section in reversed(cls.__mro__[:-1]):
    specs = {
      f.name: f.metadata[_KEY]
      for f in dataclasses.fields(section)
      if f.name in section.__dict__.get('__annotations__', {})
    }
    if not specs:
      continue
    lines = [f'{(section.__doc__ or "").splitlines()[0].rstrip(".")}:']
    for name, spec in specs.items():
      lines.append(f'  --{_synopsis(name, spec)}')
      lines += textwrap.wrap(
        spec.help, width - 6, initial_indent=' ' * 6, subsequent_indent=' ' * 6
      )
    parts.append('\n'.join(lines))
  return '\n\n'.join(parts)


def _field(default: Any, spec: _Spec) -> Any:
  return dataclasses.field(default=default, metadata={_KEY: spec})


def _shown(default: Any) -> str | None:
  return None if default is None else str(default)


def _synopsis(name: str, spec: _Spec) -> str:
  if spec.boolean:
    return f'[no]{name}' + (f'  (default: {spec.shown})' if spec.shown else '')
  right = re.sub('^one of ', '', spec.right)
  default = f'default: {spec.shown}' if spec.shown else 'no default'
  return f'{name}=...  ({right}; {default})'


def _define(cls: type[Any]) -> flags.FlagValues:
  values = flags.FlagValues()
  for field in dataclasses.fields(cls):
    spec: _Spec = field.metadata[_KEY]
    parser, default = _Parser(spec), cast(Any, field.default)
    if spec.boolean:
      flag: Any = flags.BooleanFlag(field.name, default, spec.help)
      flag.parser = parser
      values[field.name] = flag
    else:
      flags.DEFINE(parser, field.name, default, spec.help, flag_values=values)
  return values


def _unknown(name: str, known: Sequence[str]) -> str:
  near = difflib.get_close_matches(name.replace('-', '_'), known, n=3)
  hint = ' or '.join(f'--{n}' for n in near)
  more = f'did you mean {hint}?' if near else 'see --help'
  return f'--{name}: there is no such flag; {more}'
