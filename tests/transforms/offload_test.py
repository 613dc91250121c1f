"""Moving leaves to pinned host memory and back."""

import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import transforms

chex.set_n_cpu_devices(8)


def _mesh():
  auto = jax.sharding.AxisType.Auto
  return jax.make_mesh((2,), ('x',), axis_types=(auto,))


def _state():
  sharding = jax.NamedSharding(_mesh(), jax.P('x'))
  return nnx.State(
    {
      'w': nnx.Param(jax.device_put(np.arange(8.0), sharding)),
      'lora': nnx.LoRAParam(jnp.ones(3)),
      'keys': nnx.Variable(jax.random.split(jax.random.key(0), 2)),
      'host': nnx.BatchStat(np.ones(2, np.float32)),
    }
  )


def _kinds(state):
  return {
    key: leaf.get_raw_value().sharding.memory_kind
    for key, leaf in state.items()
    if isinstance(leaf.get_raw_value(), jax.Array)
  }


class OffloadTest(parameterized.TestCase):
  def test_there_and_back(self):
    state = _state()
    away = transforms.host_offload(state)
    self.assertEqual(set(_kinds(away).values()), {'pinned_host'})
    self.assertLen(_kinds(away), 4)
    self.assertEqual(away['w'].get_raw_value().sharding.spec, jax.P('x'))
    back = transforms.to_device(away)
    self.assertEqual(set(_kinds(back).values()), {'device'})
    np.testing.assert_array_equal(back['w'][...], np.arange(8.0))
    self.assertEqual(
      back['w'].get_raw_value().sharding, state['w'].get_raw_value().sharding
    )

  def test_selected_alone(self):
    state = _state()
    away = transforms.host_offload(
      state, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    )
    self.assertEqual(
      _kinds(away), {'w': 'pinned_host', 'lora': 'device', 'keys': 'device'}
    )
    self.assertIs(away['lora'], state['lora'])
    self.assertIs(transforms.to_device(away)['lora'], state['lora'])

  def test_under_jit(self):
    state = transforms.select(_state(), nnx.Param)
    away = jax.jit(transforms.host_offload)(state)
    self.assertEqual(set(_kinds(away).values()), {'pinned_host'})
    back = jax.jit(transforms.to_device)(away)
    self.assertEqual(set(_kinds(back).values()), {'device'})
    np.testing.assert_array_equal(back['w'][...], np.arange(8.0))

  def test_abstract(self):
    sharding = jax.NamedSharding(_mesh(), jax.P('x'))
    value = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    away = transforms.host_offload(nnx.State({'w': nnx.Param(value)}))
    self.assertEqual(_kinds_of(away['w']), 'pinned_host')
    with self.assertRaisesRegex(TypeError, 'w of shape .*is in no memory'):
      transforms.host_offload(
        nnx.State({'w': nnx.Param(jax.ShapeDtypeStruct((8,), jnp.float32))})
      )

  def test_backend_without_host_memory(self):
    device = types.SimpleNamespace(
      platform='toy',
      addressable_memories=lambda: [types.SimpleNamespace(kind='device')],
    )
    state = nnx.State({'w': nnx.Param(np.ones(2))})
    with mock.patch.object(jax, 'local_devices', return_value=[device]):
      with self.assertWarns(UserWarning) as warned:
        result = transforms.host_offload(state)
    self.assertEqual(
      str(warned.warning),
      "host_offload: the toy backend has no memory of kind 'pinned_host'; "
      'everything stays where it is.',
    )
    self.assertIs(result['w'], state['w'])


def _kinds_of(variable):
  return variable.get_raw_value().sharding.memory_kind


if __name__ == '__main__':
  absltest.main()
