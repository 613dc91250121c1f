from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlib
from peftlib import models
from tests.peftlib import nf4
from tests.peftlib import toy_models

P = jax.sharding.PartitionSpec
KEY = jax.random.key(0)


def _config(qtype, tile_size=None, **kwargs):
  return peftlib.LoraConfig(
    module_path='.*(up|down)',
    rank=2,
    alpha=4.0,
    weight_qtype=qtype,
    tile_size=tile_size,
    **kwargs,
  )


def _round_trip(weight, qtype, tile_size):
  """Quantization of the contracted axis of (K, N), in numpy."""
  k, n = weight.shape
  tiles = weight.reshape(-1, tile_size or k, n)
  absmax = np.abs(tiles).max(axis=1, keepdims=True)
  if qtype == 'nf4':
    return nf4.rounded(tiles, axis=1).reshape(k, n)
  # Symmetric; qwix scales to half a step beyond the largest integer.
  half = {'int8': 127.5, 'int4': 7.5}[qtype]
  scale = absmax / half
  rounded = np.rint(tiles / scale) * scale
  # The largest of a tile falls between two integers, and rounding decides.
  return np.where(np.abs(tiles) == absmax, np.nan, rounded).reshape(k, n)


class QuantizeBaseTest(parameterized.TestCase):
  @parameterized.parameters(
    ('nf4', 4, jnp.uint4, (3, 2, 16)),
    ('nf4', None, jnp.uint4, (3, 1, 16)),
    ('int4', 4, jnp.int4, (3, 2, 16)),
    ('int8', None, jnp.int8, (3, 1, 16)),
    ('fp8', None, jnp.float8_e4m3fn, (3, 1, 16)),
  )
  def test_what_is_stored(self, qtype, tile_size, dtype, scale_shape):
    graphdef, state = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    _, new = peftlib.quantize_base(
      graphdef, state, _config(qtype, tile_size), toy_models.inputs()
    )
    array = new['layers']['up']['kernel']['array']
    self.assertEqual(set(array), {'qvalue', 'scale'})
    chex.assert_shape(array['qvalue'].get_value(), (3, 8, 16))
    chex.assert_type(array['qvalue'].get_value(), dtype)
    chex.assert_shape(array['scale'].get_value(), scale_shape)
    chex.assert_type(array['scale'].get_value(), jnp.float32)
    self.assertIs(type(array['qvalue']), nnx.Param)

  @parameterized.parameters(
    ('nf4', 4), ('nf4', None), ('int4', 4), ('int8', None), ('int8', 8)
  )
  def test_values_against_numpy(self, qtype, tile_size):
    graphdef, state = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    _, back = peftlib.dequantize_base(
      *peftlib.quantize_base(
        graphdef, state, _config(qtype, tile_size), toy_models.inputs()
      )
    )
    for name in ('up', 'down'):
      weight = np.asarray(state['layers'][name]['kernel'].get_value())
      expected = np.stack([_round_trip(w, qtype, tile_size) for w in weight])
      got = np.asarray(back['layers'][name]['kernel'].get_value())
      decided = ~np.isnan(expected)
      self.assertGreater(decided.mean(), 0.7)
      np.testing.assert_allclose(got[decided], expected[decided], atol=1e-6)
      step = {'nf4': 0.31, 'int4': 1 / 7.5, 'int8': 1 / 127.5}[qtype]
      self.assertLessEqual(
        np.abs(got - weight).max(), 0.51 * step * np.abs(weight).max()
      )

  @parameterized.product(
    cls=(toy_models.Plain, toy_models.LaxScan, toy_models.NnxScan),
    qtype=('nf4', 'fp8'),
  )
  def test_forward_is_that_of_the_dequantized_weights(self, cls, qtype):
    graphdef, state = nnx.split(cls(nnx.Rngs(0)))
    x = toy_models.inputs()
    quantized = peftlib.quantize_base(graphdef, state, _config(qtype), x)
    plain_graphdef, plain = peftlib.dequantize_base(*quantized)
    self.assertEqual(plain_graphdef, graphdef)
    chex.assert_trees_all_equal_shapes_and_dtypes(plain, state)
    run = lambda graphdef, state: jax.jit(lambda s: nnx.merge(graphdef, s)(x))(
      state
    )
    chex.assert_trees_all_close(
      run(*quantized), run(plain_graphdef, plain), atol=1e-5
    )

  def test_gradients_of_adapters_are_those_over_dequantized_weights(self):
    x = toy_models.inputs()
    config = _config('nf4', 4)
    base = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    quantized = peftlib.quantize_base(*base, config, x)

    def gradients(graphdef, state):
      graphdef, state = peftlib.inject(graphdef, state, config, x, key=KEY)
      adapters, rest = nnx.split_state(state, nnx.LoRAParam, ...)
      adapters = jax.tree.map(lambda v: v + 0.1, adapters)
      loss = lambda a: jnp.sum(nnx.merge(graphdef, a, rest, copy=True)(x) ** 2)
      return jax.jit(jax.grad(loss))(adapters)

    chex.assert_trees_all_close(
      gradients(*quantized),
      gradients(*peftlib.dequantize_base(*quantized)),
      rtol=1e-4,
      atol=1e-4,
    )

  def test_order_of_inject_and_quantize_does_not_matter(self):
    x = toy_models.inputs()
    config = _config('nf4', 4)
    base = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    first = peftlib.quantize_base(
      *peftlib.inject(*base, config, x, key=KEY), config, x
    )
    second = peftlib.inject(
      *peftlib.quantize_base(*base, config, x), config, x, key=KEY
    )
    self.assertEqual(first[0], second[0])
    self.assertEqual(hash(first[0]), hash(second[0]))
    chex.assert_trees_all_equal(first[1], second[1])

  def test_everything_else_is_left_as_it_is(self):
    graphdef, state = nnx.split(toy_models.Plain(nnx.Rngs(0)))
    _, new = peftlib.quantize_base(
      graphdef, state, _config('int8'), toy_models.inputs()
    )
    after = dict(nnx.to_flat_state(new))
    for path, variable in nnx.to_flat_state(state):
      if path[-2] not in ('up', 'down'):
        self.assertIs(after[path], variable)

  def test_abstract(self):
    graphdef, state = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    config = _config('nf4', 4)
    x = toy_models.inputs()
    concrete_graphdef, concrete = peftlib.quantize_base(
      graphdef, state, config, x
    )
    abstract = jax.eval_shape(lambda: state)
    new_graphdef, new = peftlib.quantize_base(graphdef, abstract, config, x)
    self.assertEqual(new_graphdef, concrete_graphdef)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, concrete)
    for leaf in jax.tree.leaves(new):
      self.assertIsInstance(leaf, jax.ShapeDtypeStruct)
    jitted = jax.jit(
      lambda s: peftlib.quantize_base(graphdef, s, config, x)[1]
    )(state)
    chex.assert_trees_all_close(jitted, concrete)
    back_graphdef, back = peftlib.dequantize_base(new_graphdef, new)
    self.assertEqual(back_graphdef, graphdef)
    chex.assert_trees_all_equal_shapes_and_dtypes(back, state)

  def test_bytes_on_the_device(self):
    model = nnx.Linear(256, 128, use_bias=False, rngs=nnx.Rngs(0))
    config = peftlib.LoraConfig(weight_qtype='nf4', tile_size=64)
    _, state = peftlib.quantize_base(
      *nnx.split(model), config, jnp.ones((1, 256))
    )
    sizes = {
      name: variable.get_value().on_device_size_in_bytes()
      for name, variable in state['kernel']['array'].items()
    }
    # 4 bits a weight, and one f32 scale for each 64 of them.
    self.assertEqual(
      sizes, {'qvalue': 256 * 128 // 2, 'scale': 256 // 64 * 128 * 4}
    )

  @parameterized.parameters(
    # 96 scales in blocks of 96; 512 in blocks of 256, QLoRA's.
    (96, 64, 1),
    (512, 64, 2),
  )
  def test_scales_are_quantized_too(self, columns, tile, blocks):
    model = nnx.Linear(128, columns, use_bias=False, rngs=nnx.Rngs(0))
    base = nnx.split(model)
    quantize = lambda double: peftlib.quantize_base(
      *base,
      peftlib.LoraConfig(
        weight_qtype='nf4', tile_size=tile, double_quantize=double
      ),
      jnp.ones((1, 128)),
    )
    plain, double = quantize(False), quantize(True)
    array = double[1]['kernel']['array']
    self.assertEqual(
      {
        name: (variable.shape, str(variable.dtype))
        for name, variable in array['scale'].items()
      },
      {
        'qvalue': ((128 // tile, columns), 'int8'),
        'scale': ((128 // tile, blocks), 'float32'),
        'zero_point': ((128 // tile, blocks), 'int8'),
      },
    )
    chex.assert_trees_all_equal(
      array['qvalue'], plain[1]['kernel']['array']['qvalue']
    )
    # Half of a step of 255 in the range of each block.
    scale = np.asarray(plain[1]['kernel']['array']['scale'].get_value())
    rows = scale.reshape(-1, columns // blocks)
    step = (rows.max(1) - np.minimum(rows.min(1), 0)).max() / 255
    error = lambda split: np.asarray(
      peftlib.dequantize_base(*split)[1]['kernel'].get_value()
    )
    self.assertLessEqual(np.abs(error(plain) - error(double)).max(), step)
    x = jax.random.normal(KEY, (3, 128))
    chex.assert_trees_all_close(
      nnx.merge(*double)(x), x @ error(double), atol=1e-5
    )

  def test_double_in_a_stack_is_that_of_each_layer(self):
    graphdef, state = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    config = _config('nf4', 4, double_quantize=True)
    x = toy_models.inputs()
    _, stacked = peftlib.quantize_base(graphdef, state, config, x)
    scale = stacked['layers']['up']['kernel']['array']['scale']
    self.assertEqual(scale['scale'].shape, (3, 2, 1))
    plain = peftlib.quantize_base(graphdef, state, _config('nf4', 4), x)[1]
    whole = np.asarray(
      plain['layers']['up']['kernel']['array']['scale'].get_value()
    )
    back = (
      np.asarray(scale['qvalue'].get_value(), np.float32)
      - np.asarray(scale['zero_point'].get_value(), np.float32)
    ) * np.asarray(scale['scale'].get_value())
    np.testing.assert_allclose(back, whole, atol=whole.max() / 255)

  def test_metadata_follows_the_weight(self):
    mesh = jax.make_mesh(
      (1, 1), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    with jax.set_mesh(mesh):
      graphdef, state = nnx.split(
        toy_models.LaxScan(nnx.Rngs(0), names=('data', 'model'))
      )
      _, new = peftlib.quantize_base(
        graphdef, state, _config('nf4', 4), toy_models.inputs()
      )
    array = new['layers']['up']['kernel']['array']
    self.assertEqual(
      array['qvalue'].get_metadata()['out_sharding'],
      ('layers', 'data', 'model'),
    )
    self.assertEqual(
      array['scale'].get_metadata()['out_sharding'], ('layers', None, 'model')
    )

  def test_dequantize_to_another_dtype(self):
    graphdef, state = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    _, back = peftlib.dequantize_base(
      *peftlib.quantize_base(
        graphdef, state, _config('int8'), toy_models.inputs()
      ),
      dtype=jnp.bfloat16,
    )
    chex.assert_type(back['layers']['up']['kernel'].get_value(), jnp.bfloat16)

  def test_refuses(self):
    graphdef, state = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    x = toy_models.inputs()
    with self.assertRaisesRegex(
      ValueError,
      r'tile_size=6 does not divide the contracted width of'
      r' layers/up.kernel \(8\), layers/down.kernel \(16\)\.',
    ):
      peftlib.quantize_base(graphdef, state, _config('nf4', 6), x)
    with self.assertRaisesRegex(
      ValueError, 'LoraConfig.double_quantize=True: must be a bool, and False'
    ):
      _config(None, double_quantize=True)
    with self.assertRaisesRegex(ValueError, 'LoraConfig.weight_qtype is None'):
      peftlib.quantize_base(graphdef, state, _config(None), x)
    once = peftlib.quantize_base(graphdef, state, _config('int8'), x)
    with self.assertRaisesRegex(
      ValueError, 'layers/up.kernel is quantized already'
    ):
      peftlib.quantize_base(*once, _config('int8'), x)
    with self.assertRaisesRegex(TypeError, 'nnx.split it first'):
      peftlib.quantize_base(
        graphdef, toy_models.LaxScan(nnx.Rngs(0)), _config('int8'), x
      )
    with self.assertRaisesRegex(TypeError, 'nnx.split it first'):
      peftlib.dequantize_base(toy_models.LaxScan(nnx.Rngs(0)), state)


class AgainstThePaperTest(parameterized.TestCase):
  @parameterized.parameters(32, 64)
  def test_error_of_nf4_is_that_of_the_paper_s_numbers(self, tile):
    model = nnx.Linear(256, 96, use_bias=False, rngs=nnx.Rngs(0))
    weight = np.asarray(model.kernel.get_value(), np.float64)
    # Tiles along the contracted axis, each scaled by its largest magnitude.
    tiles = weight.reshape(256 // tile, tile, 96)
    expected = np.linalg.norm(nf4.rounded(tiles, axis=1) - tiles)
    quantized = peftlib.quantize_base(
      *nnx.split(model),
      peftlib.LoraConfig(weight_qtype='nf4', tile_size=tile),
      jnp.ones((1, 256)),
    )
    errors = peftlib.quantization_error(*quantized, nnx.split(model)[1])
    self.assertEqual(list(errors), ['kernel'])
    self.assertAlmostEqual(
      float(errors['kernel']) * np.linalg.norm(weight) / expected,
      1.0,
      delta=0.02,
    )

  @parameterized.parameters(True, False)
  def test_table_is_left_alone_and_a_head_tied_to_it(self, tied):
    config = models.DecoderConfig(
      vocab_size=32,
      hidden_size=16,
      intermediate_size=32,
      num_layers=2,
      num_heads=2,
      num_kv_heads=1,
      head_dim=8,
      tie_embeddings=tied,
    )
    graphdef, state = nnx.split(models.Decoder(config, rngs=nnx.Rngs(0)))
    tokens = jnp.ones((1, 4), jnp.int32)
    for pattern, head in (('.*', True), ('all-linear', False)):
      _, quantized = peftlib.quantize_base(
        graphdef,
        state,
        peftlib.LoraConfig(module_path=pattern, weight_qtype='int8'),
        tokens,
      )
      table = quantized['embed_tokens']['embedding']
      self.assertIs(table, state['embed_tokens']['embedding'])
      if not tied:
        kernel = quantized['lm_head']['kernel']
        self.assertEqual(isinstance(kernel, nnx.Param), not head)
      up = quantized['layers']['mlp']['up_proj']['kernel']['array']
      self.assertEqual(up['qvalue'].get_value().dtype, jnp.int8)


if __name__ == '__main__':
  absltest.main()
