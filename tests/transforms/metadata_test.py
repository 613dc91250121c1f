"""Reading and replacing the specs of a Variable."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp

import transforms
from transforms import metadata

chex.set_n_cpu_devices(8)

P = jax.P


def _drop_first(entries):
  return entries[1:]


class MetadataTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('tuple', ('a', 'b'), ('b',)),
    ('list', ['a', 'b'], ['b']),
    ('spec', P('a', 'b'), P('b')),
    ('unreduced', P('a', unreduced={'x'}), P(unreduced={'x'})),
    ('reduced', P('a', reduced={'x'}), P(reduced={'x'})),
    ('nested', P(('a', 'c'), ('b', 'd')), P(('b', 'd'))),
  )
  def test_type_is_kept(self, spec, expected):
    for key in metadata.SPEC_KEYS:
      variable = nnx.Param(jnp.ones(2)).replace(**{key: spec}, note=1)
      result = transforms.update_sharding_metadata(variable, _drop_first)
      self.assertEqual(result.get_metadata(key), expected)
      self.assertIs(type(result.get_metadata(key)), type(expected))
      self.assertEqual(result.get_metadata('note'), 1)
      self.assertIs(type(result), nnx.Param)
      self.assertIs(result.get_raw_value(), variable.get_raw_value())
      self.assertEqual(variable.get_metadata(key), spec)

  def test_named_sharding_keeps_mesh_and_memory(self):
    mesh = jax.make_mesh((2, 2), ('x', 'y'))
    sharding = jax.NamedSharding(mesh, P('x', 'y'), memory_kind='pinned_host')
    variable = nnx.Param(jnp.ones(2)).replace(out_sharding=sharding)
    result = transforms.update_sharding_metadata(variable, _drop_first)
    self.assertEqual(
      result.get_metadata('out_sharding'),
      jax.NamedSharding(mesh, P('y'), memory_kind='pinned_host'),
    )

  def test_nothing_to_do(self):
    variable = nnx.Param(jnp.ones(2)).replace(
      out_sharding=('a',), sharding=None
    )
    calls = []

    def same(entries):
      calls.append(entries)
      return entries

    self.assertIs(transforms.update_sharding_metadata(variable, same), variable)
    self.assertEqual(calls, [('a',)])

  def test_keys_that_flax_makes(self):
    # Guards the one assumption on flax: constructors use the first key alone.
    with self.assertWarns(DeprecationWarning):
      variable = nnx.Param(jnp.ones(2), sharding=('a',), eager_sharding=False)
    self.assertEqual(
      metadata.sharding_specs(variable.get_metadata()), {'out_sharding': ('a',)}
    )
    stray = variable.replace(sharding=('b',))
    self.assertEqual(
      metadata.sharding_specs(stray.get_metadata()),
      {'out_sharding': ('a',), 'sharding': ('b',)},
    )

  def test_a_mutable_reference_gets_a_new_one(self):
    variable = nnx.Param(jnp.ones(2), ref=True).replace(out_sharding=('a', 'b'))
    result = transforms.update_sharding_metadata(variable, _drop_first)
    self.assertIsNot(result.get_raw_value(), variable.get_raw_value())
    self.assertEqual(result.get_value().tolist(), [1, 1])

  def test_refusal_of_fn(self):
    def refuse(entries):
      raise ValueError(f'no {len(entries)}.')

    variable = nnx.Param(jnp.ones(2)).replace(sharding=('a',))
    with self.assertRaisesWithLiteralMatch(
      ValueError, "sharding ('a',): no 1."
    ):
      transforms.update_sharding_metadata(variable, refuse)

  def test_spec_of_another_type(self):
    variable = nnx.Param(jnp.ones(2)).replace(out_sharding='embed')
    with self.assertRaisesWithLiteralMatch(
      TypeError,
      "out_sharding 'embed': a spec of type str has no entries; expected a "
      'tuple, a PartitionSpec or a NamedSharding.',
    ):
      transforms.update_sharding_metadata(variable, _drop_first)

  def test_no_variable(self):
    with self.assertRaisesRegex(TypeError, 'expected an nnx.Variable, got int'):
      transforms.update_sharding_metadata(3, _drop_first)

  def test_own_name_and_axis(self):
    plain = nnx.Param(1.0).get_metadata()
    own = {**plain, 'param_scan_axis': 0, nnx.PARTITION_NAME: 'moe'}
    self.assertEqual(metadata.scan_name(plain, 'layers'), 'layers')
    self.assertEqual(metadata.scan_name(own, 'layers'), 'moe')
    self.assertEqual(metadata.scan_axis(plain, 1), 1)
    self.assertEqual(metadata.scan_axis(own, 1), 0)


if __name__ == '__main__':
  absltest.main()
