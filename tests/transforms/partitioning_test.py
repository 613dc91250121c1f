"""From logical axis names to shardings."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import linen
from flax import nnx
import hypothesis
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from qwix._src.core import qarray

import transforms

chex.set_n_cpu_devices(8)

P = jax.P


def _state(shape, spec, **metadata):
  return nnx.State(
    {'w': nnx.Param(jnp.ones(shape)).replace(out_sharding=spec, **metadata)}
  )


def _spec(state, rules, **kwargs):
  return transforms.partition_specs(state, rules, **kwargs)['w'].get_raw_value()


class PartitionSpecsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('plain', ('embed', 'mlp'), {'embed': 'x', 'mlp': 'y'}, P('x', 'y')),
    ('to_none', ('embed', 'mlp'), {'embed': 'x', 'mlp': None}, P('x', None)),
    ('no_name', (None, 'mlp'), {'mlp': 'y'}, P(None, 'y')),
    ('several', ('embed',), {'embed': ('x', 'y')}, P(('x', 'y'))),
    ('list', ('embed',), {'embed': ['x', 'y']}, P(('x', 'y'))),
    (
      'rule_order_decides_not_dimension_order',
      ('mlp', 'embed'),
      (('embed', 'x'), ('mlp', 'x')),
      P(None, 'x'),
    ),
    (
      'next_rule_if_taken',
      ('embed', 'mlp'),
      (('embed', 'x'), ('mlp', 'x'), ('mlp', 'y')),
      P('x', 'y'),
    ),
    (
      'partly_taken_is_taken',
      ('embed', 'mlp'),
      (('embed', 'x'), ('mlp', ('x', 'y'))),
      P('x', None),
    ),
    (
      'none_wins_if_first',
      ('embed',),
      (('embed', None), ('embed', 'x')),
      P(None),
    ),
    (
      'flax_docstring',
      ('batch', 'length', 'heads', 'features'),
      (
        ('batch', 'X'),
        ('features', 'X'),
        ('heads', 'Y'),
        ('batch', 'Z'),
        ('length', None),
      ),
      P('X', None, 'Y', None),
    ),
    (
      'tuple_entry',
      (('a', 'b'), None),
      {'a': 'x', 'b': 'y'},
      P(('x', 'y'), None),
    ),
    ('tuple_half', (('a', 'b'),), {'a': None, 'b': 'y'}, P('y')),
    ('short', ('embed',), {'embed': 'x'}, P('x')),
    (
      'unconstrained',
      P(P.UNCONSTRAINED, 'embed'),
      {'embed': 'x'},
      P(P.UNCONSTRAINED, 'x'),
    ),
    (
      'unreduced',
      P('embed', unreduced={'z'}),
      {'embed': 'x'},
      P('x', unreduced={'z'}),
    ),
    ('empty', P(), {}, P()),
    ('none', None, {}, P()),
  )
  def test_rules(self, spec, rules, expected):
    state = _state((8,) * 4, spec)
    self.assertEqual(_spec(state, rules), expected)
    specs = transforms.partition_specs(state, rules)
    self.assertEqual(jax.tree.structure(specs), jax.tree.structure(state))

  @hypothesis.settings(
    max_examples=500, deadline=None, derandomize=True, database=None
  )
  @hypothesis.given(
    st.lists(st.sampled_from('abcd'), max_size=4, unique=True),
    st.lists(
      st.tuples(
        st.sampled_from('abcd'),
        st.sampled_from([None, 'x', 'y', 'z', ('x', 'y'), ('y', 'z')]),
      ),
      max_size=8,
    ),
  )
  def test_same_as_flax(self, names, rules):
    rules = [*rules, *((name, None) for name in 'abcd')]
    expected = linen.logical_to_mesh_axes(tuple(names), rules)
    self.assertEqual(_spec(_state((1,) * 4, tuple(names)), rules), expected)

  def test_axes_have_to_exist(self):
    mesh = jax.make_mesh((2, 2), ('x', 'y'))
    rules = (('embed', ('x', 'pod')), ('embed', 'y'))
    state = _state((8,), ('embed',))
    self.assertEqual(_spec(state, rules), P(('x', 'pod')))
    self.assertEqual(_spec(state, rules, mesh=mesh), P('y'))

  def test_mesh_axes_stand_for_themselves(self):
    mesh = jax.make_mesh((2, 2), ('x', 'y'))
    state = _state((8, 8), ('y', 'embed'))
    self.assertEqual(_spec(state, {'embed': 'x'}, mesh=mesh), P('y', 'x'))
    with self.assertRaisesRegex(ValueError, "no rule for logical axis 'y'"):
      _spec(state, {'embed': 'x'})

  def test_own_rules_first(self):
    state = _state((8,), ('embed',), sharding_rules=(('embed', 'y'),))
    self.assertEqual(_spec(state, {'embed': 'x'}), P('y'))

  def test_raw_and_missing(self):
    state = nnx.State({'raw': jnp.ones(2), 'w': nnx.Param(jnp.ones(2))})
    specs = transforms.partition_specs(state, {})
    self.assertEqual(specs['raw'], P())
    self.assertEqual(specs['w'].get_raw_value(), P())

  def test_composite(self):
    value = qarray.QArray(
      qvalue=jnp.ones((8, 6), jnp.int4),
      scale=jnp.ones((2, 6)),
      zero_point=jnp.ones((1, 6)),
    )
    state = nnx.State({'w': nnx.Param(value).replace(out_sharding=('a', 'b'))})
    spec = _spec(state, {'a': 'x', 'b': 'y'})
    self.assertEqual(spec.qvalue, P('x', 'y'))
    self.assertEqual(spec.scale, P('x', 'y'))
    self.assertEqual(spec.zero_point, P(None, 'y'))
    mesh = jax.make_mesh((4, 2), ('x', 'y'))
    shardings = transforms.named_shardings(state, mesh, {'a': 'x', 'b': 'y'})
    # Two tiles on four devices: replicated.
    self.assertEqual(shardings['w'].get_raw_value().scale.spec, P(None, 'y'))
    self.assertEqual(shardings['w'].get_raw_value().qvalue.spec, P('x', 'y'))

  @parameterized.named_parameters(
    (
      'unknown',
      ('embd',),
      {'embed': 'x', 'mlp': 'y'},
      "no rule for logical axis 'embd'; near: embed; rules exist for embed, mlp.",
    ),
    (
      'twice',
      ('embed', 'embed'),
      {'embed': 'x'},
      "'embed' comes up more than once in one spec.",
    ),
    (
      'too_long',
      ('embed', None, None),
      {'embed': 'x'},
      "{'out_sharding': ('embed', None, None)} has more than 2 entries.",
    ),
  )
  def test_refused(self, spec, rules, message):
    with self.assertRaisesWithLiteralMatch(
      ValueError, f'partition_specs: w of shape (8,8): {message}'
    ):
      _spec(_state((8, 8), spec), rules)

  def test_keys_that_disagree(self):
    with self.assertRaisesRegex(ValueError, 'metadata keys disagree'):
      _spec(_state((8, 8), ('a',), sharding=('b',)), {'a': None, 'b': None})

  @parameterized.parameters(
    ((('a',),), "('a',) is no rule; expected a pair"),
    ({'a': 3}, "('a', 3) is no rule; the logical name has to be a str"),
  )
  def test_bad_rules(self, rules, message):
    with self.assertRaises(TypeError) as raised:
      _spec(_state((8,), ('a',)), rules)
    self.assertStartsWith(str(raised.exception), f'partition_specs: {message}')


class NamedShardingsTest(parameterized.TestCase):
  def test_shardings(self):
    mesh = jax.make_mesh((2, 4), ('x', 'y'))
    state = _state((6, 8), ('embed', 'mlp'))
    shardings = transforms.named_shardings(
      state, mesh, {'embed': 'x', 'mlp': 'y'}
    )
    self.assertEqual(
      shardings['w'].get_raw_value(), jax.NamedSharding(mesh, P('x', 'y'))
    )
    self.assertEqual(jax.tree.structure(shardings), jax.tree.structure(state))

  def test_as_in_shardings_and_out_shardings(self):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ('x', 'y'), axis_types=auto)
    state = _state((6, 8), ('embed', 'mlp'))
    shardings = transforms.named_shardings(
      state, mesh, {'embed': 'x', 'mlp': 'y'}
    )
    double = jax.jit(
      lambda state: jax.tree.map(lambda x: 2 * x, state),
      in_shardings=(shardings,),
      out_shardings=shardings,
    )
    result = double(state)['w'].get_raw_value()
    self.assertEqual(result.sharding, jax.NamedSharding(mesh, P('x', 'y')))
    self.assertEqual(float(result.sum()), 96.0)

  def test_indivisible(self):
    mesh = jax.make_mesh((2, 4), ('x', 'y'))
    state = _state((6, 9), ('embed', 'mlp'))
    rules = {'embed': ('x', 'y'), 'mlp': None}
    message = (
      'dimension 0 of extent 6 is not divisible by 8, the size of mesh axes '
      "'x', 'y'."
    )
    with self.assertRaisesWithLiteralMatch(
      ValueError, f'named_shardings: w of shape (6,9): {message}'
    ):
      transforms.named_shardings(state, mesh, rules)
    with self.assertWarns(UserWarning) as warned:
      shardings = transforms.named_shardings(
        state, mesh, rules, replicate_indivisible=True
      )
    self.assertEqual(
      str(warned.warning),
      f'named_shardings: replicated instead: w: {message}',
    )
    self.assertEqual(
      shardings['w'].get_raw_value(), jax.NamedSharding(mesh, P(None, None))
    )

  def test_size_0_is_divisible(self):
    mesh = jax.make_mesh((2,), ('x',))
    shardings = transforms.named_shardings(
      _state((0, 3), ('embed', None)), mesh, {'embed': 'x'}
    )
    self.assertEqual(shardings['w'].get_raw_value().spec, P('x', None))


if __name__ == '__main__':
  absltest.main()
