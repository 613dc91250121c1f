"""What `inject` makes of an AdapterConfig: which weight gets which adapter."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import numpy as np

import peftlib
from peftlib import methods
from tests.peftlib import toy_models

KEY = jax.random.key(0)
LORA = methods.Lora(rank=2, alpha=4.0)
W, H = toy_models.WIDTH, toy_models.HIDDEN


def _injected(cls, *rules, train=()):
  return peftlib.inject(
    *nnx.split(cls(nnx.Rngs(0))),
    peftlib.AdapterConfig(rules, train=train),
    toy_models.inputs(),
    key=KEY,
  )


def _adapters(state):
  """Shapes of what `inject` made."""
  return {
    '/'.join(map(str, path)): variable.get_value().shape
    for path, variable in nnx.to_flat_state(state)
    if isinstance(variable, nnx.LoRAParam | peftlib.AdapterConstant)
  }


def _moved(state, seed=0):
  """The State with random adapter variables."""
  rng = np.random.default_rng(seed)
  return nnx.from_flat_state(
    [
      (
        path,
        variable.replace(
          0.3 * rng.normal(size=variable.shape).astype(np.float32)
        )
        if isinstance(variable, nnx.LoRAParam)
        else variable,
      )
      for path, variable in nnx.to_flat_state(state)
    ]
  )


def _run(graphdef, state):
  x = toy_models.inputs()
  return jax.jit(lambda s: nnx.merge(graphdef, s, copy=True)(x))(state)


def _numpy_stack(up, down):
  """The toy stack's forward pass on numpy weights."""
  x = np.asarray(toy_models.inputs())
  for u, d in zip(up, down, strict=True):
    h = x @ u
    x = x + (h / (1 + np.exp(-h))) @ d
  return x


def _kernels(state):
  layers = state['layers']
  return tuple(
    np.array(layers[name]['kernel'].get_value()) for name in ('up', 'down')
  )


def _values(state, name):
  return {k: np.asarray(v) for k, v in toy_models.values(state[name]).items()}


class FirstMatchTest(parameterized.TestCase):
  def test_wins(self):
    _, state = _injected(
      toy_models.LaxScan,
      peftlib.Rule('.*up', methods.Lora(rank=1)),
      peftlib.Rule('.*', methods.Lora(rank=3)),
    )
    self.assertEqual(
      _adapters(state),
      {
        'layers/up/kernel_lora_a': (3, W, 1),
        'layers/up/kernel_lora_b': (3, 1, H),
        'layers/down/kernel_lora_a': (3, H, 3),
        'layers/down/kernel_lora_b': (3, 3, W),
      },
    )

  def test_the_order_is_what_counts(self):
    _, state = _injected(
      toy_models.LaxScan,
      peftlib.Rule('.*', methods.Lora(rank=3)),
      peftlib.Rule('.*up', methods.Lora(rank=1)),
    )
    self.assertEqual(
      {shape[-1] for k, shape in _adapters(state).items() if k.endswith('_a')},
      {3},
    )

  def test_a_rule_without_a_method_keeps_others_away(self):
    _, state = _injected(
      toy_models.Plain, peftlib.Rule('.*/0/.*'), peftlib.Rule('.*up', LORA)
    )
    self.assertEqual(
      sorted({k.rpartition('/')[0] for k in _adapters(state)}),
      ['blocks/1/up', 'blocks/2/up'],
    )

  def test_mixed_methods_by_pattern(self):
    graphdef, state = _injected(
      toy_models.LaxScan,
      peftlib.Rule('.*up', methods.Ia3()),
      peftlib.Rule('mlp', methods.Dora(rank=2, alpha=4.0)),
    )
    self.assertEqual(
      _adapters(state),
      {
        'layers/up/kernel_ia3_l': (3, H),
        'layers/down/kernel_lora_a': (3, H, 2),
        'layers/down/kernel_lora_b': (3, 2, W),
        'layers/down/kernel_lora_magnitude': (3, W),
      },
    )
    state = _moved(state)
    up, down = _kernels(state)
    of_up = _values(state['layers'], 'up')
    of_down = _values(state['layers'], 'down')
    up = up * of_up['kernel_ia3_l'][:, None]
    down = down + 2 * of_down['kernel_lora_a'] @ of_down['kernel_lora_b']
    norms = np.linalg.norm(down, axis=1)
    down = down * (of_down['kernel_lora_magnitude'] / norms)[:, None]
    np.testing.assert_allclose(
      _run(graphdef, state), _numpy_stack(up, down), rtol=1e-4, atol=1e-4
    )


