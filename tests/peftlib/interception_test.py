from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import qwix
from qwix._src.core import qarray
from qwix._src.providers import ptq

import peftlib
from peftlib import interception
from peftlib import methods
from tests.peftlib import toy_models

KEY = jax.random.key(0)


class PrivateQwixTest(absltest.TestCase):
  """Notices when what interception.py takes from qwix's inside changes."""

  def test_quantized_weight_wrapper(self):
    how = qarray.HowToQuantize(qtype=jnp.int8, channelwise_axes=(1,))
    array = qarray.quantize(jnp.ones((4, 2)), how)
    self.assertIsInstance(array, qwix.QArray)
    weight = ptq.WithAux(jax.tree.map(nnx.Param, array), how)
    self.assertEqual(weight.shape, (4, 2))
    self.assertIsInstance(weight[...].array.qvalue, jax.Array)
    self.assertIsInstance(weight.value.array, qwix.QArray)
    self.assertIs(weight.how, how)

  def test_hooks_of_the_provider(self):
    provider = qwix.PtqProvider(rules=[])
    intercepted = provider.get_intercept_map()
    for name in (
      'jax.lax.dot_general',
      'jax.lax.conv_general_dilated',
      'jax.numpy.einsum',
      'jax.numpy.dot',
      'flax.nnx.nn.dtypes.promote_dtype',
    ):
      self.assertIn(name, intercepted)
    for name in ('process_model_inputs', 'process_model_output'):
      self.assertTrue(callable(getattr(provider, name)))

  def test_class_of_a_wrapped_model_knows_the_plain_one(self):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    out = qwix.quantize_model(
      model, qwix.PtqProvider(rules=[]), None, skip_nnx_init=True
    )
    self.assertIs(type(out)._unquantized_type, nnx.Linear)
    self.assertEqual(out.qwix_path, ())

  def test_a_tracer_leads_back_through_a_cast(self):
    seen = []

    def f(x):
      y = x.astype(jnp.bfloat16)
      seen.append(y.parent.in_tracers[0] is x)
      return y

    jax.eval_shape(f, jnp.ones(3))
    self.assertEqual(seen, [True])


class PrivateJaxTest(absltest.TestCase):
  """Notices when the class of concrete arrays gets another name."""

  def test_concrete_arrays(self):
    self.assertIs(type(jnp.zeros(1)), jaxlib._jax.ArrayImpl)
    for name in ('__matmul__', '__rmatmul__', '__getitem__'):
      self.assertTrue(hasattr(jaxlib._jax.ArrayImpl, name))
      self.assertTrue(hasattr(jax.core.Tracer, name))

  def test_operators_are_answered_in_and_outside_of_a_trace(self):
    class Operators(nnx.Module):
      def __init__(self):
        self.at = nnx.Param(jnp.eye(8, 5))
        self.variable = nnx.Param(jnp.eye(5, 4))
        self.table = nnx.Param(jnp.ones((6, 4)))

      def __call__(self, x):
        ids = jnp.arange(x.shape[0])
        return x @ self.at[...] @ self.variable + self.table[...][ids]

    x = toy_models.inputs()
    graphdef, state = peftlib.inject(
      *nnx.split(Operators()), peftlib.LoraConfig(rank=2), x, key=KEY
    )
    lora, rest = nnx.split_state(state, nnx.LoRAParam, ...)
    lora = jax.tree.map(lambda v: v + 0.5, lora)
    self.assertLen(jax.tree.leaves(lora), 6)
    state = nnx.merge_state(lora, rest)
    eager = nnx.merge(graphdef, state)(x)
    jitted = jax.jit(lambda s: nnx.merge(graphdef, s)(x))(state)
    np.testing.assert_allclose(eager, jitted, rtol=1e-5, atol=1e-4)
    merged = peftlib.merge_adapters(graphdef, state)
    np.testing.assert_allclose(
      eager, nnx.merge(*merged)(x), rtol=1e-5, atol=1e-4
    )
    self.assertGreater(float(jnp.abs(eager - Operators()(x)).max()), 1.0)


