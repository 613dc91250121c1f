from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from peftlib.models import attention


def _reference(queries, keys, values, mask):
  """One head, one query at a time, in float64."""
  batch, length, num_heads, head_dim = queries.shape
  group = num_heads // keys.shape[1]
  out = np.zeros(queries.shape)
  for b in range(batch):
    for h in range(num_heads):
      for s in range(length):
        seen = mask[b, s]
        scores = keys[b, h // group][seen] @ queries[b, s, h]
        scores = scores / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, s, h] = weights @ values[b, h // group][seen]
  return out


class AttentionTest(parameterized.TestCase):
  @parameterized.parameters((4, 4), (4, 2), (6, 1))
  def test_against_numpy(self, num_heads, num_kv_heads):
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(2, 5, num_heads, 8))
    keys = rng.normal(size=(2, num_kv_heads, 7, 8))
    values = rng.normal(size=(2, num_kv_heads, 7, 8))
    mask = rng.random((2, 5, 7)) < 0.5
    mask[..., 0] = True
    out = attention.attend(
      *(jnp.asarray(x, jnp.float32) for x in (queries, keys, values)),
      jnp.asarray(mask),
    )
    np.testing.assert_allclose(
      out, _reference(queries, keys, values, mask), atol=1e-5
    )

  @parameterized.parameters(
    # length, keys before, blocks
    (5, 0, 1),
    (64, 3, 1),
    (65, 0, 2),
    (129, 7, 3),
    (600, 0, 8),
  )
  def test_causal_in_blocks(self, length, earlier, blocks):
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(2, length, 4, 2))
    keys = rng.normal(size=(2, 2, earlier + length, 2))
    values = rng.normal(size=(2, 2, earlier + length, 2))
    segment_ids = np.sort(rng.integers(3, size=(2, length)), axis=1)
    causal = np.tril(np.ones((length, length), bool))
    same = segment_ids[:, :, None] == segment_ids[:, None]
    mask = np.concatenate(
      [np.ones((2, length, earlier), bool), causal & same], axis=2
    )
    arguments = [
      *(jnp.asarray(x, jnp.float32) for x in (queries, keys, values)),
      jnp.asarray(mask),
    ]
    out = attention.attend_causal(*arguments)
    np.testing.assert_allclose(
      out, _reference(queries, keys, values, mask), atol=1e-5
    )
    # Two products a block.
    products = str(jax.make_jaxpr(attention.attend_causal)(*arguments))
    self.assertEqual(products.count('dot_general'), 2 * blocks)

  def test_causal_mask(self):
    np.testing.assert_array_equal(
      attention.causal_mask(3), np.tril(np.ones((1, 3, 3), bool))
    )
    mask = attention.causal_mask(4, jnp.asarray([[1, 1, 2, 0]]))
    np.testing.assert_array_equal(
      mask[0].astype(int),
      [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
    )

  def test_cached_mask(self):
    mask = attention.cached_mask(
      jnp.asarray([[1, 1]]), jnp.asarray([[1, 0, 1, 1, -1]]), jnp.asarray(2)
    )
    np.testing.assert_array_equal(
      mask[0].astype(int), [[1, 0, 1, 0, 0], [1, 0, 1, 1, 0]]
    )


if __name__ == '__main__':
  absltest.main()
