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
from peftlib import generation
from peftlib import methods
from peftlib.models import config as config_lib
from peftlib.models import decoder
from tests.peftlib import toy_models

LORA = methods.Lora(rank=2, alpha=4.0)
RULES = (peftlib.Rule('.*(up|down)', LORA),)
BATCH = 6


def _inputs():
  return toy_models.inputs(BATCH)


def _moved(state, seed, scale=0.2):
  """The State with random adapter variables, those of one adapter each."""
  flat = []
  for i, (path, variable) in enumerate(nnx.to_flat_state(state)):
    if isinstance(variable, nnx.LoRAParam):
      rng = np.random.default_rng([seed, i])
      value = scale * rng.normal(size=variable.shape)
      variable = variable.replace(jnp.asarray(value, jnp.float32))
    flat.append((path, variable))
  return nnx.from_flat_state(flat)


def _with(base, name, rules=RULES, seed=0):
  """`base` with a random adapter, its other variables as they are."""
  key = jax.random.key(0)
  graphdef, state = peftlib.inject(
    *base, peftlib.AdapterConfig(rules), _inputs(), key=key, adapter=name
  )
  own, rest = nnx.split_state(state, peftlib.adapter_filter(name), ...)
  return graphdef, nnx.merge_state(_moved(own, seed), rest)


@functools.cache
def _two(cls):
  """A base, it with one adapter each, and with both."""
  base = nnx.split(cls(nnx.Rngs(0)))
  a = _with(base, 'a', seed=1)
  return {
    'base': base,
    'a': a,
    'b': _with(base, 'b', seed=2),
    'both': _with(a, 'b', seed=2),
  }


class _Runner:
  """A jitted forward pass that counts how often it is compiled."""

  def __init__(self):
    self.traces = 0

    @functools.partial(jax.jit, static_argnums=0)
    def run(graphdef, state, x):
      self.traces += 1
      return nnx.merge(graphdef, state, copy=True)(x)

    self._run = run

  def __call__(self, graphdef, state, x=None):
    return np.asarray(self._run(graphdef, state, _inputs() if x is None else x))


def _assert_same_objects(test, got, expected):
  expected = dict(nnx.to_flat_state(expected))
  for path, variable in nnx.to_flat_state(got):
    test.assertIs(variable, expected[path], msg=path)
  test.assertLen(nnx.to_flat_state(got), len(expected))


class NamesTest(absltest.TestCase):
  def test_in_the_order_of_injection(self):
    models = _two(toy_models.LaxScan)
    self.assertEqual(peftlib.adapter_names(*models['base']), ())
    self.assertEqual(peftlib.adapter_names(*models['both']), ('a', 'b'))

  def test_filter(self):
    _, state = peftlib.set_active(*_two(toy_models.LaxScan)['both'], ['a'])
    names = lambda f: sorted(
      toy_models.values(nnx.split_state(state, f, ...)[0])
    )
    of = lambda name: [
      f'layers/{k}/kernel_lora_{r}_{name}' for k in ('down', 'up') for r in 'ab'
    ]
    self.assertEqual(names(peftlib.adapter_filter('a')), of('a'))
    self.assertEqual(names(peftlib.adapter_filter()), sorted(of('a') + of('b')))
    self.assertEqual(names(peftlib.adapter_filter('c')), [])

  def test_filter_picks_constants_too(self):
    base = _two(toy_models.LaxScan)['base']
    _, state = _with(base, 'v', (peftlib.Rule('.*up', methods.Vera(rank=2)),))
    own, _ = nnx.split_state(state, peftlib.adapter_filter('v'), ...)
    self.assertEqual(
      {type(v) for _, v in nnx.to_flat_state(own)},
      {nnx.LoRAParam, peftlib.AdapterConstant},
    )


