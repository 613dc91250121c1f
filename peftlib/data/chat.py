"""Turns rows into token ids with a mask of where loss counts."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import typing
from typing import Literal

import numpy as np

from peftlib.data import reading
from peftlib.data import tokenizer as tokenizer_lib

LossOn = Literal['assistant', 'all']
Template = Literal['chat', 'none']


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
  """Token ids of one row, with the tokens that are learnt.

  Attributes:
    tokens: (n,) int32 token ids.
    loss_mask: (n,) bool, True for each token that is a target of the loss. The
      first is never one: nothing comes before it.
    completion_start: index of the first token of the last completion (of the
      last assistant turn); what is before it may be cut from the left when the
      row is too long. 0 for a text.
    source: where the row is from, as `file:line`.
  """

  tokens: np.ndarray
  loss_mask: np.ndarray
  completion_start: int
  source: str = '<row>'

  def __len__(self) -> int:
    return len(self.tokens)


def encode_row(
  row: reading.Row,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  loss_on: LossOn = 'assistant',
  template: Template | None = None,
) -> Encoded:
  """Encodes a row for training.

  A chat is rendered with the model's template. Loss counts on what the
  assistant says, the token that ends its turn included, so that the model
  learns to stop. The white space that a template puts after the last turn is
  left out. A prompt with a completion is a chat of two turns, or with
  `template='none'` the two texts as they are, with the end-of-sequence token
  after them. A text is learnt whole, its end-of-sequence token included.

  The ids before an assistant's turn are exactly those that generation feeds:
  where encoding the whole chat at once would join characters across that
  border, the two sides are encoded apart.

  Example::

    row = reading.Row(prompt='2 + 2?', completion='4')
    encoded = encode_row(row, tokenizer)
    tokenizer.decode(encoded.tokens[encoded.loss_mask], skip_special=False)

  Args:
    row: the row.
    tokenizer: the tokenizer.
    loss_on: `assistant`, or `all` for every token of the row.
    template: `chat` renders prompts and completions with the chat template,
      `none` doesn't; by default `chat` if the tokenizer has a template.

  Returns:
    The encoded row.

  Raises:
    ValueError: the row is a chat and the tokenizer has no template, or the
      template isn't stable: it renders the turns so far otherwise once more
      turns follow, so that no assistant text can be found in it.
  """
  _check_options(loss_on, template)
  if row.text is not None:
    ids = tokenizer.encode(row.text, add_special_tokens=True)
    return _finish(_with_eos(ids, tokenizer), [], 0, 'all', row.source)
  if row.messages is None and not _uses_chat(tokenizer, template):
    assert row.prompt is not None
    assert row.completion is not None
    start = tokenizer.encode(row.prompt, add_special_tokens=True)
    ids = start + tokenizer.encode(row.completion)
    spans = [(len(start), len(ids) + 1)]
    ids = _with_eos(ids, tokenizer)
    return _finish(ids, spans, len(start), loss_on, row.source)
  pieces = _pieces(row, tokenizer)
  ids, spans = _encode_pieces(pieces, tokenizer)
  return _finish(ids, spans, spans[-1][0], loss_on, row.source)


def encode_prompt(
  row: reading.Row,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  template: Template | None = None,
) -> tuple[list[int], str]:
  """Encodes what comes before the last completion, for generation.

  Example::

    ids, reference = encode_prompt(row, tokenizer)

  Args:
    row: a chat that ends in an assistant turn, or a prompt with a completion.
    tokenizer: the tokenizer.
    template: as for `encode_row`.

  Returns:
    The ids to generate from, and the text that the row has as the answer.

  Raises:
    ValueError: the row is a text, or its last turn isn't the assistant's.
  """
  _check_options('assistant', template)
  if row.messages is None and not _uses_chat(tokenizer, template):
    if row.prompt is not None and row.completion is not None:
      return (
        tokenizer.encode(row.prompt, add_special_tokens=True),
        row.completion,
      )
  messages = row.as_messages()
  if messages[-1]['role'] != 'assistant':
    raise ValueError(
      f'{row.source}: the last turn is {messages[-1]["role"]!r}; expected'
      " 'assistant', whose content is the reference answer"
    )
  prompt = tokenizer.render(messages[:-1], add_generation_prompt=True)
  return tokenizer.encode(prompt), messages[-1]['content']


def _check_options(loss_on: str, template: str | None) -> None:
  if loss_on not in typing.get_args(LossOn):
    raise ValueError(
      f'loss_on is {loss_on!r}; expected one of {typing.get_args(LossOn)}'
    )
  if template is not None and template not in typing.get_args(Template):
    raise ValueError(
      f'template is {template!r}; expected one of'
      f' {typing.get_args(Template)} or None'
    )


def _uses_chat(
  tokenizer: tokenizer_lib.Tokenizer, template: Template | None
) -> bool:
  if template is None:
    return tokenizer.chat_template is not None
  return template == 'chat'


def _pieces(
  row: reading.Row, tokenizer: tokenizer_lib.Tokenizer
) -> list[tuple[str, bool]]:
  """Cuts the rendered chat into pieces, marked if the assistant's."""
  messages = row.as_messages()
  last = max(i for i, m in enumerate(messages) if m['role'] == 'assistant')
  done = ''
  pieces = []
  try:
    for i in range(last + 1):
      if messages[i]['role'] != 'assistant':
        continue
      before = tokenizer.render(messages[:i], add_generation_prompt=True)
      after = tokenizer.render(messages[: i + 1])
      if not before.startswith(done) or not after.startswith(before):
        raise ValueError(
          'the chat template renders earlier turns otherwise once'
          f' messages[{i}] follows (text removed or added in between), so'
          ' assistant tokens cannot be told apart; use a template whose'
          " rendering only grows with each turn, or template='none' with"
          ' prompt/completion rows'
        )
      pieces.append((before[len(done) :], False))
      pieces.append((after[len(before) :], True))
      done = after
  except ValueError as e:
    raise ValueError(f'{row.source}: {e}') from e
  return pieces


