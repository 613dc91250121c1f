"""How a step's time and memory grow: fits exponents, draws log-log plots.

usage: python -m tests.benchmarks.growth [--axis=NAME ...]

SmolLM2-135M, LoRA r=16, as in `parts.py`; one thing is varied at a time.
"""

from collections.abc import Sequence
import dataclasses
import os
import pathlib
import sys
from typing import Any

from absl import app
from absl import flags
from matplotlib import figure as figure_lib
import numpy as np
from rich import console as rich_console
from rich import table as rich_table

from tests.benchmarks import contest
from tests.benchmarks import material
from tests.benchmarks import parts


@dataclasses.dataclass(frozen=True)
class Axis:
  """What is varied.

  Attributes:
    field: Its field in the spec.
    values: From small to large.
    spec: The rest of the spec.
  """

  field: str
  values: tuple[int, ...]
  spec: dict[str, Any]


_STEP = {
  'case': 'growth',
  'rows': 1,
  'length': 128,
  'rank': 16,
  'layers': 30,
  'devices': 1,
}
AXES = {
  'length': Axis('length', (128, 256, 512, 1024, 2048), _STEP),
  'rank': Axis('rank', (4, 16, 64, 256), {**_STEP, 'rows': 4}),
  'layers': Axis('layers', (6, 12, 18, 24, 30), {**_STEP, 'rows': 4}),
  'adapters': Axis(
    'adapters',
    (1, 2, 4, 8, 16, 32),
    {'case': 'adapters', 'rows': 1, 'length': 64},
  ),
  'devices': Axis('devices', (1, 2, 4, 8), {**_STEP, 'rows': 8}),
}

_FOLDER = flags.DEFINE_string(
  'folder', 'runs/benchmarks/material', 'what is worked on; made if need be'
)
_AXIS = flags.DEFINE_multi_enum(
  'axis', None, list(AXES), 'what to vary; all if none is given'
)
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'that count')
_OUTPUT = flags.DEFINE_string(
  'output', 'runs/benchmarks', 'folder for growth.json and growth.png'
)


def exponent(values: Sequence[float], measured: Sequence[float]) -> float:
  """The power of `values` that `measured` grows with: least squares of logs.

  Args:
    values: What was varied.
    measured: Time or memory, as many.
  """
  return float(np.polyfit(np.log(values), np.log(measured), 1)[0])


def measure(axis: Axis, folder: pathlib.Path, rounds: int) -> dict[str, Any]:
  """Medians of seconds, and peak memory, for each value of an axis."""
  seconds, peaks = [], []
  for value in axis.values:
    competitor = parts.our_process(
      f'{axis.field} {value}',
      sys.executable,
      'cpu',
      {
        'folder': str(folder),
        'learning_rate': parts.LEARNING_RATE,
        **axis.spec,
        axis.field: value,
      },
      {
        'XLA_FLAGS': '--xla_force_host_platform_device_count='
        f'{value if axis.field == "devices" else 1}'
      },
    )
    results = contest.run([competitor], rounds + 1, log=print)
    (found,) = results.values()
    seconds.append(found.median)
    peaks.append(found.peak_bytes)
  values = list(axis.values)
  # What doesn't grow hides the exponent of what does, at the end the least.
  tail = len(values) // 2
  return {
    'values': values,
    'seconds': seconds,
    'peak_bytes': peaks,
    'exponent_time': exponent(values, seconds),
    'exponent_time_tail': exponent(values[tail:], seconds[tail:]),
    'exponent_memory': exponent(values, peaks),
    'exponent_memory_tail': exponent(values[tail:], peaks[tail:]),
  }


def draw(found: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
  """Draws time and memory over each axis, both logarithmic."""
  figure = figure_lib.Figure(figsize=(3 * len(found), 6), layout='constrained')
  axes = figure.subplots(2, len(found), squeeze=False)
  for column, (name, one) in enumerate(found.items()):
    for row, (key, unit, scale) in enumerate(
      (('seconds', 's a step', 1.0), ('peak_bytes', 'peak memory, GB', 1e9))
    ):
      plot = axes[row][column]
      power = one['exponent_time' if key == 'seconds' else 'exponent_memory']
      plot.loglog(one['values'], np.array(one[key]) / scale, 'o-')
      plot.set(xlabel=name, ylabel=unit, title=f'exponent {power:.2f}')
      plot.set_xticks(one['values'], map(str, one['values']), minor=False)
      plot.grid(which='both', alpha=0.3)
  figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
  del argv
  folder = pathlib.Path(_FOLDER.value).absolute()
  output = pathlib.Path(_OUTPUT.value)
  material.make(folder)
  os.makedirs(output, exist_ok=True)
  found = {}
  for name in _AXIS.value or AXES:
    found[name] = measure(AXES[name], folder, _ROUNDS.value)
    contest.write_json(output / 'growth.json', found)
  draw(found, output / 'growth.png')
  table = rich_table.Table(
    *('varied', 'values', 's a step', 'GB', 'exponent of time', 'of memory')
  )
  for name, one in found.items():
    table.add_row(
      name,
      ', '.join(map(str, one['values'])),
      ', '.join(f'{x:.3g}' for x in one['seconds']),
      ', '.join(f'{x / 1e9:.3g}' for x in one['peak_bytes']),
      f'{one["exponent_time"]:.2f} (last: {one["exponent_time_tail"]:.2f})',
      f'{one["exponent_memory"]:.2f} (last: {one["exponent_memory_tail"]:.2f})',
    )
  rich_console.Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == '__main__':
  app.run(main)
