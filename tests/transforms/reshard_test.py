"""Placing a State on a mesh, and entering meshes."""

import gc
import threading
import tracemalloc

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
_AUTO = jax.sharding.AxisType.Auto
_EXPLICIT = jax.sharding.AxisType.Explicit


def _mesh(shape=(4, 2), names=('x', 'y'), kinds=_AUTO):
  kinds = kinds if isinstance(kinds, tuple) else (kinds,) * len(shape)
  return jax.make_mesh(shape, names, axis_types=kinds)


def _numbers(shape, dtype=np.float32):
  return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def _param(value, **metadata):
  return nnx.State({'w': nnx.Param(value).replace(**metadata)})


def _value(state):
  return state['w'].get_raw_value()


_SOURCES = (
  ('numpy', lambda x: x),
  ('one_device', jnp.asarray),
  ('other_device', lambda x: jax.device_put(x, jax.devices()[5])),
  (
    'other_mesh',
    lambda x: jax.device_put(x, jax.NamedSharding(_mesh((2,), ('a',)), P('a'))),
  ),
  (
    'same_mesh_other_spec',
    lambda x: jax.device_put(x, jax.NamedSharding(_mesh(), P(None, 'x'))),
  ),
  (
    'partly_replicated',
    lambda x: jax.device_put(x, jax.NamedSharding(_mesh(), P('y'))),
  ),
  (
    'pinned_host',
    lambda x: jax.device_put(
      x,
      jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind='pinned_host'
      ),
    ),
  ),
  (
    'pinned_host_sharded',
    lambda x: jax.device_put(
      x, jax.NamedSharding(_mesh(), P('x'), memory_kind='pinned_host')
    ),
  ),
)