class AddAndRemoveTest(parameterized.TestCase):
  @parameterized.parameters(
    toy_models.Plain, toy_models.LaxScan, toy_models.NnxScan
  )
  def test_remove(self, cls):
    models = _two(cls)
    graphdef, state = peftlib.remove_adapter(*models['both'], 'b')
    self.assertEqual(graphdef, models['a'][0])
    expected = dict(nnx.to_flat_state(models['both'][1]))
    for path, variable in nnx.to_flat_state(state):
      self.assertIs(variable, expected[path])
    chex.assert_trees_all_equal(state, models['a'][1])
    # Taking out the first of two leaves the second one's own model.
    graphdef, state = peftlib.remove_adapter(*models['both'], 'a')
    self.assertEqual(graphdef, models['b'][0])
    chex.assert_trees_all_equal(state, models['b'][1])
    graphdef, state = peftlib.remove_adapter(graphdef, state, 'b')
    self.assertEqual(graphdef, models['base'][0])
    _assert_same_objects(self, state, models['base'][1])

  def test_remove_with_gates_and_dropout(self):
    base = _two(toy_models.LaxScan)['base']
    method = methods.Lora(rank=2, dropout=0.5)
    injected = _with(base, 'a', (peftlib.Rule('.*', method, layers=(1,)),))
    injected = peftlib.with_dropout(*injected, jax.random.key(0))
    injected = peftlib.set_active(*injected, ['a'])
    graphdef, state = peftlib.remove_adapter(*injected, 'a')
    self.assertEqual(graphdef, base[0])
    self.assertEqual(jax.tree.structure(state), jax.tree.structure(base[1]))

  def test_remove_from_a_quantized_base(self):
    base = _two(toy_models.LaxScan)['base']
    config = peftlib.LoraConfig(module_path='.*up', weight_qtype='int8')
    quantized = peftlib.quantize_base(*base, config, _inputs())
    graphdef, state = peftlib.remove_adapter(*_with(quantized, 'a'), 'a')
    self.assertEqual(graphdef, quantized[0])
    _assert_same_objects(self, state, quantized[1])

  @parameterized.parameters(
    toy_models.Plain, toy_models.LaxScan, toy_models.NnxScan
  )
  def test_rename(self, cls):
    models = _two(cls)
    graphdef, state = peftlib.rename_adapter(*models['b'], 'b', 'a')
    self.assertEqual(graphdef, models['a'][0])
    self.assertEqual(
      jax.tree.structure(state), jax.tree.structure(models['a'][1])
    )
    before = toy_models.values(models['b'][1])
    for name, value in toy_models.values(state).items():
      old = f'{name[:-2]}_b' if '_lora_' in name else name
      self.assertIs(value, before[old])
    self.assertEqual(peftlib.adapter_names(graphdef, state), ('a',))
    own, _ = nnx.split_state(state, peftlib.adapter_filter('a'), ...)
    self.assertLen(nnx.to_flat_state(own), 12 if cls is toy_models.Plain else 4)

  def test_rename_with_gates_and_to_the_default(self):
    models = _two(toy_models.LaxScan)
    gated = peftlib.set_active(*models['both'], ['b'])
    graphdef, state = peftlib.rename_adapter(*gated, 'b', 'default')
    self.assertEqual(peftlib.adapter_names(graphdef, state), ('a', 'default'))
    self.assertContainsSubset(
      {'kernel_lora_a', 'kernel_lora_b', 'kernel_adapter_gate'},
      set(state['layers']['up']),
    )
    run = _Runner()
    np.testing.assert_array_equal(run(graphdef, state), run(*models['b']))

  def test_one_compiled_function_for_adapters_of_one_shape(self):
    models = _two(toy_models.LaxScan)
    run = _Runner()
    run(*models['a'])
    got = run(*peftlib.rename_adapter(*models['b'], 'b', 'a'))
    self.assertEqual(run.traces, 1)
    np.testing.assert_array_equal(got, _Runner()(*models['b']))


class SetActiveTest(parameterized.TestCase):
  @parameterized.parameters(
    toy_models.Plain, toy_models.LaxScan, toy_models.NnxScan
  )
  def test_equal_to_models_with_those_alone(self, cls):
    models = _two(cls)
    expected = _Runner()
    run = _Runner()
    for names, same in (
      (['a'], 'a'),
      (['b'], 'b'),
      ([], 'base'),
      (['b', 'a'], 'both'),
      (('a', 'b'), 'both'),
    ):
      graphdef, state = peftlib.set_active(*models['both'], names)
      np.testing.assert_array_equal(
        run(graphdef, state), expected(*models[same]), err_msg=str(names)
      )
    self.assertEqual(run.traces, 1)

  def test_a_switch_changes_values_only(self):
    models = _two(toy_models.LaxScan)
    first = peftlib.set_active(*models['both'], ['a'])
    second = peftlib.set_active(*first, ['b'])
    self.assertEqual(second[0], first[0])
    flat = dict(nnx.to_flat_state(first[1]))
    gates = 0
    for path, variable in nnx.to_flat_state(second[1]):
      if isinstance(variable, peftlib.AdapterGate):
        gates += 1
        chex.assert_shape(variable.get_value(), (toy_models.LAYERS,))
        np.testing.assert_array_equal(
          variable.get_value(), ~flat[path].get_value()
        )
      else:
        self.assertIs(variable, flat[path])
    self.assertEqual(gates, 4)

  def test_layers_that_have_none_stay_without(self):
    base = _two(toy_models.LaxScan)['base']
    injected = _with(base, 'a', (peftlib.Rule('.*up', LORA, layers=(0, 2)),))
    run = _Runner()
    on = peftlib.set_active(*injected, ['a'])
    np.testing.assert_array_equal(
      on[1]['layers']['up']['kernel_adapter_gate_a'].get_value(),
      [True, False, True],
    )
    np.testing.assert_array_equal(run(*on), run(*injected))
    off = peftlib.set_active(*on, [])
    np.testing.assert_array_equal(run(*off), run(*base))

  def test_traced(self):
    graphdef, state = _two(toy_models.LaxScan)['both']
    activate = lambda s: peftlib.set_active(graphdef, s, ['b'])[1]
    chex.assert_trees_all_equal(jax.jit(activate)(state), activate(state))

  def test_dropout_of_the_one_that_is_on(self):
    base = _two(toy_models.LaxScan)['base']
    rules = (peftlib.Rule('.*up', methods.Lora(rank=2, dropout=0.5)),)
    injected = _with(base, 'a', rules)
    dropped = peftlib.with_dropout(*injected, jax.random.key(1))
    run = _Runner()
    np.testing.assert_array_equal(
      run(*peftlib.set_active(*dropped, ['a'])), run(*dropped)
    )
    np.testing.assert_array_equal(
      run(*peftlib.set_active(*dropped, [])), run(*base)
    )


