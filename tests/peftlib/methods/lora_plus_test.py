from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from peftlib.methods import lora_plus


def _state(**values):
  variable = lambda role, value: nnx.LoRAParam(
    jnp.asarray(value, jnp.float32), role=role
  )
  return nnx.State(
    # The name says nothing: the second has the role of another.
    {
      'q_proj': {'kernel_lora_a': variable('lora_a', values['a'])},
      'v_proj': {'lora_b': variable('lora_a', values['named_b'])},
      'o_proj': {'w': variable('lora_b', values['b'])},
    }
  )


class LoraPlusTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.params = _state(a=[1.0, 2.0], named_b=[3.0], b=[4.0, -5.0])
    self.grads = _state(a=[0.5, -0.1], named_b=[0.2], b=[0.3, 0.4])

  @parameterized.parameters(False, True)
  def test_sgd_by_hand(self, jit):
    tx = lora_plus.loraplus(0.1, ratio=4.0, optimizer=optax.sgd)
    update = jax.jit(tx.update) if jit else tx.update
    updates, _ = update(self.grads, tx.init(self.params), self.params)
    flat = {path[0]: v.get_value() for path, v in nnx.to_flat_state(updates)}
    np.testing.assert_allclose(flat['q_proj'], [-0.05, 0.01], rtol=1e-6)
    np.testing.assert_allclose(flat['v_proj'], [-0.02], rtol=1e-6)
    np.testing.assert_allclose(flat['o_proj'], [-0.12, -0.16], rtol=1e-6)

  def test_as_adamw_with_two_learning_rates(self):
    # What peft's parameter groups do: weight decay follows the learning rate.
    tx = lora_plus.loraplus(0.1, ratio=4.0, weight_decay=0.01)
    slow = optax.adamw(0.1, weight_decay=0.01)
    fast = optax.adamw(0.4, weight_decay=0.01)
    params, state = self.params, tx.init(self.params)
    others = {
      name: (p, self.grads[name], opt, opt.init(p))
      for name, opt, p in (
        ('q_proj', slow, self.params['q_proj']),
        ('v_proj', slow, self.params['v_proj']),
        ('o_proj', fast, self.params['o_proj']),
      )
    }
    for _ in range(3):
      updates, state = tx.update(self.grads, state, params)
      params = optax.apply_updates(params, updates)
      for name, (p, g, opt, s) in others.items():
        u, s = opt.update(g, s, p)
        others[name] = (optax.apply_updates(p, u), g, opt, s)
    for name, (p, *_) in others.items():
      for got, wanted in zip(
        jax.tree.leaves(params[name]), jax.tree.leaves(p), strict=True
      ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)

  @parameterized.parameters(0, -1.0, float('nan'), True, 'a')
  def test_refuses_ratio(self, ratio):
    with self.assertRaisesRegex(
      ValueError,
      r'scale_lora_b: ratio=.* must be a finite number > 0, e.g. 16.0',
    ):
      lora_plus.loraplus(0.1, ratio=ratio)

  def test_refuses_a_state_without_lora_b(self):
    params = nnx.State({'q_proj': self.params['q_proj']})
    with self.assertRaisesRegex(ValueError, 'none of the trained variables is'):
      lora_plus.scale_lora_b(2.0).init(params)


if __name__ == '__main__':
  absltest.main()