class ReshardTest(parameterized.TestCase):
  def _check(self, array, expected, sharding):
    self.assertEqual(array.sharding, sharding)
    self.assertEqual(array.dtype, expected.dtype)
    for shard in array.addressable_shards:
      np.testing.assert_array_equal(
        np.asarray(shard.data).astype(np.float64),
        expected[shard.index].astype(np.float64),
      )

  @parameterized.named_parameters(*_SOURCES)
  def test_sources(self, source):
    numbers = _numbers((8, 4))
    for kinds in (_AUTO, _EXPLICIT, (_AUTO, _EXPLICIT)):
      sharding = jax.NamedSharding(_mesh(kinds=kinds), P('x', 'y'))
      state = _param(source(numbers))
      result = transforms.reshard(state, sharding)
      self._check(_value(result), numbers, sharding)
      self.assertEqual(jax.tree.structure(result), jax.tree.structure(state))

  @parameterized.parameters(
    'int4',
    'uint4',
    'int2',
    'float8_e4m3fn',
    'bfloat16',
    'bool',
    'float4_e2m1fn',
  )
  def test_dtypes(self, dtype):
    dtype = jnp.dtype(dtype)
    numbers = (_numbers((8, 4)) % 2).astype(dtype)
    sharding = jax.NamedSharding(_mesh(), P('x', 'y'))
    for value in (numbers, jnp.asarray(numbers)):
      result = transforms.reshard(_param(value), sharding)
      self._check(_value(result), numbers, sharding)

  @parameterized.parameters(_AUTO, _EXPLICIT)
  def test_typed_keys(self, kind):
    for impl in ('threefry2x32', 'rbg'):
      keys = jax.random.split(jax.random.key(3, impl=impl), 8)
      sharding = jax.NamedSharding(_mesh(kinds=kind), P('x'))
      result = _value(transforms.reshard(_param(keys), sharding))
      self.assertTrue(result.sharding.is_equivalent_to(sharding, 1))
      self.assertEqual(result.dtype, keys.dtype)
      np.testing.assert_array_equal(
        jax.random.key_data(result), jax.random.key_data(keys)
      )

  @parameterized.named_parameters(
    ('scalar', (), P()),
    ('size_0', (0, 4), P('x', 'y')),
    ('short_spec', (8, 4), P('x')),
    ('several_axes', (8, 4), P(('x', 'y'))),
    ('replicated', (8, 4), P()),
  )
  def test_shapes(self, shape, spec):
    numbers = _numbers(shape)
    sharding = jax.NamedSharding(_mesh(), spec)
    result = transforms.reshard(_param(jnp.asarray(numbers)), sharding)
    self._check(_value(result), numbers, sharding)

  @parameterized.product(
    dtype=(np.float32, jnp.bfloat16, jnp.int4),
    spec=(P('x', 'y'), P(None, 'y'), P('x'), P()),
  )
  def test_large_value(self, dtype, spec):
    # From 4 MB on, parts that aren't contiguous are copied by several threads.
    value = (np.arange(2048 * 4096) % 13 - 6).reshape(2048, 4096).astype(dtype)
    result = _value(
      transforms.reshard(_param(value), jax.NamedSharding(_mesh(), spec))
    )
    self.assertEqual(result.sharding.spec, spec)
    for shard in result.addressable_shards:
      np.testing.assert_array_equal(
        np.asarray(shard.data).astype(np.float32),
        value[shard.index].astype(np.float32),
      )

  def test_sub_mesh_and_one_device(self):
    numbers = _numbers((8, 4))
    sub = jax.sharding.Mesh(np.array(jax.devices()[4:6]), ('x',))
    for sharding in (
      jax.NamedSharding(sub, P('x')),
      jax.NamedSharding(_mesh((1,), ('x',)), P('x')),
      jax.sharding.SingleDeviceSharding(jax.devices()[7]),
    ):
      result = transforms.reshard(_param(jnp.asarray(numbers)), sharding)
      self._check(_value(result), numbers, sharding)

  def test_by_path(self):
    mesh = _mesh()
    state = nnx.State(
      {'a': jnp.ones((8, 4)), 'b': {'c': nnx.Param(jnp.ones(8))}}
    )
    shardings = nnx.State(
      {
        'a': jax.NamedSharding(mesh, P('y')),
        'b': {'c': nnx.Param(jax.NamedSharding(mesh, P('x')))},
      }
    )
    result = transforms.reshard(state, shardings)
    self.assertEqual(result['a'].sharding, shardings['a'])
    self.assertEqual(
      result['b']['c'].get_raw_value().sharding,
      shardings['b']['c'].get_raw_value(),
    )

  def test_placed_already(self):
    sharding = jax.NamedSharding(_mesh(), P('x'))
    state = _param(jax.device_put(jnp.ones((8, 4)), sharding))
    self.assertIs(transforms.reshard(state, sharding)['w'], state['w'])
    padded = jax.NamedSharding(_mesh(), P('x', None))
    self.assertIs(transforms.reshard(state, padded)['w'], state['w'])
    # The kind of the mesh's axes is a part of an array's type.
    explicit = jax.NamedSharding(_mesh(kinds=_EXPLICIT), P('x'))
    self.assertEqual(
      _value(transforms.reshard(state, explicit)).sharding, explicit
    )

  def test_surrounding_mesh(self):
    mesh = _mesh()
    state = _param(jnp.ones((8, 4)))
    with self.assertRaisesRegex(
      ValueError, r'w of shape \(8,4\): .* needs a surrounding mesh'
    ):
      transforms.reshard(state, P('x'))
    with transforms.mesh_context(mesh):
      result = transforms.reshard(state, P('x'))
    self.assertEqual(_value(result).sharding, jax.NamedSharding(mesh, P('x')))

  def test_composite(self):
    value = qarray.QArray(
      qvalue=jnp.asarray(_numbers((8, 4)) % 4, jnp.int4),
      scale=jnp.asarray(_numbers((2, 4))),
      zero_point=None,
    )
    sharding = jax.NamedSharding(_mesh(), P('x', 'y'))
    result = _value(transforms.reshard(_param(value), sharding))
    self.assertIsInstance(result, qarray.QArray)
    self.assertEqual(result.qvalue.sharding.spec, P('x', 'y'))
    self.assertEqual(result.scale.sharding.spec, P(None, 'y'))
    np.testing.assert_array_equal(result.scale, _numbers((2, 4)))

  @parameterized.parameters(_AUTO, _EXPLICIT, ((_AUTO, _EXPLICIT),))
  def test_under_jit(self, kinds):
    mesh = _mesh(kinds=kinds)
    sharding = jax.NamedSharding(mesh, P('x', 'y'))
    state = _param(jnp.asarray(_numbers((8, 4))))
    with transforms.mesh_context(mesh):
      result = jax.jit(lambda s: transforms.reshard(s, sharding))(state)
    self._check(_value(result), _numbers((8, 4)), sharding)

  def test_abstract(self):
    sharding = jax.NamedSharding(_mesh(), P('x'))
    state = _param(jax.ShapeDtypeStruct((8,), jnp.float32))
    result = _value(transforms.reshard(state, sharding))
    self.assertEqual(
      result, jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    )

  def test_shared_array_stays_shared(self):
    array = jnp.ones((8, 4))
    state = nnx.State({'a': nnx.Param(array), 'b': nnx.Param(array)})
    result = transforms.reshard(
      state, jax.NamedSharding(_mesh(), P('x')), donate=True
    )
    self.assertIs(result['a'].get_raw_value(), result['b'].get_raw_value())
    self.assertTrue(array.is_deleted())

  def test_donate(self):
    sharding = jax.NamedSharding(_mesh(), P('x'))
    numbers = _numbers((8, 4))
    array, placed = jnp.asarray(numbers), jax.device_put(numbers, sharding)
    state = nnx.State({'a': nnx.Param(array), 'b': nnx.Param(placed)})
    kept = transforms.reshard(state, sharding)
    self.assertFalse(array.is_deleted())
    result = transforms.reshard(state, sharding, donate=True)
    self.assertTrue(array.is_deleted())
    self.assertFalse(placed.is_deleted())
    for item in (kept, result):
      self._check(item['a'].get_raw_value(), numbers, sharding)

  def test_host_memory_of_one_leaf_at_most(self):
    # Sharded sources have to be gathered, so they are what needs memory.
    source = jax.NamedSharding(_mesh(), P('x'))
    target = jax.NamedSharding(_mesh(), P(None, 'x'))
    size = 1 << 20
    state = nnx.State(
      {
        str(i): nnx.Param(
          jax.device_put(np.zeros((512, 512), np.float32), source)
        )
        for i in range(8)
      }
    )
    transforms.reshard(state, target)
    gc.collect()
    tracemalloc.start()
    result = transforms.reshard(state, target)
    jax.block_until_ready(result)
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    self.assertLess(peak, 1.2 * size)
    # And none of it is kept in the arrays as numpy copies.
    self.assertLess(left, 0.2 * size)

  @parameterized.named_parameters(
    ('tuple', ('x', None), ('y', None)),
    ('spec', P('x', None), P('y', None)),
    ('spec_grows', P(), P('y')),
    ('logical_is_kept', ('embed', 'x'), ('embed', 'x')),
    ('none', None, None),
  )
  def test_metadata_agrees(self, spec, expected):
    sharding = jax.NamedSharding(_mesh(), P('y'))
    other = _mesh((2,), ('a',))
    state = _param(jnp.ones((8, 4)), out_sharding=spec, mesh=other)
    metadata = transforms.reshard(state, sharding)['w'].get_metadata()
    self.assertEqual(metadata['out_sharding'], expected)
    self.assertIs(type(metadata['out_sharding']), type(expected))
    self.assertEqual(metadata['mesh'], sharding.mesh)
    self.assertEqual(state['w'].get_metadata('out_sharding'), spec)
    self.assertIs(state['w'].get_metadata('mesh'), other)

  @parameterized.named_parameters(
    (
      'long',
      P('x', None, None),
      'has 3 entries, more than the rank 2 of the value.',
    ),
    (
      'indivisible',
      P('y', 'x'),
      "dimension 1 of extent 6 is not divisible by 4, the size of mesh axes 'x'.",
    ),
  )
  def test_refused(self, spec, message):
    state = nnx.State(
      {'a': nnx.Param(jnp.ones(8)), 'w': nnx.Param(jnp.ones((8, 6)))}
    )
    shardings = nnx.State(
      {
        'a': jax.NamedSharding(_mesh(), P('x')),
        'w': jax.NamedSharding(_mesh(), spec),
      }
    )
    gc.collect()
    before = len(jax.live_arrays())
    with self.assertRaises(ValueError) as raised:
      transforms.reshard(state, shardings)
    self.assertStartsWith(str(raised.exception), 'reshard: w of shape (8,6): ')
    self.assertEndsWith(str(raised.exception), message)
    self.assertLen(jax.live_arrays(), before)

  def test_refused_paths_and_types(self):
    sharding = jax.NamedSharding(_mesh(), P())
    state = _param(jnp.ones(8))
    with self.assertRaisesWithLiteralMatch(
      ValueError, 'reshard: no sharding for w.'
    ):
      transforms.reshard(state, nnx.State({'v': sharding}))
    with self.assertRaisesWithLiteralMatch(
      ValueError, 'reshard: no value for v.'
    ):
      transforms.reshard(state, nnx.State({'v': sharding, 'w': sharding}))
    with self.assertRaisesRegex(TypeError, 'got dict'):
      transforms.reshard(state, {'w': sharding})
    with self.assertRaisesRegex(
      TypeError, r'w of shape \(8\): 3 of type int is no sharding'
    ):
      transforms.reshard(state, nnx.State({'w': 3}))


