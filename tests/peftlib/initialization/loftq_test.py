from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlib
from peftlib import methods
from tests.peftlib import nf4
from tests.peftlib import scanned_model

KEY = jax.random.key(0)
TOKENS = jnp.arange(12).reshape(2, 6)
METHOD = methods.Lora(rank=3, alpha=6)


def adapted(*rules):
  base = nnx.split(scanned_model.Stack(rngs=nnx.Rngs(0)))
  config = peftlib.AdapterConfig(rules)
  return base[1], config, peftlib.inject(*base, config, TOKENS, key=KEY)


def rule(*weights, **fields):
  fields = {'weight_qtype': 'nf4', 'tile_size': 16, **fields}
  return peftlib.Rule(weights, METHOD, **fields)


class LoftqTest(parameterized.TestCase):
  @parameterized.parameters(1, 2)
  def test_alternates_between_rounding_and_svd(self, iterations):
    before, config, split = adapted(rule('up_proj'))
    graphdef, state = peftlib.initialize_loftq(
      *split, config, TOKENS, iterations=iterations
    )
    module = state['layers']['up_proj']
    a, b = module['kernel_lora_a'][...], module['kernel_lora_b'][...]
    _, plain = peftlib.dequantize_base(graphdef, state)
    base = plain['layers']['up_proj']['kernel'][...]
    for layer, value in enumerate(scanned_model.values_of(before)['up']):
      left = value
      for _ in range(iterations):
        expected = nf4.rounded(left, axis=0)
        u, s, vt = np.linalg.svd(value - expected, full_matrices=False)
        update = (u[:, :3] * s[:3]) @ vt[:3]
        left = value - update
      np.testing.assert_allclose(base[layer], expected, atol=1e-3)
      np.testing.assert_allclose(
        METHOD.scale * a[layer] @ b[layer], update, atol=1e-3
      )

  def test_nearer_to_the_weight_than_plain_quantization(self):
    before, config, split = adapted(rule('up_proj'), rule('down_proj'))

    def errors(graphdef, state):
      merged = peftlib.merge_adapters(graphdef, state)[1]['layers']
      return {
        name: np.linalg.norm(
          merged[name]['kernel'][...] - before['layers'][name]['kernel'][...]
        )
        for name in ('up_proj', 'down_proj')
      }

    plain = errors(*peftlib.quantize_base(*split, config, TOKENS))
    once = errors(*peftlib.initialize_loftq(*split, config, TOKENS))
    for name, error in plain.items():
      self.assertLess(once[name], 0.85 * error)

  def test_is_the_quantized_model(self):
    _, config, split = adapted(
      rule('up_proj', layers=(1,)),
      peftlib.Rule(('down_proj',), None, weight_qtype='int8'),
    )
    quantized = peftlib.quantize_base(*split, config, TOKENS)
    graphdef, state = peftlib.initialize_loftq(
      *split, config, TOKENS, iterations=2
    )
    self.assertEqual(graphdef, quantized[0])
    self.assertEqual(
      jax.tree.map(jnp.shape, state), jax.tree.map(jnp.shape, quantized[1])
    )
    of = lambda tree, name: tree['layers'][name]['kernel']['array']['qvalue']
    for name, rows in (('up_proj', slice(1)), ('down_proj', slice(2))):
      np.testing.assert_array_equal(
        of(state, name)[...][rows], of(quantized[1], name)[...][rows]
      )
    self.assertTrue(
      (
        of(state, 'up_proj')[...][1] != of(quantized[1], 'up_proj')[...][1]
      ).any()
    )

  def test_adapted_weight_that_is_not_quantized(self):
    _, config, split = adapted(
      rule('up_proj'), rule('down_proj', weight_qtype=None, tile_size=None)
    )
    with self.assertRaisesRegex(
      ValueError,
      'the config does not quantize layers/down_proj.kernel; LoftQ starts an',
    ):
      peftlib.initialize_loftq(*split, config, TOKENS)

  def test_rank_is_too_large(self):
    base = nnx.split(scanned_model.Stack(rngs=nnx.Rngs(0)))
    config = peftlib.LoraConfig(
      module_path=('up_proj',), rank=17, weight_qtype='int8'
    )
    split = peftlib.inject(*base, config, TOKENS, key=KEY)
    with self.assertRaisesRegex(
      ValueError, 'rank=17 of layers/up_proj.kernel is more than 16, its small'
    ):
      peftlib.initialize_loftq(*split, config, TOKENS)

  def test_iterations(self):
    _, config, split = adapted(rule('up_proj'))
    with self.assertRaisesRegex(ValueError, 'iterations=0 must be an int >= 1'):
      peftlib.initialize_loftq(*split, config, TOKENS, iterations=0)


if __name__ == '__main__':
  absltest.main()
