from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from peftlib.methods import loftq_start


def _coarse(w):
  return jnp.round(w * 2) / 2


class LoftqTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    self.value = rng.normal(size=(12, 8)).astype(np.float32)

  @parameterized.product(iterations=(1, 2, 5), scale=(1.0, 1.5))
  def test_formula(self, iterations, scale):
    parts = loftq_start.loftq(
      self.value, _coarse, rank=3, scale=scale, iterations=iterations
    )
    low_rank = np.zeros((12, 8))
    for _ in range(iterations):
      base = np.round((self.value - low_rank) * 2) / 2
      u, s, vt = np.linalg.svd(self.value - base, full_matrices=False)
      low_rank = u[:, :3] * s[:3] @ vt[:3]
    np.testing.assert_allclose(parts.base, base, atol=1e-6)
    np.testing.assert_allclose(
      scale * parts.a @ parts.b, low_rank, rtol=1e-4, atol=1e-5
    )
    # Both factors have the root of the singular values.
    np.testing.assert_allclose(
      np.linalg.norm(parts.a, axis=0),
      np.linalg.norm(parts.b, axis=1),
      rtol=1e-4,
    )

  def test_error_is_below_that_of_quantization_alone(self):
    error = lambda w: float(np.linalg.norm(self.value - w))
    errors = [error(_coarse(self.value))]
    for iterations in (1, 5):
      parts = loftq_start.loftq(
        self.value, _coarse, rank=3, iterations=iterations
      )
      errors.append(error(parts.base + parts.a @ parts.b))
    self.assertEqual(errors, sorted(errors, reverse=True))

  def test_layers_are_mapped_over(self):
    split = lambda w: loftq_start.loftq(w, _coarse, rank=3, iterations=2)
    stacked = jax.jit(jax.vmap(split))(jnp.stack([self.value, -self.value]))
    one = split(self.value)
    np.testing.assert_allclose(
      stacked.a[0] @ stacked.b[0], one.a @ one.b, atol=1e-5
    )
    self.assertEqual(jax.eval_shape(split, self.value).a.shape, (12, 3))

  @parameterized.parameters(
    ({'rank': 9}, r'loftq: rank=9 must be an int from 1 to 8'),
    ({'rank': 0}, r'loftq: rank=0 must be an int from 1 to 8'),
    ({'scale': 0.0}, r'loftq: scale=0.0 must be a finite number > 0'),
    ({'iterations': 0}, r'loftq: iterations=0 must be an int >= 1'),
  )
  def test_refuses(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      loftq_start.loftq(self.value, _coarse, **{'rank': 2, **fields})


if __name__ == '__main__':
  absltest.main()
