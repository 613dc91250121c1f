from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from peftlib.methods import initialization
from peftlib.methods import lora
from peftlib.methods import method as method_lib
from tests.peftlib.methods import linear_op
from tests.peftlib.methods import method_cases

_FACTORS = method_cases.transposed(('lora_A', 'lora_a'), ('lora_B', 'lora_b'))


def _with_bias(tensors):
  # One dimension: nothing to transpose.
  return _FACTORS(tensors) | {'lora_bias': tensors['lora_B_bias']}


class LoraTest(method_cases.MethodTestCase, parameterized.TestCase):
  @parameterized.parameters(
    {},
    {'a_initializer': initialization.kaiming},
    {'a_initializer': initialization.gaussian(4)},
  )
  def test_laws(self, **fields):
    self.check_laws(lora.Lora(rank=4, alpha=6, **fields))

  def test_laws_of_embedding(self):
    self.check_laws(lora.Lora(rank=4, alpha=6), kind='embedding')

  def test_formula(self):
    self.check_formula(
      lora.Lora(rank=4, alpha=6),
      lambda x, w, v, _: x @ w + 6 / 4 * x @ v['lora_a'] @ v['lora_b'],
    )

  @parameterized.parameters('lora', 'lora_gaussian')
  def test_golden(self, case):
    self.check_golden(case, lora.Lora(rank=4, alpha=6), _FACTORS)

  def test_golden_with_bias(self):
    method = lora.Lora(rank=4, alpha=6, bias=True)
    self.check_golden('lora_bias', method, _with_bias)

  def test_golden_of_embedding(self):
    self.check_golden(
      'lora_embedding',
      lora.Lora(rank=4, alpha=6),
      method_cases.transposed(
        ('lora_embedding_A', 'lora_a'), ('lora_embedding_B', 'lora_b')
      ),
      kind='embedding',
    )

  def test_dropout_is_of_the_update_alone(self):
    weight, value = method_cases.weight_of()
    method = lora.Lora(rank=4, alpha=6, dropout=0.5)
    v = method_cases.moved(
      method.init(jax.random.key(0), weight, value), method.variables(weight)
    )
    x = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)
    keep = np.random.default_rng(1).random((5, 12)) < 0.5
    out = method.apply(x, linear_op.LinearOp(value, keep, 0.5), v)
    np.testing.assert_allclose(
      out,
      x @ value + (keep * x * 2) @ v['lora_a'] @ v['lora_b'] * 1.5,
      rtol=1e-5,
      atol=1e-5,
    )

  def test_a_bias_is_not_merged(self):
    weight = method_lib.Weight((12,), (8,), label='mlp.kernel')
    with self.assertRaisesRegex(
      ValueError, r'Lora.bias=True: the adapter of mlp.kernel has a bias'
    ):
      lora.Lora(bias=True).check_merge(weight)
    with self.assertRaisesRegex(
      ValueError, r"Lora.bias=True: table is of kind 'embedding'"
    ):
      lora.Lora(bias=True).check(
        method_lib.Weight((12,), (8,), 'embedding', 'table')
      )

  @parameterized.parameters(
    ({'rank': 0}, r'Lora.rank=0: must be an int >= 1'),
    ({'rank': 2.0}, r'Lora.rank=2.0: must be an int >= 1'),
    ({'rank': True}, r'Lora.rank=True: must be an int >= 1'),
    ({'alpha': 0}, r'Lora.alpha=0: must be a finite number > 0'),
    ({'alpha': float('inf')}, r'Lora.alpha=inf: must be a finite number > 0'),
    ({'dropout': 1.0}, r'Lora.dropout=1.0: must be a number in \[0, 1\)'),
    ({'dtype': 'int8'}, r"Lora.dtype='int8': must be a floating-point dtype"),
  )
  def test_refuses(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      lora.Lora(**fields)

  def test_start_of_a_table_is_peft_s(self):
    weight = method_lib.Weight((50,), (40,), 'embedding')
    v = lora.Lora(rank=4).init(jax.random.key(0), weight, np.zeros((50, 40)))
    np.testing.assert_array_equal(v['lora_a'], np.zeros((50, 4)))
    self.assertBetween(float(np.std(v['lora_b'])), 0.8, 1.2)
    own = lora.Lora(rank=4, a_initializer=initialization.gaussian(4))
    drawn = own.init(jax.random.key(0), weight, np.zeros((50, 40)))
    self.assertBetween(float(np.std(drawn['lora_a'])), 0.2, 0.3)
    np.testing.assert_array_equal(drawn['lora_b'], np.zeros((4, 40)))


if __name__ == '__main__':
  absltest.main()