class RecordTest(parameterized.TestCase):
  def _record(self, model):
    return {
      op.label: op for op in interception.record(model, toy_models.inputs()).ops
    }

  @parameterized.parameters(
    (toy_models.LaxScan, 'layers/{}.kernel'),
    (toy_models.NnxScan, 'layers/{}.kernel'),
    (toy_models.Plain, 'blocks/2/{}.kernel'),
  )
  def test_scanned_and_plain_layers(self, cls, label):
    ops = self._record(cls(nnx.Rngs(0)))
    up, down = ops[label.format('up')], ops[label.format('down')]
    self.assertEqual(
      (up.kind, up.shape, up.exact), ('dot_general', (8, 16), True)
    )
    self.assertEqual(down.shape, (16, 8))
    self.assertEqual((up.batch, up.inputs, up.outputs), ((), (0,), (1,)))
    a, b = methods.Lora(rank=4).variables(up.weight).values()
    self.assertEqual(up.variable_axes(a), ((8, 0), (4, None)))
    self.assertEqual(up.variable_axes(b), ((4, None), (16, 1)))

  def test_every_kind_of_op(self):
    ops = self._record(toy_models.Odd(nnx.Rngs(0)))
    self.assertEqual(
      {k: (v.kind, v.shape, v.inputs) for k, v in ops.items()},
      {
        'left': ('einsum', (6, 8), (1,)),
        'experts': ('einsum', (2, 6, 5), (1,)),
        'general.kernel': ('dot_general', (2, 5, 3, 2), (0, 1)),
        'conv.kernel': ('conv', (3, 2, 4), (0, 1)),
      },
    )

  def test_square_weights_of_one_module_are_told_apart(self):
    class Two(nnx.Module):
      def __init__(self):
        self.first = nnx.Param(jnp.eye(8))
        self.second = nnx.Param(2 * jnp.eye(8))

      def __call__(self, x):
        x = jnp.dot(x, self.second[...].astype(jnp.bfloat16))
        return jnp.dot(x, self.first[...])

    self.assertEqual(list(self._record(Two())), ['second', 'first'])

  def test_an_activation_is_not_taken_for_a_weight_of_its_shape(self):
    class Square(nnx.Module):
      def __init__(self):
        self.weight = nnx.Param(jnp.ones((4, 8)))

      def __call__(self, x):
        return jnp.einsum('bi,bi->b', x, 2 * x) + self.weight[...].sum()

    self.assertEmpty(self._record(Square()))

  def test_transposed_weight_is_not_exact(self):
    class Tied(nnx.Module):
      def __init__(self):
        self.table = nnx.Param(jnp.ones((5, 8)))

      def __call__(self, x):
        return jnp.dot(x, self.table[...].T)

    ops = self._record(Tied())
    self.assertFalse(ops['table'].exact)
    self.assertEqual(
      (ops['table'].shape, ops['table'].inputs, ops['table'].outputs),
      ((5, 8), (1,), (0,)),
    )
    with self.assertRaisesRegex(
      ValueError, 'table is reshaped or transposed on its way to the op'
    ):
      peftlib.quantize_base(
        *nnx.split(Tied()),
        peftlib.LoraConfig(weight_qtype='int8'),
        toy_models.inputs(),
      )

  def test_one_weight_in_two_forms(self):
    class Both(nnx.Module):
      def __init__(self):
        self.weight = nnx.Param(jnp.ones((2, 4, 8)))

      def __call__(self, x):
        first = jnp.einsum('bi,doi->bdo', x, self.weight[...])
        experts = jnp.einsum('bdi,doi->bdo', x[:, None], self.weight[...])
        return first + experts

    recording = interception.record(Both(), toy_models.inputs())
    self.assertEqual(recording.ops, ())
    self.assertEqual(
      recording.missed,
      (
        interception.Missed(
          '',
          'weight',
          None,
          'it takes part in two ops of different form, einsum summing over axes'
          ' (2,) and einsum summing over axes (2,), batched over (0,)',
        ),
      ),
    )
    (missed,) = recording.missed
    self.assertEqual(missed.text, f'weight: {missed.why}')

  def test_a_use_that_is_not_traced_back_names_its_op(self):
    class Inner(nnx.Module):
      def __init__(self):
        self.weight = nnx.Param(jnp.ones((8, 8)))

      def __call__(self, x):
        return x @ (self.weight[...] * 2)

    class Outer(nnx.Module):
      def __init__(self):
        self.inner = Inner()

      def __call__(self, x):
        return self.inner(x)

    (missed,) = interception.record(Outer(), toy_models.inputs()).missed
    self.assertEqual(
      missed,
      (
        'inner',
        'weight',
        'dot_general',
        'its use in dot_general could not be traced back to it',
      ),
    )
    self.assertEqual(missed.text, f'inner.weight: {missed.why}')

  def test_allocates_and_changes_nothing(self):
    model = toy_models.Odd(nnx.Rngs(0))
    before = toy_models.values(nnx.split(model)[1])
    interception.record(
      model, jax.ShapeDtypeStruct((4, toy_models.WIDTH), jnp.float32)
    )
    chex.assert_trees_all_equal(toy_models.values(nnx.split(model)[1]), before)


