"""What each process of the multi-process tests runs.

`python -m tests.multiprocess.worker SCENARIO PROCESS PORT`
"""

from collections.abc import Callable
import sys

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import peftlib
from tests.peftlib import toy_models
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


def _loss(
  model: nnx.Module, batch: tuple[jax.Array, jax.Array], rngs: nnx.Rngs
) -> tuple[jax.Array, dict[str, jax.Array]]:
  del rngs
  x, y = batch
  return jnp.mean((model(x) - y) ** 2), {}


def train() -> None:
  """Takes LoRA steps on the mesh; each process compares with its own."""
  graphdef, state = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
  rng = np.random.default_rng(1)
  batches = rng.normal(size=(4, 2, 16, toy_models.WIDTH)).astype(np.float32)
  config = peftlib.LoraConfig(module_path='.*(up|down)', rank=4, alpha=8.0)
  graphdef, state = peftlib.inject(
    graphdef, state, config, batches[0, 0], key=jax.random.key(2)
  )
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
  step = peftlib.make_train_step(graphdef, _loss, tx)
  lora = peftlib.trainable_filter(config)

  def run(
    state: nnx.State, place: Callable[[np.ndarray], jax.Array]
  ) -> tuple[list[float], nnx.State]:
    trainable, frozen = transforms.partition(state, lora, ...)
    train_state = peftlib.init_train_state(trainable, tx, key=jax.random.key(3))
    losses = []
    for x, y in batches:
      train_state, metrics = step(train_state, frozen, (place(x), place(y)))
      losses.append(float(metrics['loss']))
    return losses, train_state.trainable

  expected_losses, expected = run(state, jnp.asarray)

  mesh = _mesh(jax.sharding.AxisType.Auto)
  axes = {'up': ('layers', 'embed', 'mlp'), 'down': ('layers', 'mlp', 'embed')}
  named = []
  for path, variable in nnx.to_flat_state(state):
    names = axes.get(str(path[-2])) if len(path) > 1 else None
    if names is not None and path[-1] == 'kernel':
      variable = variable.replace(out_sharding=names)
    named.append((path, variable))
  state = nnx.from_flat_state(named)
  shardings = transforms.named_shardings(
    state, mesh, {'layers': None, 'embed': 'y', 'mlp': 'x'}
  )
  placed = transforms.reshard(state, shardings)
  kernel = placed['layers']['up']['kernel'].get_raw_value()
  assert kernel.sharding.spec == jax.P(None, 'y', 'x'), kernel.sharding
  assert kernel.addressable_shards[0].data.shape == (3, 4, 4)

  def place(rows: np.ndarray) -> jax.Array:
    return transforms.reshard(
      nnx.State({'rows': rows}), jax.NamedSharding(mesh, jax.P('x'))
    )['rows']

  losses, trained = run(placed, place)
  np.testing.assert_allclose(losses, expected_losses, rtol=1e-5, atol=1e-5)
  own = dict(nnx.to_flat_state(trained))
  start = dict(nnx.to_flat_state(state))
  for path, variable in nnx.to_flat_state(expected):
    whole = np.asarray(variable.get_raw_value())
    before = np.asarray(start[path].get_raw_value())
    assert np.abs(whole - before).max() > 1e-3, path
    for shard in own[path].get_raw_value().addressable_shards:
      np.testing.assert_allclose(
        np.asarray(shard.data), whole[shard.index], rtol=1e-5, atol=1e-5
      )


def keys() -> None:
  """Places typed keys and a 4-bit array over both processes, and offloads."""
  mesh = _mesh(jax.sharding.AxisType.Auto)
  seeds = jax.random.split(jax.random.key(5), 8)
  numbers = jnp.arange(-8, 8, dtype=jnp.int4)
  state = nnx.State({'key': nnx.RngKey(seeds), 'w': nnx.Param(numbers)})
  target = jax.NamedSharding(mesh, jax.P('x'))
  result = transforms.reshard(state, target)
  away = transforms.host_offload(result)
  for name in ('key', 'w'):
    assert away[name].get_raw_value().sharding.memory_kind == 'pinned_host'
  for placed in (result, transforms.to_device(away)):
    for name, expected in (
      ('key', np.asarray(jax.random.key_data(seeds))),
      ('w', np.asarray(numbers.astype(jnp.int8))),
    ):
      array = placed[name].get_raw_value()
      assert array.sharding == target, (name, array.sharding)
      for shard in array.addressable_shards:
        own = shard.data
        if name == 'key':
          own = jax.random.key_data(own)
        else:
          assert own.dtype == jnp.int4, own.dtype
          own = own.astype(jnp.int8)
        index = shard.index if name == 'w' else shard.index[:1]
        np.testing.assert_array_equal(np.asarray(own), expected[index])


def fail() -> None:
  """Has the second process fail while the first one waits for it."""
  if jax.process_index() == 1:
    raise RuntimeError('this process fails on purpose')
  mesh = _mesh(jax.sharding.AxisType.Auto)
  array = jax.make_array_from_callback(
    (8,), jax.NamedSharding(mesh, jax.P('x')), lambda _: np.ones(2, np.float32)
  )
  print(transforms.reshard(_state(array), jax.NamedSharding(mesh, jax.P())))


_SCENARIOS = {
  'reshard': reshard,
  'gradient': gradient,
  'train': train,
  'keys': keys,
  'fail': fail,
}


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