class LayersTest(parameterized.TestCase):
  @parameterized.parameters(
    (toy_models.LaxScan, (1,)),
    (toy_models.LaxScan, (0, 1, 2)),
    (toy_models.NnxScan, (0, 2)),
  )
  def test_others_have_no_parameters(self, cls, layers):
    graphdef, state = _injected(
      cls, peftlib.Rule('.*(up|down)', LORA, layers=layers)
    )
    n = len(layers)
    self.assertEqual(
      _adapters(state),
      {
        'layers/up/kernel_lora_a': (n, W, 2),
        'layers/up/kernel_lora_b': (n, 2, H),
        'layers/down/kernel_lora_a': (n, H, 2),
        'layers/down/kernel_lora_b': (n, 2, W),
      },
    )
    trainable, frozen = nnx.split_state(state, nnx.LoRAParam, ...)
    count = sum(v.size for v in jax.tree.leaves(trainable))
    self.assertEqual(count, n * 2 * (W * 2 + 2 * H))
    # The start is the base's.
    base = nnx.split(cls(nnx.Rngs(0)))
    np.testing.assert_array_equal(_run(graphdef, state), _run(*base))
    # Equal to merged weights of these layers alone.
    state = _moved(state)
    up, down = _kernels(state)
    for name, kernel in (('up', up), ('down', down)):
      v = _values(state['layers'], name)
      kernel[list(layers)] += 2 * v['kernel_lora_a'] @ v['kernel_lora_b']
    np.testing.assert_allclose(
      _run(graphdef, state), _numpy_stack(up, down), rtol=1e-4, atol=1e-4
    )
    # Gradients have the shapes of what is trained, and all of it moves.
    trainable, frozen = nnx.split_state(state, nnx.LoRAParam, ...)
    grads = jax.grad(
      lambda t: (_run(graphdef, nnx.merge_state(t, frozen)) ** 2).sum()
    )(trainable)
    for path, grad in nnx.to_flat_state(grads):
      value = np.asarray(grad.get_value())
      self.assertEqual(value.shape[0], n)
      for i in range(n):
        self.assertGreater(np.abs(value[i]).max(), 1e-6, msg=(path, i))

  @parameterized.parameters(toy_models.LaxScan, toy_models.NnxScan)
  def test_two_methods_in_one_stack(self, cls):
    graphdef, state = _injected(
      cls,
      peftlib.Rule('.*up', LORA, layers=(1,)),
      peftlib.Rule('.*up', methods.Ia3()),
    )
    self.assertEqual(
      _adapters(state),
      {
        'layers/up/kernel_lora_a': (1, W, 2),
        'layers/up/kernel_lora_b': (1, 2, H),
        'layers/up/kernel_ia3_l_1': (2, H),
      },
    )
    base = nnx.split(cls(nnx.Rngs(0)))
    np.testing.assert_array_equal(_run(graphdef, state), _run(*base))
    state = _moved(state)
    up, down = _kernels(state)
    v = _values(state['layers'], 'up')
    up[1] += 2 * v['kernel_lora_a'][0] @ v['kernel_lora_b'][0]
    up[[0, 2]] *= v['kernel_ia3_l_1'][:, None]
    np.testing.assert_allclose(
      _run(graphdef, state), _numpy_stack(up, down), rtol=1e-4, atol=1e-4
    )

  def test_first_match_wins_for_each_layer(self):
    _, state = _injected(
      toy_models.LaxScan,
      peftlib.Rule('.*up', methods.Lora(rank=1), layers=(0,)),
      peftlib.Rule('.*up', methods.Lora(rank=2), layers=(0, 1)),
      peftlib.Rule('.*up', methods.Lora(rank=3)),
      peftlib.Rule('.*up', methods.Lora(rank=4)),
    )
    self.assertEqual(
      {k: v for k, v in _adapters(state).items() if '_a' in k},
      {
        'layers/up/kernel_lora_a': (1, W, 1),
        'layers/up/kernel_lora_a_1': (1, W, 2),
        'layers/up/kernel_lora_a_2': (1, W, 3),
      },
    )

  def test_abstract(self):
    rule = peftlib.Rule('.*up', LORA, layers=(0, 2))
    config = peftlib.AdapterConfig((rule,))
    abstract = nnx.split(
      nnx.eval_shape(lambda: toy_models.LaxScan(nnx.Rngs(0)))
    )
    got = peftlib.inject(*abstract, config, toy_models.inputs(), key=KEY)
    expected = _injected(toy_models.LaxScan, rule)
    self.assertEqual(got[0], expected[0])
    chex.assert_trees_all_equal_shapes_and_dtypes(got[1], expected[1])
    for leaf in jax.tree.leaves(got[1]):
      self.assertIsInstance(leaf, jax.ShapeDtypeStruct)

  def test_dropout(self):
    method = methods.Lora(rank=2, alpha=4.0, dropout=0.5)
    graphdef, state = _injected(
      toy_models.LaxScan, peftlib.Rule('.*up', method, layers=(0, 2))
    )
    state = _moved(state)
    plain = _run(graphdef, state)
    dropped = [
      _run(*peftlib.with_dropout(graphdef, state, jax.random.key(i)))
      for i in (0, 0, 1)
    ]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    self.assertFalse(np.array_equal(dropped[0], dropped[2]))
    self.assertFalse(np.array_equal(dropped[0], plain))

  @parameterized.parameters(
    (
      toy_models.LaxScan,
      (1, 3),
      r'peftlib: layers=\(1, 3\): layers/up\.kernel has layers 0 to 2\.',
    ),
    (
      toy_models.Plain,
      (0,),
      r'peftlib: layers=\(0,\): blocks/0/up\.kernel is not in a stack of'
      r' layers; choose its layer by module_path\.',
    ),
  )
  def test_errors(self, cls, layers, text):
    with self.assertRaisesRegex(ValueError, text):
      _injected(cls, peftlib.Rule('.*up', LORA, layers=layers))


