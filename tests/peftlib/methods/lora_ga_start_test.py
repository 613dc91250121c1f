from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from peftlib.methods import lora_ga_start
from tests.peftlib.methods import method_cases


class LoraGATest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.value = rng.normal(size=(12, 8)).astype(np.float32)
    self.gradient = rng.normal(size=(12, 8)).astype(np.float32)

  @parameterized.parameters(
    ('ArBr', 'stable'),
    ('A2rBr', 'stable'),
    ('ArB2r', 'stable'),
    ('ArB2r', 'weight_svd'),
    ('ArB2r', 'gd_scale'),
    ('ArB2r', 'unit'),
  )
  def test_golden(self, direction, scale):
    data = method_cases.golden(f'lora_ga_{direction}_{scale}')
    a, b = lora_ga_start.lora_ga(
      data['weight'].T,
      data['gradient'].T,
      rank=4,
      scaling=1.5,
      direction=direction,
      scale=scale,
      stable_gamma=9,
    )
    # The signs of singular vectors are free.
    np.testing.assert_allclose(
      np.abs(a), np.abs(data['a'].T), rtol=1e-3, atol=1e-4
    )
    np.testing.assert_allclose(
      np.abs(b), np.abs(data['b'].T), rtol=1e-3, atol=1e-4
    )
    signs = np.sign(np.sum(a * data['a'].T, 0) * np.sum(b.T * data['b'], 0))
    np.testing.assert_allclose(
      data['weight'].T - 1.5 * (a * signs) @ b,
      data['frozen'].T,
      rtol=1e-3,
      atol=1e-4,
    )

  def test_first_step_is_along_the_gradient(self):
    # With the leading vectors in both factors, a step of size eta moves
    # a @ b by the best approximation of the gradient that has this rank.
    a, b = lora_ga_start.lora_ga(
      self.value,
      self.gradient,
      rank=2,
      scaling=1.0,
      direction='A2rBr',
      scale='unit',
    )
    step_a, step_b = self.gradient @ b.T, a.T @ self.gradient
    moved = step_a @ b + a @ step_b
    u, s, vt = np.linalg.svd(self.gradient, full_matrices=False)
    wanted = u[:, :2] * s[:2] ** 3 @ vt[:2] + u[:, 2:4] * s[2:4] @ vt[2:4]
    np.testing.assert_allclose(moved, wanted, rtol=1e-3, atol=1e-3)

  def test_random_takes_the_same_vectors_for_both(self):
    a, b = lora_ga_start.lora_ga(
      self.value,
      self.gradient,
      rank=3,
      scaling=1.0,
      direction='random',
      scale='unit',
      key=jax.random.key(0),
    )
    u, s, vt = np.linalg.svd(self.gradient, full_matrices=False)
    product = (u[:, :6].T @ a) @ (b @ vt[:6].T)
    diagonal = np.diag(product)
    np.testing.assert_allclose(product, np.diag(diagonal), atol=1e-4)
    kept = diagonal > 1e-3
    self.assertEqual(kept.sum(), 3)
    np.testing.assert_allclose(diagonal[kept], s[:6][kept], rtol=1e-4)

  def test_layers_are_mapped_over(self):
    start = lambda w, g: lora_ga_start.lora_ga(w, g, rank=2, scaling=2.0)
    a, b = jax.jit(jax.vmap(start))(
      jnp.stack([self.value] * 2), jnp.stack([self.gradient] * 2)
    )
    self.assertEqual((a.shape, b.shape), ((2, 12, 2), (2, 2, 8)))

  def test_a_zero_gradient_stays_finite(self):
    a, b = lora_ga_start.lora_ga(
      self.value,
      np.zeros_like(self.value),
      rank=2,
      scaling=1.0,
      scale='weight_svd',
    )
    self.assertTrue(np.isfinite(a).all())
    np.testing.assert_array_equal(b, np.zeros((2, 8)))

  @parameterized.parameters(
    ({'rank': 5}, r'lora_ga: rank=5 must be an int from 1 to 4, half of the'),
    ({'scaling': 0}, r'lora_ga: scaling=0 must be a finite number > 0'),
    (
      {'direction': 'ab'},
      r"lora_ga: direction='ab' must be one of \('ArBr', 'A2rBr'",
    ),
    ({'scale': 'big'}, r"lora_ga: scale='big' must be one of \('stable'"),
    (
      {'direction': 'random'},
      r"lora_ga: key=None must be a PRNG key for direction='random'",
    ),
    ({'stable_gamma': 0}, r'lora_ga: stable_gamma=0 must be a finite'),
    (
      {'gradient': np.zeros((8, 12))},
      r'lora_ga: gradient=\(8, 12\) must be \(12, 8\)',
    ),
  )
  def test_refuses(self, fields, message):
    arguments = {'gradient': self.gradient, 'rank': 2, 'scaling': 1.0, **fields}
    with self.assertRaisesRegex(ValueError, message):
      lora_ga_start.lora_ga(self.value, **arguments)


if __name__ == '__main__':
  absltest.main()
