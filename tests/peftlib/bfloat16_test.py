from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlib
from peftlib import bfloat16

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS, IN, OUT = bfloat16.MIN_ROWS, 48, 24
# As /proc/cpuinfo has them, the lines that matter and some that don't.
PLAIN_X86 = 'processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx2 fma\n'
PLAIN_ARM = 'processor\t: 0\nFeatures\t: fp asimd sve\n'


def _slow(slow):
  return mock.patch.object(bfloat16, 'slow_here', return_value=slow)


def _integers(*shape, seed=0):
  """Whole numbers of few bits: their products and sums are exact in float32."""
  values = np.random.default_rng(seed).integers(-8, 9, shape)
  return values.astype(np.float32)


def _rounded(x):
  """float32 rounded to the nearest bfloat16, ties to even, by its bits."""
  bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
  bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
  return bits.astype(np.uint32).view(np.float32)


def _products(function, *args):
  """Dtypes of the operands of all matrix products, in the order of the text."""
  found = []

  def walk(jaxpr):
    for equation in jaxpr.eqns:
      if equation.primitive.name == 'dot_general':
        found.append(tuple(str(v.aval.dtype) for v in equation.invars))
      for inner in jax.tree.leaves(
        equation.params, is_leaf=lambda x: hasattr(x, 'eqns')
      ):
        if hasattr(inner, 'eqns') or hasattr(inner, 'jaxpr'):
          walk(getattr(inner, 'jaxpr', inner))

  walk(jax.make_jaxpr(function)(*args).jaxpr)
  return found


def _operands(dtype=BF16, rows=ROWS):
  x, weight = _integers(rows, IN), _integers(IN, OUT, seed=1)
  return x, weight, jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


class WidenedTest(parameterized.TestCase):
  @parameterized.parameters(None, BF16, F32)
  def test_values_and_dtype(self, preferred):
    x, weight, x16, weight16 = _operands()
    op = lambda x, w: jax.lax.dot_general(
      x, w, (((1,), (0,)), ((), ())), preferred_element_type=preferred
    )
    with _slow(True):
      wide = bfloat16.widened(op, ROWS)
      self.assertEqual(_products(wide, x16, weight16), [('float32', 'float32')])
      out = jax.jit(wide)(x16, weight16)
    expected = x @ weight
    # Of eight bits of sums of up to twelve, some are lost.
    self.assertFalse(np.array_equal(_rounded(expected), expected))
    if preferred != F32:
      expected = _rounded(expected)
    self.assertEqual(out.dtype, preferred or BF16)
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)

  def test_gradients(self):
    x, weight, x16, weight16 = _operands()
    along = _integers(ROWS, OUT, seed=2)
    with _slow(True):
      wide = bfloat16.widened(jnp.matmul, ROWS)

      def backward(x, weight):
        return jax.vjp(wide, x, weight)[1](jnp.asarray(along, BF16))

      # Forward, and backward to either operand.
      self.assertEqual(
        set(_products(backward, x16, weight16)), {('float32', 'float32')}
      )
      dx, dweight = jax.jit(backward)(x16, weight16)
    chex.assert_type([dx, dweight], BF16)
    np.testing.assert_array_equal(
      np.asarray(dx, np.float32), _rounded(along @ weight.T)
    )
    np.testing.assert_array_equal(
      np.asarray(dweight, np.float32), _rounded(x.T @ along)
    )

  def test_residuals_are_the_bfloat16_operands(self):
    _, _, x16, weight16 = _operands()
    with _slow(True):
      wide = bfloat16.widened(jnp.matmul, ROWS)
      residuals = jax.tree.leaves(jax.vjp(wide, x16, weight16)[1])
    shapes = {(x.shape, str(x.dtype)) for x in residuals}
    self.assertEqual(
      shapes, {((ROWS, IN), 'bfloat16'), ((IN, OUT), 'bfloat16')}
    )

  def test_forward_mode_and_vmap(self):
    x, weight, x16, weight16 = _operands()
    with _slow(True):
      wide = bfloat16.widened(jnp.matmul, ROWS)
      out, tangent = jax.jvp(
        lambda x: wide(x, weight16), [x16], [jnp.ones_like(x16)]
      )
      stacked = jax.vmap(wide)(
        jnp.stack([x16, -x16]), jnp.stack([weight16, weight16])
      )
    expected = _rounded(x @ weight)
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)
    np.testing.assert_array_equal(
      np.asarray(tangent, np.float32), _rounded(np.ones_like(x) @ weight)
    )
    np.testing.assert_array_equal(
      np.asarray(stacked, np.float32), [expected, -expected]
    )

  @parameterized.parameters((F32, F32), (BF16, F32), (F32, BF16))
  def test_other_dtypes_are_as_they_were(self, x_dtype, weight_dtype):
    x, weight, _, _ = _operands()
    x, weight = jnp.asarray(x, x_dtype), jnp.asarray(weight, weight_dtype)
    with _slow(True):
      wide = bfloat16.widened(jnp.matmul, ROWS)
      self.assertEqual(
        _products(wide, x, weight), _products(jnp.matmul, x, weight)
      )
      out = wide(x, weight)
    self.assertEqual(out.dtype, F32)
    np.testing.assert_array_equal(out, jnp.matmul(x, weight))

  def test_few_rows_and_quick_units_are_as_they_were(self):
    with _slow(True):
      self.assertIs(bfloat16.widened(jnp.matmul, ROWS - 1), jnp.matmul)
    with _slow(False):
      self.assertIs(bfloat16.widened(jnp.matmul, ROWS), jnp.matmul)