class InterceptedCallTest(parameterized.TestCase):
  def test_a_cast_that_hides_the_weight_is_an_error_outside_of_jit(self):
    class Casting(nnx.Module):
      def __init__(self):
        self.weight = nnx.Param(jnp.ones((8, 5)))

      def __call__(self, x):
        return jnp.dot(x, self.weight[...].astype(jnp.bfloat16))

    x = toy_models.inputs().astype(jnp.bfloat16)
    graphdef, state = peftlib.inject(
      *nnx.split(Casting()), peftlib.LoraConfig(rank=2), x, key=KEY
    )
    with self.assertRaisesRegex(
      ValueError, 'weight reaches an op as a value that no longer leads back'
    ):
      nnx.merge(graphdef, state)(x)
    state['weight_lora_b'] = state['weight_lora_b'].replace(jnp.ones((2, 5)))
    got = jax.jit(lambda s: nnx.merge(graphdef, s)(x))(state)
    a = np.asarray(state['weight_lora_a'].get_value())
    expected = np.asarray(x, np.float32) @ (
      np.ones((8, 5)) + 16 * a.sum(1)[:, None]
    )
    np.testing.assert_allclose(
      np.asarray(got, np.float32), expected, rtol=0.05, atol=0.5
    )

  def test_bf16_compute_over_an_f32_base_through_grad_and_vmap(self):
    model = nnx.Linear(8, 5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = toy_models.inputs()
    graphdef, state = peftlib.inject(
      *nnx.split(model), peftlib.LoraConfig(rank=2), x, key=KEY
    )
    loss = lambda s, x: jnp.sum(
      nnx.merge(graphdef, s, copy=True)(x).astype(jnp.float32)
    )
    grads = jax.grad(loss)(state, x)
    self.assertGreater(
      float(jnp.abs(grads['kernel_lora_b'].get_value()).max()), 0
    )
    chex.assert_type(grads['kernel_lora_b'].get_value(), jnp.float32)
    rows = jax.vmap(lambda row: nnx.merge(graphdef, state, copy=True)(row))(x)
    chex.assert_trees_all_close(rows, nnx.merge(graphdef, state)(x), atol=1e-2)

  @parameterized.parameters(
    (lambda: nnx.Linear(8, 5, rngs=nnx.Rngs(0)), np.ones((2, 8), np.float32)),
    (lambda: nnx.Embed(8, 5, rngs=nnx.Rngs(0)), np.arange(3)),
    (lambda: toy_models.Plain(nnx.Rngs(0)), np.ones((2, 8), np.float32)),
    (lambda: toy_models.NnxScan(nnx.Rngs(0)), np.ones((2, 8), np.float32)),
  )
  def test_a_state_of_numpy_arrays(self, make, x):
    method = peftlib.methods.Lora(rank=2)
    graphdef, state = peftlib.inject(
      *nnx.split(make()),
      peftlib.AdapterConfig(rules=(peftlib.Rule('.*', method),)),
      x,
      key=KEY,
    )
    state = jax.tree.map(lambda v: v + 0.1, state)
    expected = nnx.merge(graphdef, state, copy=True)(x)
    fetched = jax.device_get(state)
    calls = (
      lambda s, x: nnx.merge(graphdef, s)(x),
      jax.jit(lambda s, x: nnx.merge(graphdef, s)(x)),
      # nnx.scan takes no variables of outside of the trace.
      lambda s, x: jax.jit(lambda x: nnx.merge(graphdef, s, copy=True)(x))(x),
    )
    for call in calls:
      np.testing.assert_allclose(call(fetched, x), expected, rtol=1e-5)
    for _, variable in nnx.to_flat_state(fetched):
      self.assertIsInstance(variable.get_raw_value(), np.ndarray)

  def test_a_quantized_state_of_numpy_arrays(self):
    x = toy_models.inputs()
    config = peftlib.LoraConfig(rank=2, weight_qtype='int8')
    base = nnx.split(toy_models.Plain(nnx.Rngs(0)))
    graphdef, state = peftlib.quantize_base(
      *peftlib.inject(*base, config, x, key=KEY), config, x
    )
    np.testing.assert_allclose(
      nnx.merge(graphdef, jax.device_get(state))(x),
      nnx.merge(graphdef, state, copy=True)(x),
      rtol=1e-5,
    )

  def test_three_operands(self):
    class Three(nnx.Module):
      def __init__(self):
        self.weight = nnx.Param(jnp.ones((8, 5)))

      def __call__(self, x):
        return jnp.einsum('bi,io,o->bo', x, self.weight[...], jnp.ones(5))

    with self.assertRaisesRegex(
      ValueError, r"einsum 'bi,io,o->bo' of 3 operands uses weight; only"
    ):
      interception.record(Three(), toy_models.inputs())

  def test_jax_is_as_before_after_a_call(self):
    before = (jnp.einsum, jnp.dot, jax.lax.dot_general.__code__)
    graphdef, state = peftlib.inject(
      *nnx.split(toy_models.Plain(nnx.Rngs(0))),
      peftlib.LoraConfig(module_path='.*up', rank=2),
      toy_models.inputs(),
      key=KEY,
    )
    nnx.merge(graphdef, state)(toy_models.inputs())
    self.assertEqual(
      (jnp.einsum, jnp.dot, jax.lax.dot_general.__code__), before
    )


class LeakTest(parameterized.TestCase):
  @parameterized.parameters(toy_models.LaxScan, toy_models.NnxScan)
  def test_no_tracer_outlives_its_scan(self, cls):
    x = toy_models.inputs()
    config = peftlib.LoraConfig(module_path='.*(up|down)', rank=1)
    with jax.checking_leaks():
      split = peftlib.inject(
        *nnx.split(cls(nnx.Rngs(0))), config, x, key=jax.random.key(0)
      )
      tuned = jax.jit(lambda state: nnx.merge(split[0], state)(x))(split[1])
    np.testing.assert_allclose(tuned, nnx.merge(*split)(x), atol=1e-5)


if __name__ == '__main__':
  absltest.main()
