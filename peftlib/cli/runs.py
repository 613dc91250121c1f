"""The folder of a run: what is in it, and who may write to it.

=====================  ======================================================
`run.json`             the flags, versions, and what model and data are
`metrics.jsonl`        one line a step
`loss.png`             the loss over the steps
`before.json`          answers before training
`after.json`           answers after it
`checkpoints/`         the last two states of the whole run
`adapter/`             what was trained, when it is done
`summary.json`         the figures at the end; its presence means: finished
=====================  ======================================================

Files are put in place in one piece.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import shutil
from typing import Any, Literal, NamedTuple, TextIO

import filelock
from matplotlib import figure

from peftlib.cli import errors
from peftlib.cli import options as options_lib

Status = Literal['new', 'unfinished', 'finished']

_PACKAGES = (
  'peftlib',
  'jax',
  'jaxlib',
  'flax',
  'qwix',
  'optax',
  'orbax-checkpoint',
  'grain',
  'numpy',
  'tokenizers',
)


class Paths(NamedTuple):
  """Paths of a run's parts."""

  root: pathlib.Path
  run: pathlib.Path
  metrics: pathlib.Path
  loss: pathlib.Path
  before: pathlib.Path
  after: pathlib.Path
  checkpoints: pathlib.Path
  adapter: pathlib.Path
  summary: pathlib.Path


def paths(output: str) -> Paths:
  """Returns the paths of the run in a folder, absolute."""
  root = pathlib.Path(output).absolute()
  return Paths(
    root,
    root / 'run.json',
    root / 'metrics.jsonl',
    root / 'loss.png',
    root / 'before.json',
    root / 'after.json',
    root / 'checkpoints',
    root / 'adapter',
    root / 'summary.json',
  )


def status(run: Paths) -> Status:
  """Whether a folder has a run, and whether that is finished."""
  if run.summary.is_file() and run.run.is_file():
    return 'finished'
  # Whatever of ours is there would be overwritten.
  return 'unfinished' if any(p.exists() for p in run[1:]) else 'new'


def check_output(run: Paths, options: options_lib.Finetune) -> Status:
  """Decides whether a run may write to its folder.

  Args:
    run: Its paths.
    options: `resume`, `overwrite` and all that is compared with `run.json`.

  Returns:
    'new' to start; 'unfinished' to go on; 'finished' if exactly this run is
    there already.

  Raises:
    errors.UserError: There is a run that has to be asked for by `--resume` or
      `--overwrite`, or one with other flags.
  """
  found = status(run)
  if found == 'new' or options.overwrite:
    return 'new'
  where = f'--output={options.output}'
  if not run.run.is_file():
    raise errors.UserError(
      f'{where}: has parts of a run but no run.json; give --overwrite to'
      ' replace them, or another folder'
    )
  differences = different_flags(read_json(run.run)['flags'], options)
  if found == 'finished' and not differences:
    return found
  if options.resume:
    if differences:
      raise errors.UserError(
        f'--resume: the run in {options.output} has other flags:'
        f' {"; ".join(differences)}; give its own, or start a new run in'
        ' another --output'
      )
    return found
  raise errors.UserError(
    f'{where}: has {"a" if found == "finished" else "an unfinished"} run'
    ' already; give --resume to go on with it, --overwrite to replace it, or'
    ' another folder'
  )


def different_flags(
  saved: Mapping[str, Any], options: options_lib.Finetune
) -> list[str]:
  """Describes the flags that change what is computed and differ.

  Args:
    saved: The flags in `run.json`.
    options: Those of now.

  Returns:
    A text for each, naming both values.
  """
  now = to_json(dataclasses.asdict(options))
  return [
    f'--{name} was {_show(saved.get(name))}, is now {_show(value)}'
    for name, value in now.items()
    if name not in options_lib.FREE_ON_RESUME and saved.get(name) != value
  ]


@contextlib.contextmanager
def locked(run: Paths) -> Iterator[None]:
  """Holds a run's folder, which is made, against other processes.

  Raises:
    errors.UserError: Another process has it.
  """
  run.root.mkdir(parents=True, exist_ok=True)
  # Given up by the system however the process ends.
  lock = filelock.FileLock(run.root / '.lock')
  try:
    lock.acquire(blocking=False)
  except filelock.Timeout as e:
    raise errors.UserError(
      f'--output={run.root}: another process is at work there; wait for it, or'
      ' give another folder'
    ) from e
  try:
    yield
  finally:
    lock.release()


