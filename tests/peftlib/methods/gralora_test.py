from absl.testing import absltest
from absl.testing import parameterized
import jax
import numpy as np

from peftlib.methods import gralora
from peftlib.methods import method as method_lib
from tests.peftlib.methods import linear_op
from tests.peftlib.methods import method_cases


def _from_peft(tensors):
  general = method_cases.transposed(
    ('gralora_A_general', 'gralora_general_a'),
    ('gralora_B_general', 'gralora_general_b'),
  )
  grid = method_cases.renamed(
    ('gralora_A', 'gralora_a'), ('gralora_B', 'gralora_b')
  )
  return grid(tensors) | general(tensors)


class GraloraTest(method_cases.MethodTestCase, parameterized.TestCase):
  @parameterized.parameters(
    ({'rank': 4, 'blocks': 2}, 'linear'),
    ({'rank': 4, 'blocks': 4, 'hybrid_rank': 3}, 'linear'),
    ({'rank': 4, 'blocks': 2, 'hybrid_rank': 3}, 'embedding'),
  )
  def test_laws(self, fields, kind):
    method = gralora.Gralora(alpha=6, **fields)
    if kind == 'linear':
      self.check_laws(method)
      return
    # Lookups use the merged table.
    weight, value = method_cases.weight_of()
    v = method_cases.moved(
      method.init(jax.random.key(0), weight, value), method.variables(weight)
    )
    ids = np.array([0, 5, 11])
    np.testing.assert_allclose(
      method_lib.Method.apply(method, ids, linear_op.LookupOp(value), v),
      method.merge(value, v)[ids],
      rtol=1e-6,
    )

  @parameterized.parameters((2, 0), (4, 0), (2, 3))
  def test_formula(self, blocks, hybrid_rank):
    # Block (i, j) of the update is A_i,j B_j,i of rank r / k.
    def formula(x, w, v, _):
      k, part = blocks, 4 // blocks
      a, b = v['gralora_a'], v['gralora_b']
      update = np.block(
        [
          [
            a[i][:, j * part : (j + 1) * part] @ b[j][i * part : (i + 1) * part]
            for j in range(k)
          ]
          for i in range(k)
        ]
      )
      if hybrid_rank:
        update = update + v['gralora_general_a'] @ v['gralora_general_b']
      return x @ (w + 6 / (4 + hybrid_rank) * update)

    self.check_formula(
      gralora.Gralora(rank=4, alpha=6, blocks=blocks, hybrid_rank=hybrid_rank),
      formula,
    )

  @parameterized.parameters(('gralora', 0), ('gralora_hybrid', 3))
  def test_golden(self, case, hybrid_rank):
    self.check_golden(
      case,
      gralora.Gralora(rank=4, alpha=6, blocks=2, hybrid_rank=hybrid_rank),
      _from_peft,
    )

  @parameterized.parameters(
    ({'rank': 3}, r'Gralora.rank=3: must be a multiple of blocks=2'),
    ({'rank': 0}, r'Gralora.rank=0: must be a multiple of blocks=2'),
    ({'blocks': 0}, r'Gralora.blocks=0: must be an int >= 1'),
    ({'hybrid_rank': -1}, r'Gralora.hybrid_rank=-1: must be an int >= 0'),
    ({'alpha': -1}, r'Gralora.alpha=-1: must be a finite number > 0'),
  )
  def test_refuses_fields(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      gralora.Gralora(**fields)

  @parameterized.parameters((12, 9), (10, 8))
  def test_refuses_weights_that_blocks_do_not_divide(self, rows, columns):
    weight = method_lib.Weight((rows,), (columns,), label='mlp.kernel')
    with self.assertRaisesRegex(
      ValueError, r'Gralora.blocks=4: does not divide mlp.kernel of \(1'
    ):
      gralora.Gralora(rank=4, blocks=4).check(weight)


if __name__ == '__main__':
  absltest.main()
