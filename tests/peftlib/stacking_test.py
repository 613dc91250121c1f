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
from peftlib import methods
from peftlib import stacking
from tests.peftlib import toy_models

W, H, L = toy_models.WIDTH, toy_models.HIDDEN, toy_models.LAYERS
KEYS = jax.random.split(jax.random.key(5), 3)
RATES = (0.01, 0.02, 0.03)
TX = optax.inject_hyperparams(optax.adamw)(learning_rate=0.01)


def _loss_fn(model, batch, rngs):
  del rngs
  return jnp.mean((model(batch['x']) - batch['y']) ** 2), {}


@functools.cache
def _injected(rank, dropout=0.0, cls=toy_models.LaxScan):
  """Graphdef, trainable and frozen State; the scale is 2 for every rank."""
  method = methods.Lora(rank=rank, alpha=2.0 * rank, dropout=dropout)
  graphdef, state = peftlib.inject(
    *nnx.split(cls(nnx.Rngs(0))),
    peftlib.AdapterConfig((peftlib.Rule('.*(up|down)', method),)),
    toy_models.inputs(),
    key=jax.random.key(rank),
  )
  return graphdef, *nnx.split_state(state, nnx.LoRAParam, ...)


def _moved(state, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jnp.asarray(0.2 * rng.normal(size=x.shape), x.dtype), state
  )


def _batches(count):
  rng = np.random.default_rng(0)
  make = lambda: jnp.asarray(rng.normal(size=(count, 6, W)), jnp.float32)
  return {'x': make(), 'y': make()}


@functools.cache
def _step(graphdef, tx):
  return peftlib.make_train_step(graphdef, _loss_fn, tx)


def _separately(graphdef, trainable, frozen, i, steps, tx=TX):
  """Losses and adapter of one run by itself."""
  state = peftlib.init_train_state(trainable, tx, key=KEYS[i])
  if hasattr(state.opt_state, 'hyperparams'):
    rate = {'learning_rate': jnp.asarray(RATES[i])}
    hyperparams = state.opt_state.hyperparams | rate
    state = state._replace(
      opt_state=state.opt_state._replace(hyperparams=hyperparams)
    )
  step = _step(graphdef, tx)
  batch = jax.tree.map(lambda x: x[i], _batches(3))
  losses = []
  for _ in range(steps):
    state, metrics = step(state, frozen, batch)
    losses.append(float(metrics['loss']))
  return losses, state.trainable


def _together(graphdef, stacked, frozen, steps, tx=TX, **kwargs):
  """Losses (steps, adapters), metrics and train state of one stacked run."""
  state = stacking.init_stacked_train_state(stacked, tx, keys=KEYS)
  if hasattr(state.opt_state, 'hyperparams'):
    rates = {'learning_rate': jnp.asarray(RATES)}
    hyperparams = state.opt_state.hyperparams | rates
    state = state._replace(
      opt_state=state.opt_state._replace(hyperparams=hyperparams)
    )
  step = peftlib.make_stacked_train_step(graphdef, _loss_fn, tx, **kwargs)
  losses = []
  for _ in range(steps):
    state, metrics = step(state, frozen, _batches(3))
    losses.append(metrics['loss'])
  return np.asarray(losses), metrics, state