class SlowHereTest(parameterized.TestCase):
  @parameterized.parameters(
    ('cpu', False, True),
    ('cpu', True, False),
    ('gpu', False, False),
    ('tpu', False, False),
  )
  def test_on_cpus_without_units(self, backend, units, expected):
    with (
      mock.patch.object(jax, 'default_backend', return_value=backend),
      mock.patch.object(bfloat16, 'has_units', return_value=units),
    ):
      self.assertEqual(bfloat16.slow_here(), expected)

  @parameterized.parameters(
    (PLAIN_X86, False),
    (PLAIN_X86.replace('fma', 'fma avx512_bf16 avx512f'), True),
    (PLAIN_X86.replace('fma', 'amx_bf16'), True),
    # Half precision is not it.
    (PLAIN_X86.replace('fma', 'avx512_fp16 amx_int8'), False),
    (PLAIN_ARM, False),
    (PLAIN_ARM.replace('sve', 'svebf16 bf16'), True),
    ('', True),
    ('processor\t: 0\nisa\t: rv64imafdc\n', True),
  )
  def test_reads_cpuinfo(self, cpuinfo, expected):
    self.assertEqual(bfloat16.lists_units(cpuinfo), expected)

  def test_units_are_taken_to_be_there_without_cpuinfo(self):
    with mock.patch('pathlib.Path.read_text', side_effect=FileNotFoundError):
      self.assertTrue(bfloat16.has_units.__wrapped__())


class Model(nnx.Module):
  """Two layers, the first of which sees more axes than two."""

  def __init__(self, dtype):
    make = lambda i, o, seed: nnx.Linear(
      i, o, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(seed)
    )
    self.first, self.second = make(IN, OUT, 0), make(OUT, IN, 1)

  def __call__(self, x):
    return self.second(self.first(x).reshape(-1, OUT))


class InjectedTest(parameterized.TestCase):
  """What a whole model does with it."""

  def _forward(self, dtype, **options):
    config = peftlib.LoraConfig(module_path='.*', rank=2, **options)
    x = jnp.asarray(_integers(4, ROWS // 4, IN), dtype)
    graphdef, state = peftlib.inject(
      *nnx.split(Model(dtype)), config, x, key=jax.random.key(0)
    )
    if options:
      graphdef, state = peftlib.quantize_base(graphdef, state, config, x)
    return lambda state, x: nnx.merge(graphdef, state)(x), state, x

  @parameterized.parameters({}, {'weight_qtype': 'int8', 'tile_size': 8})
  def test_base_products(self, **options):
    forward, state, x = self._forward(BF16, **options)
    with _slow(False):
      before, plain = _products(forward, state, x), jax.jit(forward)(state, x)
    # Or the second program would be the first one again.
    jax.clear_caches()
    with _slow(True):
      after, wide = _products(forward, state, x), jax.jit(forward)(state, x)
    in_bf16, in_f32 = ('bfloat16',) * 2, ('float32',) * 2
    # Base, A and B of both layers; the adapter's own stay.
    self.assertEqual(before, [in_bf16] * 6)
    self.assertEqual(sorted(after), [in_bf16] * 4 + [in_f32] * 2)
    self.assertEqual(wide.dtype, BF16)
    # One of the bits of bfloat16, where sums in another order round otherwise.
    np.testing.assert_allclose(
      np.asarray(wide, np.float32),
      np.asarray(plain, np.float32),
      rtol=2**-7,
      atol=2**-6,
    )

  def test_values_against_numpy(self):
    forward, state, x = self._forward(BF16)
    weights = {
      name: np.asarray(state[name]['kernel'][...], np.float32)
      for name in ('first', 'second')
    }
    with _slow(True):
      out = jax.jit(forward)(state, x)
    # B is zero, so that the adapters add nothing.
    hidden = _rounded(
      np.asarray(x, np.float32).reshape(-1, IN) @ weights['first']
    )
    np.testing.assert_allclose(
      np.asarray(out, np.float32),
      _rounded(hidden @ weights['second']),
      rtol=2**-7,
      atol=2**-5,
    )

  def test_nothing_of_a_float32_model_changes(self):
    forward, state, x = self._forward(F32)
    programs = []
    for slow in (False, True):
      # Or the second program would be the first one again.
      jax.clear_caches()
      with _slow(slow):
        programs.append(jax.jit(forward).lower(state, x).as_text())
    self.assertEqual(programs[1], programs[0])


if __name__ == '__main__':
  absltest.main()
