from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from peftlib.methods import method as method_lib
from peftlib.methods import trainable_tokens
from tests.peftlib.methods import linear_op
from tests.peftlib.methods import method_cases

_INDICES = (9, 2, 5)


class TrainableTokensTest(method_cases.MethodTestCase, parameterized.TestCase):
  def test_laws(self):
    self.check_laws(
      trainable_tokens.TrainableTokens(indices=(3, 0)), kind='embedding'
    )

  def test_golden(self):
    self.check_golden(
      'trainable_tokens',
      trainable_tokens.TrainableTokens(indices=_INDICES),
      method_cases.renamed(('trainable_tokens_delta', 'trainable_tokens')),
      kind='embedding',
    )

  def test_start_output_is_the_base_bit_for_bit(self):
    weight, value = method_cases.weight_of(kind='embedding')
    method = trainable_tokens.TrainableTokens(indices=_INDICES)
    v = method.init(jax.random.key(0), weight, value)
    ids = np.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(
      method.apply(jnp.asarray(ids), linear_op.LookupOp(value), v), value[ids]
    )

  def test_a_tied_head_has_the_new_rows(self):
    weight, value = method_cases.weight_of(kind='embedding')
    method = trainable_tokens.TrainableTokens(indices=_INDICES)
    v = method_cases.moved(
      method.init(jax.random.key(0), weight, value), method.variables(weight)
    )

    class Head(linear_op.LinearOp):
      def using(self, weight, x):
        return x @ weight.T

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8)), 'float32')
    new = value.copy()
    new[list(_INDICES)] = v['trainable_tokens']
    np.testing.assert_allclose(
      method.apply(x, Head(value), v), x @ new.T, rtol=1e-5, atol=1e-5
    )

  @parameterized.parameters(
    (),
    ((3, 3),),
    ((-1,),),
    ([1, 2],),
    ((1.0,),),
  )
  def test_refuses_indices(self, indices=()):
    with self.assertRaisesRegex(
      ValueError,
      r'TrainableTokens.indices=.*: must be a tuple of different token ids',
    ):
      trainable_tokens.TrainableTokens(indices=indices)

  def test_refuses_weights(self):
    method = trainable_tokens.TrainableTokens(indices=_INDICES)
    with self.assertRaisesRegex(
      ValueError, r"TrainableTokens: mlp is of kind 'linear', not a table"
    ):
      method.check(method_lib.Weight((12,), (8,), label='mlp'))
    with self.assertRaisesRegex(
      ValueError, r'TrainableTokens.indices has 9: table has 9 rows'
    ):
      method.check(method_lib.Weight((9,), (8,), 'embedding', 'table'))


if __name__ == '__main__':
  absltest.main()
