from absl.testing import absltest
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlib.cli import errors
from peftlib.cli import meshes

chex.set_n_cpu_devices(8)

P = jax.sharding.PartitionSpec


class MeshesTest(absltest.TestCase):
  def test_mesh(self):
    mesh = meshes.make_mesh('fsdp=2,data=3')
    self.assertEqual(dict(mesh.shape), {'fsdp': 2, 'data': 3})
    self.assertEqual(set(mesh.axis_types), {jax.sharding.AxisType.Auto})
    self.assertIsNone(meshes.make_mesh(None))

  def test_too_few_devices(self):
    with self.assertRaises(errors.UserError) as caught:
      meshes.make_mesh('fsdp=3,data=3')
    self.assertEqual(
      str(caught.exception),
      '--mesh=fsdp=3,data=3: needs 9 devices; there are 8 (cpu)',
    )

  def test_longest_dimension_that_fits_is_split(self):
    mesh = meshes.make_mesh('fsdp=4,data=2')
    state = nnx.State(
      {
        'w': nnx.Param(jnp.arange(48.0).reshape(2, 3, 8)),
        'odd': nnx.Param(jnp.ones((3, 5))),
        'scalar': nnx.Param(jnp.ones(())),
        'packed': nnx.Param(jnp.ones((8, 12), jnp.int4)),
      }
    )
    out = meshes.shard_state(state, mesh)
    specs = {k: out[k].get_raw_value().sharding.spec for k in state}
    self.assertEqual(
      specs,
      {
        'w': P(None, None, 'fsdp'),
        'odd': P(None, None),
        'scalar': P(),
        'packed': P(None, 'fsdp'),
      },
    )
    chex.assert_trees_all_equal(out, state)
    self.assertIs(meshes.shard_state(state, None), state)

  def test_data_alone_leaves_weights_whole(self):
    mesh = meshes.make_mesh('data=2')
    out = meshes.shard_state(nnx.State({'w': nnx.Param(jnp.ones(8))}), mesh)
    self.assertEqual(out['w'].get_raw_value().sharding.spec, P(None))

  def test_rest_is_replicated(self):
    mesh = meshes.make_mesh('fsdp=4')
    placed = jax.device_put(
      jnp.ones(4), jax.sharding.NamedSharding(mesh, P('fsdp'))
    )
    out = meshes.replicate_rest((placed, jnp.ones(2), jax.random.key(0)), mesh)
    self.assertIs(out[0], placed)
    self.assertEqual([x.sharding.spec for x in out[1:]], [P(), P()])
    self.assertLen(out[1].devices(), 4)
    self.assertEqual(meshes.replicate_rest(1, None), 1)

  def test_batch(self):
    mesh = meshes.make_mesh('fsdp=2,data=2')
    batch = {'tokens': np.arange(24).reshape(8, 3)}
    out = meshes.shard_batch(batch, mesh)['tokens']
    self.assertEqual(out.sharding.spec, P(('fsdp', 'data')))
    self.assertEqual({s.data.shape for s in out.addressable_shards}, {(2, 3)})
    np.testing.assert_array_equal(out, batch['tokens'])
    self.assertIs(meshes.shard_batch(batch, None)['tokens'], batch['tokens'])


if __name__ == '__main__':
  absltest.main()
