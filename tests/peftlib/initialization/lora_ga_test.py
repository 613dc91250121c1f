from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlib
from peftlib import methods
from tests.peftlib import scanned_model

KEY = jax.random.key(0)
TOKENS = jax.random.randint(jax.random.key(5), (4, 12), 0, 32)


def loss_fn(model, batch, rngs):
  del rngs
  return jnp.mean(model(batch) ** 2), {}


def plain_loss(up, values, head, tokens):
  """The loss as a function of one weight, without any of our code."""
  x = values['embedding'][tokens]
  for layer in range(scanned_model.LAYERS):
    x = x + jnp.tanh(x @ up[layer]) @ values['down'][layer]
  return jnp.mean((jnp.tanh(x) @ head) ** 2)


class LoraGaTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.base = nnx.split(scanned_model.Stack(rngs=nnx.Rngs(0)))

  def injected(self, method, *weights, **fields):
    rule = peftlib.Rule(weights, method, **fields)
    config = peftlib.AdapterConfig((rule,))
    return peftlib.inject(*self.base, config, TOKENS, key=KEY)

  def start(self, graphdef, state, **options):
    batches = jnp.split(TOKENS, 2)
    return peftlib.initialize_lora_ga(
      graphdef, state, loss_fn, batches, key=KEY, **options
    )

  @parameterized.product(
    method=(methods.Lora(rank=3, alpha=6), methods.RsLora(rank=3, alpha=6)),
    scale=('stable', 'gd_scale'),
  )
  def test_singular_vectors_of_the_mean_gradient(self, method, scale):
    graphdef, state = self.injected(method, 'up_proj')
    new = self.start(graphdef, state, scale=scale)
    values = scanned_model.values_of(self.base[1])
    head = self.base[1]['head']['kernel'][...]
    gradient = np.asarray(
      jax.grad(plain_loss)(
        jnp.asarray(values['up']), values, head, np.asarray(TOKENS)
      )
    )
    module = new['layers']['up_proj']
    for layer in range(scanned_model.LAYERS):
      u, s, vt = np.linalg.svd(gradient[layer], full_matrices=False)
      # The first of the singular vectors for a, the second ones for b.
      product = u[:, :3] @ (s[3:6, None] * vt[3:6])
      if scale == 'stable':
        product *= 32**0.25 / 16**0.5
      else:
        product /= method.scale**2
      a = np.asarray(module['kernel_lora_a'][...])[layer]
      b = np.asarray(module['kernel_lora_b'][...])[layer]
      # Each pair of vectors may have its sign.
      np.testing.assert_allclose(
        np.linalg.svd(a @ b, compute_uv=False),
        np.linalg.svd(product, compute_uv=False),
        rtol=1e-3,
        atol=1e-6,
      )
      np.testing.assert_allclose(
        np.abs(u[:, :3].T @ a), np.diag(np.linalg.norm(a, axis=0)), atol=1e-3
      )
      np.testing.assert_allclose(
        np.asarray(module['kernel'][...])[layer],
        values['up'][layer] - method.scale * a @ b,
        atol=1e-6,
      )

  def test_output_is_unchanged(self):
    method = methods.Lora(rank=3)
    graphdef, state = self.injected(method, 'up_proj', 'down_proj', 'head')
    new = self.start(graphdef, state, direction='random')
    self.assertEqual(jax.tree.structure(new), jax.tree.structure(state))
    np.testing.assert_allclose(
      nnx.merge(graphdef, new)(TOKENS),
      nnx.merge(*self.base)(TOKENS),
      atol=1e-5,
    )
    self.assertGreater(jnp.abs(new['head']['kernel_lora_b'][...]).max(), 0)

  def test_other_layers_keep_their_weight(self):
    method = methods.Lora(rank=3)
    graphdef, state = self.injected(method, 'up_proj', layers=(1,))
    new = self.start(graphdef, state)
    module = new['layers']['up_proj']
    self.assertEqual(module['kernel_lora_a'].shape, (1, 16, 3))
    before = scanned_model.values_of(self.base[1])['up']
    after = np.asarray(module['kernel'][...])
    np.testing.assert_array_equal(after[0], before[0])
    self.assertGreater(np.abs(after[1] - before[1]).max(), 0)

  def test_quantized_base(self):
    graphdef, state = self.injected(methods.Lora(rank=3), 'up_proj')
    config = peftlib.LoraConfig(module_path=('up_proj',), weight_qtype='int8')
    graphdef, state = peftlib.quantize_base(graphdef, state, config, TOKENS)
    with self.assertRaisesRegex(
      ValueError,
      'lora_ga: layers/up_proj.kernel is quantized; the weight has to change,'
      ' so start before quantize_base',
    ):
      self.start(graphdef, state)

  def test_rank_is_too_large(self):
    graphdef, state = self.injected(methods.Lora(rank=9), 'up_proj')
    with self.assertRaisesRegex(
      ValueError, 'rank=9 must be an int from 1 to 8'
    ):
      self.start(graphdef, state)


if __name__ == '__main__':
  absltest.main()
