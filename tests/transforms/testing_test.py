"""What each assertion passes, and the very words in which it fails."""

import functools
import threading
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from qwix._src.core import qarray

import transforms
from transforms import testing

P = jax.P
MESH = jax.sharding.AbstractMesh((2, 3), ('x', 'y'))


class Block(nnx.Module):
  def __init__(self, rate=0.1, *, bias=True, act=nnx.relu, rngs):
    self.up = nnx.Linear(2, 3, use_bias=bias, rngs=rngs)
    self.dropout = nnx.Dropout(rate)
    self.act = act


class Tied(nnx.Module):
  def __init__(self, tied, *, rngs):
    self.one = nnx.Linear(2, 2, use_bias=False, rngs=rngs)
    self.two = self.one if tied else nnx.Linear(2, 2, use_bias=False, rngs=rngs)


def _split(kind, *args, graph=True, **kwargs):
  model = kind(*args, rngs=nnx.Rngs(0), **kwargs)
  return nnx.split(model, graph=graph)


def _state(**values):
  return nnx.State({key: nnx.Param(value) for key, value in values.items()})


def _spec(value, spec, key='out_sharding'):
  return nnx.State({'w': nnx.Param(value).replace(**{key: spec})})


class TestingTest(parameterized.TestCase):
  def _fails(self, text, fn, *args, error=AssertionError):
    with self.assertRaises(error) as caught:
      fn(*args)
    self.assertEqual(str(caught.exception), text)


class AssertStatesShareTest(TestingTest):
  def test_passes(self):
    array, quantized = np.ones(2), qarray.QArray(np.ones((4, 2)), np.ones(2))
    one = _state(a=array, q=quantized)
    two = _state(a=array, q=qarray.QArray(quantized.qvalue, quantized.scale))
    testing.assert_states_share(one, two)
    testing.assert_states_share(nnx.State({}), nnx.State({}))

  def test_passes_mutable_references(self):
    ref = jax.new_ref(jnp.ones(2))
    testing.assert_states_share(nnx.State({'r': ref}), nnx.State({'r': ref}))

  def test_passes_tracers(self):
    jax.make_jaxpr(
      lambda x: testing.assert_states_share(_state(x=x), _state(x=x))
    )(1.0)

  def test_copy(self):
    array = np.ones((2, 3))
    self._fails(
      'assert_states_share: 1 of 2 leaves are not shared: b of shape (2,3) is '
      'another array in b. Each has to be the same object in both.',
      testing.assert_states_share,
      _state(a=array, b=array),
      _state(a=array, b=array.copy()),
    )

  def test_one_part_of_a_composite_value(self):
    value, scale = np.ones((4, 2)), np.ones((1, 2))
    self._fails(
      'assert_states_share: 1 of 1 leaves are not shared: w with parts of '
      'shapes (4,2), (1,2) is another array in b. Each has to be the same '
      'object in both.',
      testing.assert_states_share,
      _state(w=qarray.QArray(value, scale)),
      _state(w=qarray.QArray(value, scale.copy())),
    )

  def test_other_paths_and_more_than_are_shown(self):
    array = np.ones(())
    self._fails(
      'assert_states_share: 7 of 7 leaves are not shared: a is in a alone; b '
      'is in a alone; c is in b alone; d is in b alone; e is in b alone; and '
      '2 more. Each has to be the same object in both.',
      testing.assert_states_share,
      _state(a=array, b=array),
      _state(c=array, d=array, e=array, f=array, g=array),
    )

  def test_no_state(self):
    self._fails(
      'assert_states_share: expected an nnx.State, got dict.',
      testing.assert_states_share,
      nnx.State({}),
      {},
      error=TypeError,
    )