class StackTest(parameterized.TestCase):
  def test_equal_shapes(self):
    states = [_moved(_injected(2)[1], seed) for seed in range(3)]
    stacked = peftlib.stack_adapters(states)
    shapes = {k: v.shape for k, v in toy_models.values(stacked).items()}
    self.assertEqual(
      shapes,
      {
        'layers/up/kernel_lora_a': (3, L, W, 2),
        'layers/up/kernel_lora_b': (3, L, 2, H),
        'layers/down/kernel_lora_a': (3, L, H, 2),
        'layers/down/kernel_lora_b': (3, L, 2, W),
      },
    )
    for path, value in toy_models.values(stacked).items():
      np.testing.assert_array_equal(
        value, np.stack([toy_models.values(s)[path] for s in states])
      )
    for got, expected in zip(
      peftlib.unstack_adapters(stacked), states, strict=True
    ):
      chex.assert_trees_all_equal(got, expected)
      chex.assert_trees_all_equal_structs(got, expected)

  @parameterized.parameters(toy_models.LaxScan, toy_models.Odd)
  def test_ranks_are_padded_with_zeros(self, cls):
    if cls is toy_models.Odd:
      inject = lambda rank: nnx.split_state(
        peftlib.inject(
          *nnx.split(cls(nnx.Rngs(0))),
          peftlib.LoraConfig(rank=rank, alpha=2 * rank),
          toy_models.inputs(),
          key=jax.random.key(0),
        )[1],
        nnx.LoRAParam,
        ...,
      )[0]
    else:
      inject = lambda rank: _injected(rank)[1]
    states = [_moved(inject(rank), rank) for rank in (1, 3, 2)]
    stacked = peftlib.stack_adapters(states)
    wide = toy_models.values(states[1])
    mask = toy_models.values(stacking.padding_mask(states))
    for path, value in toy_models.values(stacked).items():
      chex.assert_shape(value, (3, *wide[path].shape))
      for i, state in enumerate(states):
        own = np.asarray(toy_models.values(state)[path])
        expected = np.zeros(wide[path].shape, np.float32)
        inside = tuple(slice(n) for n in own.shape)
        expected[inside] = own
        np.testing.assert_array_equal(value[i], expected)
        ones = np.zeros(wide[path].shape, np.float32)
        ones[inside] = 1
        np.testing.assert_array_equal(mask[path][i], ones)
    back = peftlib.unstack_adapters(stacked, states)
    chex.assert_trees_all_equal(back, states)
    # Shapes are enough.
    abstract = [jax.eval_shape(lambda s=s: s) for s in states]
    chex.assert_trees_all_equal(
      peftlib.unstack_adapters(stacked, abstract), states
    )

  def test_layers_on_the_last_axis(self):
    states = [_pair((4, 2, L), (2, 5, L)), _pair((4, 3, L), (3, 5, L))]
    shapes = [
      v.shape
      for v in toy_models.values(peftlib.stack_adapters(states)).values()
    ]
    self.assertEqual(shapes, [(2, 4, 3, L), (2, 3, 5, L)])

  def test_abstract(self):
    states = [_injected(rank)[1] for rank in (1, 2)]
    abstract = [jax.eval_shape(lambda s=s: s) for s in states]
    stacked = peftlib.stack_adapters(abstract)
    chex.assert_trees_all_equal_shapes_and_dtypes(
      stacked, peftlib.stack_adapters(states)
    )
    back = peftlib.unstack_adapters(stacked, abstract)
    for state, expected in zip(back, states, strict=True):
      chex.assert_trees_all_equal_shapes_and_dtypes(state, expected)
      for leaf in jax.tree.leaves(state):
        self.assertIsInstance(leaf, jax.ShapeDtypeStruct)

  @parameterized.parameters(
    ('out_sharding', ('data', None), (None, 'data', None)),
    (
      'sharding_names',
      jax.sharding.PartitionSpec('data'),
      jax.sharding.PartitionSpec(None, 'data'),
    ),
  )
  def test_axis_names(self, key, names, expected):
    variable = nnx.LoRAParam(jnp.ones((4, 2)), role='lora_a')
    variable = variable.replace(**{key: names})
    state = nnx.State({'a': variable})
    stacked = peftlib.stack_adapters([state, state])
    self.assertEqual(stacked['a'].get_metadata()[key], expected)
    (one, _) = peftlib.unstack_adapters(stacked)
    self.assertEqual(one['a'].get_metadata()[key], names)


