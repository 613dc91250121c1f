import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import peftlib
from tests.peftlib import toy_models
import transforms
from transforms import testing

chex.set_n_cpu_devices(8)

P = jax.sharding.PartitionSpec
KEY = jax.random.key(0)
CONFIG = peftlib.LoraConfig(module_path='.*(up|down)', rank=2, alpha=4.0)
QLORA = peftlib.LoraConfig(
  module_path='.*(up|down)',
  rank=2,
  alpha=4.0,
  weight_qtype='nf4',
  tile_size=4,
)


def _loss(model, batch, rngs):
  del rngs
  out = model(batch)
  target = jnp.linspace(-1, 1, out.shape[-1])
  return jnp.mean((out - target) ** 2), {'tokens': jnp.int32(batch.shape[0])}


def _model(cls, config):
  x = toy_models.inputs()
  graphdef, state = nnx.split(cls(nnx.Rngs(0)))
  if config is not None:
    graphdef, state = peftlib.inject(graphdef, state, config, x, key=KEY)
    if config.weight_qtype is not None:
      graphdef, state = peftlib.quantize_base(graphdef, state, config, x)
  return graphdef, *transforms.partition(
    state, peftlib.trainable_filter(config), ...
  )


def _bytes(state):
  return {
    k: np.asarray(v).tobytes() for k, v in toy_models.values(state).items()
  }