class TrainTest(parameterized.TestCase):
  def _trained(self, config, state):
    picked, _ = nnx.split_state(state, peftlib.trainable_filter(config), ...)
    return sorted(toy_models.values(picked))

  @parameterized.parameters(
    (('norm',), ['norm/bias', 'norm/scale']),
    (('norm/scale',), ['norm/scale']),
    (('norm.scale',), ['norm/scale']),
    (('bias',), ['embed/bias', 'norm/bias']),
    (('blocks/1',), ['blocks/1/down/kernel', 'blocks/1/up/kernel']),
    (('embed', 'scale'), ['embed/bias', 'embed/kernel', 'norm/scale']),
  )
  def test_whole_variables(self, train, expected):
    config = peftlib.AdapterConfig((), train=train)
    graphdef, state = peftlib.inject(
      *nnx.split(toy_models.Plain(nnx.Rngs(0))),
      config,
      toy_models.inputs(),
      key=KEY,
    )
    self.assertEqual(_adapters(state), {})
    self.assertEqual(self._trained(config, state), expected)

  def test_beside_adapters(self):
    rules = (peftlib.Rule('.*0/up', LORA),)
    config = peftlib.AdapterConfig(rules, train=('norm/scale',))
    _, state = _injected(toy_models.Plain, *rules, train=config.train)
    self.assertEqual(
      self._trained(config, state),
      ['blocks/0/up/kernel_lora_a', 'blocks/0/up/kernel_lora_b', 'norm/scale'],
    )

  def test_a_constant_of_a_method_is_saved_and_not_trained(self):
    config = peftlib.AdapterConfig(
      (peftlib.Rule('.*0/up', methods.Vera(rank=2)),)
    )
    _, state = _injected(toy_models.Plain, *config.rules)
    trained = self._trained(config, state)
    saved, _ = nnx.split_state(state, peftlib.saved_filter(config), ...)
    constants = set(toy_models.values(saved)) - set(trained)
    self.assertLen(constants, 2)
    self.assertEqual(constants | set(trained), set(_adapters(state)))