class AssignRowsTest(parameterized.TestCase):
  @parameterized.parameters(
    toy_models.Plain, toy_models.LaxScan, toy_models.NnxScan
  )
  def test_equal_to_row_by_row(self, cls):
    models = _two(cls)
    # On the whole batch, so that the base's rounding is the same.
    single = [_Runner()(*models[k]) for k in ('a', 'b', 'base')]
    run = _Runner()
    for rows in ([0, 1, -1, 1, 0, 0], [-1] * 6, [1, 1, 0, -1, -1, 0]):
      got = run(*peftlib.assign_rows(*models['both'], ['a', 'b'], rows))
      expected = np.stack([single[r][i] for i, r in enumerate(rows)])
      np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
      # No adapter touches a row that has none, not even by rounding.
      bare = np.equal(rows, -1)
      np.testing.assert_array_equal(got[bare], expected[bare])
    self.assertEqual(run.traces, 1)
    # One row at a time, up to rounding.
    one = _Runner()
    x = _inputs()
    for i, r in enumerate(rows):
      model = models[('a', 'b', 'base')[r]]
      np.testing.assert_allclose(
        got[i : i + 1], one(*model, x[i : i + 1]), rtol=1e-5, atol=1e-5
      )

  def test_names_choose_the_order(self):
    models = _two(toy_models.LaxScan)
    run = _Runner()
    rows = jnp.array([0, 1, 1, 0, -1, 0])
    flipped = jnp.array([1, 0, 0, 1, -1, 1])
    np.testing.assert_array_equal(
      run(*peftlib.assign_rows(*models['both'], ['b', 'a'], rows)),
      run(*peftlib.assign_rows(*models['both'], ['a', 'b'], flipped)),
    )
    # An adapter that isn't named is off.
    got = run(*peftlib.assign_rows(*models['both'], ['b'], jnp.zeros(6, int)))
    np.testing.assert_allclose(got, run(*models['b']), rtol=1e-5, atol=1e-6)

  def test_several_methods_and_ranks(self):
    base = _two(toy_models.LaxScan)['base']
    a = _with(base, 'a', (peftlib.Rule('.*up', LORA),), seed=1)
    rules = (
      peftlib.Rule('.*up', methods.Lora(rank=3), layers=(1, 2)),
      peftlib.Rule('.*down', methods.Dora(rank=2)),
    )
    both = _with(a, 'b', rules, seed=2)
    b = _with(base, 'b', rules, seed=2)
    run = _Runner()
    rows = [0, 1, -1, 1, 0, 0]
    got = run(*peftlib.assign_rows(*both, ['a', 'b'], rows))
    single = [run(*a), run(*b), run(*base)]
    expected = np.stack([single[r][i] for i, r in enumerate(rows)])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)

  def test_over_a_quantized_base(self):
    models = _two(toy_models.LaxScan)
    config = peftlib.LoraConfig(module_path='.*(up|down)', weight_qtype='int8')
    run = _Runner()
    quantize = lambda m: peftlib.quantize_base(*m, config, _inputs())
    rows = [0, 1, -1, 1, 0, 0]
    got = run(*peftlib.assign_rows(*quantize(models['both']), ['a', 'b'], rows))
    single = [run(*quantize(models[k])) for k in ('a', 'b', 'base')]
    expected = np.stack([single[r][i] for i, r in enumerate(rows)])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)

  def test_gradients_are_those_of_an_adapter_s_own_rows(self):
    models = _two(toy_models.LaxScan)
    target = jax.random.normal(jax.random.key(1), (BATCH, toy_models.WIDTH))
    is_lora = nnx.LoRAParam

    def grads(graphdef, state, x, target):
      trainable, frozen = nnx.split_state(state, is_lora, ...)

      def loss(trainable):
        model = nnx.merge(graphdef, trainable, frozen, copy=True)
        return ((model(x) - target) ** 2).sum()

      return toy_models.values(jax.jit(jax.grad(loss))(trainable))

    rows = np.array([0, 1, -1, 1, 0, 0])
    x = _inputs()
    got = grads(
      *peftlib.assign_rows(*models['both'], ['a', 'b'], jnp.asarray(rows)),
      x,
      target,
    )
    self.assertLen(got, 8)
    for i, name in enumerate('ab'):
      own = rows == i
      for path, expected in grads(*models[name], x[own], target[own]).items():
        np.testing.assert_allclose(
          got[path], expected, rtol=1e-4, atol=1e-5, err_msg=path
        )

  def test_in_a_train_step_with_traced_rows(self):
    graphdef, state = _two(toy_models.LaxScan)['both']
    rows = jnp.array([0, 1, -1, 1, 0, 0])
    gated, state = peftlib.assign_rows(graphdef, state, ['a', 'b'], rows)
    trainable, frozen = nnx.split_state(state, nnx.LoRAParam, ...)
    tx = optax.sgd(0.1)

    def loss_fn(model, batch, rngs):
      del rngs
      graphdef, state = nnx.split(model)
      own = peftlib.assign_rows(graphdef, state, ['a', 'b'], batch['rows'])
      return (nnx.merge(*own)(batch['x']) ** 2).mean(), {}

    step = peftlib.make_train_step(gated, loss_fn, tx, donate=False)
    start = peftlib.init_train_state(trainable, tx, key=jax.random.key(0))
    batch = {'x': _inputs(), 'rows': jnp.full(6, 1)}
    new, _ = step(start, frozen, batch)
    for path, after in toy_models.values(new.trainable).items():
      before = toy_models.values(trainable)[path]
      self.assertEqual(
        np.array_equal(before, after), path.endswith('_a'), msg=path
      )


