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
_ROUNDS = flags.DEFINE_integer('rounds', None, 'that count; 5, 3 if quick')

_MARKDOWN = flags.DEFINE_bool(
  'markdown', False, 'print the tables as README.md has them, too'
)

_PACKAGES = ('jax', 'flax', 'qwix', 'optax')
_PEER_PACKAGES = ('torch', 'transformers', 'peft')


def _cpu() -> tuple[str, list[str]]:
  """The processor's name and features."""
  try:
    text = pathlib.Path('/proc/cpuinfo').read_text()
  except FileNotFoundError:
    return platform.processor() or platform.machine(), []
  fields = {}
  for line in text.splitlines():
    name, _, value = line.partition(':')
    fields[name.strip()] = value.strip()
  return fields.get('model name', ''), fields.get('flags', '').split()


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


def _machine(features: list[str]) -> dict[str, Any]:
  return {
    'processor': _cpu()[0],
    'cores': os.cpu_count(),
    'avx512': 'avx512f' in features,
    'bf16_units': _has_bf16(features),
    'python': platform.python_version(),
  }


def _has_bf16(features: list[str]) -> bool:
  return bool({'avx512_bf16', 'amx_bf16'} & set(features))


def _json(result: contest.Result) -> dict[str, Any]:
  return {
    **dataclasses.asdict(result),
    'median': result.median,
    'spread': result.spread,
  }


def main(argv: list[str]) -> None:
  del argv
  began = time.perf_counter()
  console = rich_console.Console(width=None if sys.stdout.isatty() else 140)
  features = _cpu()[1]
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
    bf16_units=accelerated or _has_bf16(features),
    quick=_QUICK.value,
    log=lambda text: print(text, flush=True),
  )
  report: dict[str, Any] = {
    'date': datetime.date.today().isoformat(),
    'machine': _machine(features),
    'versions': {
      'peftlib': importlib.metadata.version('peftlib'),
      **versions,
    },
    'parts': {},
    'rows': [],
  }
  rows: list[bars.Row] = []
  entries: list[bars.Entry] = []
  names = _PART.value or (parts.QUICK if _QUICK.value else parts.PARTS)
  for name, (results, found) in parts.run(field, list(names)):
    rows += found
    entries += [
      bars.Entry(name, key, one.median, one.spread, one.peak_bytes)
      for key, one in results.items()
    ]
    report['parts'][name] = {k: _json(v) for k, v in results.items()}
    report['rows'] = [
      {**dataclasses.asdict(row), 'ratio': row.ratio, 'met': row.met}
      for row in rows
    ]
    report['seconds'] = time.perf_counter() - began
    # After each part: hours of a machine aren't lost with the last one.
    contest.write_json(pathlib.Path(_OUTPUT.value), report)
  console.print(bars.terminal(entries, 'All who took part'))
  console.print(bars.terminal(rows, 'Against the bars'))
  if _MARKDOWN.value:
    print(bars.markdown(entries), bars.markdown(rows), sep='\n\n')
  print(f'{time.perf_counter() - began:.0f} s; figures in {_OUTPUT.value}')


if __name__ == '__main__':
  app.run(main)
