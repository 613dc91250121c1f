from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from peftlib.models import cache as cache_lib
from tests.peftlib.models import golden


class CacheTest(parameterized.TestCase):
  def test_init(self):
    cache = cache_lib.init_cache(golden.tiny_config(dtype='bfloat16'), 2, 5)
    self.assertEqual(cache.keys.shape, (3, 2, 2, 5, 6))
    self.assertEqual(cache.values.shape, (3, 2, 2, 5, 6))
    self.assertEqual(cache.keys.dtype, jnp.bfloat16)
    self.assertEqual(cache.segment_ids.tolist(), [[-1] * 5] * 2)
    self.assertEqual(int(cache.next_slot), 0)
    self.assertEqual(cache.length, 5)

  @parameterized.parameters(
    ({'batch_size': 0, 'length': 1}, 'batch_size=0: expected at least 1'),
    ({'batch_size': 1, 'length': 0}, 'length=0: expected at least 1'),
  )
  def test_rejects(self, sizes, message):
    with self.assertRaisesRegex(ValueError, message):
      cache_lib.init_cache(golden.tiny_config(), **sizes)

  def _filled(self, rows):
    cache = cache_lib.init_cache(golden.tiny_config(), rows, 2)
    numbers = jnp.arange(cache.keys.size, dtype=jnp.float32)
    return cache._replace(
      keys=numbers.reshape(cache.keys.shape),
      values=-numbers.reshape(cache.keys.shape),
      segment_ids=jnp.ones((rows, 2), jnp.int32),
      next_slot=jnp.asarray(2),
    )

  def test_extend_repeats_the_row_and_adds_slots(self):
    one = self._filled(1)
    cache = cache_lib.extend(one, batch_size=3, length=4)
    self.assertEqual(cache.keys.shape, (3, 3, 2, 4, 6))
    for row in range(3):
      np.testing.assert_array_equal(cache.keys[:, row, :, :2], one.keys[:, 0])
      np.testing.assert_array_equal(
        cache.values[:, row, :, :2], one.values[:, 0]
      )
    self.assertEqual(cache.segment_ids.tolist(), [[1, 1, -1, -1]] * 3)
    self.assertEqual(int(cache.next_slot), 2)

  @parameterized.parameters(
    ({'batch_size': 3, 'length': 2}, 'batch_size=3: the cache has 2 rows'),
    ({'batch_size': 2, 'length': 1}, 'length=1: the cache has 2 slots'),
  )
  def test_extend_rejects(self, sizes, message):
    with self.assertRaisesRegex(ValueError, message):
      cache_lib.extend(self._filled(2), **sizes)

  def test_join_rows(self):
    whole = self._filled(4)
    halves = [
      cache_lib.Cache(
        whole.keys[:, rows],
        whole.values[:, rows],
        whole.segment_ids[rows],
        whole.next_slot,
      )
      for rows in (slice(0, 2), slice(2, 4))
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *halves)
    joined = cache_lib.join_rows(stacked)
    jax.tree.map(np.testing.assert_array_equal, joined, whole)


if __name__ == '__main__':
  absltest.main()
