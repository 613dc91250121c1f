"""What each process of the multi-process tests runs.

`python -m tests.multiprocess.worker SCENARIO PROCESS PORT`
"""

import sys

from flax import nnx
import jax
import numpy as np

import transforms

_PROCESSES = 2
_DEVICES = 4


def _mesh(axis_type: jax.sharding.AxisType) -> jax.sharding.Mesh:
  return jax.make_mesh((4, 2), ('x', 'y'), axis_types=(axis_type, axis_type))


def _check(array: jax.Array, expected: np.ndarray, sharding: object) -> None:
  assert array.sharding == sharding, (array.sharding, sharding)
  assert array.shape == expected.shape, array.shape
  shards = array.addressable_shards
  assert len(shards) == _DEVICES, len(shards)
  for shard in shards:
    assert shard.device.process_index == jax.process_index()
    np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])


def _state(value: object) -> nnx.State:
  return nnx.State({'w': nnx.Param(value).replace(out_sharding=('a', 'b'))})


def reshard() -> None:
  """Places arrays of every kind on a mesh over both processes."""
  numbers = np.arange(64, dtype=np.float32).reshape(8, 8)
  for axis_type in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
    mesh = _mesh(axis_type)
    shardings = transforms.named_shardings(
      _state(numbers), mesh, {'a': 'x', 'b': 'y'}
    )
    target = jax.NamedSharding(mesh, jax.P('x', 'y'))
    assert shardings['w'].get_raw_value() == target

    def place(sharding: jax.NamedSharding) -> jax.Array:
      return jax.make_array_from_callback(
        numbers.shape, sharding, lambda index: numbers[index]
      )

    local = jax.local_devices()[1]
    sources = {
      'numpy': numbers,
      'one device of this process': jax.device_put(numbers, local),
      'replicated': place(jax.NamedSharding(mesh, jax.P())),
      'global': place(jax.NamedSharding(mesh, jax.P('y', 'x'))),
      'global, partly replicated': place(jax.NamedSharding(mesh, jax.P('x'))),
    }
    for name, source in sources.items():
      result = transforms.reshard(_state(source), shardings, donate=True)
      _check(result['w'].get_raw_value(), numbers, target)
      if isinstance(source, jax.Array):
        assert source.is_deleted(), name
      again = transforms.reshard(result, shardings)
      assert again['w'] is result['w'], name

    spread = place(jax.NamedSharding(mesh, jax.P('x')))
    message = 'nothing was raised'
    try:
      transforms.reshard(
        _state(spread), jax.sharding.SingleDeviceSharding(jax.devices()[0])
      )
    except ValueError as error:
      message = str(error)
    assert 'reshard: w of shape (8,8): it is spread over' in message, message


def gradient() -> None:
  """Computes a gradient on the mesh; each process compares with its own."""
  mesh = _mesh(jax.sharding.AxisType.Auto)
  rng = np.random.default_rng(0)
  weights = rng.normal(size=(8, 8)).astype(np.float32)
  rows = rng.normal(size=(16, 8)).astype(np.float32)

  def loss(state: nnx.State, rows: jax.Array) -> jax.Array:
    return jax.numpy.mean(jax.numpy.tanh(rows @ state['w'][...]) ** 2)

  grad = jax.jit(jax.grad(loss))
  expected = np.asarray(grad(_state(weights), rows)['w'][...])
  state = _state(weights)
  shardings = transforms.named_shardings(state, mesh, {'a': 'x', 'b': 'y'})
  batch = transforms.reshard(
    nnx.State({'rows': rows}), jax.NamedSharding(mesh, jax.P('x'))
  )
  actual = grad(transforms.reshard(state, shardings), batch['rows'])
  for shard in actual['w'].get_raw_value().addressable_shards:
    np.testing.assert_allclose(
      np.asarray(shard.data), expected[shard.index], rtol=1e-5, atol=1e-6
    )


def fail() -> None:
  """Has the second process fail while the first one waits for it."""
  if jax.process_index() == 1:
    raise RuntimeError('this process fails on purpose')
  mesh = _mesh(jax.sharding.AxisType.Auto)
  array = jax.make_array_from_callback(
    (8,), jax.NamedSharding(mesh, jax.P('x')), lambda _: np.ones(2, np.float32)
  )
  print(transforms.reshard(_state(array), jax.NamedSharding(mesh, jax.P())))


_SCENARIOS = {'reshard': reshard, 'gradient': gradient, 'fail': fail}


def main(argv: list[str]) -> None:
  """Joins the other process and runs a scenario."""
  scenario, process, port = argv[1], int(argv[2]), argv[3]
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', _DEVICES)
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(
    f'localhost:{port}',
    _PROCESSES,
    process,
    initialization_timeout=60,
    heartbeat_timeout_seconds=10,
    shutdown_timeout_seconds=20,
  )
  assert jax.device_count() == _PROCESSES * _DEVICES
  _SCENARIOS[scenario]()
  print(f'process {process} is done')


if __name__ == '__main__':
  main(sys.argv)
