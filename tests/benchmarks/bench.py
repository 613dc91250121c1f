"""Times peftlib side by side with what one would use instead.

usage: python -m tests.benchmarks.bench [--quick] [--part=NAME ...]

Prints the table of README.md and writes all that was measured as JSON.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from typing import Any

from absl import app
from absl import flags
from rich import console as rich_console

from peftlib import bfloat16
from tests.benchmarks import bars
from tests.benchmarks import contest
from tests.benchmarks import material
from tests.benchmarks import parts

_FOLDER = flags.DEFINE_string(
  'folder', 'runs/benchmarks/material', 'what is worked on; made if need be'
)
_INTEROP = flags.DEFINE_string(
  'interop_python',
  '.venv-interop/bin/python',
  'a Python with torch, transformers and peft',
)
_TUNIX = flags.DEFINE_string(
  'tunix_python', '.venv-tunix/bin/python', "a Python with Tunix; '' for none"
)
_OUTPUT = flags.DEFINE_string('output', 'bench.json', 'where the figures go')
_PART = flags.DEFINE_multi_enum(
  'part', None, list(parts.PARTS), 'what to run; all if none is given'
)
_PLATFORM = flags.DEFINE_enum(
  'platform', 'cpu', ['cpu', 'gpu', 'tpu'], 'where all of them compute'
)
_QUICK = flags.DEFINE_bool('quick', False, 'the shorter parts, fewer rounds')
_RESUME = flags.DEFINE_bool(
  'resume', False, 'keep the parts that --output has already'
)
_ROUNDS = flags.DEFINE_integer('rounds', None, 'that count; 5, 3 if quick')

_MARKDOWN = flags.DEFINE_bool(
  'markdown', False, 'print the tables as README.md has them, too'
)

_PACKAGES = ('jax', 'flax', 'qwix', 'optax')
_PEER_PACKAGES = ('torch', 'transformers', 'peft')


def _processor() -> str:
  """The processor's name."""
  try:
    text = pathlib.Path('/proc/cpuinfo').read_text()
  except OSError:
    return platform.processor() or platform.machine()
  names = [x for x in text.splitlines() if x.startswith('model name')]
  return names[0].partition(':')[2].strip() if names else platform.machine()


def _versions(python: str, packages: tuple[str, ...]) -> dict[str, str]:
  program = (
    'import importlib.metadata as m, json, sys;'
    'print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))'
  )
  found = subprocess.run(
    [python, '-c', program, *packages],
    capture_output=True,
    check=True,
    cwd=contest.ROOT,
  )
  versions: dict[str, str] = json.loads(found.stdout)
  return versions


def _machine() -> dict[str, Any]:
  return {
    'processor': _processor(),
    'cores': os.cpu_count(),
    'bf16_units': bfloat16.has_units(),
    'python': platform.python_version(),
  }


def _json(result: contest.Result) -> dict[str, Any]:
  return {
    **dataclasses.asdict(result),
    'median': result.median,
    'spread': result.spread,
  }


def main(argv: list[str]) -> None:
  del argv
  console = rich_console.Console(width=None if sys.stdout.isatty() else 140)
  accelerated = _PLATFORM.value != 'cpu'
  folder = pathlib.Path(_FOLDER.value).absolute()
  material.make(folder)
  versions = _versions(sys.executable, _PACKAGES)
  versions |= _versions(_INTEROP.value, _PEER_PACKAGES)
  if _TUNIX.value and not _QUICK.value:
    versions |= _versions(_TUNIX.value, ('google-tunix',))
  field = parts.Field(
    folder=folder,
    ours=sys.executable,
    interop=_INTEROP.value,
    tunix=None if _QUICK.value else _TUNIX.value or None,
    rounds=_ROUNDS.value or (3 if _QUICK.value else 5),
    platform=_PLATFORM.value,
    bf16_units=accelerated or bfloat16.has_units(),
    quick=_QUICK.value,
    log=lambda text: print(text, flush=True),
  )
  report: dict[str, Any] = {
    'date': datetime.date.today().isoformat(),
    'machine': _machine(),
    'versions': {
      'peftlib': importlib.metadata.version('peftlib'),
      **versions,
    },
    'seconds': 0.0,
    'parts': {},
  }
  output = pathlib.Path(_OUTPUT.value)
  if _RESUME.value and output.exists():
    report |= _resumed(output, report)
  names = _PART.value or (parts.QUICK if _QUICK.value else parts.PARTS)
  missing = [name for name in names if name not in report['parts']]
  spent, began = report['seconds'], time.perf_counter()
  for name, (results, rows) in parts.run(field, missing):
    report['parts'][name] = {
      'rows': [dataclasses.asdict(row) for row in rows],
      'competitors': {k: _json(v) for k, v in results.items()},
    }
    report['seconds'] = spent + time.perf_counter() - began
    # After each part, so that none is lost with a later one.
    contest.write_json(output, report)
  entries, rows = _lines(report)
  console.print(bars.terminal(entries, 'All who took part'))
  console.print(bars.terminal(rows, 'Against the bars'))
  if _MARKDOWN.value:
    print(bars.markdown(entries), bars.markdown(rows), sep='\n\n')
  print(f'{report["seconds"]:.0f} s; figures in {output}')


def _resumed(path: pathlib.Path, report: dict[str, Any]) -> dict[str, Any]:
  """The parts of a report of the same machine and versions."""
  old = json.loads(path.read_text())
  for key in ('machine', 'versions'):
    if old[key] != report[key]:
      raise app.UsageError(
        f'--resume: {path} is of another {key}: {old[key]}, now {report[key]}'
      )
  return {key: old[key] for key in ('seconds', 'parts')}


def _lines(report: dict[str, Any]) -> tuple[list[bars.Entry], list[bars.Row]]:
  """What both tables show of a report."""
  entries, rows = [], []
  for name, part in report['parts'].items():
    rows += [bars.Row(**row) for row in part['rows']]
    entries += [
      bars.Entry(
        name, who, found['median'], found['spread'], found['peak_bytes']
      )
      for who, found in part['competitors'].items()
    ]
  return entries, rows


if __name__ == '__main__':
  app.run(main)
