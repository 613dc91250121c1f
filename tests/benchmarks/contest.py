"""The side of a benchmark that compares: has processes take turns."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Competitor:
  """A process that takes part.

  Attributes:
    name: What it is called in the table.
    command: What is run; the spec is put behind it.
    spec: What it is to do.
    environ: What is added to the environment.
  """

  name: str
  command: tuple[str, ...]
  spec: Mapping[str, Any]
  environ: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
  """What a competitor did.

  Attributes:
    name: Its name.
    ready: Seconds that preparing took.
    since_exec: Seconds from the start of the process until it was ready.
    rounds: What it answered, one a round, `seconds` in each.
    peak_bytes: The most memory that its process held.
    skip: How many rounds at the start don't count.
  """

  name: str
  ready: float
  since_exec: float
  rounds: tuple[dict[str, Any], ...]
  peak_bytes: int
  skip: int

  @property
  def seconds(self) -> list[float]:
    """Seconds of the rounds that count."""
    return [r['seconds'] for r in self.rounds[self.skip :]]

  @property
  def median(self) -> float:
    """The median of the rounds that count."""
    return statistics.median(self.seconds)

  @property
  def spread(self) -> float:
    """Half of the range between the quartiles, as a part of the median."""
    if len(self.seconds) < 4:
      return (max(self.seconds) - min(self.seconds)) / 2 / self.median
    low, _, high = statistics.quantiles(self.seconds, n=4)
    return (high - low) / 2 / self.median


def joined(results: Sequence[Result]) -> Result:
  """Several processes of one competitor as one, with the rounds of all.

  Args:
    results: Of one name. Medians of the times until they were ready, and the
      highest peak, are those of the whole.
  """
  return Result(
    name=results[0].name,
    ready=statistics.median(r.ready for r in results),
    since_exec=statistics.median(r.since_exec for r in results),
    rounds=tuple(found for r in results for found in r.rounds[r.skip :]),
    peak_bytes=max(r.peak_bytes for r in results),
    skip=0,
  )


class ProcessError(Exception):
  """A competitor ended where it should have answered."""


class _Process:
  """A running competitor."""

  def __init__(self, competitor: Competitor, stack: contextlib.ExitStack):
    self.name = competitor.name
    self._errors = stack.enter_context(tempfile.TemporaryFile('w+'))
    self._process = subprocess.Popen(
      [*competitor.command, json.dumps(dict(competitor.spec))],
      cwd=ROOT,
      env={
        **os.environ,
        'HF_HUB_OFFLINE': '1',
        'TOKENIZERS_PARALLELISM': 'false',
        'BENCHMARK_STARTED': repr(time.time()),
        **competitor.environ,
      },
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      text=True,
    )
    stack.callback(self._process.kill)

  def answer(self) -> dict[str, Any]:
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      self._errors.seek(0)
      raise ProcessError(
        f'{self.name}: ended with exit code {self._process.wait()}:\n'
        f'{self._errors.read()[-3000:]}'
      )
    answer: dict[str, Any] = json.loads(line)
    return answer

  def ask(self) -> dict[str, Any]:
    assert self._process.stdin is not None
    self._process.stdin.write('\n')
    self._process.stdin.flush()
    return self.answer()

  def end(self) -> dict[str, Any]:
    assert self._process.stdin is not None
    self._process.stdin.close()
    answer = self.answer()
    self._process.wait()
    return answer


def run(
  competitors: Sequence[Competitor],
  rounds: int,
  *,
  skip: int = 1,
  log: Callable[[str], None] = lambda text: None,
) -> dict[str, Result]:
  """Lets competitors work in turns, so that the machine's moods hit all.

  Args:
    competitors: Who takes part. They are prepared one after the other and
      then wait: only one works at any time.
    rounds: How often each works.
    skip: How many rounds at the start don't count: they compile.
    log: Is told what happens.

  Returns:
    What each did, by name.

  Raises:
    ProcessError: One of them failed; what it printed is in the message.
  """
  with contextlib.ExitStack() as stack:
    processes, ready = [], []
    for competitor in competitors:
      processes.append(_Process(competitor, stack))
      ready.append(processes[-1].answer())
      log(f'{competitor.name}: ready after {ready[-1]["since_exec"]:.1f} s')
    answers: list[list[dict[str, Any]]] = [[] for _ in processes]
    for _ in range(rounds):
      for own, process in zip(answers, processes, strict=True):
        own.append(process.ask())
    results = {}
    for process, own, first in zip(processes, answers, ready, strict=True):
      results[process.name] = Result(
        name=process.name,
        ready=first['ready'],
        since_exec=first['since_exec'],
        rounds=tuple(own),
        peak_bytes=process.end()['peak_bytes'],
        skip=skip,
      )
      log(_text(results[process.name]))
    return results


def write_json(path: pathlib.Path, value: Any) -> None:
  """Replaces a file by one that is complete."""
  fresh = path.with_name(f'.{path.name}.new')
  fresh.write_text(json.dumps(value, indent=1) + '\n')
  fresh.replace(path)


def _text(result: Result) -> str:
  return (
    f'{result.name}: {result.median:.4g} s (± {result.spread:.1%}),'
    f' peak {result.peak_bytes / 1e9:.2f} GB'
  )