def _encode_pieces(
  pieces: Sequence[tuple[str, bool]], tokenizer: tokenizer_lib.Tokenizer
) -> tuple[list[int], list[tuple[int, int]]]:
  """Ids of all pieces, and where in them the assistant's turns are."""
  pieces = [(text, own) for text, own in pieces]
  # White space after the end token of the last turn teaches nothing.
  pieces[-1] = (_strip_after_end(pieces[-1][0], tokenizer), True)
  whole = tokenizer.encode(''.join(text for text, _ in pieces))
  ends: list[int] = []
  text = ''
  for piece, _ in pieces[:-1]:
    text += piece
    prefix = tokenizer.encode(text)
    if whole[: len(prefix)] != prefix:
      whole, ends = _encode_apart(pieces, tokenizer)
      break
    ends.append(len(prefix))
  else:
    ends.append(len(whole))
  spans, start = [], 0
  for (_, own), end in zip(pieces, ends, strict=True):
    if own:
      spans.append((start, _end_of_turn(whole, start, end, tokenizer)))
    start = end
  if spans[-1][1] == len(whole) and not _ends_turn(whole, tokenizer):
    whole = _with_eos(whole, tokenizer)
    spans[-1] = (spans[-1][0], len(whole))
  return whole, spans


def _encode_apart(
  pieces: Sequence[tuple[str, bool]], tokenizer: tokenizer_lib.Tokenizer
) -> tuple[list[int], list[int]]:
  ids: list[int] = []
  ends = []
  for text, _ in pieces:
    ids += tokenizer.encode(text)
    ends.append(len(ids))
  return ids, ends


def _strip_after_end(text: str, tokenizer: tokenizer_lib.Tokenizer) -> str:
  stripped = text.rstrip()
  ids = tokenizer.encode(stripped)
  return stripped if ids and _ends_turn(ids, tokenizer) else text


def _ends_turn(ids: Sequence[int], tokenizer: tokenizer_lib.Tokenizer) -> bool:
  return ids[-1] in tokenizer.eos_ids or ids[-1] in tokenizer.special_ids


def _end_of_turn(
  ids: Sequence[int], start: int, end: int, tokenizer: tokenizer_lib.Tokenizer
) -> int:
  """End of the loss: after the turn's end token, not the white space there."""
  for i in range(end, start, -1):
    if _ends_turn(ids[start:i], tokenizer):
      rest = tokenizer.decode(ids[i:end], skip_special=False)
      return i if not rest.strip() else end
  return end


def _with_eos(ids: list[int], tokenizer: tokenizer_lib.Tokenizer) -> list[int]:
  if not tokenizer.eos_ids or (ids and ids[-1] in tokenizer.eos_ids):
    return ids
  return [*ids, tokenizer.eos_ids[0]]


def _finish(
  ids: Sequence[int],
  spans: Sequence[tuple[int, int]],
  completion_start: int,
  loss_on: LossOn,
  source: str,
) -> Encoded:
  tokens = np.asarray(ids, np.int32)
  mask = np.full(tokens.shape, loss_on == 'all')
  for start, end in spans:
    mask[start:end] = True
  mask[:1] = False
  if not mask.any():
    raise ValueError(
      f'{source}: the row is {len(tokens)} token(s) long and has none to'
      ' learn; expected at least two tokens'
    )
  return Encoded(tokens, mask, completion_start, source)
