"""Rows to batches: a deterministic grain pipeline with a saveable position."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import hashlib
import typing

import grain
import numpy as np

from peftlib.data import chat
from peftlib.data import packing
from peftlib.data import reading
from peftlib.data import tokenizer as tokenizer_lib

Batch = dict[str, np.ndarray]

_SMALLEST_BUCKET = 32
_MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
  """A dataset of batches and what is known about it.

  Attributes:
    dataset: iterates over batches, dicts of the arrays of
      `peftlib.data.packing`. `iter(dataset)` has `get_state()` and
      `set_state()`; the state is a small JSON-able dict, and an iterator set to
      it gives exactly the batches that the other had left.
    stats: of one epoch.
    batch_size: sequences in each batch, the last one included.
    shapes: the (length, loss length) pairs that occur; one if packed.
    steps_per_epoch: batches of an epoch; a fraction if the last batch of an
      epoch is shared with the next.
    fingerprint: hash of all that decides the batches, but not of how many
      epochs there are. A saved position is meaningful only where it is equal.
  """

  dataset: grain.IterDataset[Batch]
  stats: packing.PackingStats
  batch_size: int
  shapes: tuple[tuple[int, int], ...]
  steps_per_epoch: float
  fingerprint: str

  @property
  def length(self) -> int:
    """Tokens of the longest sequences."""
    return max(length for length, _ in self.shapes)

  @property
  def loss_length(self) -> int:
    """Targets that the longest sequences have room for."""
    return max(self.shapes)[1]


@dataclasses.dataclass(frozen=True)
class _Plan:
  """Which rows make up one sequence, or one batch, and its shape."""

  sequences: tuple[tuple[int, ...], ...]
  length: int
  loss_length: int


def encode_rows(
  rows: Sequence[reading.Row],
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  length: int,
  loss_on: chat.LossOn = 'assistant',
  template: chat.Template | None = None,
  overlong: packing.Overlong = 'error',
) -> tuple[list[chat.Encoded], int]:
  """Encodes rows and cuts those that are too long.

  Args:
    rows: the rows.
    tokenizer: the tokenizer.
    length: the most tokens a row may have.
    loss_on: as for `chat.encode_row`.
    template: as for `chat.encode_row`.
    overlong: as for `packing.fit`.

  Returns:
    The encoded rows in order, and how many of them were cut.

  Raises:
    ValueError: as `chat.encode_row` and `packing.fit` do, naming file and line.
  """
  encoded, truncated = [], 0
  for row in rows:
    whole = chat.encode_row(row, tokenizer, loss_on=loss_on, template=template)
    part, cut = packing.fit(whole, length, overlong=overlong)
    encoded.append(part)
    truncated += cut
  return encoded, truncated


def make_pipeline(
  rows: Sequence[reading.Row],
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  length: int,
  batch_size: int,
  seed: int = 0,
  num_epochs: int | None = None,
  shuffle: bool = True,
  pack: bool = True,
  loss_on: chat.LossOn = 'assistant',
  template: chat.Template | None = None,
  overlong: packing.Overlong = 'error',
) -> Pipeline:
  """Makes the pipeline from rows to batches.

  Packed, every batch has one shape. Which rows share a sequence is decided
  once, from the seed; the order of the sequences is new in every epoch.
  Unpacked, a sequence holds one row and has the least of a few lengths (powers
  of two from 32 up to `length`) that it fits; a batch is of one such length.
  Nothing is dropped: what the last batch lacks is padding of weight 0.

  Example::

    pipeline = make_pipeline(rows, tokenizer, length=512, batch_size=1)
    batches = iter(pipeline.dataset)
    batch = next(batches)
    position = batches.get_state()

  Args:
    rows: the rows of an epoch.
    tokenizer: the tokenizer.
    length: tokens of a sequence.
    batch_size: sequences of a batch.
    seed: decides packing and order; 0 to 2**32 - 1.
    num_epochs: number of epochs; None for no end.
    shuffle: False to keep the order of the rows, for evaluation.
    pack: whether several rows share a sequence.
    loss_on: as for `chat.encode_row`.
    template: as for `chat.encode_row`.
    overlong: as for `packing.fit`.

  Returns:
    The pipeline.

  Raises:
    ValueError: an argument is out of range, or a row can't be encoded (the
      message has its file and line).
  """
  _check(rows, length, batch_size, seed, num_epochs, overlong)
  encoded, truncated = encode_rows(
    rows,
    tokenizer,
    length=length,
    loss_on=loss_on,
    template=template,
    overlong=overlong,
  )
  order = np.arange(len(encoded))
  if shuffle:
    order = np.random.default_rng(seed).permutation(len(encoded))
  plan = _plan_packed if pack else _plan_bucketed
  plans = plan(encoded, order, length, batch_size)

  def build(batch: Sequence[_Plan]) -> Batch:
    sequences = [s for p in batch for s in p.sequences]
    sequences += [()] * (batch_size - len(sequences))
    return packing.stack(
      [
        packing.build_sequence(
          [encoded[i] for i in sequence],
          length=batch[0].length,
          loss_length=batch[0].loss_length,
          pad_id=tokenizer.pad_id,
        )
        for sequence in sequences
      ]
    )

  dataset = grain.MapDataset.source(plans)
  if shuffle:
    dataset = dataset.shuffle(seed)
  batches = (
    dataset.repeat(num_epochs)
    # A batch takes less to build than to hand from thread to thread.
    .to_iter_dataset(grain.ReadOptions(num_threads=0))
    # A packed plan is one sequence, a bucketed one a batch.
    .batch(batch_size if pack else 1, batch_fn=build)
  )
  return Pipeline(
    batches,
    packing.PackingStats(
      rows=len(encoded),
      sequences=sum(len(p.sequences) for p in plans),
      tokens=sum(map(len, encoded)),
      slots=sum(p.length * len(p.sequences) for p in plans),
      loss_tokens=sum(int(e.loss_mask.sum()) for e in encoded),
      truncated_rows=truncated,
    ),
    batch_size,
    tuple(sorted({(p.length, p.loss_length) for p in plans})),
    len(plans) / batch_size if pack else float(len(plans)),
    _fingerprint(encoded, plans, (seed, shuffle, batch_size)),
  )


def _check(
  rows: Sequence[reading.Row],
  length: int,
  batch_size: int,
  seed: int,
  num_epochs: int | None,
  overlong: str,
) -> None:
  if not rows:
    raise ValueError('no rows; expected at least one')
  if length < 2:
    raise ValueError(f'length is {length}; expected at least 2')
  if batch_size < 1:
    raise ValueError(f'batch_size is {batch_size}; expected at least 1')
  if not 0 <= seed <= _MAX_SEED:
    raise ValueError(f'seed is {seed}; expected 0 to {_MAX_SEED}')
  if num_epochs is not None and num_epochs < 1:
    raise ValueError(
      f'num_epochs is {num_epochs}; expected at least 1, or None for no end'
    )
  if overlong not in typing.get_args(packing.Overlong):
    raise ValueError(
      f'overlong is {overlong!r}; expected one of'
      f' {typing.get_args(packing.Overlong)}'
    )


def _plan_packed(
  encoded: Sequence[chat.Encoded],
  order: np.ndarray,
  length: int,
  batch_size: int,
) -> list[_Plan]:
  """One plan a packed sequence."""
  del batch_size
  lengths = [len(encoded[i]) for i in order]
  losses = [int(encoded[i].loss_mask.sum()) for i in order]
  loss_length = packing.choose_loss_length(lengths, losses, length=length)
  packs = packing.first_fit(
    lengths, losses, length=length, loss_length=loss_length
  )
  return [
    _Plan((tuple(int(order[i]) for i in pack),), length, loss_length)
    for pack in packs
  ]


def _plan_bucketed(
  encoded: Sequence[chat.Encoded],
  order: np.ndarray,
  length: int,
  batch_size: int,
) -> list[_Plan]:
  """One plan a batch of rows that are about as long."""
  buckets: dict[int, list[int]] = {}
  for i in order:
    size = _SMALLEST_BUCKET
    while size < len(encoded[i]):
      size *= 2
    buckets.setdefault(min(size, length), []).append(int(i))
  plans = []
  for size, members in sorted(buckets.items()):
    most = max(int(encoded[i].loss_mask.sum()) for i in members)
    loss_length = packing.round_up(most)
    for at in range(0, len(members), batch_size):
      part = members[at : at + batch_size]
      plans.append(_Plan(tuple((i,) for i in part), size, loss_length))
  return plans


def _fingerprint(
  encoded: Sequence[chat.Encoded], plans: Sequence[_Plan], options: object
) -> str:
  digest = hashlib.sha256(repr((plans, options)).encode())
  for row in encoded:
    digest.update(row.tokens.tobytes())
    digest.update(row.loss_mask.tobytes())
  return digest.hexdigest()