class AssertOnlyChangedTest(TestingTest):
  def setUp(self):
    super().setUp()
    self.before = nnx.State(
      {
        'w': nnx.Param(np.ones(2)),
        'a': nnx.LoRAParam(np.zeros(2)),
        'b': nnx.LoRAParam(np.zeros(2)),
      }
    )

  def _after(self, **values):
    return transforms.merge(
      transforms.exclude(self.before, lambda path, _: path[0] in values),
      nnx.State(values),
    )

  @parameterized.parameters(
    nnx.LoRAParam,
    transforms.PathMatches('a|b'),
    ((nnx.LoRAParam, nnx.BatchStat),),
    ...,
  )
  def test_passes(self, filters):
    after = self._after(a=nnx.LoRAParam(np.asarray([0.0, 1.0])))
    testing.assert_only_changed(self.before, after, filters)

  def test_passes_if_nothing_may_change_and_nothing_did(self):
    for filters in (None, False):
      testing.assert_only_changed(self.before, self._after(), filters)

  def test_passes_metadata_within(self):
    after = self._after(a=self.before['a'].replace(note=1))
    testing.assert_only_changed(self.before, after, nnx.LoRAParam)

  def test_value_outside(self):
    self._fails(
      'assert_only_changed: 1 change outside of the filter LoRAParam: w: values '
      '1.0 at [1] != 3.0 (1 of 2 differ).',
      testing.assert_only_changed,
      self.before,
      self._after(
        w=nnx.Param(np.asarray([1.0, 3.0])), a=nnx.LoRAParam(np.ones(2))
      ),
      nnx.LoRAParam,
    )

  def test_metadata_outside(self):
    self._fails(
      'assert_only_changed: 2 changes outside of the filter None: a: values 0.0 '
      "at [0] != 1.0 (2 of 2 differ); w: metadata {'note': None} != "
      "{'note': 1}.",
      testing.assert_only_changed,
      self.before,
      self._after(
        a=nnx.LoRAParam(np.ones(2)), w=self.before['w'].replace(note=1)
      ),
      None,
    )

  def test_structure_within(self):
    self._fails(
      'assert_only_changed: 2 changes of structure: a: shape (2,) != (3,); b: '
      'type LoRAParam != Param. Paths, types, shapes and dtypes have to stay.',
      testing.assert_only_changed,
      self.before,
      self._after(a=nnx.LoRAParam(np.ones(3)), b=nnx.Param(np.ones(2))),
      nnx.LoRAParam,
    )

  def test_missing(self):
    self._fails(
      'assert_only_changed: 1 change of structure: a: missing LoRAParam != '
      'None. Paths, types, shapes and dtypes have to stay.',
      testing.assert_only_changed,
      self.before,
      transforms.exclude(self.before, transforms.PathMatches('a')),
      nnx.LoRAParam,
    )

  def test_nothing_changed(self):
    self._fails(
      'assert_only_changed: nothing changed, also none of what matches '
      'LoRAParam: a; b.',
      testing.assert_only_changed,
      self.before,
      self._after(),
      nnx.LoRAParam,
    )

  def test_filter_without_a_match(self):
    self._fails(
      "assert_only_changed: no leaf matches the filter PathMatches(pattern='x')"
      '; give None if nothing may change.',
      testing.assert_only_changed,
      self.before,
      self._after(),
      transforms.PathMatches('x'),
      error=ValueError,
    )

  def test_donated(self):
    array = jnp.ones(2)
    array.delete()
    self._fails(
      'assert_only_changed: before: w was deleted, as by donation to a step; '
      'compare with a copy: jax.tree.map(jax.numpy.copy, state).',
      testing.assert_only_changed,
      _state(w=array),
      _state(w=np.ones(2)),
      None,
      error=ValueError,
    )

  def test_abstract(self):
    self._fails(
      'assert_only_changed: after: w has a ShapeDtypeStruct, whose values are '
      'not there to be compared; give concrete arrays.',
      testing.assert_only_changed,
      _state(w=np.ones(2)),
      _state(w=jax.ShapeDtypeStruct((2,), 'float32')),
      None,
      error=TypeError,
    )


