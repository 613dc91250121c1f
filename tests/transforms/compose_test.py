"""Composing State transformations."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp

import transforms


def _state():
  return nnx.State(
    {'w': nnx.Param(jnp.ones(2)), 'h': nnx.Intermediate((jnp.ones(2),))}
  )


def _double(state):
  return jax.tree.map(lambda x: 2 * x, state)


def _increment(state):
  return jax.tree.map(lambda x: x + 1, state)


class ComposeTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('none', (), 1),
    ('one', (_double,), 2),
    ('in_order', (_double, _increment), 3),
    ('other_order', (_increment, _double), 4),
    ('nested', (transforms.chain(_double, _increment), _double), 6),
  )
  def test_chain_on_states(self, links, expected):
    for chained in (
      transforms.chain(*links),
      jax.jit(transforms.chain(*links)),
    ):
      self.assertEqual(chained(_state())['w'][...].tolist(), [expected] * 2)
    abstract = jax.eval_shape(transforms.chain(*links), _state())
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, _state())

  def test_chain_on_graphdef_and_state(self):
    graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))

    def swap(given, state):
      self.assertIs(given, graphdef)
      return given, state

    chained = transforms.chain(
      transforms.lift(_double), swap, transforms.chain(swap)
    )
    new_graphdef, new_state = chained(graphdef, state)
    self.assertIs(new_graphdef, graphdef)
    chex.assert_trees_all_equal(
      new_state['kernel'][...], 2 * state['kernel'][...]
    )

  def test_lift(self):
    graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    new_graphdef, new_state = transforms.lift(_increment)(graphdef, state)
    self.assertIs(new_graphdef, graphdef)
    self.assertEqual(new_state['bias'][...].tolist(), [1, 1, 1])
    self.assertEqual(transforms.lift(_increment).__name__, '_increment')
    with self.assertRaisesWithLiteralMatch(
      TypeError, 'lift: 3 cannot be called.'
    ):
      transforms.lift(3)

  def test_which_link_failed(self):
    fails = functools.partial(transforms.select)
    chained = transforms.chain(_double, fails, _increment)
    with self.assertRaises(ValueError) as raised:
      chained(_state())
    self.assertEqual(str(raised.exception), 'select: give at least one filter.')
    self.assertEqual(
      raised.exception.__notes__, ['chain: link 1 of 3, select, failed.']
    )

  @parameterized.named_parameters(
    ('none', lambda state: None, 'NoneType; expected a State'),
    ('tuple', lambda state: (state, 1), '(State, int); expected a State'),
  )
  def test_result_of_a_link(self, link, message):
    with self.assertRaisesWithLiteralMatch(
      TypeError, f'chain: link 1 of 2, <lambda>, returned {message}.'
    ):
      transforms.chain(_double, link)(_state())

  def test_result_of_a_graph_link(self):
    graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    with self.assertRaisesWithLiteralMatch(
      TypeError,
      'chain: link 0 of 1, <lambda>, returned State; expected (graphdef, '
      'State).',
    ):
      transforms.chain(lambda graphdef, state: state)(graphdef, state)

  def test_arguments(self):
    with self.assertRaisesWithLiteralMatch(
      TypeError, 'chain: link 1, 3, cannot be called.'
    ):
      transforms.chain(_double, 3)
    with self.assertRaisesWithLiteralMatch(
      TypeError,
      'chain: expected a State, or a GraphDef and a State, got (State, int).',
    ):
      transforms.chain(_double)(_state(), 3)


if __name__ == '__main__':
  absltest.main()
