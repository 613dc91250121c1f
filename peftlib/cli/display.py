"""What is shown: tables, and the progress of training."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import os
from typing import Any, NamedTuple, Protocol

from flax import nnx
import jax
import jax.numpy as jnp
from rich import box
from rich import console as rich_console
from rich import progress
from rich import table as rich_table
from rich import text as rich_text

from peftlib.cli import evaluation


class ModuleRow(NamedTuple):
  """What is trained in one module, and what isn't."""

  module: str
  shape: str
  trainable: int
  frozen: int
  size: int


class Reporter(Protocol):
  """Shows a step; called after each."""

  def __call__(self, record: Mapping[str, Any]) -> None:
    """Shows the step's record, as it is in `metrics.jsonl`."""


def make_console() -> rich_console.Console:
  """A console on standard output; 100 columns where that is no terminal."""
  console = rich_console.Console(highlight=False)
  if not console.is_terminal and 'COLUMNS' not in os.environ:
    console = rich_console.Console(highlight=False, width=100)
  return console


def say(console: rich_console.Console, text: str) -> None:
  """Prints a sentence as it is, so that a path in it can be copied."""
  console.print(text, soft_wrap=True, markup=False)


def num_bytes(value: Any) -> int:
  """Bytes that an array, or one like an abstract one, takes on its device."""
  if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
      value = jax.random.key_data(value)
    return int(value.on_device_size_in_bytes())
  if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
    return int(value.size) * value.dtype.itemsize
  # `iinfo` knows the bits of int4, whose itemsize is that of a whole byte.
  bits = value.dtype.itemsize * 8
  if jnp.issubdtype(value.dtype, jnp.integer):
    bits = jnp.iinfo(value.dtype).bits
  return int(value.size) * bits // 8


def tree_bytes(tree: Any) -> int:
  """Bytes of all arrays of a tree, concrete or abstract."""
  return sum(num_bytes(leaf) for leaf in jax.tree.leaves(tree))


def module_rows(
  trainable: nnx.State[Any, Any], frozen: nnx.State[Any, Any]
) -> list[ModuleRow]:
  """Sums up what each module holds in which something is trained.

  Args:
    trainable: What is trained, arrays or abstract values.
    frozen: All else.

  Returns:
    A row for each such module, in the order of their paths, and one, named '',
    for the rest of the model.
  """
  modules: dict[str, list[tuple[tuple[Any, ...], Any, bool]]] = {}
  trained = [(p, v, True) for p, v in nnx.to_flat_state(trainable)]
  owners = {path[:-1] for path, _, _ in trained}
  for path, variable, is_trained in [
    *trained,
    *((p, v, False) for p, v in nnx.to_flat_state(frozen)),
  ]:
    owner = next(
      (path[:n] for n in range(len(path)) if path[:n] in owners), None
    )
    name = '' if owner is None else '/'.join(map(str, owner))
    modules.setdefault(name, []).append((path, variable, is_trained))
  names = sorted(modules, key=lambda name: (name == '', name))
  return [_module_row(name, modules[name]) for name in names]


def _module_row(
  name: str, variables: Sequence[tuple[tuple[Any, ...], Any, bool]]
) -> ModuleRow:
  counts = {True: 0, False: 0}
  size = 0
  weights = []
  for path, variable, is_trained in variables:
    for leaf in jax.tree.leaves(variable):
      size += num_bytes(leaf)
    if not isinstance(variable, nnx.Param):
      continue
    value = variable.get_raw_value()
    # Scales and zero points describe parameters, they are none.
    if path[-1] in ('scale', 'zero_point') and 'array' in path:
      continue
    counts[is_trained] += int(value.size)
    if not isinstance(variable, nnx.LoRAParam):
      weights.append(value)
  largest = max(weights, key=lambda v: v.size, default=None)
  shape = ''
  if name and largest is not None:
    dims = ' x '.join(map(str, largest.shape))
    shape = f'{dims} {largest.dtype}'
  return ModuleRow(name, shape, counts[True], counts[False], size)


def module_table(rows: Sequence[ModuleRow]) -> rich_table.Table:
  """The table of `module_rows`, with its sums."""
  table = rich_table.Table(box=box.SIMPLE, title='What is trained')
  table.add_column('module', overflow='fold')
  table.add_column('weight', overflow='fold')
  for name in ('trainable', 'frozen', 'bytes'):
    table.add_column(name, justify='right', no_wrap=True)
  for row in rows:
    table.add_row(
      rich_text.Text(row.module or '(the rest)'),
      row.shape,
      f'{row.trainable:,}',
      f'{row.frozen:,}',
      size(row.size),
    )
  table.add_section()
  table.add_row(
    'all',
    '',
    f'{sum(r.trainable for r in rows):,}',
    f'{sum(r.frozen for r in rows):,}',
    size(sum(r.size for r in rows)),
  )
  return table


def size(count: int) -> str:
  """Bytes for people: '12.3 MB'."""
  amount = float(count)
  for unit in ('B', 'kB', 'MB'):
    if amount < 1000:
      return f'{amount:.0f} B' if unit == 'B' else f'{amount:.1f} {unit}'
    amount /= 1000
  return f'{amount:.2f} GB'