class TrainTest(parameterized.TestCase):
  def test_equal_to_separate_runs(self):
    """Own learning rate, seed (of the dropout) and batch for each."""
    graphdef, start, frozen = _injected(2, 0.25)
    states = [_moved(start, seed) for seed in range(3)]
    losses, metrics, state = _together(
      graphdef, peftlib.stack_adapters(states), frozen, 4
    )
    np.testing.assert_allclose(metrics['learning_rate'], RATES, rtol=1e-6)
    chex.assert_shape((metrics['grad_norm'], metrics['update_norm']), (3,))
    np.testing.assert_array_equal(state.step, [4, 4, 4])
    after = peftlib.unstack_adapters(state.trainable)
    for i, own in enumerate(states):
      expected, trained = _separately(graphdef, own, frozen, i, 4)
      np.testing.assert_allclose(losses[:, i], expected, rtol=1e-5, atol=1e-5)
      chex.assert_trees_all_close(after[i], trained, rtol=1e-4, atol=1e-5)
    self.assertLess(losses[-1].max(), losses[0].max())

  def test_ranks_of_their_own(self):
    ranks = (1, 3, 2)
    states = [
      _moved(_injected(rank, cls=toy_models.Block)[1], rank) for rank in ranks
    ]
    losses, _, state = _together(
      _injected(3, cls=toy_models.Block)[0],
      peftlib.stack_adapters(states),
      _injected(3, cls=toy_models.Block)[2],
      4,
    )
    after = peftlib.unstack_adapters(state.trainable, states)
    mask = stacking.padding_mask(states)
    chex.assert_trees_all_equal(
      state.trainable, jax.tree.map(jnp.multiply, state.trainable, mask)
    )
    for i, (rank, own) in enumerate(zip(ranks, states)):
      graphdef, _, frozen = _injected(rank, cls=toy_models.Block)
      expected, trained = _separately(graphdef, own, frozen, i, 4)
      np.testing.assert_allclose(losses[:, i], expected, rtol=1e-5, atol=1e-5)
      chex.assert_trees_all_close(after[i], trained, rtol=1e-4, atol=1e-5)

  def test_mask_holds_the_padding_under_noise(self):
    tx = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(1))
    states = [
      _moved(_injected(rank, cls=toy_models.Block)[1], rank)
      for rank in (1, 3, 2)
    ]
    stacked = peftlib.stack_adapters(states)
    mask = stacking.padding_mask(states)
    graphdef, _, frozen = _injected(3, cls=toy_models.Block)
    outside = lambda state: max(
      float(jnp.abs(x * (1 - m)).max())
      for x, m in zip(jax.tree.leaves(state.trainable), jax.tree.leaves(mask))
    )
    _, _, free = _together(graphdef, stacked, frozen, 2, tx)
    self.assertGreater(outside(free), 0.01)
    _, _, held = _together(graphdef, stacked, frozen, 2, tx, mask=mask)
    self.assertEqual(outside(held), 0.0)

  def test_the_frozen_base_has_no_adapter_axis(self):
    graphdef, start, frozen = _injected(2)
    step = peftlib.make_stacked_train_step(graphdef, _loss_fn, TX)
    stacked = peftlib.stack_adapters([start] * 3)
    state = stacking.init_stacked_train_state(stacked, TX, keys=KEYS)
    text = str(jax.make_jaxpr(step)(state, frozen, _batches(3)))
    self.assertIn(f'f32[3,6,{H}]', text)
    # A base of each would be a copy of each kernel.
    self.assertNotIn(f'f32[3,{W},{H}]', text.replace(f'f32[{L},{W},{H}]', ''))

  def test_one_batch_for_all(self):
    graphdef, start, frozen = _injected(2, cls=toy_models.Block)
    stacked = peftlib.stack_adapters([_moved(start, i) for i in range(3)])
    one = jax.tree.map(lambda x: x[0], _batches(3))
    many = jax.tree.map(lambda x: jnp.stack([x] * 3), one)
    found = []
    for batch, axis in ((one, None), (many, 0)):
      state = stacking.init_stacked_train_state(stacked, TX, keys=KEYS)
      step = peftlib.make_stacked_train_step(
        graphdef, _loss_fn, TX, batch_axis=axis
      )
      state, metrics = step(state, frozen, batch)
      found.append((state.trainable, metrics))
    self.assertEqual(found[0][1]['loss'].shape, (3,))
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-6)

  def test_donates_the_train_state_unless_asked_not_to(self):
    graphdef, start, frozen = _injected(2, cls=toy_models.Block)
    stacked = peftlib.stack_adapters([start] * 3)
    for donate in (True, False):
      state = stacking.init_stacked_train_state(stacked, TX, keys=KEYS)
      step = peftlib.make_stacked_train_step(
        graphdef, _loss_fn, TX, donate=donate
      )
      step(state, frozen, _batches(3))
      leaf = jax.tree.leaves(state.trainable)[0]
      self.assertEqual(leaf.is_deleted(), donate)
      self.assertFalse(jax.tree.leaves(stacked)[0].is_deleted())