@functools.cache
def _decoder():
  config = config_lib.DecoderConfig(
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
  )
  model = decoder.Decoder(config, rngs=nnx.Rngs(0))
  graphdef, state = nnx.split(model)
  state = jax.tree.map(
    lambda x: jax.random.normal(jax.random.key(x.size), x.shape) * 0.3, state
  )
  a = _on_decoder((graphdef, state), 'a', 1)
  return {'a': a, 'both': _on_decoder(a, 'b', 2)}


def _on_decoder(base, name, seed):
  graphdef, state = peftlib.inject(
    *base,
    peftlib.LoraConfig(module_path='all-linear', rank=2, alpha=4.0),
    jax.ShapeDtypeStruct((1, 4), jnp.int32),
    key=jax.random.key(0),
    adapter=name,
  )
  own, rest = nnx.split_state(state, peftlib.adapter_filter(name), ...)
  return graphdef, nnx.merge_state(_moved(own, seed, 0.5), rest)


class GenerationTest(absltest.TestCase):
  def test_rows_equal_single_runs(self):
    models = _decoder()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 37, 5).tolist() for _ in range(5)]
    rows = [0, 1, -1, 1, 0]
    generate = functools.partial(
      generation.generate, prompts=prompts, max_new_tokens=4, eos_ids=(-1,)
    )
    single = [
      generate(*peftlib.set_active(*models['both'], names))
      for names in (['a'], ['b'], [])
    ]
    self.assertEqual(single[0], generate(*models['a']))
    for i in range(5):  # They say different things, so that it is a test.
      self.assertLen({tuple(outputs[i]) for outputs in single}, 3)
    got = generate(*peftlib.assign_rows(*models['both'], ['a', 'b'], rows))
    self.assertEqual(got, [single[r][i] for i, r in enumerate(rows)])


