"""Hands shardings of `transforms` to orbax, as a user of both would."""

import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import transforms

chex.set_n_cpu_devices(8)

P = jax.sharding.PartitionSpec
RULES = {'layers': None, 'embed': 'x', 'mlp': 'y'}


def _state() -> nnx.State:
  kernel = jnp.arange(2 * 8 * 4, dtype=jnp.float32).reshape(2, 8, 4)
  return nnx.State(
    {
      'layers': {
        'kernel': nnx.Param(kernel).replace(
          out_sharding=('layers', 'embed', 'mlp')
        ),
        'bias': nnx.Param(jnp.ones((2, 4))).replace(
          out_sharding=('layers', 'mlp')
        ),
      },
      'count': nnx.BatchStat(jnp.int32(7)),
    }
  )


class ShardedCheckpointTest(parameterized.TestCase):
  @parameterized.parameters(
    jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
  )
  def test_restored_onto_a_mesh(self, axis_type):
    mesh = jax.make_mesh((4, 2), ('x', 'y'), axis_types=(axis_type,) * 2)
    state = _state()
    path = pathlib.Path(self.create_tempdir().full_path) / 'state'
    shardings = transforms.named_shardings(state, mesh, RULES)
    specs = transforms.partition_specs(state, RULES)
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(path, nnx.to_pure_dict(state))
      checkpointer.wait_until_finished()
      for placed in (
        nnx.to_pure_dict(shardings),
        jax.tree.map(
          lambda spec: jax.NamedSharding(mesh, spec),
          nnx.to_pure_dict(specs),
          is_leaf=lambda x: isinstance(x, P),
        ),
      ):
        target = jax.tree.map(
          lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
          nnx.to_pure_dict(state),
          placed,
        )
        restored = checkpointer.restore(path, target)
        kernel = restored['layers']['kernel']
        self.assertEqual(
          kernel.sharding, jax.NamedSharding(mesh, P(None, 'x', 'y'))
        )
        self.assertEqual(restored['layers']['bias'].sharding.spec, P(None, 'y'))
        self.assertEqual(restored['count'].sharding.spec, P())
        whole = np.arange(64, dtype=np.float32).reshape(2, 8, 4)
        for shard in kernel.addressable_shards:
          self.assertEqual(shard.data.shape, (2, 2, 2))
          np.testing.assert_array_equal(shard.data, whole[shard.index])
        self.assertEqual(int(restored['count']), 7)


if __name__ == '__main__':
  absltest.main()