class TrainStepTest(parameterized.TestCase):
  @parameterized.product(
    cls=(toy_models.Plain, toy_models.LaxScan, toy_models.NnxScan),
    config=(CONFIG, QLORA),
  )
  def test_every_adapter_leaf_moves_and_no_base_leaf(self, cls, config):
    graphdef, trainable, frozen = _model(cls, config)
    tx = optax.adamw(1e-2)
    train_state = peftlib.init_train_state(trainable, tx, key=KEY)
    step = peftlib.make_train_step(graphdef, _loss, tx)
    frozen_before = _bytes(frozen)
    before = _bytes(trainable)
    # `a` has no gradient as long as `b` is zero, so it takes two steps.
    for _ in range(2):
      train_state, _ = step(train_state, frozen, toy_models.inputs())
    self.assertEqual(_bytes(frozen), frozen_before)
    after = _bytes(train_state.trainable)
    self.assertEqual(set(after), set(before))
    for path, value in before.items():
      self.assertIn('_lora_', path)
      self.assertNotEqual(after[path], value, msg=path)

  @parameterized.parameters(toy_models.Plain, toy_models.LaxScan)
  def test_without_lora_the_base_moves(self, cls):
    graphdef, trainable, frozen = _model(cls, None)
    self.assertEmpty(jax.tree.leaves(frozen))
    before = _bytes(trainable)
    tx = optax.sgd(1e-2)
    train_state = peftlib.init_train_state(trainable, tx, key=KEY)
    step = peftlib.make_train_step(graphdef, _loss, tx)
    train_state, _ = step(train_state, frozen, toy_models.inputs())
    after = _bytes(train_state.trainable)
    for path, value in before.items():
      self.assertNotIn('lora', path)
      self.assertNotEqual(after[path], value, msg=path)

  def test_gradients_against_the_formula(self):
    """dL/da = s x' (g b'), dL/db = s (x a)' g, for y = x w + s x a b."""
    model = nnx.Linear(8, 5, use_bias=False, rngs=nnx.Rngs(0))
    config = peftlib.LoraConfig(rank=3, alpha=6.0)
    x = jax.random.normal(KEY, (7, 8))
    graphdef, state = peftlib.inject(*nnx.split(model), config, x, key=KEY)
    trainable, frozen = transforms.partition(
      state, peftlib.trainable_filter(config), ...
    )
    trainable = jax.tree.map(
      lambda v: jax.random.normal(jax.random.key(v.size), v.shape), trainable
    )
    # With SGD at rate 1 the update is the gradient.
    tx = optax.sgd(1.0)
    train_state = peftlib.init_train_state(trainable, tx, key=KEY)
    loss = lambda model, batch, rngs: (0.5 * jnp.sum(model(batch) ** 2), {})
    step = peftlib.make_train_step(graphdef, loss, tx)
    new, metrics = step(train_state, frozen, x)

    x, w = np.asarray(x, np.float64), np.asarray(model.kernel[...])
    a = np.asarray(trainable['kernel_lora_a'].get_value())
    b = np.asarray(trainable['kernel_lora_b'].get_value())
    y = x @ w + 2.0 * x @ a @ b
    grad_a, grad_b = 2.0 * x.T @ (y @ b.T), 2.0 * (x @ a).T @ y
    got_a = a - np.asarray(new.trainable['kernel_lora_a'].get_value())
    got_b = b - np.asarray(new.trainable['kernel_lora_b'].get_value())
    np.testing.assert_allclose(got_a, grad_a, rtol=1e-3)
    np.testing.assert_allclose(got_b, grad_b, rtol=1e-3)
    norm = np.sqrt((grad_a**2).sum() + (grad_b**2).sum())
    np.testing.assert_allclose(metrics['grad_norm'], norm, rtol=1e-4)
    np.testing.assert_allclose(metrics['update_norm'], norm, rtol=1e-4)
    np.testing.assert_allclose(metrics['loss'], 0.5 * (y**2).sum(), rtol=1e-4)

  def test_metrics(self):
    graphdef, trainable, frozen = _model(toy_models.LaxScan, CONFIG)
    tx = optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(0.0, 1.0, 10)
      ),
    )
    train_state = peftlib.init_train_state(trainable, tx, key=KEY)
    step = peftlib.make_train_step(graphdef, _loss, tx)
    rates = []
    for i in range(3):
      train_state, metrics = step(train_state, frozen, toy_models.inputs())
      rates.append(float(metrics['learning_rate']))
      self.assertEqual(int(train_state.step), i + 1)
    self.assertEqual(
      set(metrics),
      {'loss', 'tokens', 'grad_norm', 'update_norm', 'learning_rate'},
    )
    np.testing.assert_allclose(rates, [0.0, 0.1, 0.2], rtol=1e-6)
    self.assertEqual(int(metrics['tokens']), 4)
    plain = optax.sgd(0.1)
    _, metrics = peftlib.make_train_step(graphdef, _loss, plain)(
      peftlib.init_train_state(trainable, plain, key=KEY),
      frozen,
      toy_models.inputs(),
    )
    self.assertNotIn('learning_rate', metrics)

  def test_train_state_is_donated_and_nothing_else(self):
    graphdef, trainable, frozen = _model(toy_models.LaxScan, CONFIG)
    tx = optax.adamw(1e-2)
    first = peftlib.init_train_state(trainable, tx, key=KEY)
    step = peftlib.make_train_step(graphdef, _loss, tx)
    step(first, frozen, toy_models.inputs())
    for leaf in jax.tree.leaves((first.trainable, first.opt_state)):
      self.assertTrue(leaf.is_deleted())
    for leaf in jax.tree.leaves((trainable, frozen, KEY)):
      self.assertFalse(leaf.is_deleted())
    kept = peftlib.init_train_state(trainable, tx, key=KEY)
    peftlib.make_train_step(graphdef, _loss, tx, donate=False)(
      kept, frozen, toy_models.inputs()
    )
    for leaf in jax.tree.leaves(kept):
      self.assertFalse(leaf.is_deleted())

  def test_compiled_once_a_shape(self):
    graphdef, trainable, frozen = _model(toy_models.LaxScan, CONFIG)
    tx = optax.adamw(1e-2)
    train_state = peftlib.init_train_state(trainable, tx, key=KEY)
    step = testing.assert_max_compilations(
      peftlib.make_train_step(graphdef, _loss, tx), 2
    )
    for batch in (4, 6, 4, 6, 4):
      train_state, _ = step(train_state, frozen, toy_models.inputs(batch))

  def test_no_gradient_is_computed_for_a_frozen_weight(self):
    graphdef, trainable, frozen = _model(toy_models.Plain, CONFIG)
    tx = optax.sgd(1e-2)
    train_state = peftlib.init_train_state(trainable, tx, key=KEY)
    step = peftlib.make_train_step(graphdef, _loss, tx)
    x = toy_models.inputs(64)
    flops = (
      step.lower(train_state, frozen, x).compile().cost_analysis()['flops']
    )
    w, h, r, n = toy_models.WIDTH, toy_models.HIDDEN, 2, 64
    layers = toy_models.LAYERS * 2
    forward = 2 * n * (w * w + layers * (w * h + r * (w + h)))
    # Backwards: activations through base and adapters, weights of adapters.
    backward = 2 * n * layers * (w * h + 2 * r * (w + h))
    full = forward + backward + 2 * n * layers * w * h
    self.assertLess(flops, full)

  def test_dropout_is_on_in_training_and_off_in_evaluation(self):
    config = peftlib.LoraConfig(
      module_path='.*(up|down)', rank=2, alpha=4.0, dropout=0.5
    )
    graphdef, trainable, frozen = _model(toy_models.LaxScan, config)
    trainable = jax.tree.map(lambda v: v + 0.1, trainable)
    tx = optax.sgd(0.0)
    step = peftlib.make_train_step(graphdef, _loss, tx)
    evaluate = peftlib.make_eval_step(graphdef, _loss)

    def losses(seed):
      state = peftlib.init_train_state(trainable, tx, key=jax.random.key(seed))
      out = []
      for _ in range(3):
        state, metrics = step(state, frozen, toy_models.inputs())
        out.append(float(metrics['loss']))
      return out

    first = losses(0)
    self.assertLen(set(first), 3)
    self.assertEqual(first, losses(0))
    self.assertNotEqual(first, losses(1))
    x = toy_models.inputs()
    plain_graphdef, plain, plain_frozen = _model(toy_models.LaxScan, CONFIG)
    expected = peftlib.make_eval_step(plain_graphdef, _loss)(
      jax.tree.map(lambda v: v + 0.1, plain), plain_frozen, x
    )
    chex.assert_trees_all_equal(evaluate(trainable, frozen, x), expected)

  def test_rngs_and_mode_reach_the_user_s_own_modules(self):
    class Dropping(nnx.Module):
      def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

      def __call__(self, x, rngs=None):
        return self.dropout(self.linear(x), rngs=rngs)

    x = toy_models.inputs()
    graphdef, state = peftlib.inject(
      *nnx.split(Dropping(nnx.Rngs(0))),
      peftlib.LoraConfig(module_path='linear', rank=2),
      x,
      rngs=nnx.Rngs(0),
      key=KEY,
    )
    trainable, frozen = transforms.partition(
      state, peftlib.trainable_filter(CONFIG), ...
    )
    loss = lambda model, batch, rngs: (jnp.sum(model(batch, rngs)), {})
    tx = optax.sgd(0.0)
    step = peftlib.make_train_step(graphdef, loss, tx)
    train_state = peftlib.init_train_state(trainable, tx, key=KEY)
    train_state, first = step(train_state, frozen, x)
    train_state, second = step(train_state, frozen, x)
    self.assertNotEqual(float(first['loss']), float(second['loss']))
    got = peftlib.make_eval_step(graphdef, loss)(trainable, frozen, x)
    linear = nnx.merge(graphdef, state).linear
    expected = np.asarray(x) @ np.asarray(linear.kernel[...])
    np.testing.assert_allclose(got['loss'], expected.sum(), rtol=1e-4)

  @parameterized.parameters(lambda state: state, nnx.as_pure)
  def test_variables_that_the_forward_pass_updates(self, kind):
    x = toy_models.inputs()
    config = peftlib.LoraConfig(rank=2)
    graphdef, state = peftlib.inject(
      *nnx.split(toy_models.Odd(nnx.Rngs(0))), config, x, key=KEY
    )
    self.assertEqual(int(state['count'].get_value()), 0)
    trainable, mutable, frozen = map(
      kind,
      transforms.partition(
        state, peftlib.trainable_filter(config), nnx.BatchStat, ...
      ),
    )
    tx = optax.sgd(1e-3)
    train_state = peftlib.init_train_state(
      trainable, tx, key=KEY, mutable=mutable
    )
    step = testing.assert_max_compilations(
      peftlib.make_train_step(graphdef, _loss, tx), 1
    )
    for _ in range(3):
      train_state, _ = step(train_state, frozen, x)
    self.assertEqual(int(nnx.as_pure(train_state.mutable)['count']), 3)
    chex.assert_trees_all_equal_structs(train_state.mutable, mutable)

  @parameterized.parameters(CONFIG, QLORA)
  def test_states_of_arrays_alone_give_the_same_bits(self, config):
    config = dataclasses.replace(config, dropout=0.5)
    graphdef, trainable, frozen = _model(toy_models.NnxScan, config)
    tx = optax.adamw(1e-2)
    step = peftlib.make_train_step(graphdef, _loss, tx)
    ours = peftlib.init_train_state(trainable, tx, key=KEY)
    pure = peftlib.init_train_state(nnx.as_pure(trainable), tx, key=KEY)
    arrays = nnx.as_pure(frozen)
    losses = []
    for _ in range(3):
      ours, metrics = step(ours, frozen, toy_models.inputs())
      pure, same = step(pure, arrays, toy_models.inputs())
      chex.assert_trees_all_equal(same, metrics)
      losses.append(float(metrics['loss']))
    self.assertLen(set(losses), 3)
    chex.assert_trees_all_equal(pure, nnx.as_pure(ours))
    chex.assert_trees_all_equal(
      peftlib.make_eval_step(graphdef, _loss)(
        pure.trainable, arrays, toy_models.inputs()
      ),
      peftlib.make_eval_step(graphdef, _loss)(
        ours.trainable, frozen, toy_models.inputs()
      ),
    )

  def test_works_with_multi_steps(self):
    graphdef, trainable, frozen = _model(toy_models.LaxScan, CONFIG)
    x = toy_models.inputs()
    inner = optax.sgd(1e-1)
    one = peftlib.make_train_step(graphdef, _loss, inner)(
      peftlib.init_train_state(trainable, inner, key=KEY), frozen, x
    )[0]
    tx = optax.MultiSteps(inner, 2).gradient_transformation()
    step = peftlib.make_train_step(graphdef, _loss, tx)
    train_state = peftlib.init_train_state(trainable, tx, key=KEY)
    train_state, _ = step(train_state, frozen, x)
    chex.assert_trees_all_equal(train_state.trainable, trainable)
    train_state, _ = step(train_state, frozen, x)
    chex.assert_trees_all_close(train_state.trainable, one.trainable)

  @parameterized.parameters(CONFIG, QLORA)
  def test_eight_devices_give_the_losses_of_one(self, config):
    graphdef, trainable, frozen = _model(toy_models.LaxScan, config)
    tx = optax.adamw(1e-2)
    x = toy_models.inputs(16)

    def losses(trainable, frozen, x):
      step = peftlib.make_train_step(graphdef, _loss, tx)
      train_state = peftlib.init_train_state(trainable, tx, key=KEY)
      out = []
      for _ in range(4):
        train_state, metrics = step(train_state, frozen, x)
        out.append(metrics['loss'])
      return np.array(out), train_state

    expected, _ = losses(trainable, frozen, x)
    mesh = jax.make_mesh(
      (4, 2), ('fsdp', 'data'), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )

    def place(v):
      fits = v.ndim == 3 and v.shape[1] % 4 == 0
      spec = P(None, 'fsdp') if fits else P()
      return jax.device_put(v, jax.NamedSharding(mesh, spec))

    got, train_state = losses(
      jax.tree.map(place, trainable),
      jax.tree.map(place, frozen),
      jax.device_put(x, jax.NamedSharding(mesh, P(('fsdp', 'data')))),
    )
    np.testing.assert_allclose(got, expected, atol=1e-5)
    a = train_state.trainable['layers']['up']['kernel_lora_a'].get_value()
    self.assertEqual(a.sharding.spec, P(None, 'fsdp'))

  def test_module_instead_of_a_graphdef(self):
    with self.assertRaisesRegex(TypeError, 'nnx.split it first'):
      peftlib.make_train_step(
        toy_models.Plain(nnx.Rngs(0)), _loss, optax.sgd(1.0)
      )
    with self.assertRaisesRegex(TypeError, 'nnx.split it first'):
      peftlib.make_eval_step(toy_models.Plain(nnx.Rngs(0)), _loss)