def clear(run: Paths) -> None:
  """Removes a run, and nothing else that may be in its folder."""
  # The sign that it is finished goes first, what tells of a run last.
  for path in (*reversed(run[2:]), run.run):
    if path.is_dir():
      shutil.rmtree(path)
    else:
      path.unlink(missing_ok=True)


def describe(
  options: options_lib.Finetune,
  *,
  base_fingerprint: str,
  data_fingerprint: str,
  steps: int,
) -> dict[str, Any]:
  """What `run.json` says."""
  return {
    'flags': to_json(dataclasses.asdict(options)),
    'seed': options.seed,
    'steps': steps,
    'base_fingerprint': base_fingerprint,
    'data_fingerprint': data_fingerprint,
    'versions': {
      'python': platform.python_version(),
      **{name: _version(name) for name in _PACKAGES},
    },
  }


def check_contents(
  run: Paths, *, base_fingerprint: str, data_fingerprint: str
) -> None:
  """Checks that model and data are those that a run started with.

  Raises:
    errors.UserError: They are not.
  """
  saved = read_json(run.run)
  for flag, name, now in (
    ('--model', 'base_fingerprint', base_fingerprint),
    ('--data', 'data_fingerprint', data_fingerprint),
  ):
    if saved[name] != now:
      raise errors.UserError(
        f'--resume: {flag} has other contents than the run started with'
        f' (fingerprint was {saved[name]}, is now {now})'
      )


def to_json(value: Any) -> Any:
  """A value as it would be read back from JSON."""
  return json.loads(json.dumps(value))


def read_json(path: pathlib.Path) -> Any:
  """Reads a JSON file that a run has written."""
  try:
    return json.loads(path.read_text('utf-8'))
  except ValueError as e:
    raise errors.UserError(f'{path}: not valid JSON: {e}') from e


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes a JSON file in one piece."""
  text = json.dumps(value, indent=1, ensure_ascii=False) + '\n'
  write_bytes(path, text.encode('utf-8'))


def write_bytes(path: pathlib.Path, content: bytes) -> None:
  """Writes a file in one piece."""
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'.{path.name}.{os.getpid()}')
  try:
    with open(temporary, 'wb') as f:
      f.write(content)
      f.flush()
      os.fsync(f.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
  """Reads the lines of `metrics.jsonl`; none if there is no file.

  A last line that was cut off when its process was killed is left out.
  """
  if not path.exists():
    return []
  lines = path.read_text('utf-8').split('\n')
  # What follows the last line feed is empty, or cut off.
  return [json.loads(line) for line in lines[:-1]]


def open_metrics(path: pathlib.Path, step: int) -> TextIO:
  """Opens `metrics.jsonl` to go on after a step; later lines are dropped."""
  kept = [r for r in read_metrics(path) if r['step'] <= step]
  text = ''.join(json.dumps(r) + '\n' for r in kept)
  write_bytes(path, text.encode('utf-8'))
  return open(path, 'a', encoding='utf-8')


def append_metrics(file: TextIO, record: Mapping[str, Any]) -> None:
  """Adds a line to `metrics.jsonl`, there for others to read at once."""
  file.write(json.dumps(record) + '\n')
  file.flush()


def write_loss_plot(
  path: pathlib.Path, records: Sequence[Mapping[str, Any]]
) -> None:
  """Draws the loss of each step, and its running mean, into a PNG file."""
  steps = [r['step'] for r in records]
  losses = [r['loss'] for r in records]
  drawing = figure.Figure(figsize=(7, 4), dpi=120, layout='constrained')
  axes = drawing.subplots()
  axes.plot(steps, losses, color='tab:blue', alpha=0.35, label='step')
  axes.plot(steps, _running_mean(losses), color='tab:blue', label='mean of 10')
  axes.set(xlabel='step', ylabel='loss')
  axes.set_ylim(bottom=0)
  axes.grid(alpha=0.3)
  axes.legend()
  content = io.BytesIO()
  drawing.savefig(content, format='png')
  write_bytes(path, content.getvalue())


def _running_mean(values: Sequence[float], width: int = 10) -> list[float]:
  means = []
  for end in range(1, len(values) + 1):
    window = values[max(0, end - width) : end]
    means.append(sum(window) / len(window))
  return means


def _show(value: Any) -> str:
  return 'not given' if value is None else str(value)


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return 'unknown'