class AssertSpecsMatchTest(TestingTest):
  @parameterized.named_parameters(
    ('none', np.ones(2), None),
    ('short', np.ones((2, 3)), ('x',)),
    ('tuple', np.ones((6, 3)), (('x', 'y'), None)),
    ('spec', jax.ShapeDtypeStruct((4, 3), 'int8'), P('x', 'y')),
    ('unconstrained', np.ones((1, 3)), P(P.UNCONSTRAINED, 'y')),
    (
      # A scale for each tile of 2 and one for the whole tensor.
      'composite',
      qarray.QArray(np.ones((4, 3)), np.ones((1, 3)), np.ones(())),
      ('x', 'y'),
    ),
  )
  def test_passes(self, value, spec):
    testing.assert_specs_match(_spec(value, spec), MESH)

  def test_passes_logical_names_without_a_mesh(self):
    testing.assert_specs_match(_spec(np.ones((4, 3)), ('embed', 'mlp')))

  def test_passes_what_is_no_variable(self):
    testing.assert_specs_match(nnx.State({'w': np.ones(2)}), MESH)

  @parameterized.named_parameters(
    ('long', ('x', None, None), '3 entries for 2 dimensions', None),
    ('long_on_mesh', ('x', None, None), '3 entries for 2 dimensions', MESH),
    (
      'no_spec',
      'x',
      'a spec of type str has no entries; expected a tuple, a PartitionSpec or a NamedSharding',
      None,
    ),
    (
      'unknown',
      ('embed', 'y'),
      "'embed' is no axis of the mesh (x: 2, y: 3)",
      MESH,
    ),
    ('twice', ('x', 'x'), "'x' comes up more than once", MESH),
    (
      'indivisible',
      ('y', None),
      "dimension 0 of extent 4 is not divisible by 3, the size of mesh axes 'y'",
      MESH,
    ),
    (
      'indivisible_by_two',
      (('x', 'y'), None),
      "dimension 0 of extent 4 is not divisible by 6, the size of mesh axes 'x', 'y'",
      MESH,
    ),
  )
  def test_fails(self, spec, problem, mesh):
    self._fails(
      "assert_specs_match: 1 spec doesn't fit: w of shape (4,3): out_sharding "
      f'{spec!r}: {problem}.',
      testing.assert_specs_match,
      _spec(np.ones((4, 3)), spec),
      mesh,
    )

  def test_own_mesh_of_a_named_sharding(self):
    sharding = jax.sharding.NamedSharding(MESH, P('x'))
    self._fails(
      f"assert_specs_match: 1 spec doesn't fit: w of shape (3): out_sharding "
      f'{sharding!r}: dimension 0 of extent 3 is not divisible by 2, the size '
      "of mesh axes 'x'.",
      testing.assert_specs_match,
      _spec(np.ones(3), sharding),
    )

  def test_more_than_are_shown(self):
    state = nnx.State(
      {
        f'w{n}': nnx.Param(np.ones(())).replace(out_sharding=('x',))
        for n in range(7)
      }
    )
    shown = '; '.join(
      f"w{n} of shape (): out_sharding ('x',): 1 entries for 0 dimensions"
      for n in range(5)
    )
    self._fails(
      f"assert_specs_match: 7 specs don't fit: {shown}; and 2 more.",
      testing.assert_specs_match,
      state,
    )

  def test_shardings(self):
    self._fails(
      'assert_specs_match: w is a sharding; expected a State of arrays.',
      testing.assert_specs_match,
      _state(w=P('x')),
      error=TypeError,
    )


class AssertNoAbstractLeavesTest(TestingTest):
  def test_passes(self):
    state = _state(a=jnp.ones(2), b=np.ones(2), c=1.0, k=jax.random.key(0))
    testing.assert_no_abstract_leaves(state)
    jax.eval_shape(testing.assert_no_abstract_leaves, state)

  def test_fails(self):
    shape = jax.ShapeDtypeStruct((2, 3), 'float32')
    self._fails(
      'assert_no_abstract_leaves: 3 of 4 leaves hold no array: a of shape '
      '(2,3) has a ShapeDtypeStruct; b with parts of shapes (2,3), (3) has a '
      'ShapeDtypeStruct; c with P has a P.',
      testing.assert_no_abstract_leaves,
      _state(
        a=shape, b=qarray.QArray(shape, np.ones(3)), c=P('x'), d=np.ones(2)
      ),
    )


