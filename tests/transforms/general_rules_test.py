"""What holds for every State transformation, by one parameterised body."""

import gc

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from qwix._src.core import qarray

import transforms

chex.set_n_cpu_devices(8)

P = jax.P
_SPEC_KEYS = ('out_sharding', 'sharding', 'sharding_names')


class Special(nnx.Param):
  """A Variable class that transformations have to keep."""


def _hook(variable, value):
  del variable
  return value


def _quantized(layers):
  # Extents differ along the same axes: 2 tiles of 4 for the scale.
  return qarray.QArray(
    qvalue=jnp.ones((*layers, 8, 6), jnp.int4),
    scale=jnp.ones((*layers, 2, 6)),
    zero_point=jnp.ones((*layers, 1, 6), jnp.int4),
  )


def _state(*layers):
  """A State with values of all kinds, stacked over `layers`."""
  names = ('layers',) * len(layers)
  key = jax.random.key(0)
  variables = {
    'tuple': nnx.Param(jnp.ones((*layers, 8, 6))).replace(
      out_sharding=(*names, 'embed', 'mlp')
    ),
    'spec': nnx.LoRAParam(jnp.ones((*layers, 8, 6), jnp.bfloat16)).replace(
      out_sharding=P(*names, 'embed', None)
    ),
    'none': nnx.BatchStat(jnp.ones((*layers, 8))).replace(out_sharding=None),
    'old_key': nnx.Param(jnp.ones((*layers, 8))).replace(
      sharding_names=(*names, 'embed')
    ),
    'special': Special(jnp.ones((*layers, 8))).replace(
      on_get_value=_hook, note='kept', out_sharding=P(*names, 'embed')
    ),
    'key': nnx.Variable(jax.random.split(key, (*layers, 8))),
    'int4': nnx.Param(jnp.ones((*layers, 8, 6), jnp.int4)),
    'uint4': nnx.Param(jnp.ones((*layers, 8, 6), jnp.uint4)),
    'fp8': nnx.Param(jnp.ones((*layers, 8), jnp.float8_e4m3fn)),
    'size_0': nnx.Param(jnp.ones((*layers, 8, 0))),
    'quantized': nnx.Param(_quantized(layers)).replace(
      out_sharding=(*names, 'embed', 'mlp')
    ),
    'sown': nnx.Intermediate((jnp.ones((*layers, 8)),)),
    'raw': jnp.ones((*layers, 8)),
  }
  if not layers:
    variables['scalar'] = nnx.Variable(jnp.asarray(3))
  return nnx.State({'block': variables})


def _auto_mesh():
  auto = jax.sharding.AxisType.Auto
  return jax.make_mesh((2, 2), ('x', 'y'), axis_types=(auto, auto))


_RULES = (('embed', 'x'), ('mlp', 'y'))


def _reshard(state):
  return transforms.reshard(
    state, transforms.named_shardings(state, _auto_mesh(), _RULES)
  )


def _same_value(variable):
  return variable.replace(variable.get_raw_value())


_TRANSFORMS = (
  (
    'remove_scan_axis',
    transforms.remove_scan_axis,
    # As in the body of a scan: the values have lost the axis.
    lambda: jax.tree.map(lambda x: x[0], _state(3)),
  ),
  ('add_scan_axis', transforms.add_scan_axis, lambda: _state(3)),
  (
    'add_scan_axis_elsewhere',
    lambda state: transforms.add_scan_axis(state, 'stack', 1),
    lambda: jax.tree.map(
      lambda x: x[None],
      transforms.exclude(_state(), nnx.PathContains('scalar')),
    ),
  ),
  (
    'move_scan_axis',
    lambda state: transforms.move_scan_axis(state, 0, 1),
    lambda: _state(3),
  ),
  (
    'stack_layers',
    lambda state: transforms.stack_layers([state, state]),
    _state,
  ),
  (
    'unstack_layers',
    lambda state: transforms.unstack_layers(
      transforms.exclude(
        state, transforms.PathMatches('block/(int4|uint4|fp8|size_0|raw)')
      )
    )[1],
    lambda: _state(3),
  ),
  ('select', lambda s: transforms.select(s, nnx.Param), _state),
  ('exclude', lambda s: transforms.exclude(s, nnx.Param), _state),
  ('partition', lambda s: transforms.partition(s, Special, ...)[1], _state),
  (
    'merge',
    lambda s: transforms.merge(*transforms.partition(s, nnx.Param, ...)),
    _state,
  ),
  ('drop_intermediates', transforms.drop_intermediates, _state),
  ('reshard', _reshard, _state),
  ('cast', lambda s: transforms.cast(s, jnp.bfloat16), _state),
  (
    'map_variables',
    lambda s: transforms.map_variables(_same_value, s, nnx.Param),
    _state,
  ),
  ('host_offload', transforms.host_offload, _state),
  ('to_device', transforms.to_device, _state),
  (
    'chain',
    transforms.chain(
      transforms.drop_intermediates, transforms.remove_scan_axis
    ),
    _state,
  ),
)


