import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlib
from tests.peftlib import toy_models

chex.set_n_cpu_devices(8)

P = jax.sharding.PartitionSpec
CONFIG = peftlib.LoraConfig(module_path='.*(up|down)', rank=2, alpha=4.0)
KEY = jax.random.key(0)


def _injected(model, config=CONFIG, **kwargs):
  return peftlib.inject(
    *nnx.split(model), config, toy_models.inputs(), key=KEY, **kwargs
  )


def _moved(state, scale=0.1):
  """Every adapter variable away from its start, by known amounts."""
  adapters, rest = nnx.split_state(state, nnx.LoRAParam, ...)
  adapters = jax.tree.map(
    lambda v: (
      scale * jax.random.normal(jax.random.key(v.size), v.shape, v.dtype)
    ),
    adapters,
  )
  return nnx.merge_state(adapters, rest)


class InjectTest(parameterized.TestCase):
  @parameterized.parameters(
    (toy_models.LaxScan, (toy_models.LAYERS,), 'layers'),
    (toy_models.NnxScan, (toy_models.LAYERS,), 'layers'),
    (toy_models.Plain, (), 'blocks/1'),
  )
  def test_shapes_dtypes_and_paths(self, model, stack, prefix):
    _, state = _injected(model(nnx.Rngs(0)))
    got = {
      k: (v.shape, str(v.dtype))
      for k, v in toy_models.values(state).items()
      if 'lora' in k and k.startswith(prefix)
    }
    w, h = toy_models.WIDTH, toy_models.HIDDEN
    self.assertEqual(
      got,
      {
        f'{prefix}/up/kernel_lora_a': ((*stack, w, 2), 'float32'),
        f'{prefix}/up/kernel_lora_b': ((*stack, 2, h), 'float32'),
        f'{prefix}/down/kernel_lora_a': ((*stack, h, 2), 'float32'),
        f'{prefix}/down/kernel_lora_b': ((*stack, 2, w), 'float32'),
      },
    )

  @parameterized.parameters(
    toy_models.Plain, toy_models.LaxScan, toy_models.NnxScan
  )
  def test_start_output_is_the_base_s_bit_for_bit(self, cls):
    model = cls(nnx.Rngs(0))
    graphdef, state = _injected(model)
    x = toy_models.inputs()
    chex.assert_trees_all_equal(nnx.merge(graphdef, state)(x), model(x))
    base_graphdef, base_state = nnx.split(model)
    run = lambda graphdef, state: jax.jit(lambda s: nnx.merge(graphdef, s)(x))(
      state
    )
    chex.assert_trees_all_equal(
      run(graphdef, state), run(base_graphdef, base_state)
    )

  def test_base_variables_are_the_very_objects(self):
    graphdef, state = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    _, new = peftlib.inject(
      graphdef, state, CONFIG, toy_models.inputs(), key=KEY
    )
    after = dict(nnx.to_flat_state(new))
    for path, variable in nnx.to_flat_state(state):
      self.assertIs(after[path], variable)

  def test_a_layer_s_values_are_those_that_its_own_key_draws(self):
    _, state = _injected(toy_models.LaxScan(nnx.Rngs(0)))
    # Of the first weight in the order of use; the first half of its key is a's.
    keys = jax.random.split(jax.random.fold_in(KEY, 0), toy_models.LAYERS)
    a = state['layers']['up']['kernel_lora_a'].get_value()
    bound = np.sqrt(6 / toy_models.WIDTH)
    for layer, key in zip(a, keys, strict=True):
      own = jax.random.split(key)[0]
      drawn = jax.random.uniform(own, layer.shape, minval=-bound, maxval=bound)
      np.testing.assert_allclose(layer, drawn, rtol=1e-5, atol=1e-7)

  def test_layers_draw_different_a_and_equal_keys_equal_ones(self):
    _, state = _injected(toy_models.LaxScan(nnx.Rngs(0)))
    a = np.asarray(state['layers']['up']['kernel_lora_a'].get_value())
    b = np.asarray(state['layers']['up']['kernel_lora_b'].get_value())
    self.assertLen(np.unique(a.reshape(toy_models.LAYERS, -1), axis=0), 3)
    np.testing.assert_array_equal(b, np.zeros_like(b))
    # He et al., 2015: uniform in +-sqrt(6 / fan_in).
    bound = np.sqrt(6 / toy_models.WIDTH)
    self.assertLess(np.abs(a).max(), bound)
    self.assertGreater(np.abs(a).max(), 0.8 * bound)
    _, again = _injected(toy_models.LaxScan(nnx.Rngs(0)))
    chex.assert_trees_all_equal(state, again)
    graphdef, base = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    _, other = peftlib.inject(
      graphdef, base, CONFIG, toy_models.inputs(), key=jax.random.key(1)
    )
    self.assertFalse(
      np.array_equal(a, other['layers']['up']['kernel_lora_a'].get_value())
    )

  @parameterized.parameters(
    toy_models.Plain, toy_models.LaxScan, toy_models.NnxScan
  )
  def test_update_is_alpha_over_rank_times_x_a_b(self, cls):
    model = cls(nnx.Rngs(0))
    graphdef, state = _injected(model)
    state = _moved(state)
    # The reference adds the update to the plain weights, in numpy.
    values = toy_models.values(state)
    flat = []
    for path, variable in nnx.to_flat_state(nnx.split(model)[1]):
      name = '/'.join(map(str, path))
      if f'{name}_lora_a' in values:
        update = np.asarray(values[f'{name}_lora_a']) @ np.asarray(
          values[f'{name}_lora_b']
        )
        variable = variable.replace(np.asarray(values[name]) + 4.0 / 2 * update)
      flat.append((path, variable))
    merged = nnx.merge(nnx.split(model)[0], nnx.from_flat_state(flat))
    x = toy_models.inputs()
    got = nnx.merge(graphdef, state)(x)
    chex.assert_trees_all_close(got, merged(x), atol=1e-5)
    self.assertGreater(float(jnp.abs(got - model(x)).max()), 0.1)

  def test_every_kind_of_op(self):
    model = toy_models.Odd(nnx.Rngs(0))
    config = peftlib.LoraConfig(rank=2, alpha=4.0)
    graphdef, state = _injected(model, config)
    shapes = {
      k: v.shape for k, v in toy_models.values(state).items() if 'lora' in k
    }
    self.assertEqual(
      shapes,
      {
        'left_lora_a': (8, 2),
        'left_lora_b': (2, 6),
        'experts_lora_a': (6, 2),
        'experts_lora_b': (2, 2, 5),
        'general/kernel_lora_a': (10, 2),
        'general/kernel_lora_b': (2, 6),
        'conv/kernel_lora_a': (3, 2, 2),
        'conv/kernel_lora_b': (2, 4),
      },
    )
    state = _moved(state)
    v = {k: np.asarray(x) for k, x in toy_models.values(state).items()}
    update = {
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
    flat = [
      (
        path,
        variable.replace(variable.get_value() + 2.0 * update[name])
        if (name := '/'.join(map(str, path))) in update
        else variable,
      )
      for path, variable in nnx.to_flat_state(nnx.split(model)[1])
    ]
    merged = nnx.merge(nnx.split(model)[0], nnx.from_flat_state(flat))
    x = toy_models.inputs()
    chex.assert_trees_all_close(
      nnx.merge(graphdef, state, copy=True)(x), merged(x), atol=1e-4
    )

  @chex.variants(with_jit=True, without_jit=True)
  def test_same_result_jitted(self):
    graphdef, state = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    seen = []

    def inject(state):
      new, state = peftlib.inject(
        graphdef, state, CONFIG, toy_models.inputs(), key=KEY
      )
      seen.append(new)
      return state

    got = self.variant(inject)(state)
    expected_graphdef, expected = peftlib.inject(
      graphdef, state, CONFIG, toy_models.inputs(), key=KEY
    )
    chex.assert_trees_all_equal(got, expected)
    self.assertEqual(seen[0], expected_graphdef)

  def test_abstract_model_allocates_nothing(self):
    abstract = nnx.eval_shape(lambda: toy_models.LaxScan(nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    before = len(jax.live_arrays())
    new_graphdef, new = peftlib.inject(
      graphdef,
      state,
      CONFIG,
      jax.ShapeDtypeStruct((4, toy_models.WIDTH), jnp.float32),
      key=KEY,
    )
    for path, variable in nnx.to_flat_state(new):
      self.assertIsInstance(
        variable.get_value(), jax.ShapeDtypeStruct, msg=str(path)
      )
    self.assertLessEqual(len(jax.live_arrays()), before + 4)  # split keys
    concrete_graphdef, concrete = _injected(toy_models.LaxScan(nnx.Rngs(0)))
    self.assertEqual(new_graphdef, concrete_graphdef)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, concrete)

  def test_under_eval_shape(self):
    graphdef, state = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    inject = lambda s: peftlib.inject(
      graphdef, s, CONFIG, toy_models.inputs(), key=KEY
    )[1]
    chex.assert_trees_all_equal_shapes_and_dtypes(
      jax.eval_shape(inject, state), inject(state)
    )

  def test_equal_inputs_give_equal_graphdefs(self):
    first, state = _injected(toy_models.LaxScan(nnx.Rngs(0)))
    second, _ = _injected(toy_models.LaxScan(nnx.Rngs(1)))
    self.assertEqual(first, second)
    self.assertEqual(hash(first), hash(second))
    other, _ = _injected(
      toy_models.LaxScan(nnx.Rngs(0)),
      peftlib.LoraConfig(module_path='.*(up|down)', rank=2, alpha=5.0),
    )
    self.assertNotEqual(first, other)
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(graphdef, state):
      traced.append(graphdef)
      return nnx.merge(graphdef, state)(toy_models.inputs())

    run(first, state)
    run(second, state)
    self.assertLen(traced, 1)

  def test_sharding_metadata_follows_the_weight(self):
    mesh = jax.make_mesh(
      (1, 1), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    with jax.set_mesh(mesh):
      model = toy_models.LaxScan(nnx.Rngs(0), names=('data', 'model'))
      graphdef, state = nnx.split(model)
      _, new = peftlib.inject(
        graphdef, state, CONFIG, toy_models.inputs(), key=KEY
      )
    up = new['layers']['up']
    self.assertEqual(
      up['kernel'].get_metadata()['out_sharding'], ('layers', 'data', 'model')
    )
    self.assertEqual(
      up['kernel_lora_a'].get_metadata()['out_sharding'],
      ('layers', 'data', None),
    )
    self.assertEqual(
      up['kernel_lora_b'].get_metadata()['out_sharding'],
      ('layers', None, 'model'),
    )
    self.assertNotIn(
      'out_sharding', new['layers']['down']['kernel_lora_a'].get_metadata()
    )

  def test_placed_beside_a_sharded_weight(self):
    mesh = jax.make_mesh(
      (2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    graphdef, state = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    spec = P(None, 'data', 'model')
    state = jax.tree.map(
      lambda x: jax.device_put(x, jax.NamedSharding(mesh, spec)), state
    )
    _, new = peftlib.inject(
      graphdef, state, CONFIG, toy_models.inputs(), key=KEY
    )
    up = new['layers']['up']
    self.assertEqual(
      up['kernel_lora_a'].get_value().sharding,
      jax.NamedSharding(mesh, P(None, 'data', None)),
    )
    self.assertEqual(
      up['kernel_lora_b'].get_value().sharding,
      jax.NamedSharding(mesh, P(None, None, 'model')),
    )

  def test_adapter_dtype_over_a_bf16_base(self):
    graphdef, state = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    x = toy_models.inputs().astype(jnp.bfloat16)
    graphdef, state = peftlib.inject(graphdef, state, CONFIG, x, key=KEY)
    self.assertEqual(
      state['layers']['up']['kernel_lora_a'].get_value().dtype, jnp.float32
    )
    self.assertEqual(nnx.merge(graphdef, state)(x).dtype, jnp.bfloat16)

  def test_a_second_adapter_adds_up(self):
    model = toy_models.LaxScan(nnx.Rngs(0))
    graphdef, state = _injected(model)
    with self.assertRaisesRegex(
      ValueError, "the model has an adapter 'default' already"
    ):
      peftlib.inject(graphdef, state, CONFIG, toy_models.inputs(), key=KEY)
    state = _moved(state)
    x = toy_models.inputs()
    one = nnx.merge(graphdef, state)(x)
    two_graphdef, two = peftlib.inject(
      graphdef, state, CONFIG, x, key=KEY, adapter='style'
    )
    chex.assert_trees_all_equal(nnx.merge(two_graphdef, two)(x), one)
    names = set(two['layers']['up'])
    self.assertEqual(
      names,
      {
        'kernel',
        'kernel_lora_a',
        'kernel_lora_b',
        'kernel_lora_a_style',
        'kernel_lora_b_style',
      },
    )
    with self.assertRaisesRegex(ValueError, "adapter='a/b': a name is"):
      peftlib.inject(graphdef, state, CONFIG, x, key=KEY, adapter='a/b')

  def test_pattern_that_matches_nothing_names_the_nearest(self):
    with self.assertRaisesRegex(
      ValueError,
      r"module_path '\.\*\(upp\|downn\)' matches no module .* nearest:"
      r" \['layers/(up|down)', 'layers/(up|down)'\]",
    ):
      _injected(
        toy_models.LaxScan(nnx.Rngs(0)),
        peftlib.LoraConfig(module_path='.*(upp|downn)'),
      )

  def test_module_instead_of_a_state(self):
    model = toy_models.LaxScan(nnx.Rngs(0))
    graphdef, state = nnx.split(model)
    with self.assertRaisesRegex(
      TypeError, 'state is a LaxScan, an nnx.Module; nnx.split it first'
    ):
      peftlib.inject(graphdef, model, CONFIG, toy_models.inputs(), key=KEY)
    with self.assertRaisesRegex(
      TypeError, 'graphdef is a LaxScan, an nnx.Module; nnx.split it first'
    ):
      peftlib.inject(model, state, CONFIG, toy_models.inputs(), key=KEY)


class WithDropoutTest(parameterized.TestCase):
  @parameterized.parameters(
    toy_models.Plain, toy_models.LaxScan, toy_models.NnxScan
  )
  def test_off_by_default_and_equal_for_equal_keys(self, cls):
    config = peftlib.LoraConfig(
      module_path='.*(up|down)', rank=2, alpha=4.0, dropout=0.5
    )
    graphdef, state = _injected(cls(nnx.Rngs(0)), config)
    state = _moved(state)
    plain_graphdef, plain = _injected(cls(nnx.Rngs(0)))
    plain = _moved(plain)
    x = toy_models.inputs()
    chex.assert_trees_all_equal(
      nnx.merge(graphdef, state)(x), nnx.merge(plain_graphdef, plain)(x)
    )
    run = jax.jit(
      lambda s, key: nnx.merge(*peftlib.with_dropout(graphdef, s, key))(x)
    )
    first = run(state, jax.random.key(1))
    chex.assert_trees_all_equal(first, run(state, jax.random.key(1)))
    self.assertFalse(np.array_equal(first, run(state, jax.random.key(2))))
    self.assertFalse(np.array_equal(first, nnx.merge(graphdef, state)(x)))

  def test_layers_have_masks_of_their_own(self):
    config = peftlib.LoraConfig(module_path='.*up', rank=2, dropout=0.5)
    graphdef, state = _injected(toy_models.LaxScan(nnx.Rngs(0)), config)
    _, state = peftlib.with_dropout(graphdef, state, jax.random.key(1))
    keys = jax.random.key_data(
      state['layers']['up']['kernel_lora_key'].get_value()
    )
    self.assertLen(np.unique(np.asarray(keys), axis=0), toy_models.LAYERS)

  def test_mean_over_masks_is_the_output_without(self):
    config = peftlib.LoraConfig(
      module_path='embed', rank=2, alpha=4.0, dropout=0.25
    )
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    config = peftlib.LoraConfig(rank=2, alpha=4.0, dropout=0.25)
    graphdef, state = _injected(model, config)
    state = _moved(state, 0.5)
    x = toy_models.inputs()
    expected = nnx.merge(graphdef, state)(x)
    outputs = jax.vmap(
      lambda k: nnx.merge(*peftlib.with_dropout(graphdef, state, k), copy=True)(
        x
      )
    )(jax.random.split(jax.random.key(3), 4000))
    chex.assert_trees_all_close(outputs.mean(0), expected, atol=0.1)

  def test_nothing_to_do_without_dropout(self):
    graphdef, state = _injected(toy_models.LaxScan(nnx.Rngs(0)))
    new_graphdef, new = peftlib.with_dropout(graphdef, state, KEY)
    self.assertIs(new, state)
    self.assertIs(new_graphdef, graphdef)


if __name__ == '__main__':
  absltest.main()