class AssertSameGraphTest(TestingTest):
  @parameterized.parameters(True, False)
  def test_passes(self, graph):
    graphdef, state = _split(Block, graph=graph)
    other, other_state = _split(Block, graph=graph)
    testing.assert_same_graph(graphdef, other)
    longer = jax.tree.map(lambda x: jnp.zeros((4, *x.shape)), other_state)
    testing.assert_same_graph((graphdef, state), (other, longer))

  def test_static_attribute(self):
    self._fails(
      'assert_same_graph: 2 differences: act: attribute relu != gelu; '
      'dropout/rate: attribute 0.1 != 0.2.',
      testing.assert_same_graph,
      _split(Block)[0],
      _split(Block, 0.2, act=nnx.gelu)[0],
    )

  def test_unequal_objects_of_the_same_name(self):
    def act(x):
      return x

    first = act

    def act(x):
      return x + 1

    self._fails(
      'assert_same_graph: 1 difference: act: attribute two unequal objects '
      'AssertSameGraphTest.test_unequal_objects_of_the_same_name.<locals>.act.',
      testing.assert_same_graph,
      _split(Block, act=first)[0],
      _split(Block, act=act)[0],
    )

  def test_shared(self):
    self._fails(
      'assert_same_graph: 1 difference: two: type Linear != reference to one.',
      testing.assert_same_graph,
      _split(Tied, False)[0],
      _split(Tied, True)[0],
    )

  def test_other_module(self):
    self._fails(
      'assert_same_graph: 1 difference: the root: type Block != Tied.',
      testing.assert_same_graph,
      _split(Block)[0],
      _split(Tied, True)[0],
    )

  def test_variable_in_one_alone(self):
    pair, other = _split(Block), _split(Block, bias=False)
    for one, two in ((pair[0], other[0]), (pair, other)):
      self._fails(
        'assert_same_graph: 2 differences: up/bias: type Param != NoneType; '
        'up/use_bias: attribute True != False.',
        testing.assert_same_graph,
        one,
        two,
      )

  def test_metadata_in_the_graph_and_in_the_state(self):
    model = Block(rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    model.up.kernel = model.up.kernel.replace(note='x')
    other, other_state = nnx.split(model)
    self._fails(
      "assert_same_graph: 1 difference: up/kernel: metadata 'note' missing != "
      "'x'.",
      testing.assert_same_graph,
      graphdef,
      other,
    )
    self._fails(
      "assert_same_graph: 1 difference: up/kernel: metadata {'note': None} != "
      "{'note': 'x'}.",
      testing.assert_same_graph,
      (graphdef, state),
      (graphdef, other_state),
    )

  def test_raw_arrays_and_mutable_references(self):
    def graphdef(*values):
      return nnx.graphdef(nnx.List(values))

    ref = jax.new_ref(np.ones(2))
    one, two = (nnx.Param(np.ones(2), ref=True) for _ in range(2))
    array = jnp.ones(2)
    first = graphdef(
      array, one, ref, ref, one.get_raw_value(), nnx.List([array])
    )
    testing.assert_same_graph(
      first,
      graphdef(
        array + 1, two, ref, ref, two.get_raw_value(), nnx.List([array])
      ),
    )
    self._fails(
      'assert_same_graph: 4 differences: 0: type array != Ref; 2: type Ref != '
      'reference to 1; 3: type reference to 2 != reference to 0; 4: type '
      'reference to 1 != reference to 0.',
      testing.assert_same_graph,
      first,
      graphdef(ref, one, one.get_raw_value(), ref, ref, nnx.List([array])),
    )

  def test_tree_mode(self):
    graphdef, state = _split(Block, graph=False)
    self._fails(
      'assert_same_graph: 1 difference: static attributes of modules, of which '
      'flax does not tell the place.',
      testing.assert_same_graph,
      graphdef,
      _split(Block, 0.2, graph=False)[0],
    )
    self._fails(
      'assert_same_graph: 1 difference: up/bias: type Param != missing.',
      testing.assert_same_graph,
      graphdef,
      _split(Block, bias=False, graph=False)[0],
    )
    self._fails(
      'assert_same_graph: 1 difference: made by nnx.split with graph=False != '
      'True.',
      testing.assert_same_graph,
      graphdef,
      _split(Block)[0],
    )

  def test_kinds(self):
    graphdef, state = _split(Block)
    self._fails(
      'assert_same_graph: give two graphdefs or two pairs, not one of each.',
      testing.assert_same_graph,
      graphdef,
      (graphdef, state),
      error=TypeError,
    )
    self._fails(
      'assert_same_graph: expected an nnx.GraphDef or a pair (graphdef, state),'
      ' got Block; nnx.split it first.',
      testing.assert_same_graph,
      graphdef,
      nnx.merge(graphdef, state),
      error=TypeError,
    )
    self._fails(
      'assert_same_graph: expected an nnx.GraphDef or a pair (graphdef, state),'
      ' got tuple.',
      testing.assert_same_graph,
      (state, graphdef),
      graphdef,
      error=TypeError,
    )


def _new_step():
  """Returns a function that jax has compiled nothing for yet."""

  def step(state, factor):
    return jax.tree.map(lambda x: x * factor, state)

  return step


class AssertMaxCompilationsTest(TestingTest):
  def _guarded(self, n, **kwargs):
    return testing.assert_max_compilations(jax.jit(_new_step(), **kwargs), n)

  def test_passes(self):
    step = self._guarded(2)
    for size in (2, 3, 2, 3):
      out = step({'w': np.ones(size)}, 2.0)
      np.testing.assert_array_equal(out['w'], np.full(size, 2.0))

  def test_passes_what_was_compiled_before(self):
    step = jax.jit(_new_step())
    step(np.ones(2), 2.0)
    testing.assert_max_compilations(step, 0)(np.ones(2), 3.0)

  def test_passes_under_another_transform(self):
    step = self._guarded(0)
    jax.make_jaxpr(step)(np.ones(2), 2.0)

  def test_shape(self):
    step = self._guarded(1)
    step({'w': np.ones(2), 'v': np.ones(3)}, factor=2.0)
    self._fails(
      'assert_max_compilations: step was compiled 2 times, at most 1 is '
      'allowed. Since the last time: argument 0/w was float32[2] and is '
      'float32[3]; factor was ~float32[] and is int32[3].',
      lambda: step(
        {'w': np.ones(3), 'v': np.ones(3)}, factor=np.asarray([2, 2, 2])
      ),
    )
    # It is compiled now, and what the test goes on with is as fast as ever.
    step({'w': np.ones(2), 'v': np.ones(3)}, factor=2.0)

  def test_donated_array_on_another_device(self):
    # Not traced again, so that chex.assert_max_traces does not see it.
    step = testing.assert_max_compilations(
      jax.jit(chex.assert_max_traces(n=1)(lambda x: x + 1), donate_argnums=0), 1
    )
    one, two = jax.devices()[:2]
    step(jax.device_put(jnp.ones(2), one))
    self._fails(
      'assert_max_compilations: <lambda> was compiled 2 times, at most 1 is '
      'allowed. Since the last time: argument 0 was float32[2] on '
      f'{jax.sharding.SingleDeviceSharding(one)!r} and is float32[2] on '
      f'{jax.sharding.SingleDeviceSharding(two)!r}.',
      lambda: step(jax.device_put(jnp.ones(2), two)),
    )

  def test_metadata(self):
    step = self._guarded(1)
    step(_spec(np.ones(2), ('x',)), 2.0)
    self._fails(
      'assert_max_compilations: step was compiled 2 times, at most 1 is '
      'allowed. Since the last time, what is static in the arguments differs: '
      'their structure, or the metadata of Variables.',
      lambda: step(_spec(np.ones(2), ('y',)), 2.0),
    )

  def test_setting_of_jax(self):
    step = self._guarded(1)
    step(np.ones(2), 2.0)

    def again():
      with jax.default_matmul_precision('highest'):
        step(np.ones(2), 2.0)

    self._fails(
      'assert_max_compilations: step was compiled 2 times, at most 1 is '
      'allowed. The arguments are like those of the last time: a setting of '
      'jax differs, or what was compiled is kept no longer.',
      again,
    )

  def test_first_compilation_and_static_argument(self):
    self._fails(
      'assert_max_compilations: step was compiled once, at most 0 is allowed.',
      self._guarded(0),
      np.ones(2),
      2.0,
    )
    step = self._guarded(1, static_argnums=1)
    step(np.ones(2), 2)
    self._fails(
      'assert_max_compilations: step was compiled 2 times, at most 1 is '
      'allowed. The arguments are like those of the last time: a setting of '
      'jax differs, or what was compiled is kept no longer.',
      step,
      np.ones(2),
      3,
    )

  def test_nnx_jit(self):
    def update(model, x):
      model.kernel[...] += x

    step = testing.assert_max_compilations(nnx.jit(update), 1)
    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    step(model, 1.0)
    step(model, 1.0)
    self.assertEqual(step.__name__, 'update')
    with self.assertRaisesRegex(AssertionError, 'update was compiled 2 times'):
      step(nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0)), 1.0)

  def test_other_programs_and_threads_are_not_counted(self):
    inner = jax.jit(_new_step())

    def elsewhere():
      thread = threading.Thread(target=inner, args=(np.ones(5), 2.0))
      thread.start()
      thread.join()
      # Runs while `work` is traced: compiled for itself.
      with jax.ensure_compile_time_eval():
        return jnp.ones(7) + jnp.arange(7)

    work = jax.jit(elsewhere)
    np.testing.assert_array_equal(
      testing.assert_max_compilations(work, 1)(), np.arange(1.0, 8.0)
    )

  def test_goes_on_after_an_error(self):
    def fragile(x):
      if x.shape:
        raise KeyError(x.shape)
      return x + 1

    step = testing.assert_max_compilations(jax.jit(fragile), 1)
    for _ in range(2):
      with self.assertRaises(KeyError):
        step(np.ones(2))
    self.assertEqual(step(1.0), 2.0)
    with self.assertRaisesRegex(AssertionError, 'fragile was compiled 2 times'):
      step(1)

  def test_jax_that_reports_nothing(self):
    testing._check_reported.cache_clear()
    with mock.patch.object(testing, '_COMPILE_EVENT', '/renamed'):
      self._fails(
        f'assert_max_compilations: jax {jax.__version__} does not report the '
        'event /renamed with the name of the program, so that compilations '
        'cannot be counted.',
        self._guarded,
        1,
        error=RuntimeError,
      )
    self._guarded(1)

  def test_functions_without_a_name(self):
    class Scale:
      def __call__(self, x):
        return x * 2

    for fn in (Scale(), functools.partial(jnp.add, 1.0)):
      step = testing.assert_max_compilations(jax.jit(fn), 0)
      with self.assertRaisesRegex(AssertionError, ' was compiled once, at'):
        step(np.ones(11))

  def test_bad_arguments(self):
    self._fails(
      'assert_max_compilations: expected a jitted function, got TestingTest; '
      'jax.jit it first.',
      testing.assert_max_compilations,
      TestingTest,
      1,
      error=TypeError,
    )
    self._fails(
      'assert_max_compilations: n is the bool True; it must be an int.',
      self._guarded,
      True,
      error=TypeError,
    )
    self._fails(
      'assert_max_compilations: n is -1; it must not be negative.',
      self._guarded,
      -1,
      error=ValueError,
    )


