"""Rows of the table: what was measured, against whom, and what was asked."""

from collections.abc import Iterable
import dataclasses

from rich import table as rich_table


@dataclasses.dataclass(frozen=True)
class Row:
  """One bar.

  Attributes:
    work: What was done.
    measure: What was measured of it, with the unit.
    ours: Our figure.
    peer: The figure that it is compared with, 1 for a bar on ours alone.
    peer_name: Whose; '' for a bar on ours alone.
    bar: What the ratio of ours to the peer's must not be above.
    at_least: The ratio must not be below the bar instead.
    spread: Of ours, half of the range between the quartiles, as a part of it.
  """

  work: str
  measure: str
  ours: float
  bar: float
  peer: float = 1.0
  peer_name: str = ''
  at_least: bool = False
  spread: float | None = None

  @property
  def ratio(self) -> float:
    """Of ours to the peer's."""
    return self.ours / self.peer

  @property
  def met(self) -> bool:
    """Whether the ratio is on the right side of the bar."""
    if self.at_least:
      return self.ratio >= self.bar
    return self.ratio <= self.bar


_COLUMNS = ('work', 'measure', 'ours', 'peer', 'ratio', 'bar', 'met')


def _cells(row: Row) -> tuple[str, ...]:
  ours = f'{row.ours:.3g}'
  if row.spread is not None:
    ours += f' ± {row.spread:.0%}'
  limit = f'{"≥" if row.at_least else "≤"} {row.bar:g}'
  if not row.peer_name:
    return row.work, row.measure, ours, '', '', limit, _verdict(row)
  return (
    row.work,
    row.measure,
    ours,
    f'{row.peer:.3g} ({row.peer_name})',
    f'{row.ratio:.2f}x',
    f'{limit}x',
    _verdict(row),
  )


def _verdict(row: Row) -> str:
  if row.met:
    return 'yes'
  far = row.bar / row.ratio if row.at_least else row.ratio / row.bar
  return f'no, by {far - 1:.0%}'


def terminal(rows: Iterable[Row]) -> rich_table.Table:
  """The table for a terminal."""
  table = rich_table.Table(*_COLUMNS, title='Against the bars')
  for row in rows:
    table.add_row(*_cells(row))
  return table


def markdown(rows: Iterable[Row]) -> str:
  """The table as README.md has it."""
  lines = [_COLUMNS, ['---'] * len(_COLUMNS), *map(_cells, rows)]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)
