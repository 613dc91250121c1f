from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from peftlib.methods import method as method_lib
from peftlib.methods import oft
from tests.peftlib.methods import linear_op
from tests.peftlib.methods import method_cases

_R = method_cases.renamed(('oft_R', 'oft_r'))


def _skew(entries, size):
  out = np.zeros((size, size))
  position = 0
  for i in range(size):
    for j in range(i + 1, size):
      out[i, j], out[j, i] = entries[position], -entries[position]
      position += 1
  return out


def _block_diagonal(blocks):
  size = blocks[0].shape[0]
  out = np.zeros((size * len(blocks), size * len(blocks)))
  for i, block in enumerate(blocks):
    part = slice(i * size, (i + 1) * size)
    out[part, part] = block
  return out


class OftTest(method_cases.MethodTestCase, parameterized.TestCase):
  @parameterized.parameters(
    {},
    {'neumann_terms': 2},
    {'neumann_terms': 9},
    {'cayley_neumann': False},
    {'block_share': True},
    {'constrained': True, 'epsilon': 0.5},
  )
  def test_laws(self, **fields):
    self.check_laws(oft.Oft(block_size=4, **fields))

  def test_formula_of_the_exact_transform(self):
    def formula(x, w, v, _):
      blocks = []
      for entries in v['oft_r']:
        q = _skew(entries, 4)
        blocks.append((np.eye(4) - q) @ np.linalg.inv(np.eye(4) + q))
      return x @ _block_diagonal(blocks) @ w

    self.check_formula(oft.Oft(block_size=4, cayley_neumann=False), formula)

  @parameterized.parameters(False, True)
  def test_formula_of_the_series(self, share):
    def formula(x, w, v, _):
      blocks = []
      for entries in v['oft_r']:
        q = _skew(entries, 4)
        power = np.linalg.matrix_power
        blocks.append(
          np.eye(4) + 2 * q + 2 * power(q, 2) + 2 * power(q, 3) + power(q, 4)
        )
      return x @ _block_diagonal(blocks * (3 if share else 1)) @ w

    self.check_formula(oft.Oft(block_size=4, block_share=share), formula)

  @parameterized.parameters(
    ('oft', {}),
    ('oft_two_terms', {'neumann_terms': 2}),
    ('oft_three_terms', {'neumann_terms': 3}),
    ('oft_seven_terms', {'neumann_terms': 7}),
    ('oft_exact', {'cayley_neumann': False}),
    ('oft_shared', {'block_share': True}),
    ('oft_constrained', {'constrained': True, 'epsilon': 1.8}),
  )
  def test_golden(self, case, fields):
    self.check_golden(case, oft.Oft(block_size=4, **fields), _R)

  def test_golden_of_the_constraint_has_both_sides(self):
    entries = method_cases.golden('oft_constrained')['v/oft_R']
    inside = [np.linalg.norm(_skew(e, 4)) <= 1.8 / 3**0.5 for e in entries]
    self.assertEqual(set(inside), {True, False})

  def test_exact_transform_keeps_lengths(self):
    method = oft.Oft(block_size=4, cayley_neumann=False)
    weight, value = method_cases.weight_of()
    v = method_cases.moved(
      method.init(jax.random.key(0), weight, value), method.variables(weight)
    )
    np.testing.assert_allclose(
      np.linalg.norm(method.merge(value, v), axis=0),
      np.linalg.norm(value, axis=0),
      rtol=1e-5,
    )

  def test_constraint_is_finite_at_the_start(self):
    method = oft.Oft(block_size=4, constrained=True)
    weight, value = method_cases.weight_of()
    v = method.init(jax.random.key(0), weight, value)
    x = np.ones((2, 12), np.float32)
    op = linear_op.LinearOp(value)
    loss = lambda v: method.apply(x, op, v).sum()
    gradient = method_cases.jit(jax.grad(loss))(v)
    self.assertTrue(np.isfinite(gradient['oft_r']).all())
    self.assertGreater(np.abs(gradient['oft_r']).max(), 0)

  @parameterized.parameters(
    ({'block_size': 1}, r'Oft.block_size=1: must be an int >= 2'),
    ({'neumann_terms': 0}, r'Oft.neumann_terms=0: must be an int >= 1'),
    ({'epsilon': 0.0}, r'Oft.epsilon=0.0: must be a finite number > 0'),
    ({'dropout': 0.1}, r'Oft.dropout=0.1: must be 0'),
  )
  def test_refuses_fields(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      oft.Oft(**fields)

  def test_refuses_weights(self):
    method = oft.Oft(block_size=5)
    with self.assertRaisesRegex(
      ValueError,
      r'Oft.block_size=5: does not divide the 12 inputs of mlp.kernel; nearest'
      r' that do: \[3, 4, 6\]',
    ):
      method.check(method_lib.Weight((12,), (8,), label='mlp.kernel'))
    with self.assertRaisesRegex(
      ValueError, r"Oft: conv.kernel is of kind 'conv'"
    ):
      method.check(method_lib.Weight((5,), (8,), 'conv', 'conv.kernel'))


if __name__ == '__main__':
  absltest.main()
