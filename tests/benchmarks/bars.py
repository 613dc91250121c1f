"""Rows of the table: what was measured, against whom, and what was asked."""

from collections.abc import Sequence
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

  @property
  def cells(self) -> dict[str, str]:
    """What the table has in each column."""
    limit = f'{"≥" if self.at_least else "≤"} {self.bar:g}'
    alone = not self.peer_name
    return {
      'work': self.work,
      'measure': self.measure,
      'ours': _figure(self.ours, self.spread),
      'peer': '' if alone else f'{_figure(self.peer)} ({self.peer_name})',
      'ratio': '' if alone else f'{self.ratio:z.2f}x',
      'bar': limit if alone else f'{limit}x',
      'met': self._verdict,
    }

  @property
  def _verdict(self) -> str:
    if self.met:
      return 'yes'
    far = self.bar / self.ratio if self.at_least else self.ratio / self.bar
    percent = 100 * (far - 1)
    # One digit of what would be rounded to nothing.
    return f'no, by {percent:{".0f" if percent >= 1 else ".1g"}}%'


@dataclasses.dataclass(frozen=True)
class Entry:
  """One competitor of a part.

  Attributes:
    part: The part's name.
    name: The competitor's.
    seconds: Median of a round.
    spread: As `Row`'s.
    peak_bytes: The most memory that its process held.
  """

  part: str
  name: str
  seconds: float
  spread: float
  peak_bytes: int

  @property
  def cells(self) -> dict[str, str]:
    """What the table has in each column."""
    return {
      'part': self.part,
      'who': self.name,
      's': _figure(self.seconds, self.spread),
      'peak memory, GB': f'{self.peak_bytes / 1e9:.2f}',
    }


def _figure(value: float, spread: float | None = None) -> str:
  text = f'{value:,.0f}' if abs(value) >= 1e3 else f'{value:.3g}'
  return text if spread is None else f'{text} ± {spread:.0%}'


def terminal(
  lines: Sequence[Row] | Sequence[Entry], title: str
) -> rich_table.Table:
  """The table for a terminal."""
  table = rich_table.Table(*lines[0].cells, title=title)
  for line in lines:
    table.add_row(*line.cells.values())
  return table


def markdown(lines: Sequence[Row] | Sequence[Entry]) -> str:
  """The table as README.md has it."""
  columns = list(lines[0].cells)
  rows = [columns, ['---'] * len(columns)]
  rows += [list(line.cells.values()) for line in lines]
  return '\n'.join(f'| {" | ".join(row)} |' for row in rows)
