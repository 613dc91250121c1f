from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import qwix

import peftlib
from peftlib import methods
from tests.peftlib import toy_models

chex.set_n_cpu_devices(8)

KEY = jax.random.key(0)
LORA = methods.Lora(rank=2, alpha=4.0)


def _moved(state):
  """The State with random adapter variables."""
  rng = np.random.default_rng(0)
  return nnx.from_flat_state(
    [
      (
        path,
        variable.replace(
          jnp.asarray(0.2 * rng.normal(size=variable.shape), jnp.float32)
        )
        if isinstance(variable, nnx.LoRAParam)
        else variable,
      )
      for path, variable in nnx.to_flat_state(state)
    ]
  )


def _base(cls):
  return nnx.split(cls(nnx.Rngs(0)))


def _injected(base, *rules, **kwargs):
  graphdef, state = peftlib.inject(
    *base,
    peftlib.AdapterConfig(rules or (peftlib.Rule('.*', LORA),)),
    toy_models.inputs(),
    key=KEY,
    **kwargs,
  )
  return graphdef, _moved(state)


def _run(graphdef, state):
  x = toy_models.inputs()
  return jax.jit(lambda s: nnx.merge(graphdef, s, copy=True)(x))(state)


def _numpy(state):
  return {k: np.asarray(v) for k, v in toy_models.values(state).items()}