class ErrorsTest(parameterized.TestCase):
  @parameterized.parameters(
    (lambda m: peftlib.remove_adapter(*m, 'aa'), 'remove_adapter', 'aa'),
    (lambda m: peftlib.rename_adapter(*m, 'aa', 'c'), 'rename_adapter', 'aa'),
    (lambda m: peftlib.set_active(*m, ['b', 'aa']), 'set_active', 'aa'),
    (lambda m: peftlib.assign_rows(*m, ['aa'], [0]), 'assign_rows', 'aa'),
  )
  def test_no_such_adapter(self, f, function, name):
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      f"peftlib.{function}: the model has no adapter {name!r}; nearest: ['a'].",
    ):
      f(_two(toy_models.LaxScan)['both'])

  def test_all_names_where_none_is_near(self):
    with self.assertRaisesRegex(
      ValueError, r"no adapter 'xyz'; nearest: \['a', 'b'\]\."
    ):
      peftlib.set_active(*_two(toy_models.LaxScan)['both'], ['xyz'])

  @parameterized.parameters(
    ('b', r"the model has an adapter 'b' already"),
    ('b/c', r"adapter='b/c': a name is letters, digits and underscores"),
  )
  def test_new_name(self, new, text):
    with self.assertRaisesRegex(
      ValueError, rf'peftlib\.rename_adapter: {text}'
    ):
      peftlib.rename_adapter(*_two(toy_models.LaxScan)['both'], 'a', new)

  @parameterized.parameters(
    ([0.0, 1.0], r'rows is float32\[2\]; it must be integers of shape'),
    ([[0, 1]], r'rows is int32\[1, 2\]; it must be integers of shape'),
    ([0, 2, -1], r'rows\[1\]=2; must be -1 or an index into the 2 names\.'),
    ([0, 1, -2], r'rows\[2\]=-2; must be -1 or an index into the 2 names\.'),
  )
  def test_rows(self, rows, text):
    with self.assertRaisesRegex(ValueError, rf'peftlib\.assign_rows: {text}'):
      peftlib.assign_rows(
        *_two(toy_models.LaxScan)['both'], ['a', 'b'], np.array(rows)
      )

  def test_names_of_rows(self):
    both = _two(toy_models.LaxScan)['both']
    with self.assertRaisesRegex(
      ValueError, r"names=\['a', 'b', 'a'\]: one is there twice"
    ):
      peftlib.assign_rows(*both, ['a', 'b', 'a'], [0])
    for f in (
      lambda: peftlib.assign_rows(*both, 'ab', [0]),
      lambda: peftlib.set_active(*both, 'ab'),
    ):
      with self.assertRaisesRegex(TypeError, r"names='ab'; give a list:"):
        f()

  def test_a_batch_of_another_size(self):
    rows = peftlib.assign_rows(
      *_two(toy_models.LaxScan)['both'], ['a', 'b'], [0, 1, 0, 0]
    )
    with self.assertRaisesRegex(
      ValueError,
      r'layers/up\.kernel is used on 6 rows, the adapters were assigned to a'
      r' batch of 4; the first axis of the input has to be the batch',
    ):
      _Runner()(*rows)

  def test_an_adapter_that_holds_a_part_of_the_base(self):
    base = _two(toy_models.LaxScan)['base']
    rules = (peftlib.Rule('.*up', methods.Pissa(rank=2)),)
    graphdef, state = peftlib.inject(
      *base,
      peftlib.AdapterConfig(rules),
      _inputs(),
      key=jax.random.key(0),
      adapter='p',
    )
    for function, f in (
      ('remove_adapter', lambda: peftlib.remove_adapter(graphdef, state, 'p')),
      ('set_active', lambda: peftlib.set_active(graphdef, state, [])),
      ('assign_rows', lambda: peftlib.assign_rows(graphdef, state, ['p'], [0])),
    ):
      with self.assertRaisesRegex(
        ValueError,
        rf"peftlib\.{function}: adapter 'p' \(pissa\) holds a part of the"
        r' weight of layers/up\.kernel; what is left without it is not the'
        r' base\.',
      ):
        f()
    on = peftlib.set_active(graphdef, state, ['p'])
    run = _Runner()
    np.testing.assert_array_equal(run(*on), run(graphdef, state))

  def test_a_module(self):
    model = toy_models.LaxScan(nnx.Rngs(0))
    graphdef, _ = nnx.split(model)
    for f in (
      lambda: peftlib.adapter_names(graphdef, model),
      lambda: peftlib.remove_adapter(graphdef, model, 'a'),
      lambda: peftlib.rename_adapter(graphdef, model, 'a', 'b'),
      lambda: peftlib.set_active(graphdef, model, ['a']),
      lambda: peftlib.assign_rows(graphdef, model, ['a'], [0]),
    ):
      with self.assertRaisesRegex(TypeError, 'state is a LaxScan, an nnx.Mod'):
        f()


if __name__ == '__main__':
  absltest.main()