def _snapshot(state):
  return [
    (
      path,
      leaf,
      leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf,
      list(leaf.get_metadata().items())
      if isinstance(leaf, nnx.Variable)
      else None,
    )
    for path, leaf in nnx.to_flat_state(state)
  ]


def _numpy(x):
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  return np.asarray(x).astype(np.float64)


def _abstract(state):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    state,
  )


class GeneralRulesTest(parameterized.TestCase):
  def _assert_same_shapes(self, actual, expected):
    self.assertEqual(jax.tree.structure(actual), jax.tree.structure(expected))
    for one, two in zip(
      jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
      self.assertEqual((one.shape, one.dtype), (two.shape, two.dtype))

  @parameterized.named_parameters(*_TRANSFORMS)
  def test_input_is_not_changed(self, fn, make):
    state = make()
    before = _snapshot(state)
    fn(state)
    after = _snapshot(state)
    self.assertEqual([x[0] for x in before], [x[0] for x in after])
    for one, two in zip(before, after, strict=True):
      self.assertIs(one[1], two[1])
      # A composite value is a pytree; its nodes are made anew when read.
      for old, new in zip(
        jax.tree.leaves(one[2]), jax.tree.leaves(two[2]), strict=True
      ):
        self.assertIs(old, new)
      self.assertEqual(one[3], two[3])

  @parameterized.named_parameters(*_TRANSFORMS)
  def test_under_jit(self, fn, make):
    state = make()
    expected = fn(state)
    actual = jax.jit(fn)(state)
    self._assert_same_shapes(actual, expected)
    for one, two in zip(
      jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
      np.testing.assert_array_equal(_numpy(one), _numpy(two))

  @parameterized.named_parameters(*_TRANSFORMS)
  def test_abstractly(self, fn, make):
    state = make()
    expected = fn(state)
    abstract = _abstract(state)
    gc.collect()
    before = len(jax.live_arrays())
    traced = jax.eval_shape(fn, state)
    direct = fn(abstract)
    self.assertLen(jax.live_arrays(), before)
    self._assert_same_shapes(traced, expected)
    self._assert_same_shapes(direct, expected)
    for leaf in jax.tree.leaves(direct):
      self.assertIsInstance(leaf, jax.ShapeDtypeStruct)

  @parameterized.named_parameters(*_TRANSFORMS)
  def test_class_hooks_and_metadata_are_kept(self, fn, make):
    state = make()
    before = dict(nnx.to_flat_state(state))
    kept = 0
    for path, leaf in nnx.to_flat_state(fn(state)):
      self.assertIs(type(leaf), type(before[path]))
      if not isinstance(leaf, nnx.Variable):
        continue
      old, new = before[path].get_metadata(), leaf.get_metadata()
      self.assertEqual(list(old), list(new))
      for key in old:
        if key in _SPEC_KEYS:
          self.assertIs(type(old[key]), type(new[key]))
        else:
          self.assertIs(old[key], new[key])
      kept += 1
    self.assertGreater(kept, 0)

  @parameterized.named_parameters(*_TRANSFORMS)
  def test_compiles_once(self, fn, make):
    calls = []

    def counted(state):
      calls.append(1)
      return fn(state)

    jitted = jax.jit(counted)
    jitted(make())
    jitted(make())
    self.assertLen(calls, 1)


class ModuleTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('remove_scan_axis', transforms.remove_scan_axis),
    ('add_scan_axis', transforms.add_scan_axis),
    ('move_scan_axis', lambda m: transforms.move_scan_axis(m, 0, 1)),
    ('stack_layers', lambda m: transforms.stack_layers([m])),
    ('unstack_layers', transforms.unstack_layers),
    (
      'update_sharding_metadata',
      lambda m: transforms.update_sharding_metadata(m, lambda e: e),
    ),
    ('partition_specs', lambda m: transforms.partition_specs(m, {})),
    (
      'named_shardings',
      lambda m: transforms.named_shardings(m, _auto_mesh(), {}),
    ),
    ('reshard', lambda m: transforms.reshard(m, P())),
    ('host_offload', transforms.host_offload),
    ('to_device', transforms.to_device),
    ('map_variables', lambda m: transforms.map_variables(lambda x: x, m)),
    ('cast', lambda m: transforms.cast(m, jnp.bfloat16)),
    ('param_count', transforms.param_count),
    ('param_bytes', transforms.param_bytes),
    ('describe', transforms.describe),
    ('diff', lambda m: transforms.diff(nnx.State({}), m)),
    ('chain', lambda m: transforms.chain()(m)),
  )
  def test_refused(self, fn):
    name = self._testMethodName.removeprefix('test_refused_')
    with self.assertRaisesWithLiteralMatch(
      TypeError,
      f'{name}: got the nnx.Module Linear; nnx.split it first and hand in the '
      'State.',
    ):
      fn(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))

  def test_refused_within_a_tree(self):
    module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(TypeError, 'remove_scan_axis: got the nnx.Mod'):
      transforms.remove_scan_axis((nnx.State({}), module))


if __name__ == '__main__':
  absltest.main()
