from absl.testing import absltest
import chex
from flax import nnx
import jax
import numpy as np

from tests.consumers import distillation
from tests.consumers import harness
import transforms


class DistillationTest(harness.LeakCheckedTestCase):
  loop = distillation

  def test_comes_near_to_the_teacher(self):
    loss = self.result()['loss']
    self.assertLess(loss[-1], 0.3 * loss[0])

  def test_first_loss_is_that_of_the_base(self):
    result = self.result()
    log_p = [
      np.asarray(jax.nn.log_softmax(model(result['x'])), np.float64)
      for model in (
        nnx.merge(*result['teacher']),
        distillation.models.VisionTransformer(
          distillation.SIZE, 8, 1, distillation.CLASSES, nnx.Rngs(0)
        ),
      )
    ]
    expected = (np.exp(log_p[0]) * (log_p[0] - log_p[1])).sum(axis=1).mean()
    self.assertAlmostEqual(result['loss'][0], expected, places=5)

  def test_gradient_is_that_of_the_whole_batch(self):
    result = self.result()
    home = lambda tree: jax.device_put(jax.device_get(tree))
    frozen, start = home(result['frozen']), home(result['start'])
    teacher, teacher_state = result['teacher']
    targets = nnx.merge(teacher, home(teacher_state))(result['x'])

    @jax.jit
    def gradient(trainable):
      loss = lambda trainable: distillation.distance(
        nnx.merge(result['student'], trainable, frozen)(result['x']), targets
      )
      return jax.grad(loss)(trainable)

    chex.assert_trees_all_close(
      home(result['first_gradient']), home(gradient(start)), atol=1e-6
    )

  def test_every_device_has_the_same_adapter(self):
    for leaf in jax.tree.leaves(self.result()['trainable']):
      self.assertLen(leaf.addressable_shards, distillation.DEVICES)
      for shard in leaf.addressable_shards:
        np.testing.assert_array_equal(shard.data, leaf)

  def test_base_and_teacher_stay(self):
    result = self.result()
    for before, after in (
      (result['base_state'], result['frozen']),
      (
        nnx.state(
          distillation.models.VisionTransformer(
            distillation.SIZE, 16, 3, distillation.CLASSES, nnx.Rngs(1)
          )
        ),
        result['teacher'][1],
      ),
    ):
      chex.assert_trees_all_equal(before, after)
    self.assertGreater(
      transforms.param_count(result['teacher'][1]),
      5 * transforms.param_count(result['base_state']),
    )


if __name__ == '__main__':
  absltest.main()
