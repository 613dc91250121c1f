"""Reads training rows from JSON lines files."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import difflib
import json
import os
import pathlib
from typing import Any

ROLES = ('system', 'user', 'assistant')
_FORMS = (
  '{"messages": [{"role": ..., "content": ...}, ...]}',
  '{"prompt": ..., "completion": ...}',
  '{"text": ...}',
)


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of data: a chat, a prompt with its completion, or a text.

  Exactly one of `messages`, `completion` (with `prompt`) and `text` is set;
  anything else is a `ValueError`.

  Attributes:
    messages: the turns of a chat, `{'role': ..., 'content': ...}` each.
    prompt: what comes before a completion.
    completion: what is to be learnt.
    text: a text that is learnt whole.
    source: where the row is from, as `file:line`, for messages.
  """

  messages: tuple[Mapping[str, str], ...] | None = None
  prompt: str | None = None
  completion: str | None = None
  text: str | None = None
  source: str = '<row>'

  def __post_init__(self) -> None:
    forms = [
      self.messages is not None,
      self.prompt is not None and self.completion is not None,
      self.text is not None,
    ]
    half = (self.prompt is None) != (self.completion is None)
    if sum(forms) != 1 or half:
      raise ValueError(
        f'{self.source}: a row is one of {", ".join(_FORMS)}, with no other'
        ' field set'
      )

  def as_messages(self) -> tuple[Mapping[str, str], ...]:
    """The row as a chat.

    Returns:
      The messages; a prompt with its completion is one user turn and one
      assistant turn.

    Raises:
      ValueError: the row is a text.
    """
    if self.messages is not None:
      return self.messages
    if self.prompt is not None and self.completion is not None:
      return (
        {'role': 'user', 'content': self.prompt},
        {'role': 'assistant', 'content': self.completion},
      )
    raise ValueError(
      f'{self.source}: a text row is no chat; expected messages, or prompt and'
      ' completion'
    )


def read_jsonl(path: str | os.PathLike[str]) -> list[Row]:
  """Reads rows from a JSON lines file.

  Each line is one of `{"messages": [{"role", "content"}, ...]}` with at least
  one assistant turn, `{"prompt", "completion"}` and `{"text"}`. Lines of
  nothing but white space are passed over.

  Example::

    rows = read_jsonl('train.jsonl')

  Args:
    path: a UTF-8 file.

  Returns:
    The rows in the order of the file.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: the first thing that is wrong, as `file:line: what, and what
      would be right`.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(
      f'{path}: no such file; expected a JSON lines file of training rows'
    )
  rows = []
  with open(path, 'rb') as f:
    for number, line in enumerate(f, start=1):
      source = f'{path}:{number}'
      try:
        # A byte order mark is what some editors put first; it is no content.
        text = line.decode('utf-8-sig' if number == 1 else 'utf-8').strip()
      except UnicodeDecodeError as e:
        raise ValueError(
          f'{source}: not UTF-8 (byte {e.object[e.start]:#04x} at column'
          f' {e.start + 1}); save the file as UTF-8'
        ) from e
      if text:
        rows.append(parse_row(text, source))
  if not rows:
    raise ValueError(
      f'{path}:1: the file has no rows; expected one of'
      f' {", ".join(_FORMS)} a line'
    )
  return rows


def parse_row(line: str, source: str = '<row>') -> Row:
  """Reads one row from its line of JSON.

  Args:
    line: a JSON object.
    source: where it is from, as `file:line`, for messages.

  Returns:
    The row.

  Raises:
    ValueError: as `read_jsonl` does.
  """
  try:
    value = json.loads(line)
  except json.JSONDecodeError as e:
    raise ValueError(
      f'{source}: not valid JSON: {e.msg} at column {e.colno}; expected one'
      ' JSON object a line'
    ) from e
  if not isinstance(value, dict):
    raise ValueError(
      f'{source}: a JSON {_kind(value)}; expected an object, one of'
      f' {", ".join(_FORMS)}'
    )
  keys = set(value)
  if keys == {'messages'}:
    return Row(messages=_messages(value['messages'], source), source=source)
  if keys == {'prompt', 'completion'}:
    for key in ('prompt', 'completion'):
      _check_text(value[key], key, source)
    return Row(
      prompt=value['prompt'], completion=value['completion'], source=source
    )
  if keys == {'text'}:
    _check_text(value['text'], 'text', source)
    return Row(text=value['text'], source=source)
  known = ('messages', 'prompt', 'completion', 'text')
  near = {
    key: match[0]
    for key in sorted(keys - set(known))
    if (match := difflib.get_close_matches(key, known, n=1))
  }
  hint = ''.join(f'; {k!r}: did you mean {v!r}?' for k, v in near.items())
  raise ValueError(
    f'{source}: fields {sorted(keys)}; expected one of'
    f' {", ".join(_FORMS)} and no other field{hint}'
  )


def _messages(value: Any, source: str) -> tuple[Mapping[str, str], ...]:
  """Checks the messages of a row."""
  if not isinstance(value, list) or not value:
    got = 'empty' if value == [] else f'a JSON {_kind(value)}'
    raise ValueError(
      f'{source}: messages is {got};'
      ' expected a list of at least one {"role", "content"} object'
    )
  for i, message in enumerate(value):
    where = f'messages[{i}]'
    if not isinstance(message, dict) or set(message) != {'role', 'content'}:
      got = (
        f'has fields {sorted(message)}'
        if isinstance(message, dict)
        else f'is a JSON {_kind(message)}'
      )
      raise ValueError(
        f'{source}: {where} {got}; expected an object of "role" and "content"'
      )
    if message['role'] not in ROLES:
      near = difflib.get_close_matches(str(message['role']), ROLES, n=1)
      hint = f'; did you mean {near[0]!r}?' if near else ''
      raise ValueError(
        f'{source}: {where}.role is {message["role"]!r}; expected one of'
        f' {", ".join(ROLES)}{hint}'
      )
    _check_text(message['content'], f'{where}.content', source)
  if not any(message['role'] == 'assistant' for message in value):
    raise ValueError(
      f'{source}: messages has no assistant turn, so there is nothing to'
      ' learn; expected at least one with role "assistant"'
    )
  return tuple(value)


def _check_text(value: Any, name: str, source: str) -> None:
  if not isinstance(value, str):
    raise ValueError(
      f'{source}: {name} is a JSON {_kind(value)}; expected text'
    )
  if not value.strip():
    raise ValueError(f'{source}: {name} is empty; expected some text')


def _kind(value: Any) -> str:
  """What JSON calls the type of a value."""
  if value is None:
    return 'null'
  names = {bool: 'boolean', dict: 'object', list: 'list', str: 'string'}
  return names.get(type(value), 'number')
