import string
from typing import Any, NamedTuple

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax.numpy as jnp
import numpy as np

from peftlib import weight_ops
from peftlib.methods import method


def _op(shape=(2, 3, 4), batch=(), inputs=(0, 1), outputs=(2,), **kwargs):
  fields = dict(
    path=('layers', 0, 'up'),
    name='kernel',
    kind='dot_general',
    dtype=jnp.dtype('float32'),
    route=(),
    exact=True,
  )
  return weight_ops.WeightOp(
    shape=shape, batch=batch, inputs=inputs, outputs=outputs, **fields | kwargs
  )


def _random(*shape):
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


class WeightOpTest(parameterized.TestCase):
  def test_texts(self):
    op = _op()
    self.assertEqual(op.module_path, 'layers/0/up')
    self.assertEqual(op.label, 'layers/0/up.kernel')
    self.assertEqual(op.form, 'dot_general summing over axes (0, 1)')
    top = _op(path=(), batch=(2,), outputs=(), kind='einsum')
    self.assertEqual(top.label, 'kernel')
    self.assertEqual(
      top.form, 'einsum summing over axes (0, 1), batched over (2,)'
    )

  @parameterized.parameters(
    ('dot_general', 'linear'),
    ('einsum', 'linear'),
    ('conv', 'conv'),
    ('embedding', 'embedding'),
  )
  def test_as_a_method_sees_it(self, kind, expected):
    op = _op((5, 2, 3, 4), batch=(0,), inputs=(1, 2), outputs=(3,), kind=kind)
    self.assertEqual(
      op.weight, method.Weight((2, 3), (4,), expected, 'layers/0/up.kernel')
    )
    self.assertEqual((op.weight.rows, op.weight.columns), (6, 4))
    self.assertEqual(op.batch_shape, (5,))

  def test_contracted_width_is_that_of_the_innermost_axis(self):
    self.assertEqual(_op().contracted_width, 3)
    self.assertEqual(_op(inputs=(1, 0)).contracted_width, 2)
    self.assertEqual(_op((4,), inputs=(), outputs=(0,)).contracted_width, 1)

  @parameterized.parameters(
    # qwix joins the axes of a dot_general, and leaves an einsum's apart.
    ('dot_general', ((6, 1), (8, None)), ((8, None), (20, 3))),
    (
      'einsum',
      ((2, 1), (3, 2), (8, None)),
      ((8, None), (4, 3), (5, 4)),
    ),
  )
  def test_variable_axes(self, kind, a, b):
    op = _op(
      (7, 2, 3, 4, 5), batch=(0,), inputs=(1, 2), outputs=(3, 4), kind=kind
    )
    spec_a = method.VariableSpec((method.INPUTS, 8))
    spec_b = method.VariableSpec((8, method.OUTPUTS))
    self.assertEqual(op.variable_axes(spec_a), ((7, 0), *a))
    self.assertEqual(op.variable_axes(spec_b), ((7, 0), *b))
    self.assertEqual(op.variable_shape(spec_a), (7, *(n for n, _ in a)))

  def test_an_op_without_outputs_has_one_column(self):
    op = _op((3,), inputs=(0,), outputs=())
    spec = method.VariableSpec((2, method.OUTPUTS))
    self.assertEqual(op.variable_axes(spec), ((2, None), (1, None)))
    self.assertEqual(op.to_matrix(jnp.ones(3)).shape, (3, 1))

  @parameterized.parameters(
    ((3, 4), (), (0,), (1,)),
    ((4, 3), (), (1,), (0,)),
    ((2, 3, 4, 5), (), (2, 0), (3, 1)),
    ((2, 3, 4, 5), (1,), (3,), (0, 2)),
    ((2, 3, 4, 5), (3, 1), (0,), (2,)),
    ((3,), (), (), (0,)),
  )
  def test_matrix_there_and_back(self, shape, batch, inputs, outputs):
    op = _op(shape, batch, inputs, outputs)
    value = _random(*shape)
    letters = string.ascii_lowercase[: len(shape)]
    of = lambda axes: ''.join(letters[i] for i in axes)
    expected = np.einsum(
      f'{letters}->{of(batch)}{of(inputs)}{of(outputs)}', value
    ).reshape(
      *(shape[i] for i in batch),
      int(np.prod([shape[i] for i in inputs])),
      int(np.prod([shape[i] for i in outputs])),
    )
    matrix = op.to_matrix(jnp.asarray(value))
    np.testing.assert_array_equal(matrix, expected)
    np.testing.assert_array_equal(op.from_matrix(matrix), value)

  @parameterized.parameters(
    ((),),
    ((('reshape', (6, 4)),),),
    ((('transpose', (2, 0, 1)),),),
    ((('transpose', (1, 2, 0)), ('reshape', (12, 2))),),
    ((('reshape', (6, 4)), ('transpose', (1, 0)), ('reshape', (2, 2, 6))),),
    (
      (
        ('reshape', (1, 2, 3, 4)),
        ('transpose', (3, 1, 0, 2)),
        ('transpose', (1, 2, 3, 0)),
        ('reshape', (24,)),
      ),
    ),
  )
  def test_route_there_and_back(self, route):
    value = _random(2, 3, 4)
    expected = value
    for kind, how in route:
      expected = getattr(np, kind)(expected, how)
    op = _op(expected.shape, (), (0,), (1,), route=route, exact=not route)
    there = op.from_variable(jnp.asarray(value))
    np.testing.assert_array_equal(there, expected)
    np.testing.assert_array_equal(op.to_variable(there, value.shape), value)


