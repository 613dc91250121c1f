"""Mapping over Variables, casting and counting."""

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from qwix._src.core import qarray

import transforms
from transforms import mapping


def _state():
  return nnx.State(
    {
      'mlp': {
        'w': nnx.Param(jnp.ones((4, 5))).replace(out_sharding=('a', 'b')),
        'lora': nnx.LoRAParam(jnp.ones((4, 2))),
      },
      'mlp_norm': nnx.Param(jnp.ones(5)),
      'count': nnx.Variable(jnp.asarray(3)),
      'keys': nnx.Variable(jax.random.split(jax.random.key(0), 3)),
    }
  )


class MapVariablesTest(absltest.TestCase):
  def test_only_the_selected(self):
    state = _state()
    result = transforms.map_variables(
      lambda variable: variable.replace(2 * variable[...]),
      state,
      (nnx.LoRAParam, transforms.PathMatches('mlp_norm')),
    )
    self.assertEqual(result['mlp']['lora'][0, 0], 2)
    self.assertEqual(result['mlp_norm'][0], 2)
    self.assertIs(result['mlp']['w'], state['mlp']['w'])
    self.assertIs(result['count'], state['count'])
    self.assertEqual(state['mlp_norm'][0], 1)

  def test_error_has_the_path(self):
    def fail(variable):
      raise ValueError('no.')

    with self.assertRaisesWithLiteralMatch(
      ValueError, 'map_variables: mlp/lora of shape (4,2): no.'
    ):
      transforms.map_variables(fail, _state(), nnx.LoRAParam)


class CastTest(parameterized.TestCase):
  def test_floats_alone(self):
    state = _state()
    result = transforms.cast(state, jnp.bfloat16)
    for path in (('mlp', 'w'), ('mlp', 'lora'), ('mlp_norm',)):
      variable = dict(nnx.to_flat_state(result))[path]
      self.assertEqual(variable.dtype, jnp.bfloat16)
    self.assertIs(result['count'], state['count'])
    self.assertIs(result['keys'], state['keys'])
    self.assertEqual(
      result['mlp']['w'].get_metadata('out_sharding'), ('a', 'b')
    )

  def test_filter_and_nothing_to_do(self):
    state = _state()
    result = transforms.cast(state, jnp.float16, nnx.LoRAParam)
    self.assertEqual(result['mlp']['lora'].dtype, jnp.float16)
    self.assertIs(result['mlp']['w'], state['mlp']['w'])
    self.assertIs(
      transforms.cast(state, jnp.float32)['mlp']['w'], state['mlp']['w']
    )

  def test_kinds_of_values(self):
    state = nnx.State(
      {
        'host': nnx.Param(np.ones(2, np.float32)),
        'abstract': nnx.Param(jax.ShapeDtypeStruct((2,), jnp.float32)),
        'python': nnx.Param(1.0),
        'raw': jnp.ones(2),
        'quantized': nnx.Param(
          qarray.QArray(jnp.ones((4, 2), jnp.int4), jnp.ones((1, 2)))
        ),
      }
    )
    result = transforms.cast(state, jnp.bfloat16)
    self.assertIsInstance(result['host'].get_raw_value(), np.ndarray)
    self.assertEqual(result['host'].dtype, jnp.bfloat16)
    self.assertEqual(
      result['abstract'].get_raw_value(),
      jax.ShapeDtypeStruct((2,), jnp.bfloat16),
    )
    self.assertEqual(result['python'].get_raw_value().dtype, jnp.bfloat16)
    self.assertEqual(result['raw'].dtype, jnp.bfloat16)
    quantized = result['quantized'].get_raw_value()
    self.assertEqual(quantized.qvalue.dtype, jnp.int4)
    self.assertEqual(quantized.scale.dtype, jnp.bfloat16)

  def test_refused(self):
    with self.assertRaisesWithLiteralMatch(
      ValueError, 'cast: int8 is no floating-point dtype.'
    ):
      transforms.cast(_state(), jnp.int8)


class CountTest(parameterized.TestCase):
  @parameterized.parameters(
    ('', 20 + 8 + 5 + 1 + 3, 4 * 34 + 8 * 3),
    ('mlp', 28, 4 * 28),
    ('mlp/w', 20, 80),
    ('keys', 3, 24),
  )
  def test_by_prefix(self, prefix, count, size):
    for state in (_state(), jax.eval_shape(_state)):
      self.assertEqual(transforms.param_count(state, prefix), count)
      self.assertEqual(transforms.param_bytes(state, prefix), size)

  @parameterized.parameters(
    'bool',
    'int2',
    'int4',
    'uint4',
    'int8',
    'float4_e2m1fn',
    'float8_e4m3fn',
    'bfloat16',
    'float32',
    'complex64',
  )
  def test_bytes_are_those_on_the_device(self, dtype):
    for shape in ((3, 5), (4, 4), (), (0, 3)):
      array = jnp.zeros(shape, dtype)
      self.assertEqual(
        mapping.array_bytes(array), array.on_device_size_in_bytes()
      )
      self.assertEqual(
        mapping.array_bytes(jax.ShapeDtypeStruct(shape, array.dtype)),
        array.on_device_size_in_bytes(),
      )

  @parameterized.parameters('threefry2x32', 'rbg')
  def test_bytes_of_keys(self, impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    self.assertEqual(
      mapping.array_bytes(keys), jax.random.key_data(keys).nbytes
    )

  def test_unknown_prefix(self):
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      "param_count: nothing is below 'mlp/v'; at the top there are: count, "
      'keys, mlp, mlp_norm.',
    ):
      transforms.param_count(_state(), 'mlp/v')

  def test_shardings(self):
    state = nnx.State({'w': jax.P('x')})
    with self.assertRaisesWithLiteralMatch(
      TypeError, 'param_bytes: expected a State of arrays, not shardings.'
    ):
      transforms.param_bytes(state)
    with self.assertRaisesRegex(TypeError, 'cast: w with .* it is a sharding'):
      transforms.cast(state, jnp.bfloat16)


if __name__ == '__main__':
  absltest.main()