class ErrorsTest(parameterized.TestCase):
  def test_nothing_to_do(self):
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      'AdapterConfig: no rules, nothing to train, no virtual tokens: there would'
      ' be nothing to do.',
    ):
      peftlib.AdapterConfig(())

  def test_no_rule_has_a_method(self):
    with self.assertRaisesRegex(
      ValueError, r'peftlib\.inject: no rule of the config has a method; give'
    ):
      _injected(toy_models.Plain, peftlib.Rule('.*', weight_qtype='int8'))

  def test_a_rule_that_means_nothing(self):
    with self.assertRaisesRegex(
      ValueError, r"module_path '\.\*upp' matches no module .* nearest: \["
    ):
      _injected(
        toy_models.LaxScan,
        peftlib.Rule('.*', LORA),
        peftlib.Rule('.*upp', LORA),
      )

  @parameterized.parameters(
    (
      dict(module_path='(', method=LORA),
      r"Rule\.module_path='\(' is not a regular expression: ",
    ),
    (
      dict(module_path=('up', ''), method=LORA),
      r"Rule\.module_path=\('up', ''\): must be a regular expression or a"
      r' tuple of names\.',
    ),
    (
      dict(module_path='.*', method='lora'),
      r"Rule\.method='lora': must be None or a peftlib\.methods\.Method",
    ),
    (
      dict(module_path='.*', method=LORA, exclude=['up']),
      r"Rule\.exclude=\['up'\]: must be a regular expression or a tuple",
    ),
    (
      dict(module_path='.*', method=LORA, layers=(2, 0)),
      r'Rule\.layers=\(2, 0\): must be None or a tuple of layer numbers that'
      r' rise, from 0\.',
    ),
    (dict(module_path='.*', layers=(0, 0)), r'Rule\.layers=\(0, 0\): must be'),
    (dict(module_path='.*', layers=(-1,)), r'Rule\.layers=\(-1,\): must be'),
    (dict(module_path='.*', layers=()), r'Rule\.layers=\(\): must be'),
    (
      dict(module_path='.*', weight_qtype='int3'),
      r"Rule\.weight_qtype='int3': must be None or one of \['fp8', 'int4',",
    ),
    (
      dict(module_path='.*', tile_size=4),
      r'Rule\.tile_size=4: must be None where weight_qtype is None',
    ),
  )
  def test_fields(self, fields, text):
    with self.assertRaisesRegex(ValueError, text):
      peftlib.Rule(**fields)

  @parameterized.parameters(
    (dict(rules=[]), r'AdapterConfig\.rules=\[\]: must be a tuple of'),
    (
      dict(rules=(), train=['norm']),
      r"AdapterConfig\.train=\['norm'\]: must be a tuple of names\.",
    ),
  )
  def test_fields_of_the_config(self, fields, text):
    with self.assertRaisesRegex(ValueError, text):
      peftlib.AdapterConfig(**fields)


if __name__ == '__main__':
  absltest.main()