class Two(NamedTuple):
  first: Any
  second: Any


class Holder(nnx.Module):
  """Weights in every place that a module may keep them in."""

  def __init__(self):
    self.kernel = nnx.Param(jnp.zeros(1))
    self.items = nnx.List([nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(2))])
    self.named = nnx.Dict({'a': nnx.Param(jnp.ones(3))})
    self.nested = nnx.List([nnx.Dict({'b': nnx.Param(jnp.ones(4))})])
    self.pair = nnx.data((nnx.Param(jnp.ones(5)), nnx.Param(jnp.ones(6))))
    self.numbered = nnx.data({3: nnx.Param(jnp.ones(7))})
    self.fields = nnx.data([Two(nnx.Param(jnp.ones(8)), None)])
    self.below = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])


class WeightsOfTest(absltest.TestCase):
  def test_names(self):
    holder = Holder()
    found = {
      name: node
      for name, node in weight_ops.weights_of(holder)
      if isinstance(node, nnx.Variable)
    }
    self.assertEqual(
      list(found),
      [
        'kernel',
        'items/0',
        'items/1',
        'named/a',
        'nested/0/b',
        'pair/0',
        'pair/1',
        'numbered/3',
        'fields/0/0',
      ],
    )
    self.assertIs(found['items/1'], holder.items[1])
    for name, node in found.items():
      self.assertIs(weight_ops.get_weight(holder, name), node)

  def test_set(self):
    holder = Holder()
    for name, node in list(weight_ops.weights_of(holder)):
      if not isinstance(node, nnx.Variable):
        continue
      new = nnx.Param(jnp.zeros(9))
      weight_ops.set_weight(holder, name, new)
      self.assertIs(weight_ops.get_weight(holder, name), new)
    self.assertIsInstance(holder.fields[0], Two)
    graphdef, state = nnx.split(holder)
    self.assertEqual(graphdef, nnx.split(Holder())[0])
    shapes = [v.shape for p, v in nnx.to_flat_state(state)]
    self.assertCountEqual(shapes, [*(9 * [(9,)]), *(2 * [(2,), (2, 2)])])


if __name__ == '__main__':
  absltest.main()
