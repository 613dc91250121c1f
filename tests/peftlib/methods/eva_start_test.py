from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from peftlib.methods import eva_start
from tests.peftlib.methods import method_cases


def _summed(batches):
  return jax.tree.map(lambda *x: sum(x), *map(eva_start.moments, batches))


class EvaTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_golden(self, whiten):
    data = method_cases.golden('eva')
    a = eva_start.eva(_summed(data['x']), rank=4, whiten=whiten)
    wanted = data['components']
    if whiten:
      wanted = wanted / np.sqrt(data['singular_values'])[:, None]
    self.assertEqual(a.shape, (12, 4))
    # peft forgets the smaller components after each batch.
    np.testing.assert_allclose(np.abs(a.T), np.abs(wanted), atol=0.02)

  @parameterized.parameters(False, True)
  def test_formula(self, whiten):
    x = method_cases.golden('eva')['x']
    a = eva_start.eva(_summed(x), rank=4, whiten=whiten)
    rows = x.reshape(-1, 12).astype(np.float64)
    _, s, vt = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    wanted = vt[:4] / np.sqrt(s[:4])[:, None] ** whiten
    np.testing.assert_allclose(
      np.abs(a.T), np.abs(wanted), rtol=1e-3, atol=1e-4
    )

  def test_moments_of_batches_are_those_of_all(self):
    x = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    whole, parts = eva_start.moments(x), _summed([x[:1], x[1:]])
    self.assertEqual(float(whole.number), 12)
    for one, other in zip(whole, parts, strict=True):
      np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    half = jnp.asarray(x, jnp.bfloat16)
    self.assertEqual(eva_start.moments(half).gram.dtype, jnp.float32)

  @parameterized.parameters(0, 6, 2.0)
  def test_refuses_rank(self, rank):
    with self.assertRaisesRegex(
      ValueError, rf'eva: rank={rank} must be an int from 1 to 5'
    ):
      eva_start.eva(eva_start.moments(jnp.ones((9, 5))), rank=rank)


if __name__ == '__main__':
  absltest.main()