class InitTrainStateTest(parameterized.TestCase):
  def test_optimizer_state_is_over_trainable_leaves_alone(self):
    _, trainable, _ = _model(toy_models.LaxScan, CONFIG)
    state = peftlib.init_train_state(trainable, optax.adam(1.0), key=KEY)
    adam = state.opt_state[0]
    chex.assert_trees_all_equal_shapes_and_dtypes(adam.mu, trainable)
    chex.assert_trees_all_equal_structs(adam.nu, trainable)

  @chex.variants(with_jit=True, without_jit=True)
  def test_jit_and_abstract(self):
    _, trainable, _ = _model(toy_models.LaxScan, CONFIG)
    init = functools.partial(
      peftlib.init_train_state, tx=optax.adam(1.0), key=KEY
    )
    got = self.variant(init)(trainable)
    chex.assert_trees_all_equal(got.trainable, trainable)
    chex.assert_trees_all_equal_shapes_and_dtypes(
      jax.eval_shape(init, trainable), got
    )

  def test_nothing_to_train(self):
    _, state = nnx.split(toy_models.Plain(nnx.Rngs(0)))
    trainable, _ = transforms.partition(
      state, peftlib.trainable_filter(CONFIG), ...
    )
    with self.assertRaisesRegex(ValueError, 'there is nothing to train'):
      peftlib.init_train_state(trainable, optax.sgd(1.0), key=KEY)

  def test_integers_cannot_be_trained(self):
    state = nnx.State({'a': {'n': nnx.Param(jnp.arange(3))}})
    with self.assertRaisesRegex(ValueError, 'a/n has dtype int32'):
      peftlib.init_train_state(state, optax.sgd(1.0), key=KEY)

  def test_module(self):
    with self.assertRaisesRegex(TypeError, 'nnx.split it first'):
      peftlib.init_train_state(
        toy_models.Plain(nnx.Rngs(0)), optax.sgd(1.0), key=KEY
      )