class MergeTest(parameterized.TestCase):
  @parameterized.parameters(
    toy_models.Plain, toy_models.LaxScan, toy_models.NnxScan
  )
  def test_a_plain_model_of_numpy_s_weights(self, cls):
    base = _base(cls)
    graphdef, state = _injected(base)
    merged_graphdef, merged = peftlib.merge_adapters(graphdef, state)
    self.assertEqual(merged_graphdef, base[0])
    self.assertEqual(hash(merged_graphdef), hash(base[0]))
    self.assertEqual(
      [p for p, _ in nnx.to_flat_state(merged)],
      [p for p, _ in nnx.to_flat_state(base[1])],
    )
    v = _numpy(state)
    for name, value in _numpy(merged).items():
      expected = v[name]
      if f'{name}_lora_a' in v:
        expected = expected + 2 * v[f'{name}_lora_a'] @ v[f'{name}_lora_b']
      np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
      _run(merged_graphdef, merged), _run(graphdef, state), atol=1e-5
    )

  def test_every_kind_of_op(self):
    base = _base(toy_models.Odd)
    graphdef, state = _injected(base)
    merged_graphdef, merged = peftlib.merge_adapters(graphdef, state)
    self.assertEqual(merged_graphdef, base[0])
    v = _numpy(state)
    updates = {
      'left': np.einsum('ir,ro->oi', v['left_lora_a'], v['left_lora_b']),
      'experts': np.einsum(
        'dr,ref->edf', v['experts_lora_a'], v['experts_lora_b']
      ),
      'general/kernel': (
        v['general/kernel_lora_a'] @ v['general/kernel_lora_b']
      ).reshape(2, 5, 3, 2),
      'conv/kernel': np.einsum(
        'kir,ro->kio', v['conv/kernel_lora_a'], v['conv/kernel_lora_b']
      ),
    }
    got = _numpy(merged)
    for name, update in updates.items():
      np.testing.assert_allclose(
        got[name], v[name] + 2 * update, rtol=1e-5, atol=1e-6
      )

  def test_reshaped_and_transposed_weights(self):
    class Reshaping(nnx.Module):
      def __init__(self):
        rngs = nnx.Rngs(0)
        init = nnx.initializers.normal(0.5)
        self.heads = nnx.Param(init(rngs.params(), (2, 4, 6)))
        self.flipped = nnx.Param(init(rngs.params(), (5, 6)))

      def __call__(self, x):
        return x @ self.heads[...].reshape(8, 6) @ self.flipped[...].T

    base = nnx.split(Reshaping())
    graphdef, state = _injected(base)
    merged_graphdef, merged = peftlib.merge_adapters(graphdef, state)
    self.assertEqual(merged_graphdef, base[0])
    v, got = _numpy(state), _numpy(merged)
    np.testing.assert_allclose(
      got['heads'],
      v['heads'] + 2 * (v['heads_lora_a'] @ v['heads_lora_b']).reshape(2, 4, 6),
      rtol=1e-5,
      atol=1e-6,
    )
    np.testing.assert_allclose(
      got['flipped'],
      v['flipped'] + 2 * (v['flipped_lora_a'] @ v['flipped_lora_b']).T,
      rtol=1e-5,
      atol=1e-6,
    )

  def test_some_layers_only(self):
    base = _base(toy_models.LaxScan)
    graphdef, state = _injected(base, peftlib.Rule('.*up', LORA, layers=(0, 2)))
    merged_graphdef, merged = peftlib.merge_adapters(graphdef, state)
    self.assertEqual(merged_graphdef, base[0])
    v, got = _numpy(state), _numpy(merged)
    expected = v['layers/up/kernel'].copy()
    expected[[0, 2]] += (
      2 * v['layers/up/kernel_lora_a'] @ v['layers/up/kernel_lora_b']
    )
    np.testing.assert_allclose(got['layers/up/kernel'], expected, rtol=1e-5)
    np.testing.assert_array_equal(
      got['layers/up/kernel'][1], v['layers/up/kernel'][1]
    )

  def test_two_adapters_and_those_that_are_on(self):
    base = _base(toy_models.LaxScan)
    one = _injected(base, peftlib.Rule('.*up', LORA))
    graphdef, state = _injected(
      one, peftlib.Rule('.*up', methods.Ia3()), adapter='b'
    )
    v = _numpy(state['layers']['up'])
    update = 2 * v['kernel_lora_a'] @ v['kernel_lora_b']
    scale = v['kernel_ia3_l_b'][:, None]
    for names, expected in (
      (['default', 'b'], (v['kernel'] + update) * scale),
      (['default'], v['kernel'] + update),
      (['b'], v['kernel'] * scale),
      ([], v['kernel']),
    ):
      merged_graphdef, merged = peftlib.merge_adapters(
        *peftlib.set_active(graphdef, state, names)
      )
      self.assertEqual(merged_graphdef, base[0])
      np.testing.assert_allclose(
        _numpy(merged)['layers/up/kernel'], expected, rtol=1e-5, atol=1e-6
      )
    np.testing.assert_array_equal(
      _numpy(merged)['layers/up/kernel'], v['kernel']
    )

  def test_what_has_no_adapter_is_the_very_object(self):
    base = _base(toy_models.Plain)
    graphdef, state = _injected(base, peftlib.Rule('.*1/up', LORA))
    _, merged = peftlib.merge_adapters(graphdef, state)
    new = dict(nnx.to_flat_state(merged))
    for path, variable in nnx.to_flat_state(base[1]):
      if path == ('blocks', 1, 'up', 'kernel'):
        self.assertIsNot(new[path], variable)
      else:
        self.assertIs(new[path], variable)

  def test_metadata_stays(self):
    mesh = jax.make_mesh(
      (1, 1), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    with jax.set_mesh(mesh):
      model = toy_models.LaxScan(nnx.Rngs(0), names=('data', 'model'))
      base = nnx.split(model)
      _, merged = peftlib.merge_adapters(*_injected(base))
    before = base[1]['layers']['up']['kernel']
    after = merged['layers']['up']['kernel']
    self.assertEqual(after.get_metadata(), before.get_metadata())
    self.assertIs(type(after), nnx.Param)

  @parameterized.parameters(
    (jnp.bfloat16, None, jnp.bfloat16),
    (jnp.bfloat16, jnp.float32, jnp.float32),
    (jnp.float32, 'bfloat16', jnp.bfloat16),
  )
  def test_dtype(self, stored, dtype, expected):
    graphdef, state = _base(toy_models.LaxScan)
    state = jax.tree.map(lambda x: x.astype(stored), state)
    graphdef, state = _injected((graphdef, state), peftlib.Rule('.*up', LORA))
    _, merged = peftlib.merge_adapters(graphdef, state, dtype=dtype)
    up = merged['layers']['up']['kernel'].get_value()
    chex.assert_type(up, expected)
    chex.assert_type(merged['layers']['down']['kernel'].get_value(), stored)
    v = _numpy(state['layers']['up'])
    full = np.float32(v['kernel']) + 2 * (
      v['kernel_lora_a'] @ v['kernel_lora_b']
    )
    if expected == jnp.float32:
      np.testing.assert_allclose(up, full, rtol=1e-5, atol=1e-6)
    else:  # Added in f32 and rounded once.
      rounded = np.asarray(jnp.asarray(full).astype(expected), np.float32)
      close = np.asarray(up, np.float32) == rounded
      self.assertGreater(close.mean(), 0.99)

  def test_abstract(self):
    base = nnx.split(nnx.eval_shape(lambda: toy_models.LaxScan(nnx.Rngs(0))))
    graphdef, state = peftlib.inject(
      *base,
      peftlib.AdapterConfig((peftlib.Rule('.*up', LORA, layers=(1,)),)),
      toy_models.inputs(),
      key=KEY,
    )
    merged_graphdef, merged = peftlib.merge_adapters(graphdef, state)
    self.assertEqual(merged_graphdef, base[0])
    chex.assert_trees_all_equal_shapes_and_dtypes(merged, base[1])
    for leaf in jax.tree.leaves(merged):
      self.assertIsInstance(leaf, jax.ShapeDtypeStruct)

  def test_jitted(self):
    graphdef, state = _injected(_base(toy_models.NnxScan))
    merge = lambda s: peftlib.merge_adapters(graphdef, s)[1]
    chex.assert_trees_all_close(
      jax.jit(merge)(state), merge(state), rtol=1e-6, atol=1e-7
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(
      jax.eval_shape(merge, state), merge(state)
    )

  def test_sharding(self):
    mesh = jax.make_mesh(
      (2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    graphdef, state = _base(toy_models.LaxScan)
    sharding = jax.NamedSharding(mesh, jax.P(None, 'data', 'model'))
    state = jax.tree.map(lambda x: jax.device_put(x, sharding), state)
    _, merged = peftlib.merge_adapters(
      *_injected((graphdef, state), peftlib.Rule('.*up', LORA))
    )
    up = merged['layers']['up']['kernel'].get_value()
    self.assertTrue(up.sharding.is_equivalent_to(sharding, 3))


class UnmergeTest(absltest.TestCase):
  def test_the_base_s_very_objects(self):
    base = _base(toy_models.Plain)
    injected = _injected(base)
    graphdef, merged = peftlib.merge_adapters(*injected)
    for before in (base[1], injected[1]):
      back = peftlib.unmerge_adapters(merged, before)
      self.assertEqual(jax.tree.structure(back), jax.tree.structure(base[1]))
      for (path, variable), (_, old) in zip(
        nnx.to_flat_state(back), nnx.to_flat_state(base[1]), strict=True
      ):
        self.assertIs(variable, old, msg=path)
    np.testing.assert_array_equal(_run(graphdef, back), _run(*base))

  def test_errors(self):
    base = _base(toy_models.Plain)
    other = _base(toy_models.LaxScan)
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      'peftlib.unmerge_adapters: blocks/0/down/kernel is not in the base.',
    ):
      peftlib.unmerge_adapters(base[1], other[1])
    with self.assertRaisesRegex(
      TypeError, 'peftlib.unmerge_adapters: state is a Plain, an nnx.Module'
    ):
      peftlib.unmerge_adapters(toy_models.Plain(nnx.Rngs(0)), base[1])


def _int8(weight):
  """numpy's int8 by column: values that come back."""
  scale = np.abs(weight).max(-2, keepdims=True) / 127.5
  return np.clip(np.round(weight / scale), -127, 127) * scale


def _relative(got, expected):
  return np.linalg.norm(got - expected) / np.linalg.norm(expected)


class QuantizedTest(parameterized.TestCase):
  def _model(self, qtype='int8', tile_size=None):
    base = _base(toy_models.LaxScan)
    rule = peftlib.Rule(
      '.*(up|down)', LORA, weight_qtype=qtype, tile_size=tile_size
    )
    config = peftlib.AdapterConfig((rule,))
    x = toy_models.inputs()
    quantized = peftlib.quantize_base(*base, config, x)
    graphdef, state = peftlib.inject(*quantized, config, x, key=KEY)
    return base, quantized, (graphdef, _moved(state))

  def test_into_floating_point(self):
    base, quantized, injected = self._model()
    graphdef, merged = peftlib.merge_adapters(*injected)
    self.assertEqual(graphdef, base[0])
    plain = _numpy(peftlib.dequantize_base(*quantized)[1])
    v = _numpy(injected[1])
    for name, value in _numpy(merged).items():
      np.testing.assert_allclose(
        plain[name], _int8(_numpy(base[1])[name]), rtol=1e-3, atol=7e-3
      )
      np.testing.assert_allclose(
        value,
        plain[name] + 2 * v[f'{name}_lora_a'] @ v[f'{name}_lora_b'],
        rtol=1e-5,
        atol=1e-6,
      )
    np.testing.assert_allclose(
      _run(graphdef, merged), _run(*injected), atol=1e-4
    )

  @parameterized.parameters(('int8', None), ('int4', 4), ('nf4', 4))
  def test_requantized(self, qtype, tile_size):
    _, quantized, injected = self._model(qtype, tile_size)
    graphdef, merged = peftlib.merge_adapters(*injected, requantize=True)
    self.assertEqual(graphdef, quantized[0])
    chex.assert_trees_all_equal_shapes_and_dtypes(merged, quantized[1])
    full = peftlib.merge_adapters(*injected)[1]
    errors = peftlib.quantization_error(graphdef, merged, full)
    self.assertEqual(sorted(errors), ['layers/down/kernel', 'layers/up/kernel'])
    reference = _numpy(full)
    for path, error in errors.items():
      _, module, _ = path.split('/')
      array = jax.tree.map(
        lambda v: v.get_value(),
        merged['layers'][module]['kernel']['array'],
        is_leaf=lambda v: isinstance(v, nnx.Variable),
      )
      q = qwix.QArray(
        array['qvalue'],
        array['scale'],
        qtype=qtype if qtype == 'nf4' else array['qvalue'].dtype,
      )
      got = np.asarray(jax.vmap(qwix.dequantize)(q), np.float32)
      expected = _relative(got, reference[path])
      np.testing.assert_allclose(error, expected, rtol=1e-4)
      # Round-off of so many bits, absmax scales.
      self.assertBetween(
        float(error),
        *{'int8': (5e-4, 0.01), 'int4': (0.02, 0.12), 'nf4': (0.02, 0.12)}[
          qtype
        ],
      )
    if qtype == 'int8':
      for path, error in errors.items():
        expected = _relative(_int8(reference[path]), reference[path])
        np.testing.assert_allclose(error, expected, rtol=0.1)

  def test_only_the_quantized_ones(self):
    rules = (
      peftlib.Rule('.*up', LORA, weight_qtype='int8'),
      peftlib.Rule('.*down', LORA),
    )
    base = _base(toy_models.LaxScan)
    config = peftlib.AdapterConfig(rules)
    x = toy_models.inputs()
    quantized = peftlib.quantize_base(*base, config, x)
    injected = peftlib.inject(*quantized, config, x, key=KEY)
    graphdef, merged = peftlib.merge_adapters(*injected, requantize=True)
    self.assertEqual(graphdef, quantized[0])
    self.assertEqual(
      list(peftlib.quantization_error(graphdef, merged, base[1])),
      ['layers/up/kernel'],
    )
    # An update of zero rounds to where it was, but for ties of the extremes.
    before, after = (
      state['layers']['up']['kernel']['array']
      for state in (quantized[1], merged)
    )
    steps = np.abs(
      np.asarray(before['qvalue'].get_value(), np.int32)
      - np.asarray(after['qvalue'].get_value(), np.int32)
    )
    self.assertLessEqual(steps.max(), 1)
    self.assertLess(steps.mean(), 0.05)
    np.testing.assert_allclose(
      before['scale'].get_value(), after['scale'].get_value(), rtol=0.01
    )

  def test_a_quantized_weight_without_adapter_stays(self):
    rules = (
      peftlib.Rule('.*up', LORA, weight_qtype='int8'),
      peftlib.Rule('.*down', weight_qtype='int8'),
    )
    base = _base(toy_models.LaxScan)
    config = peftlib.AdapterConfig(rules)
    x = toy_models.inputs()
    quantized = peftlib.quantize_base(*base, config, x)
    injected = peftlib.inject(*quantized, config, x, key=KEY)
    graphdef, merged = peftlib.merge_adapters(*injected)
    self.assertIs(
      merged['layers']['down']['kernel']['array']['qvalue'],
      quantized[1]['layers']['down']['kernel']['array']['qvalue'],
    )
    self.assertEqual(
      merged['layers']['up']['kernel'].get_value().dtype, jnp.float32
    )
    np.testing.assert_allclose(
      _run(graphdef, merged), _run(*injected), atol=1e-5
    )

  def test_reference_without_the_weight(self):
    _, quantized, _ = self._model()
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      'peftlib.quantization_error: layers/down/kernel is not in the reference.',
    ):
      peftlib.quantization_error(*quantized, _base(toy_models.Plain)[1])


class ErrorsTest(parameterized.TestCase):
  def test_no_adapters(self):
    with self.assertRaisesWithLiteralMatch(
      ValueError, 'peftlib.merge_adapters: the model has no adapters.'
    ):
      peftlib.merge_adapters(*_base(toy_models.Plain))

  def test_rows_of_a_batch(self):
    graphdef, state = _injected(
      _base(toy_models.LaxScan), peftlib.Rule('.*up', LORA)
    )
    rows = peftlib.assign_rows(
      graphdef, state, ['default'], jnp.array([0, -1, 0, 0])
    )
    with self.assertRaisesRegex(
      ValueError,
      r"peftlib\.merge_adapters: adapter 'default' of layers/up\.kernel is"
      r' assigned to rows of a batch; no single weight does what they do\.',
    ):
      peftlib.merge_adapters(*rows)

  def test_a_bias(self):
    graphdef, state = _injected(
      _base(toy_models.LaxScan), peftlib.Rule('.*up', methods.Lora(bias=True))
    )
    with self.assertRaisesRegex(
      ValueError,
      r'Lora\.bias=True: the adapter of layers/up\.kernel has a bias, for'
      r' which no weight can stand\.',
    ):
      peftlib.merge_adapters(graphdef, state)

  def test_a_module(self):
    model = toy_models.Plain(nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    with self.assertRaisesRegex(
      TypeError, 'peftlib.merge_adapters: state is a Plain, an nnx.Module'
    ):
      peftlib.merge_adapters(graphdef, model)
    with self.assertRaisesRegex(
      TypeError, 'peftlib.quantization_error: graphdef is a Plain'
    ):
      peftlib.quantization_error(model, state, state)


if __name__ == '__main__':
  absltest.main()
