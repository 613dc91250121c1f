from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from peftlib.methods import method as method_lib
from peftlib.methods import vera
from tests.peftlib.methods import method_cases


def _from_peft(tensors):
  scales = method_cases.renamed(
    ('vera_lambda_b', 'vera_lambda_b'), ('vera_lambda_d', 'vera_lambda_d')
  )
  projections = method_cases.transposed(
    ('vera_A', 'vera_a'), ('vera_B', 'vera_b')
  )
  return scales(tensors) | projections(tensors)


class VeraTest(method_cases.MethodTestCase, parameterized.TestCase):
  @parameterized.parameters('linear', 'embedding')
  def test_laws(self, kind):
    self.check_laws(vera.Vera(rank=4), kind=kind)

  def test_formula(self):
    self.check_formula(
      vera.Vera(rank=4),
      lambda x, w, v, _: (
        x @ w
        + ((x @ v['vera_a']) * v['vera_lambda_d'])
        @ v['vera_b']
        * v['vera_lambda_b']
      ),
      constants=('vera_a', 'vera_b'),
    )

  def test_golden(self):
    self.check_golden('vera', vera.Vera(rank=4), _from_peft)

  def test_projections_are_equal_for_every_layer(self):
    method = vera.Vera(rank=4, projection_key=7)
    weight, value = method_cases.weight_of()
    one = method.init(jax.random.key(0), weight, value)
    two = method.init(jax.random.key(1), weight, value + 1)
    other = vera.Vera(rank=4, projection_key=8).init(
      jax.random.key(0), weight, value
    )
    for name in ('vera_a', 'vera_b'):
      np.testing.assert_array_equal(one[name], two[name])
      self.assertFalse(np.array_equal(one[name], other[name]))

  def test_weights_use_the_first_part_of_larger_projections(self):
    method = vera.Vera(rank=4, projection_shape=(20, 30))
    large, small = (
      method.init(
        jax.random.key(0), method_lib.Weight((rows,), (columns,)), None
      )
      for rows, columns in ((20, 30), (12, 8))
    )
    np.testing.assert_array_equal(large['vera_a'][:12], small['vera_a'])
    np.testing.assert_array_equal(large['vera_b'][:, :8], small['vera_b'])
    with self.assertRaisesRegex(
      ValueError, r'Vera.projection_shape=\(20, 30\): smaller than weight of'
    ):
      method.check(method_lib.Weight((21,), (8,)))

  def test_start(self):
    weight, value = method_cases.weight_of(600, 400)
    v = vera.Vera(rank=32, d_initial=0.2).init(jax.random.key(0), weight, value)
    np.testing.assert_array_equal(v['vera_lambda_d'], np.full(32, 0.2, 'f4'))
    np.testing.assert_array_equal(v['vera_lambda_b'], np.zeros(400))
    # Uniform in +-sqrt(6 / fan in), as peft draws them.
    for name, fan_in in (('vera_a', 600), ('vera_b', 32)):
      bound = (6 / fan_in) ** 0.5
      self.assertLessEqual(np.abs(v[name]).max(), bound)
      self.assertGreater(np.abs(v[name]).max(), 0.99 * bound)
      self.assertAlmostEqual(
        float(np.std(v[name])), bound / 3**0.5, delta=0.02 * bound
      )

  @parameterized.parameters(
    ({'rank': 0}, r'Vera.rank=0: must be an int >= 1'),
    ({'projection_key': 1.5}, r'Vera.projection_key=1.5: must be an int'),
    (
      {'projection_shape': (3,)},
      r'Vera.projection_shape=\(3,\): must be None or \(inputs, outputs\)',
    ),
    ({'d_initial': 'a'}, r"Vera.d_initial='a': must be a finite number"),
  )
  def test_refuses(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      vera.Vera(**fields)


if __name__ == '__main__':
  absltest.main()
