import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from tests.consumers import harness
from tests.consumers import own_step


@functools.cache
def _result(optimizer, steps=30):
  return own_step.run(steps, optimizer)


def _values(state):
  return {
    '/'.join(map(str, path)): np.asarray(
      jax.random.key_data(value)
      if jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
      else value
    )
    for path, value in (
      (p, v.get_raw_value()) for p, v in nnx.to_flat_state(state)
    )
  }


class OwnStepTest(harness.LeakCheckedTestCase):
  loop = own_step

  @parameterized.parameters(*own_step.OPTIMIZERS)
  def test_every_optimizer_learns(self, optimizer):
    result = _result(optimizer)
    loss = result['history']['loss']
    self.assertLess(loss[-5:].mean(), 0.5 * loss[0])
    # A copy: evaluation updates the metric in place.
    model = nnx.merge(
      result['graphdef'], *result['end'], result['frozen'], copy=True
    )
    model.eval()
    data = own_step.make_data(2)
    accuracy = (model(data['x']).argmax(axis=1) == data['label']).mean()
    self.assertGreater(accuracy, 0.85)

  def test_two_rates(self):
    result = _result('multi_transform', 1)
    before, after = (_values(result[name][0]) for name in ('start', 'end'))
    # Adam's first step is the learning rate; of `a` nothing is known yet.
    for path in before:
      moved = np.abs(after[path] - before[path]).max()
      expected = 0.05 if path.endswith('lora_b') else 0
      self.assertAlmostEqual(moved, expected, places=4, msg=path)

  def test_masked_leaves_a_layer_alone(self):
    result = _result('masked')
    before, after = (_values(result[name][0]) for name in ('start', 'end'))
    for path in before:
      same = bool((before[path] == after[path]).all())
      self.assertEqual(same, path.startswith('last'), path)

  def test_multi_steps_waits(self):
    one, two = (_result('multi_steps', steps) for steps in (1, 2))
    chex.assert_trees_all_equal(one['end'][0], one['start'][0])
    moved = _values(two['end'][0])['last/kernel_lora_b']
    self.assertAlmostEqual(np.abs(moved).max(), 0.1, places=4)

  def test_apply_if_finite_skips_a_bad_batch(self):
    result = _result('apply_if_finite')
    self.assertEqual(result['opt_state'].total_notfinite, 0)
    trainable, user = result['end']
    step = own_step.make_step(
      result['graphdef'], own_step.OPTIMIZERS['apply_if_finite']
    )
    batch = own_step.make_data(1)
    batch['x'] = batch['x'].at[0].set(jnp.inf)
    after, opt_state, _, _ = step(
      trainable, result['opt_state'], user, result['frozen'], batch
    )
    chex.assert_trees_all_equal(after, trainable)
    self.assertEqual(opt_state.total_notfinite, 1)

  def test_user_state_is_what_the_forward_passes_left(self):
    result = _result('multi_transform')
    user = _values(result['end'][1])
    magnitudes = np.abs(result['history']['hidden']).mean(axis=(1, 2))
    np.testing.assert_allclose(user['seen/total'], magnitudes.sum(), rtol=1e-5)
    self.assertEqual(user['seen/count'], 30)
    self.assertEqual(user['dropout/rngs/count'], 30)
    start = _values(result['start'][1])
    self.assertEqual(user.keys(), start.keys())
    np.testing.assert_array_equal(
      user['dropout/rngs/key'], start['dropout/rngs/key']
    )

  def test_batch_statistics(self):
    result = _result('multi_transform', 1)
    user, base = _values(result['end'][1]), result['base']
    x = np.asarray(own_step.make_data(1)['x'])
    first = x @ np.asarray(base.first.kernel) + np.asarray(base.first.bias)
    for name, start, batch in (
      ('mean', 0, first.mean(axis=0)),
      ('var', 1, first.var(axis=0)),
    ):
      np.testing.assert_allclose(
        user[f'norm/{name}'], 0.8 * start + 0.2 * batch, rtol=1e-4, atol=1e-6
      )

  def test_nothing_else_has_changed(self):
    result = _result('multi_transform')
    base, frozen = (
      {p: v.get_raw_value() for p, v in nnx.to_flat_state(state)}
      for state in (nnx.state(result['base']), result['frozen'])
    )
    for path, value in frozen.items():
      self.assertIs(value, base[path])
    user = _values(nnx.state(result['base'], own_step.USER_STATE))
    self.assertEqual(user['seen/count'], 0)
    self.assertEqual(user['dropout/rngs/count'], 0)


if __name__ == '__main__':
  absltest.main()
