"""The side of a benchmark that works: one process a competitor.

Imports nothing but the standard library, since peers run it in environments of
their own. The other side is `contest.py`.
"""

from collections.abc import Callable, Iterator, Mapping
import json
import os
import resource
import sys
import time
from typing import Any

Spec = dict[str, Any]
Work = Callable[[], dict[str, Any]]


def peak_bytes() -> int:
  """The most memory that this process has held so far."""
  try:
    with open('/proc/self/status', encoding='ascii') as status:
      fields = dict(line.split(':', 1) for line in status)
    return int(fields['VmHWM'].split()[0]) * 1024
  except (FileNotFoundError, KeyError):
    # What a process was before `exec` counts here, so this comes second.
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def jax_peak(device: Any) -> int | None:
  """The most memory of a JAX device so far; None where it is the host's."""
  stats = device.memory_stats()
  return stats and stats['peak_bytes_in_use']


def batches(tokens: Any, spec: Spec) -> Iterator[Any]:
  """Cuts a row of tokens into what the steps of all competitors see.

  Args:
    tokens: Integers (N,), an array of any library.
    spec: `rows` and `length` of a step's inputs.

  Yields:
    (rows, length + 1): the last column only as a target.
  """
  shape = (spec['rows'], spec['length'] + 1)
  size = shape[0] * shape[1]
  for at in range(0, len(tokens) - size + 1, size):
    yield tokens[at : at + size].reshape(shape)


def serve(
  cases: Mapping[str, Callable[[Spec], Work]],
  device_peak: Callable[[], int | None] | None = None,
) -> None:
  """Prepares what argv[1] says; works once for each line of stdin.

  Answers on stdout, a line of JSON each: when it is ready, with the seconds
  that preparing took, and those since the process was started; after each work,
  with its seconds and what it returned; at the end of stdin with the peak
  memory.

  Args:
    cases: What makes the work of a spec, by its field `case`. The work ends
      when everything has been computed; `seconds` among what it returns
      replaces what is measured here.
    device_peak: Peak memory of the accelerator, which counts instead of the
      host's where there is one.
  """
  answers = os.fdopen(os.dup(1), 'w')
  # Whatever libraries print is not an answer.
  os.dup2(2, 1)

  def answer(**fields: Any) -> None:
    print(json.dumps(fields), file=answers, flush=True)

  start = time.perf_counter()
  spec = json.loads(sys.argv[1])
  work = cases[spec['case']](spec)
  answer(ready=time.perf_counter() - start, since_exec=time.time() - _started())
  for _ in sys.stdin:
    start = time.perf_counter()
    fields = work()
    answer(**{'seconds': time.perf_counter() - start, **fields})
  on_device = device_peak() if device_peak is not None else None
  answer(peak_bytes=peak_bytes() if on_device is None else on_device)


def _started() -> float:
  """When the parent started this process, seconds of `time.time`."""
  return float(os.environ['BENCHMARK_STARTED'])