class MeshContextTest(parameterized.TestCase):
  def _axes(self):
    return jax.sharding.get_abstract_mesh().axis_names

  def test_enters_nests_and_restores(self):
    outer, inner = _mesh(), _mesh((2,), ('z',))
    self.assertEqual(self._axes(), ())
    with transforms.mesh_context(outer):
      self.assertEqual(self._axes(), ('x', 'y'))
      with transforms.mesh_context(inner):
        self.assertEqual(self._axes(), ('z',))
      self.assertEqual(self._axes(), ('x', 'y'))
      with self.assertRaisesRegex(KeyError, 'inside'):
        with transforms.mesh_context(inner):
          raise KeyError('inside')
      self.assertEqual(self._axes(), ('x', 'y'))
      with transforms.mesh_context(None):
        self.assertEqual(self._axes(), ('x', 'y'))
    self.assertEqual(self._axes(), ())

  @parameterized.named_parameters(
    ('jit', lambda f: jax.jit(f)(1.0)),
    ('grad', lambda f: jax.grad(f)(1.0)),
    ('vmap', lambda f: jax.vmap(f)(jnp.ones(2))),
    ('eval_shape', lambda f: jax.eval_shape(f, 1.0)),
    ('scan', lambda f: jax.lax.scan(lambda c, _: (f(c), None), 1.0, length=2)),
  )
  def test_while_tracing(self, apply):
    mesh, other = _mesh(), _mesh((2,), ('z',))
    seen = []

    def same(x):
      with transforms.mesh_context(mesh):
        seen.append(self._axes())
        return x * 2

    with transforms.mesh_context(mesh):
      apply(same)
    self.assertIn(('x', 'y'), seen)
    self.assertLen(set(seen), 1)
    with transforms.mesh_context(other):
      with self.assertRaisesRegex(
        ValueError,
        r'surrounding mesh \(z=2 Auto\), which differs from \(x=4 Auto, y=2 Auto',
      ):
        apply(same)
    with self.assertRaisesRegex(ValueError, r'surrounding mesh \(none\)'):
      apply(same)

  def test_kind_of_axes_differs(self):
    def f(x):
      with transforms.mesh_context(_mesh(kinds=_EXPLICIT)):
        return x

    with transforms.mesh_context(_mesh()):
      with self.assertRaisesRegex(ValueError, 'x=4 Explicit'):
        jax.jit(f)(1.0)

  def test_within_shard_map(self):
    mesh = _mesh((8,), ('x',))

    def body(x):
      with transforms.mesh_context(mesh):
        return 2 * x

    with transforms.mesh_context(mesh):
      result = jax.shard_map(body, in_specs=P('x'), out_specs=P('x'))(
        jnp.ones(8)
      )
    self.assertEqual(float(result.sum()), 16.0)

  def test_threads(self):
    meshes = [_mesh((2,), (name,)) for name in 'abcd']
    barrier = threading.Barrier(4)
    seen = [None] * 4

    def work(number):
      with transforms.mesh_context(meshes[number]):
        barrier.wait()
        inside = self._axes()
        barrier.wait()
      seen[number] = (inside, self._axes())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEqual(seen, [((name,), ()) for name in 'abcd'])

  def test_no_mesh(self):
    with self.assertRaisesWithLiteralMatch(
      TypeError, 'mesh_context: expected a jax.sharding.Mesh, got str.'
    ):
      with transforms.mesh_context('x'):
        self.fail('must not be entered')


if __name__ == '__main__':
  absltest.main()