def figures_table(title: str, figures: Mapping[str, str]) -> rich_table.Table:
  """A table of names and values."""
  table = rich_table.Table(box=box.SIMPLE, title=title, show_header=False)
  table.add_column(no_wrap=True)
  table.add_column(overflow='fold')
  for name, value in figures.items():
    table.add_row(name, rich_text.Text(value))
  return table


def match_table(
  before: Sequence[evaluation.Result] | None,
  after: Sequence[evaluation.Result],
) -> rich_table.Table:
  """Exact match of each file before and after."""
  table = rich_table.Table(box=box.SIMPLE, title='Exact match')
  table.add_column('file', overflow='fold')
  for name in ('rows', 'before', 'after'):
    table.add_column(name, justify='right', no_wrap=True)
  for i, new in enumerate(after):
    table.add_row(
      rich_text.Text(new.path),
      str(len(new.answers)),
      '-' if before is None else f'{before[i].exact_match:.1%}',
      f'{new.exact_match:.1%}',
    )
  return table


def examples_table(
  before: Sequence[evaluation.Result] | None,
  after: Sequence[evaluation.Result],
  count: int = 3,
) -> rich_table.Table:
  """A few questions, of all files in turn, with the answers to them."""
  table = rich_table.Table(box=box.SIMPLE, title='Examples', show_header=False)
  table.add_column(no_wrap=True)
  table.add_column(overflow='fold')
  shown = [
    (file, i)
    for i in range(count)
    for file in range(len(after))
    if i < len(after[file].answers)
  ]
  for file, i in shown[:count]:
    lines = {'asked': after[file].texts[i]}
    if before is not None:
      lines['before'] = shorten(before[file].given[i])
    lines['after'] = shorten(after[file].given[i])
    lines['right'] = after[file].answers[i]
    for name, value in lines.items():
      table.add_row(name, rich_text.Text(value))
    table.add_section()
  return table


def shorten(text: str, width: int = 300) -> str:
  """A model's text in one line: cut, and with nothing that moves the cursor."""
  flat = ' '.join(text.split())
  flat = ''.join(
    c if c.isprintable() else '\N{REPLACEMENT CHARACTER}' for c in flat
  )
  return flat if len(flat) <= width else f'{flat[: width - 3]}...'


@contextlib.contextmanager
def training_progress(
  console: rich_console.Console, *, start: int, steps: int, every: int
) -> Iterator[Reporter]:
  """Shows training: a bar on a terminal, otherwise a line every few steps.

  Args:
    console: Where to.
    start: Steps done already.
    steps: Steps in all.
    every: How many steps there are to a line.

  Yields:
    What to call after each step.
  """
  if console.is_terminal:
    with _bar(console, start, steps) as report:
      yield report
  else:
    yield _lines(console, start, steps, every)


def _lines(
  console: rich_console.Console, start: int, steps: int, every: int
) -> Reporter:
  seconds: list[float] = []

  def report(record: Mapping[str, Any]) -> None:
    seconds.append(record['seconds'])
    step = record['step']
    if step % every and step not in (start + 1, steps):
      return
    recent = seconds[-every:]
    left = (steps - step) * sum(recent) / len(recent)
    console.print(
      f'step {step}/{steps}  loss {record["loss"]:.4f}'
      f'  {record["tokens_per_second"]:.0f} tokens/s'
      f'  {duration(left)} left'
    )

  return report


@contextlib.contextmanager
def _bar(
  console: rich_console.Console, start: int, steps: int
) -> Iterator[Reporter]:
  with progress.Progress(
    progress.TextColumn('training'),
    progress.BarColumn(),
    progress.MofNCompleteColumn(),
    progress.TextColumn('loss {task.fields[loss]}'),
    progress.TextColumn('{task.fields[speed]} tokens/s'),
    progress.TimeRemainingColumn(),
    console=console,
  ) as bar:
    task = bar.add_task('', total=steps, completed=start, loss='-', speed='-')

    def report(record: Mapping[str, Any]) -> None:
      bar.update(
        task,
        advance=1,
        loss=f'{record["loss"]:.4f}',
        speed=f'{record["tokens_per_second"]:.0f}',
      )

    yield report


def duration(seconds: float) -> str:
  """Seconds for people: '1:05'."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{rest:02}' if hours else f'{minutes}:{rest:02}'


def evaluation_table(figures: Sequence[Mapping[str, Any]]) -> rich_table.Table:
  """Loss and exact match of each file.

  Args:
    figures: Mappings of `file`, `rows`, `loss_tokens`, `loss` and
      `exact_match`, which is None where rows have no answers.
  """
  table = rich_table.Table(box=box.SIMPLE, title='Evaluation')
  table.add_column('file', overflow='fold')
  for name in ('rows', 'learnt tokens', 'loss', 'exact match'):
    table.add_column(name, justify='right', no_wrap=True)
  for record in figures:
    match = record['exact_match']
    table.add_row(
      rich_text.Text(record['file']),
      str(record['rows']),
      f'{record["loss_tokens"]:,}',
      f'{record["loss"]:.4f}',
      '-' if match is None else f'{match:.1%}',
    )
  return table