class TrainableFilterTest(parameterized.TestCase):
  def test_states_and_states_of_shardings_alike(self):
    mesh = jax.make_mesh(
      (8,), ('fsdp',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    graphdef, trainable, frozen = _model(toy_models.LaxScan, CONFIG)
    del graphdef
    state = transforms.merge(trainable, frozen)
    shardings = jax.tree.map(
      lambda v: jax.NamedSharding(mesh, P(*(None,) * v.ndim)), state
    )
    for config, kind in ((CONFIG, nnx.LoRAParam), (None, nnx.Param)):
      picked, _ = transforms.partition(
        shardings, peftlib.trainable_filter(config), ...
      )
      for _, variable in nnx.to_flat_state(picked):
        self.assertIsInstance(variable, kind)
        self.assertIsInstance(
          variable.get_raw_value(), jax.sharding.NamedSharding
        )
      self.assertLen(nnx.to_flat_state(picked), 4 if config else 6)

  def test_optimizer_state_follows_the_trainable_s_sharding(self):
    mesh = jax.make_mesh(
      (8,), ('fsdp',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    _, trainable, _ = _model(toy_models.LaxScan, CONFIG)
    sharding = jax.NamedSharding(mesh, P())
    trainable = jax.device_put(trainable, sharding)
    state = peftlib.init_train_state(trainable, optax.adam(1.0), key=KEY)
    for leaf in jax.tree.leaves((state.opt_state[0].mu, state.trainable)):
      self.assertEqual(leaf.sharding, sharding)


if __name__ == '__main__':
  absltest.main()