def _state(**variables):
  return nnx.State(
    {
      name: nnx.LoRAParam(jnp.ones(shape, dtype), role=role)
      for name, (role, shape, dtype) in variables.items()
    }
  )


def _pair(a, b, dtype='float32'):
  return _state(w_lora_a=('lora_a', a, dtype), w_lora_b=('lora_b', b, dtype))


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    ([], r'states is empty\.'),
    (
      [_pair((4, 2), (2, 4)), _state(w_lora_a=('lora_a', (4, 2), 'float32'))],
      r'states\[0\] and states\[1\] have not the same variables: w_lora_b\.',
    ),
    (
      [_pair((4, 2), (2, 4)), _pair((4, 2), (2, 4), 'bfloat16')],
      r'w_lora_a differs in more than the rank: shapes \[\(4, 2\)\], dtypes'
      r" \['bfloat16', 'float32'\]\.",
    ),
    (
      [_pair((4, 2), (2, 4)), _pair((5, 3), (3, 4))],
      r'w_lora_a differs in more than the rank: shapes \[\(4, 2\), \(5, 3\)\]',
    ),
    # Another number of inputs, of outputs, or of both is no rank.
    (
      [_pair((4, 2), (2, 4)), _pair((5, 2), (2, 4))],
      r'w_lora_a has extents \(4, 5\) along axis 0, which is not a rank that'
      r' its other factor has too\.',
    ),
    (
      [_pair((4, 2), (2, 4)), _pair((4, 2), (2, 5))],
      r'w_lora_b has extents \(4, 5\) along axis 1, which is not a rank',
    ),
    (
      [_pair((4, 2), (2, 4)), _pair((5, 2), (2, 5))],
      r'w_lora_a has extents \(4, 5\) along axis 0, which is not a rank',
    ),
    (
      [_pair((4, 2), (2, 4)), _pair((4, 3), (4, 4))],
      r'w_lora_a has extents \(2, 3\) along axis 1, which is not a rank',
    ),
    (
      [
        _state(w_ia3=('ia3_l', (4,), 'float32')),
        _state(w_ia3=('ia3_l', (5,), 'float32')),
      ],
      r'w_ia3 differs in more than the rank: shapes \[\(4,\), \(5,\)\]',
    ),
  )
  def test_stack(self, states, text):
    with self.assertRaisesRegex(
      ValueError, rf'peftlib\.stack_adapters: {text}'
    ):
      peftlib.stack_adapters(states)

  def test_unstack(self):
    one = _pair((4, 2), (2, 4))
    stacked = peftlib.stack_adapters([one, one])
    for like, text in (
      ([one], r'the variables are stacks of \[2\] adapters, like has 1\.'),
      (
        [one, _state(w_lora_a=('lora_a', (4, 2), 'float32'))],
        r'stacked and like\[1\] have not the same variables: w_lora_b\.',
      ),
    ):
      with self.assertRaisesRegex(ValueError, text):
        peftlib.unstack_adapters(stacked, like)
    with self.assertRaisesRegex(
      ValueError, r'the variables are stacks of \[2, 4\] adapters\.'
    ):
      peftlib.unstack_adapters(one)

  def test_a_module(self):
    model = toy_models.Plain(nnx.Rngs(0))
    with self.assertRaisesRegex(TypeError, r'states\[0\] is a Plain, an nnx'):
      peftlib.stack_adapters([model])
    with self.assertRaisesRegex(TypeError, 'stacked is a Plain, an nnx.Module'):
      peftlib.unstack_adapters(model)


if __name__ == '__main__':
  absltest.main()
