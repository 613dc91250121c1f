"""Puts rows of different lengths into arrays of one shape, few of it padding.

The arrays of a batch of `B` sequences of `S` tokens, int32 but the weights:

==================  =======  ==================================================
`tokens`            (B, S)   token ids, `pad_id` where nothing is
`positions`         (B, S)   0, 1, ... from the start of each row
`segment_ids`       (B, S)   1, 2, ... for the rows of a sequence, 0 for padding
`loss_positions`    (B, K)   places whose logits count
`targets`           (B, K)   the token that each of them should predict
`loss_weights`      (B, K)   float32, 1 for a target, 0 for padding
==================  =======  ==================================================

Logits at `loss_positions[b, k]` predict `targets[b, k]`, so the head of the
model, the dearest of its layers at this size, is computed where loss counts and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Literal

import numpy as np

from peftlib.data import chat

Overlong = Literal['error', 'truncate']

_LOSS_MULTIPLE = 16
_SAMPLE = 4096


@dataclasses.dataclass(frozen=True)
class PackingStats:
  """What packing made of the rows; of one epoch.

  Attributes:
    rows: number of rows.
    sequences: number of sequences that hold them.
    tokens: number of tokens of the rows, after cutting.
    slots: number of places in the sequences, for a token each.
    loss_tokens: number of tokens that are targets.
    truncated_rows: number of rows that were cut to fit.
  """

  rows: int
  sequences: int
  tokens: int
  slots: int
  loss_tokens: int
  truncated_rows: int

  @property
  def pad_share(self) -> float:
    """Share of the places that hold padding."""
    return 1.0 - self.tokens / self.slots if self.slots else 0.0

  @property
  def loss_share(self) -> float:
    """Share of the tokens that are targets."""
    return self.loss_tokens / self.tokens if self.tokens else 0.0


def fit(
  row: chat.Encoded, length: int, *, overlong: Overlong = 'error'
) -> tuple[chat.Encoded, bool]:
  """Cuts a row to at most `length` tokens.

  The prompt is cut from the left; one of its tokens always stays, to predict
  the first token of the completion. The last completion is never cut, unless
  `overlong` is `truncate`.

  Args:
    row: an encoded row.
    length: the most tokens it may have.
    overlong: what to do if the completion alone doesn't fit: `error`, or
      `truncate` to cut it from the right.

  Returns:
    The row, and whether it was cut.

  Raises:
    ValueError: the completion alone is too long.
  """
  if len(row) <= length:
    return row, False
  start = max(row.completion_start - 1, 0)
  completion = len(row) - start
  if completion > length and overlong == 'error':
    what = 'completion' if row.completion_start else 'text'
    raise ValueError(
      f'{row.source}: the {what} alone needs {completion} tokens, more than'
      f' the length of {length}; shorten it, use a length of at least'
      f" {completion}, or overlong='truncate'"
    )
  begin = min(start, len(row) - length)
  part = slice(begin, begin + length)
  mask = row.loss_mask[part].copy()
  mask[:1] = False
  return (
    chat.Encoded(
      row.tokens[part], mask, max(row.completion_start - begin, 0), row.source
    ),
    True,
  )


def first_fit(
  lengths: Sequence[int],
  loss_counts: Sequence[int],
  *,
  length: int,
  loss_length: int,
  window: int = 128,
) -> list[list[int]]:
  """Packs rows into sequences: each into the first that has room.

  Rows are taken a window at a time, the longest of it first (first fit
  decreasing). Both of a sequence's capacities hold: tokens and targets. No row
  is dropped or cut.

  Args:
    lengths: tokens of each row.
    loss_counts: targets of each row.
    length: tokens that a sequence has room for.
    loss_length: targets that a sequence has room for.
    window: number of rows that are sorted together, and of sequences that are
      open at a time; when none of them has room, the fullest is closed.

  Returns:
    The indices of each sequence's rows, sequences in the order in which they
    were opened.

  Raises:
    ValueError: a row fits no sequence.
  """
  packs: list[list[int]] = []
  opened = np.zeros(window, np.int64)
  free = np.zeros(window, np.int64)
  loss_free = np.zeros(window, np.int64)
  order = [
    i
    for start in range(0, len(lengths), window)
    for i in sorted(
      range(start, min(start + window, len(lengths))),
      key=lambda i: -lengths[i],
    )
  ]
  for i in order:
    n, k = lengths[i], loss_counts[i]
    if n > length or k > loss_length:
      raise ValueError(
        f'row {i} has {n} tokens and {k} targets; a sequence has room for'
        f' {length} and {loss_length}'
      )
    fits = (free >= n) & (loss_free >= k)
    if fits.any():
      # First opened, not first in the window, whose places are reused.
      slot = int(np.where(fits, opened, len(packs)).argmin())
    else:
      slot = int(free.argmin())
      opened[slot] = len(packs)
      free[slot], loss_free[slot] = length, loss_length
      packs.append([])
    packs[opened[slot]].append(i)
    free[slot] -= n
    loss_free[slot] -= k
  return packs


def choose_loss_length(
  lengths: Sequence[int], loss_counts: Sequence[int], *, length: int
) -> int:
  """Number of targets that a sequence should have room for.

  The smallest multiple of 16 that holds any one row and needs at most 1 % more
  sequences than no limit would; tried on at most the first 4096 rows.

  Args:
    lengths: tokens of each row.
    loss_counts: targets of each row.
    length: tokens that a sequence has room for.

  Returns:
    A multiple of 16, at least the largest of `loss_counts`.
  """
  top = round_up(max(loss_counts))
  lengths, loss_counts = lengths[:_SAMPLE], loss_counts[:_SAMPLE]

  def packed(loss_length: int) -> int:
    return len(
      first_fit(lengths, loss_counts, length=length, loss_length=loss_length)
    )

  high = max(round_up(length), top)
  most = packed(high) * 1.01
  low = max(top, round_up(length * sum(loss_counts) // sum(lengths)))
  while low < high and packed(low) > most:
    low += _LOSS_MULTIPLE
  return low


def build_sequence(
  rows: Sequence[chat.Encoded], *, length: int, loss_length: int, pad_id: int
) -> dict[str, np.ndarray]:
  """The arrays of one sequence.

  Args:
    rows: the rows that share it; none for a sequence of nothing but padding.
    length: tokens of the sequence, `S`.
    loss_length: targets of the sequence, `K`.
    pad_id: token id of padding.

  Returns:
    A dict of the arrays of the module's table, without the batch axis.

  Raises:
    ValueError: the rows don't fit.
  """
  need = sum(len(r) for r in rows), sum(int(r.loss_mask.sum()) for r in rows)
  if need[0] > length or need[1] > loss_length:
    raise ValueError(
      f'rows of {need[0]} tokens and {need[1]} targets in a sequence for'
      f' {length} and {loss_length}'
    )
  out = {
    'tokens': np.full(length, pad_id, np.int32),
    'positions': np.zeros(length, np.int32),
    'segment_ids': np.zeros(length, np.int32),
    'loss_positions': np.zeros(loss_length, np.int32),
    'targets': np.zeros(loss_length, np.int32),
    'loss_weights': np.zeros(loss_length, np.float32),
  }
  at = filled = 0
  for segment, row in enumerate(rows, start=1):
    end = at + len(row)
    out['tokens'][at:end] = row.tokens
    out['positions'][at:end] = np.arange(len(row))
    out['segment_ids'][at:end] = segment
    (targets,) = np.nonzero(row.loss_mask)
    part = slice(filled, filled + len(targets))
    out['loss_positions'][part] = at + targets - 1
    out['targets'][part] = row.tokens[targets]
    out['loss_weights'][part] = 1.0
    at, filled = end, part.stop
  return out


def stack(
  sequences: Sequence[Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
  """Stacks sequences of one shape into a batch.

  Args:
    sequences: what `build_sequence` gives, `B` of them.

  Returns:
    The same arrays with a batch axis of `B` in front.
  """
  return {k: np.stack([s[k] for s in sequences]) for k in sequences[0]}


def round_up(count: int) -> int:
  """The least multiple of 16, from 16 up, that holds a count of targets.

  Args:
    count: number of targets.

  Returns:
    The multiple. Few different values keep compilations few.
  """
  return max(-(-int(count) // _LOSS_MULTIPLE), 1) * _LOSS_MULTIPLE