class AssertBytesAtMostTest(TestingTest):
  def setUp(self):
    super().setUp()
    self.state = nnx.State(
      {
        'w': nnx.Param(jax.ShapeDtypeStruct((1000, 3), 'float32')),
        'q': nnx.Param(jnp.ones((2, 3), jnp.int4)),
        'a': nnx.LoRAParam(np.ones(4, np.float32)),
      }
    )

  def test_passes(self):
    testing.assert_bytes_at_most(self.state, 12_000 + 3 + 16)
    testing.assert_bytes_at_most(self.state, 16, nnx.LoRAParam)

  def test_fails(self):
    self._fails(
      'assert_bytes_at_most: 12,019 bytes are more than 12,018; the largest: w '
      'of shape (1000,3): 12,000 bytes; a of shape (4): 16 bytes; q of shape '
      '(2,3): 3 bytes.',
      testing.assert_bytes_at_most,
      self.state,
      12_018,
    )

  def test_fails_on_what_is_selected(self):
    self._fails(
      'assert_bytes_at_most: 16 bytes are more than 15; the largest: a of '
      'shape (4): 16 bytes.',
      testing.assert_bytes_at_most,
      self.state,
      15,
      nnx.LoRAParam,
    )

  @parameterized.named_parameters(
    (
      'no_match',
      (15, nnx.BatchStat),
      ValueError,
      'no leaf matches the filter BatchStat.',
    ),
    (
      'no_filter',
      (15, 3),
      TypeError,
      '3 of type int is no filter; expected a Variable type, a tag, a bool, '
      '`...`, None, a predicate on (path, leaf), or a tuple or list of these.',
    ),
    ('negative', (-1,), ValueError, 'limit is -1; it must not be negative.'),
    (
      'no_int',
      (1e6,),
      TypeError,
      'limit is the float 1000000.0; it must be an int.',
    ),
  )
  def test_bad_arguments(self, args, error, text):
    self._fails(
      f'assert_bytes_at_most: {text}',
      testing.assert_bytes_at_most,
      self.state,
      *args,
      error=error,
    )

  def test_shardings(self):
    self._fails(
      'assert_bytes_at_most: w is a sharding; expected a State of arrays.',
      testing.assert_bytes_at_most,
      _state(w=P('x')),
      1,
      error=TypeError,
    )


if __name__ == '__main__':
  absltest.main()
