"""Ratios of the transforms to what jax and flax do, in one run on 8 devices.

Run it as a program; it prints a table and fails where a ratio is missed:
`python -m tests.benchmarks.transforms_bench`.
"""

from collections.abc import Callable
import gc
import sys
import time
from typing import Any

from absl import app
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import transforms

_VARIABLES = 2_000
_LIMIT_US = 20.0


def _times(
  *functions: Callable[[], Any], repeats: int = 25
) -> list[list[float]]:
  """Returns sorted seconds of each, run in turns so that load is shared."""
  times: list[list[float]] = [[] for _ in functions]
  for function in functions:
    jax.block_until_ready(function())
  for _ in range(repeats):
    for own, function in zip(times, functions, strict=True):
      gc.collect()
      start = time.perf_counter()
      jax.block_until_ready(function())
      own.append(time.perf_counter() - start)
  return [sorted(own) for own in times]


def _medians(*functions: Callable[[], Any], repeats: int = 25) -> list[float]:
  """What is compared: memory that is fresh or not makes single runs differ."""
  return [own[repeats // 2] for own in _times(*functions, repeats=repeats)]


def _best(function: Callable[[], Any]) -> float:
  """What Python code takes when nothing disturbs it."""
  return _times(function, repeats=15)[0][0]


def _many(shape: tuple[int, ...], spec: Any) -> nnx.State:
  value = jnp.ones(shape)
  return nnx.State(
    {
      f'layer_{index:04}': {
        'w': nnx.Param(value + index).replace(out_sharding=spec)
      }
      for index in range(_VARIABLES)
    }
  )


def _mesh() -> jax.sharding.Mesh:
  auto = jax.sharding.AxisType.Auto
  return jax.make_mesh((4, 2), ('x', 'y'), axis_types=(auto, auto))


def _reshard_large() -> tuple[str, float, float]:
  sharding = jax.NamedSharding(_mesh(), jax.P('x', 'y'))
  array = jnp.asarray(np.ones((4096, 4096), np.float32))
  state = nnx.State({'w': nnx.Param(array)})
  ours, theirs = _medians(
    lambda: transforms.reshard(state, sharding),
    lambda: jax.device_put(array, sharding),
  )
  return 'reshard 64 MB: times as fast as device_put', theirs / ours, 2.0


def _reshard_small() -> tuple[str, float, float]:
  sharding = jax.NamedSharding(_mesh(), jax.P('x', 'y'))
  state = _many((32, 32), None)
  ours, theirs = _medians(
    lambda: transforms.reshard(state, sharding),
    lambda: jax.device_put(state, sharding),
    repeats=7,
  )
  return 'reshard 2,000 x 4 KB: times as fast as device_put', theirs / ours, 1.0


def _scan_axes() -> tuple[str, float, float]:
  state = _many((4, 8), ('layers', 'embed'))
  metadata = {nnx.PARTITION_NAME: 'layers'}

  def flax() -> nnx.State:
    # Its functions change Variables in place, so they need new ones.
    copied = jax.tree.map(lambda x: x, state)
    copied = nnx.spmd.remove_axis(copied, 0, metadata)
    return nnx.spmd.add_axis(copied, 0, metadata)

  def ours() -> nnx.State:
    return transforms.add_scan_axis(transforms.remove_scan_axis(state))

  mine, theirs = _medians(ours, flax)
  return 'remove and add scan axis: times as fast as flax', theirs / mine, 1.0


def _per_variable() -> list[tuple[str, float, float]]:
  stacked = _many((4, 8), ('layers', 'embed'))
  layer = _many((8,), ('layers', 'embed'))
  flat = _many((4, 8), ('embed',))
  placed = transforms.reshard(
    _many((4, 8), ('embed', None)), jax.NamedSharding(_mesh(), jax.P('x'))
  )
  rules = {'embed': 'x', 'layers': None}
  shardings = transforms.named_shardings(placed, _mesh(), rules)
  halves = transforms.partition(
    stacked, lambda path, leaf: path[0] < 'layer_1000', ...
  )
  cases: list[tuple[str, Callable[[], Any]]] = [
    ('remove_scan_axis', lambda: transforms.remove_scan_axis(layer)),
    ('add_scan_axis', lambda: transforms.add_scan_axis(flat)),
    ('move_scan_axis', lambda: transforms.move_scan_axis(stacked, 0, 1)),
    ('select', lambda: transforms.select(stacked, nnx.Param)),
    ('exclude', lambda: transforms.exclude(stacked, nnx.LoRAParam)),
    ('partition', lambda: transforms.partition(stacked, nnx.LoRAParam, ...)),
    ('merge', lambda: transforms.merge(*halves)),
    ('drop_intermediates', lambda: transforms.drop_intermediates(stacked)),
    ('partition_specs', lambda: transforms.partition_specs(stacked, rules)),
    (
      'named_shardings',
      lambda: transforms.named_shardings(stacked, _mesh(), rules),
    ),
    ('reshard, all in place', lambda: transforms.reshard(placed, shardings)),
    (
      'map_variables',
      lambda: transforms.map_variables(lambda leaf: leaf, stacked),
    ),
    ('cast, nothing to do', lambda: transforms.cast(stacked, jnp.float32)),
    ('param_bytes', lambda: transforms.param_bytes(stacked)),
  ]
  return [
    (f'{name}: us a variable', _best(case) / _VARIABLES * 1e6, _LIMIT_US)
    for name, case in cases
  ]


def main(argv: list[str]) -> None:
  """Runs all and prints the table."""
  del argv
  chex.set_n_cpu_devices(8)
  missed = 0
  for name, ratio, least in (_reshard_large(), _reshard_small(), _scan_axes()):
    missed += ratio < least
    print(f'{name:55} {ratio:8.2f}   at least {least}')
  for name, micros, most in _per_variable():
    missed += micros > most
    print(f'{name:55} {micros:8.2f}   at most {most}')
  if missed:
    sys.exit(f'{missed} limits are missed.')


if __name__ == '__main__':
  app.run(main)
