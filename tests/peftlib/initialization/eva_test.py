from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlib
from peftlib import methods
from tests.peftlib import scanned_model

KEY = jax.random.key(0)
TOKENS = jax.random.randint(jax.random.key(5), (4, 12), 0, 32)
RANK = 3


def loss_fn(model, batch, rngs):
  del rngs
  return jnp.mean(model(batch) ** 2), {}


def inputs_of(state):
  """What goes into each layer's two weights, in numpy."""
  values = scanned_model.values_of(state)
  x = values['embedding'][np.asarray(TOKENS)].reshape(-1, 16)
  found = {'up_proj': [], 'down_proj': []}
  for up, down in zip(values['up'], values['down'], strict=True):
    hidden = np.tanh(x @ up)
    found['up_proj'].append(x)
    found['down_proj'].append(hidden)
    x = x + hidden @ down
  return found


def components(x, whiten=False):
  _, values, vectors = np.linalg.svd(x - x.mean(0), full_matrices=False)
  vectors = vectors[:RANK]
  return (vectors / np.sqrt(values[:RANK, None]) if whiten else vectors).T


def up_to_sign(a, like):
  return a * np.sign(np.sum(a * like, 0))


class EvaTest(parameterized.TestCase):
  def injected(self, *weights, **fields):
    base = nnx.split(scanned_model.Stack(rngs=nnx.Rngs(0)))
    rule = peftlib.Rule(weights, methods.Lora(rank=RANK), **fields)
    config = peftlib.AdapterConfig((rule,))
    return base, peftlib.inject(*base, config, TOKENS, key=KEY)

  @parameterized.product(whiten=(False, True), batches=(1, 2))
  def test_components_of_the_inputs_of_each_layer(self, whiten, batches):
    base, (graphdef, state) = self.injected('up_proj', 'down_proj')
    new = peftlib.initialize_eva(
      graphdef,
      state,
      loss_fn,
      jnp.split(TOKENS, batches),
      key=KEY,
      whiten=whiten,
    )
    self.assertEqual(jax.tree.structure(new), jax.tree.structure(state))
    for name, inputs in inputs_of(base[1]).items():
      module = new['layers'][name]
      a = np.asarray(module['kernel_lora_a'].get_raw_value())
      for layer, x in enumerate(inputs):
        expected = components(x, whiten)
        np.testing.assert_allclose(
          up_to_sign(a[layer], expected), expected, rtol=1e-3, atol=1e-4
        )
      self.assertIs(
        module['kernel_lora_b'].get_raw_value(),
        state['layers'][name]['kernel_lora_b'].get_raw_value(),
      )
      self.assertIs(
        module['kernel'].get_raw_value(),
        base[1]['layers'][name]['kernel'].get_raw_value(),
      )

  def test_some_layers(self):
    base, (graphdef, state) = self.injected('up_proj', layers=(1,))
    new = peftlib.initialize_eva(graphdef, state, loss_fn, [TOKENS], key=KEY)
    a = new['layers']['up_proj']['kernel_lora_a'].get_raw_value()
    chex.assert_shape(a, (1, 16, RANK))
    expected = components(inputs_of(base[1])['up_proj'][1])
    np.testing.assert_allclose(
      up_to_sign(np.asarray(a[0]), expected), expected, rtol=1e-3, atol=1e-4
    )

  def test_weight_that_the_loss_does_not_see(self):
    _, (graphdef, state) = self.injected('up_proj', 'head')
    blind = lambda model, batch, rngs: (
      jnp.mean(model.hidden(batch) ** 2),
      {},
    )
    with self.assertRaisesRegex(
      ValueError,
      'peftlib.initialize_eva: the loss does not depend on head.kernel',
    ):
      peftlib.initialize_eva(graphdef, state, blind, [TOKENS], key=KEY)

  def test_what_is_no_linear_layer(self):
    _, (graphdef, state) = self.injected('embed_tokens')
    with self.assertRaisesRegex(
      ValueError, 'embed_tokens.embedding is used by embedding; EVA is for lin'
    ):
      peftlib.initialize_eva(graphdef, state, loss_fn, [TOKENS], key=KEY)

  def test_rank_is_too_large(self):
    base = nnx.split(scanned_model.Stack(rngs=nnx.Rngs(0)))
    config = peftlib.LoraConfig(module_path=('up_proj',), rank=17)
    graphdef, state = peftlib.inject(*base, config, TOKENS, key=KEY)
    with self.assertRaisesRegex(
      ValueError, 'rank=17 of layers/up_proj.kernel is more than its 16 inputs'
    ):
      peftlib.initialize_eva(graphdef, state, loss_fn, [TOKENS], key=KEY)

  def test_no_batch(self):
    _, (graphdef, state) = self.injected('up_proj')
    with self.assertRaisesRegex(ValueError, 'eva: there is no batch'):
      peftlib.initialize_eva(graphdef, state, loss_fn, [], key=KEY)

  def test_no_such_adapter(self):
    _, (graphdef, state) = self.injected('up_proj')
    with self.assertRaisesRegex(
      ValueError, r"adapter='x': the model has \['default'\]"
    ):
      peftlib.initialize_eva(
        graphdef, state, loss_fn, [TOKENS], key=KEY, adapter='x'
      )

  def test_other_method(self):
    base = nnx.split(scanned_model.Stack(rngs=nnx.Rngs(0)))
    rule = peftlib.Rule(('up_proj',), methods.Pissa(rank=2))
    graphdef, state = peftlib.inject(
      *base, peftlib.AdapterConfig((rule,)), TOKENS, key=KEY
    )
    with self.assertRaisesRegex(
      ValueError, 'layers/up_proj.kernel has a pissa adapter; this start is for'
    ):
      peftlib.initialize_eva(graphdef, state, loss_fn, [TOKENS], key=KEY)

  def test_module_instead_of_state(self):
    model = scanned_model.Stack(rngs=nnx.Rngs(0))
    with self.assertRaisesRegex(TypeError, 'peftlib.initialize_eva: '):
      peftlib.initialize_eva(model, model, loss_fn, [TOKENS], key=KEY)


if __name__ == '__main__':
  absltest.main()
