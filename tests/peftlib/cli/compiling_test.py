from unittest import mock

from absl.testing import absltest
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import peftlib
from peftlib.cli import compiling

chex.set_n_cpu_devices(8)

P = jax.sharding.PartitionSpec
KEY = jax.random.key(0)


def _step_and_states():
  x = jnp.ones((2, 8))
  config = peftlib.LoraConfig(rank=2)
  graphdef, state = peftlib.inject(
    *nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0))), config, x, key=KEY
  )
  trainable, frozen = nnx.split_state(
    state, peftlib.trainable_filter(config), ...
  )
  tx = optax.adam(1e-2)
  train_state = peftlib.init_train_state(trainable, tx, key=KEY)
  traced = []

  def loss(model, batch, rngs):
    del rngs
    traced.append(batch['x'].shape)
    return jnp.mean(model(batch['x']) ** 2), {}

  return (
    peftlib.make_train_step(graphdef, loss, tx, donate=False),
    train_state,
    frozen,
    traced,
  )


class StepTest(absltest.TestCase):
  def test_one_compilation_a_shape(self):
    jitted, train_state, frozen, traced = _step_and_states()
    step = compiling.Step(jitted)
    self.assertEqual(step.seconds, 0.0)
    seconds = []
    for rows in (2, 3, 2, 3):
      batch = {'x': np.ones((rows, 8), np.float32)}
      step(train_state, frozen, batch)
      seconds.append(step.seconds)
    self.assertEqual(traced, [(2, 8), (3, 8)])
    self.assertGreater(seconds[0], 0.0)
    self.assertGreater(seconds[1], seconds[0])
    self.assertEqual(seconds[1:], [seconds[1]] * 3)

  def test_freed_memory_is_given_back_after_compiling_and_at_times(self):
    jitted, train_state, frozen, _ = _step_and_states()
    batch = {'x': np.ones((2, 8), np.float32)}
    with (
      mock.patch.object(compiling.malloc, 'trim') as trim,
      mock.patch.object(compiling.time, 'monotonic') as clock,
    ):
      clock.return_value = 0.0
      step = compiling.Step(jitted)
      counts = []
      for now in (0.0, 9.0, 10.5, 20.0, 20.6):
        clock.return_value = now
        step(train_state, frozen, batch)
        counts.append(trim.call_count)
    self.assertEqual(counts, [1, 1, 2, 2, 3])

  def test_the_result_is_the_jitted_step_s(self):
    jitted, train_state, frozen, _ = _step_and_states()
    batch = {'x': np.arange(16, dtype=np.float32).reshape(2, 8)}
    chex.assert_trees_all_equal(
      compiling.Step(jitted)(train_state, frozen, batch),
      jitted(train_state, frozen, batch),
    )

  def test_the_new_state_is_where_the_old_one_was(self):
    jitted, train_state, frozen, _ = _step_and_states()
    mesh = jax.make_mesh((8,), ('x',))
    rows = jax.sharding.NamedSharding(mesh, P('x'))
    whole = jax.sharding.NamedSharding(mesh, P())
    place = lambda x: jax.device_put(
      x, rows if x.ndim and x.shape[0] == 8 else whole
    )
    train_state = jax.tree.map(place, train_state)
    frozen = jax.device_put(frozen, whole)
    batch = jax.device_put({'x': np.ones((2, 8), np.float32)}, whole)
    new, _ = compiling.Step(jitted)(train_state, frozen, batch)
    found = jax.tree.map(lambda x: x.sharding, new)
    self.assertEqual(
      jax.tree.leaves(found),
      jax.tree.leaves(jax.tree.map(lambda x: x.sharding, train_state)),
    )
    self.assertIn(rows, jax.tree.leaves(found))


if __name__ == '__main__':
  absltest.main()
