"""Selecting, splitting and joining the leaves of a State."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp

import transforms
from transforms import filtering


class Block(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(2, 3, rngs=rngs)
    self.norm = nnx.BatchNorm(3, rngs=rngs)
    self.up.kernel_lora_a = nnx.LoRAParam(jnp.ones((2, 1)))


def _state():
  state = nnx.state(Block(nnx.Rngs(0)))
  state['hidden'] = nnx.Intermediate((jnp.ones(4),))
  state['delta'] = nnx.Perturbation(jnp.ones(4))
  return state


def _paths(state):
  return ['/'.join(map(str, path)) for path, _ in nnx.to_flat_state(state)]


_PARAMS = ['norm/bias', 'norm/scale', 'up/bias', 'up/kernel']
_ADAPTERS = ['up/kernel_lora_a']
_STATS = ['norm/mean', 'norm/var']
_SOWN = ['delta', 'hidden']


def _is_vector(path, leaf):
  del path
  return getattr(leaf, 'shape', None) == (3,)


_KINDS = (nnx.Param, nnx.LoRAParam, nnx.BatchStat, nnx.Intermediate)


def _starts_with_a(path, leaf):
  del leaf
  return path[0] == 'a'


class FilteringTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('type', (nnx.BatchStat,), _STATS),
    ('subclass_too', (nnx.Param,), [*_PARAMS, *_ADAPTERS]),
    ('any_of', (nnx.BatchStat, nnx.LoRAParam), [*_STATS, *_ADAPTERS]),
    ('tuple', ((nnx.BatchStat, nnx.LoRAParam),), [*_STATS, *_ADAPTERS]),
    ('base', (nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)),), _PARAMS),
    ('everything', (...,), _PARAMS + _ADAPTERS + _STATS + _SOWN),
    ('nothing', (None,), []),
    ('path_in', (nnx.PathContains('norm'),), _PARAMS[:2] + _STATS),
    ('pattern', (filtering.PathMatches('.*/bias'),), ['norm/bias', 'up/bias']),
    ('pattern_is_of_the_whole_path', (filtering.PathMatches('bias'),), []),
    (
      'predicate',
      (_is_vector,),
      ['norm/bias', 'norm/scale', *_STATS, 'up/bias'],
    ),
  )
  def test_select_and_exclude(self, filters, expected):
    state = _state()
    selected = transforms.select(state, *filters)
    excluded = transforms.exclude(state, *filters)
    self.assertEqual(_paths(selected), sorted(expected))
    self.assertEqual(sorted(_paths(selected) + _paths(excluded)), _paths(state))
    originals = dict(nnx.to_flat_state(state))
    for part in (selected, excluded):
      for path, leaf in nnx.to_flat_state(part):
        self.assertIs(leaf, originals[path])

  def test_tag_filter(self):
    state = _state()
    state['tagged'] = nnx.Param(jnp.ones(1), tag='here')
    self.assertEqual(_paths(transforms.select(state, 'here')), ['tagged'])

  def test_partition_first_match_wins(self):
    state = _state()
    adapters, params, rest = transforms.partition(
      state, nnx.LoRAParam, nnx.Param, ...
    )
    self.assertEqual(_paths(adapters), _ADAPTERS)
    self.assertEqual(_paths(params), _PARAMS)
    self.assertEqual(_paths(rest), sorted(_STATS + _SOWN))
    params, adapters, _ = transforms.partition(
      state, nnx.Param, nnx.LoRAParam, ...
    )
    self.assertEmpty(_paths(adapters))
    self.assertEqual(_paths(params), sorted(_PARAMS + _ADAPTERS))

  def test_partition_with_one_filter_returns_a_tuple(self):
    parts = transforms.partition(_state(), ...)
    self.assertIsInstance(parts, tuple)
    self.assertLen(parts, 1)

  @parameterized.parameters(
    ((nnx.LoRAParam, ...),),
    ((nnx.Param, nnx.BatchStat, nnx.Intermediate),),
    ((_is_vector, filtering.PathMatches('up/.*'), True),),
    ((None, ..., ...),),
  )
  def test_merge_inverts_partition(self, filters):
    state = _state()
    parts = transforms.partition(state, *filters)
    merged = transforms.merge(*reversed(parts))
    self.assertEqual(_paths(merged), _paths(state))
    for (_, leaf), (_, original) in zip(
      nnx.to_flat_state(merged), nnx.to_flat_state(state), strict=True
    ):
      self.assertIs(leaf, original)
    self.assertEqual(jax.tree.structure(merged), jax.tree.structure(state))

  @hypothesis.settings(
    max_examples=500, deadline=None, derandomize=True, database=None
  )
  @hypothesis.given(
    st.dictionaries(
      st.lists(st.sampled_from('abc'), min_size=3, max_size=3).map(tuple),
      st.sampled_from(_KINDS),
      min_size=1,
    ),
    st.lists(st.sampled_from([*_KINDS, 'a', None, _starts_with_a]), max_size=4),
  )
  def test_complement_law(self, kinds, filters):
    state = nnx.from_flat_state(
      [
        (path, kind(number))
        for number, (path, kind) in enumerate(kinds.items())
      ]
    )
    merged = [transforms.merge(*transforms.partition(state, *filters, ...))]
    if filters:
      merged.append(
        transforms.merge(
          transforms.exclude(state, *filters),
          transforms.select(state, *filters),
        )
      )
    for result in merged:
      self.assertEqual(jax.tree.structure(result), jax.tree.structure(state))
      for (_, leaf), (_, original) in zip(
        nnx.to_flat_state(result), nnx.to_flat_state(state), strict=True
      ):
        self.assertIs(leaf, original)

  def test_input_is_not_changed(self):
    state = _state()
    before = _paths(state)
    selected = transforms.select(state, nnx.Param)
    selected['new'] = nnx.Param(jnp.ones(1))
    del selected['up']
    one = transforms.merge(state)
    del one['up']
    self.assertEqual(_paths(state), before)

  def test_drop_intermediates(self):
    state = _state()
    dropped = transforms.drop_intermediates(state)
    self.assertEqual(_paths(dropped), sorted(_PARAMS + _ADAPTERS + _STATS))
    jitted = jax.jit(transforms.drop_intermediates)(state)
    self.assertEqual(jax.tree.structure(jitted), jax.tree.structure(dropped))
    chex.assert_trees_all_equal(jitted, dropped)

  @parameterized.named_parameters(
    ('concrete', lambda state: state),
    ('abstract', lambda state: jax.eval_shape(lambda: state)),
    (
      'shardings',
      lambda state: nnx.get_named_sharding(state, jax.make_mesh((1,), ('x',))),
    ),
  )
  def test_kinds_of_leaves(self, kind):
    state = kind(transforms.drop_intermediates(_state()))
    adapters, rest = transforms.partition(state, nnx.LoRAParam, ...)
    self.assertEqual(_paths(adapters), _ADAPTERS)
    self.assertIs(adapters['up']['kernel_lora_a'], state['up']['kernel_lora_a'])
    self.assertEqual(_paths(rest), sorted(_PARAMS + _STATS))

  def test_raw_leaves_by_path(self):
    mesh = jax.make_mesh((1,), ('x',))
    state = nnx.State(
      {
        'a': jnp.ones(2),
        'b': {'c': jax.sharding.NamedSharding(mesh, jax.P('x'))},
        'd': jax.ShapeDtypeStruct((2,), jnp.float32),
      }
    )
    picked, rest = transforms.partition(
      state, filtering.PathMatches('b/.*'), ...
    )
    self.assertIs(picked['b']['c'], state['b']['c'])
    self.assertEqual(_paths(rest), ['a', 'd'])
    self.assertEmpty(_paths(transforms.select(state, nnx.Param)))

  def test_under_jit_and_eval_shape(self):
    state = transforms.drop_intermediates(_state())

    def split_and_scale(state):
      adapters, rest = transforms.partition(state, nnx.LoRAParam, ...)
      adapters = jax.tree.map(lambda x: 2 * x, adapters)
      return transforms.merge(adapters, rest)

    result = jax.jit(split_and_scale)(state)
    self.assertEqual(jax.tree.structure(result), jax.tree.structure(state))
    chex.assert_trees_all_equal(
      result['up']['kernel_lora_a'][...], jnp.full((2, 1), 2.0)
    )
    chex.assert_trees_all_equal(result['norm'], state['norm'])
    abstract = jax.eval_shape(split_and_scale, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, state)


class FilteringErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    (transforms.select, 'select'),
    (transforms.exclude, 'exclude'),
    (transforms.partition, 'partition'),
    (transforms.merge, 'merge'),
  )
  def test_module(self, fn, name):
    block = Block(nnx.Rngs(0))
    with self.assertRaisesWithLiteralMatch(
      TypeError,
      f'{name}: got the nnx.Module Block; nnx.split it first and hand in the '
      'State.',
    ):
      fn(block, block)

  def test_graphdef_and_other_types(self):
    graphdef, _ = nnx.split(Block(nnx.Rngs(0)))
    with self.assertRaisesRegex(TypeError, 'select: got an nnx.GraphDef'):
      transforms.select(graphdef, ...)
    with self.assertRaisesWithLiteralMatch(
      TypeError, 'drop_intermediates: expected an nnx.State, got dict.'
    ):
      transforms.drop_intermediates({'a': 1})

  def test_no_filter(self):
    for name in ('select', 'exclude', 'partition'):
      with self.assertRaisesWithLiteralMatch(
        ValueError, f'{name}: give at least one filter.'
      ):
        getattr(transforms, name)(_state())

  def test_bad_filter(self):
    with self.assertRaisesRegex(
      TypeError, r'^select: 3 of type int is no filter; expected a Variable'
    ):
      transforms.select(_state(), (nnx.Param, 3))

  def test_bad_pattern(self):
    with self.assertRaisesRegex(
      ValueError, r"^PathMatches: '\(' is no regular expression: missing \)"
    ):
      transforms.PathMatches('(')

  def test_partition_unmatched(self):
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      'partition: 8 leaves match no filter: delta, hidden, norm/bias, '
      'norm/mean, norm/scale and 3 more; end with `...` to take what is left.',
    ):
      transforms.partition(_state(), nnx.LoRAParam)

  def test_partition_rest_not_last(self):
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      'partition: Ellipsis takes all that is left and has to come last, but is '
      'filter 0 of 2.',
    ):
      transforms.partition(_state(), ..., nnx.Param)

  def test_merge_overlap(self):
    state = _state()
    adapters = transforms.select(state, nnx.LoRAParam)
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      'merge: up/kernel_lora_a is in state 0 and in state 1; States to merge '
      'must not overlap.',
    ):
      transforms.merge(adapters, state)

  @parameterized.parameters((False,), (True,))
  def test_merge_leaf_against_substate(self, swap):
    outer = nnx.State({'a': nnx.Param(1.0)})
    inner = nnx.State({'a': {'b': nnx.Param(1.0)}})
    states = (inner, outer) if swap else (outer, inner)
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      f'merge: a is a leaf in state {int(swap)}, but state {1 - int(swap)} has '
      'a/b below it; States to merge must not overlap.',
    ):
      transforms.merge(*states)


if __name__ == '__main__':
  absltest.main()
