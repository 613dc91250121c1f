import math

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import optax

from peftlib.cli import optimizers
from peftlib.cli import options as options_lib


def _options(**changes):
  return options_lib.Finetune(learning_rate=0.1, **changes)


class ScheduleTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('cosine', 'cosine', [(1 + math.cos(math.pi * i / 4)) / 20 for i in range(4)]),
    ('linear', 'linear', [0.1, 0.075, 0.05, 0.025]),
    ('constant', 'constant', [0.1] * 4),
  )  # fmt: skip
  def test_rates(self, name, falling):
    schedule = optimizers.make_schedule(
      _options(schedule=name, warmup_steps=4), 8
    )
    np.testing.assert_allclose(
      [float(schedule(i)) for i in range(8)],
      [0.025, 0.05, 0.075, 0.1, *falling],
      rtol=1e-6,
    )

  @parameterized.parameters(0, 1)
  def test_little_warm_up(self, warmup):
    schedule = optimizers.make_schedule(
      _options(schedule='linear', warmup_steps=warmup), 2 + warmup
    )
    np.testing.assert_allclose(
      [float(schedule(i)) for i in range(2 + warmup)],
      [0.1] * warmup + [0.1, 0.05],
      rtol=1e-6,
    )

  def test_warm_up_all_the_way(self):
    schedule = optimizers.make_schedule(_options(warmup_steps=3), 3)
    np.testing.assert_allclose(
      [float(schedule(i)) for i in range(3)], [0.1 / 3, 0.2 / 3, 0.1], rtol=1e-6
    )


class OptimizerTest(parameterized.TestCase):
  def test_first_update_is_adamws(self):
    tx = optimizers.make_optimizer(
      _options(
        schedule='constant', warmup_steps=0, weight_decay=0.5, clip_norm=1.0
      ),
      4,
    )
    params = {'w': jnp.array([2.0, -4.0])}
    updates, _ = tx.update(
      {'w': jnp.array([30.0, 40.0])}, tx.init(params), params
    )
    # Clipped to (0.6, 0.8); Adam's first step is the sign, up to epsilon.
    np.testing.assert_allclose(
      updates['w'], [-0.1 * (1 + 0.5 * 2), -0.1 * (1 - 0.5 * 4)], rtol=1e-5
    )

  @parameterized.parameters((0.0, 50.0), (1.0, 1.0))
  def test_clipping(self, clip_norm, expected):
    tx = optimizers.make_optimizer(
      _options(warmup_steps=0, clip_norm=clip_norm), 4
    )
    params = {'w': jnp.zeros(2)}
    _, state = tx.update(
      {'w': jnp.array([30.0, 40.0])}, tx.init(params), params
    )
    (moments,) = optax.tree_utils.tree_get_all_with_path(state, 'mu')
    # A tenth of the gradient goes into Adam's mean.
    self.assertAlmostEqual(
      float(jnp.linalg.norm(moments[1]['w'])), 0.1 * expected, places=4
    )

  def test_accumulation(self):
    tx = optimizers.make_optimizer(
      _options(schedule='linear', warmup_steps=0, accumulate=2, clip_norm=0), 8
    )
    params = {'w': jnp.zeros(1)}
    state = tx.init(params)
    sizes, rates = [], []
    for gradient in (1.0, 3.0, 1.0, 3.0):
      updates, state = tx.update({'w': jnp.full(1, gradient)}, state, params)
      sizes.append(float(updates['w'][0]))
      rate = state.inner_opt_state.hyperparams['learning_rate']
      rates.append(float(rate))
    # The third step is the first that the second update counts from: 2 of 8.
    np.testing.assert_allclose(sizes, [0, -0.1, 0, -0.075], rtol=1e-4)
    np.testing.assert_allclose(rates[1::2], [0.1, 0.075], rtol=1e-6)


if __name__ == '__main__':
  absltest.main()
