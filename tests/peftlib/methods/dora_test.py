from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from peftlib.methods import dora
from tests.peftlib.methods import linear_op
from tests.peftlib.methods import method_cases


def _from_peft(tensors):
  factors = method_cases.transposed(('lora_A', 'lora_a'), ('lora_B', 'lora_b'))
  return factors(tensors) | {'lora_magnitude': tensors['lora_magnitude_vector']}


def _from_peft_embedding(tensors):
  factors = method_cases.transposed(
    ('lora_embedding_A', 'lora_a'), ('lora_embedding_B', 'lora_b')
  )
  return factors(tensors) | {'lora_magnitude': tensors['lora_magnitude_vector']}


class DoraTest(method_cases.MethodTestCase, parameterized.TestCase):
  @parameterized.parameters('linear', 'embedding')
  def test_laws(self, kind):
    self.check_laws(dora.Dora(rank=4, alpha=6), kind=kind)

  def test_formula(self):
    def formula(x, w, v, fixed):
      norm = np.linalg.norm(w + 1.5 * fixed['lora_a'] @ fixed['lora_b'], axis=0)
      moved = w + 1.5 * v['lora_a'] @ v['lora_b']
      return x @ (v['lora_magnitude'] * moved / norm)

    self.check_formula(dora.Dora(rank=4, alpha=6), formula)

  def test_golden(self):
    self.check_golden('dora', dora.Dora(rank=4, alpha=6), _from_peft)

  def test_golden_of_embedding(self):
    self.check_golden(
      'dora_embedding',
      dora.Dora(rank=4, alpha=6),
      _from_peft_embedding,
      kind='embedding',
    )

  def test_magnitude_starts_as_the_norm_of_columns(self):
    data = method_cases.golden('dora')
    weight, _ = method_cases.weight_of()
    v = dora.Dora(rank=4).init(jax.random.key(0), weight, data['weight'].T)
    np.testing.assert_allclose(
      v['lora_magnitude'], data['start/lora_magnitude_vector'], rtol=1e-6
    )

  def test_a_zero_column_stays_finite(self):
    weight, value = method_cases.weight_of()
    value[:, 3] = 0
    method = dora.Dora(rank=4, alpha=6)
    v = method.init(jax.random.key(0), weight, value)
    op = linear_op.LinearOp(value)
    x = np.ones((2, 12), np.float32)

    def loss(v):
      return jnp.sum(method.apply(x, op, v) ** 2)

    np.testing.assert_allclose(
      method.apply(x, op, v), x @ value, rtol=1e-5, atol=1e-5
    )
    for gradient in jax.tree.leaves(method_cases.jit(jax.grad(loss))(v)):
      self.assertTrue(np.isfinite(gradient).all())
    self.assertTrue(np.isfinite(method.merge(value, v)).all())

  def test_dropout_is_as_in_peft(self):
    weight, value = method_cases.weight_of()
    method = dora.Dora(rank=4, alpha=6, dropout=0.5)
    v = method_cases.moved(
      method.init(jax.random.key(0), weight, value), method.variables(weight)
    )
    x = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)
    keep = np.random.default_rng(1).random((5, 12)) < 0.5
    out = method.apply(x, linear_op.LinearOp(value, keep, 0.5), v)
    moved = value + v['lora_a'] @ v['lora_b'] * 1.5
    factor = v['lora_magnitude'] / np.linalg.norm(moved, axis=0)
    np.testing.assert_allclose(
      out,
      x @ value + (keep * x * 2) @ (factor * moved - value),
      rtol=1e-4,
      atol=1e-5,
    )

  def test_refuses_a_bias(self):
    with self.assertRaisesRegex(
      ValueError, 'Dora.bias=True: must be False: DoRA has no bias'
    ):
      dora.Dora(bias=True)


if __name__ == '__main__':
  absltest.main()
