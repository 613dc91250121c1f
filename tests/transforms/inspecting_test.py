"""Tables of a State and differences between two."""

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from qwix._src.core import qarray

import transforms

P = jax.P


def _state(value, **metadata):
  return nnx.State({'a': {'w': nnx.Param(value).replace(**metadata)}})


def _diff(one, two):
  return [tuple(item) for item in transforms.diff(one, two)]


class DiffTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('arrays', lambda: _state(jnp.asarray([1.0, np.nan]))),
    ('spec', lambda: _state(jnp.ones(2), out_sharding=P('x'))),
    ('keys', lambda: _state(jax.random.key(1))),
    ('int4', lambda: _state(jnp.ones(2, jnp.int4))),
    ('fp8', lambda: _state(jnp.ones(2, jnp.float8_e4m3fn))),
    ('abstract', lambda: _state(jax.ShapeDtypeStruct((2,), jnp.int8))),
    ('shardings', lambda: nnx.State({'w': P('x')})),
    (
      'composite',
      lambda: _state(
        qarray.QArray(jnp.ones((4, 2), jnp.int4), jnp.ones((1, 2)))
      ),
    ),
    ('size_0', lambda: _state(jnp.ones((0, 2)))),
  )
  def test_equal(self, make):
    self.assertEqual(transforms.diff(make(), make()), ())

  @parameterized.named_parameters(
    ('shape', jnp.ones((2, 3)), jnp.ones((2, 4)), ('shape', (2, 3), (2, 4))),
    (
      'dtype',
      jnp.ones(2),
      jnp.ones(2, jnp.bfloat16),
      ('dtype', jnp.dtype('float32'), jnp.dtype('bfloat16')),
    ),
    (
      'values',
      jnp.asarray([[1.0, 2.0], [3.0, 4.0]]),
      jnp.asarray([[1.0, 2.5], [0.0, 4.0]]),
      ('values', '3.0 at [1, 0]', '0.0 (2 of 4 differ)'),
    ),
    (
      'nan',
      jnp.asarray([1.0, 2.0]),
      jnp.asarray([1.5, np.nan]),
      ('values', '2.0 at [1]', 'nan (2 of 2 differ)'),
    ),
    (
      'int4',
      jnp.asarray([1, 2], jnp.int4),
      jnp.asarray([1, 3], jnp.int4),
      ('values', '2.0 at [1]', '3.0 (1 of 2 differ)'),
    ),
  )
  def test_values(self, one, two, expected):
    self.assertEqual(_diff(_state(one), _state(two)), [('a/w', *expected)])

  def test_metadata(self):
    value = jnp.ones(2)
    one = _state(value, out_sharding=P('x'), note=1)
    two = _state(value, out_sharding=('x',), note=2)
    self.assertEqual(
      _diff(one, two),
      [
        ('a/w', 'metadata', {'note': 1}, {'note': 2}),
        ('a/w', 'spec', P('x'), ('x',)),
      ],
    )

  def test_missing_and_type(self):
    one = nnx.State({'a': nnx.Param(1), 'b': nnx.Param(1)})
    two = nnx.State({'b': nnx.LoRAParam(1), 'c': nnx.Param(1)})
    self.assertEqual(
      _diff(one, two),
      [
        ('a', 'missing', 'Param', None),
        ('b', 'type', 'Param', 'LoRAParam'),
        ('c', 'missing', None, 'Param'),
      ],
    )
    self.assertEqual(
      str(transforms.diff(one, two)[1]), 'b: type Param != LoRAParam'
    )


class DescribeTest(absltest.TestCase):
  def test_table(self):
    state = nnx.State(
      {
        'layers': {
          i: {
            'w': nnx.Param(jnp.ones((4, 6), jnp.int4)).replace(
              out_sharding=('embed', 'mlp')
            )
          }
          for i in range(12)
        },
        'odd': {1: nnx.Param(jnp.ones(2)), 3: nnx.Param(jnp.ones(2))},
        'raw': np.ones(300, np.float64),
      }
    )
    expected = '\n'.join(
      [
        'path            type  shape  dtype   spec             bytes',
        "layers/{0-11}/w Param (4, 6) int4    ('embed', 'mlp')   144",
        'odd/{1,3}       Param (2,)   float32 -                   16',
        'raw             -     (300,) float64 -                2,400',
        'total           15 leaves, 592 elements               2,560',
      ]
    )
    self.assertEqual(transforms.describe(state), expected)

  def test_composite_and_empty(self):
    state = _state(qarray.QArray(jnp.ones((4, 2), jnp.int4), jnp.ones((1, 2))))
    lines = transforms.describe(state).splitlines()
    self.assertLen(lines, 4)
    self.assertEqual(
      lines[1].split(), ['a/w', 'Param', '(4,', '2)', 'int4', '-', '4']
    )
    self.assertEqual(lines[2].split()[-1], '8')
    self.assertStartsWith(
      transforms.describe(nnx.State({})).splitlines()[1],
      'total 0 leaves, 0 elements',
    )

  def test_shardings(self):
    with self.assertRaisesWithLiteralMatch(
      TypeError, 'describe: w is a sharding; expected a State of arrays.'
    ):
      transforms.describe(nnx.State({'w': P()}))


if __name__ == '__main__':
  absltest.main()
