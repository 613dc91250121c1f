import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

from peftlib import methods
from peftlib.methods import method as method_lib
from tests.peftlib.methods import linear_op
from tests.peftlib.methods import method_cases


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shift(method_lib.Method):
  """A method of a user's own."""

  name = 'shift_of_method_test'

  def variables(self, weight):
    return {'shift': method_lib.VariableSpec((method_lib.OUTPUTS,))}

  def init(self, key, weight, value):
    return {'shift': jnp.zeros(weight.columns)}

  def merge(self, value, v):
    return value + v['shift'].astype(value.dtype)


class MethodTest(parameterized.TestCase):
  def test_weight_is_a_matrix(self):
    weight = method_lib.Weight((3, 3, 4), (5, 2), 'conv')
    self.assertEqual((weight.rows, weight.columns), (36, 10))

  def test_spec_takes_the_extents_of_the_weight(self):
    spec = method_lib.VariableSpec((method_lib.INPUTS, 3, method_lib.OUTPUTS))
    self.assertEqual(spec.shape(method_lib.Weight((2, 4), (5,))), (8, 3, 5))

  def test_apply_uses_the_merged_weight(self):
    w, x = np.ones((3, 2), 'f4'), np.array([[1.0, 2.0, 3.0]], 'f4')
    v = {'shift': jnp.array([0.0, 0.5])}
    out = Shift().apply(x, linear_op.LinearOp(w), v)
    np.testing.assert_allclose(out, [[6.0, 9.0]])

  def test_apply_drops_inputs_of_the_update_alone(self):
    w, x = np.ones((3, 2), 'f4'), np.array([[1.0, 2.0, 3.0]], 'f4')
    v = {'shift': jnp.array([0.0, 0.5])}
    op = linear_op.LinearOp(w, np.array([[True, False, True]]), 0.5)
    out = Shift(dropout=0.5).apply(x, op, v)
    np.testing.assert_allclose(out, [[6.0, 6.0 + 0.5 * 2 * (1 + 3)]])

  def test_methods_hash_by_their_fields(self):
    self.assertEqual(hash(methods.Lora(rank=4)), hash(methods.Lora(rank=4)))
    self.assertNotEqual(methods.Lora(rank=4), methods.Lora(rank=5))
    self.assertNotEqual(methods.Lora(), methods.RsLora())
    for cls in methods.registry().values():
      if cls is not methods.TrainableTokens:
        self.assertEqual(cls(), cls())
        self.assertEqual(hash(cls()), hash(cls()))

  def test_registry(self):
    self.assertContainsSubset(
      {
        *('dora', 'gralora', 'hira', 'ia3', 'loha', 'lokr', 'lora', 'lora_fa'),
        *('lora_orthogonal', 'miss', 'oft', 'olora', 'pissa', 'rslora'),
        *('shira', 'trainable_tokens', 'vera'),
      },
      methods.registry(),
    )
    self.assertIs(methods.by_name('oft'), methods.Oft)

  def test_a_new_method_is_found_by_its_name(self):
    method_lib.register(Shift)
    self.assertIs(methods.by_name('shift_of_method_test'), Shift)
    # Once more, as when a notebook's cell is run again.
    method_lib.register(Shift)

    class Other(Shift):
      pass

    with self.assertRaisesRegex(
      ValueError, "the name 'shift_of_method_test' belongs to Shift already"
    ):
      method_lib.register(Other)

  def test_an_unknown_name(self):
    with self.assertRaisesRegex(
      ValueError, r"there is no method 'doro'; nearest: \['dora'"
    ):
      methods.by_name('doro')

  @parameterized.parameters(
    ({'dropout': -0.1}, r'Shift.dropout=-0.1: must be a number in \[0, 1\)'),
    ({'dropout': True}, r'Shift.dropout=True: must be a number in'),
    ({'dtype': 'int32'}, r"Shift.dtype='int32': must be a floating-point"),
    ({'dtype': 'float31'}, r"Shift.dtype='float31': must be a floating-point"),
  )
  def test_refuses(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      Shift(**fields)

  @parameterized.parameters(*methods.registry().values())
  def test_every_method_learns(self, cls):
    """A target that the method can reach is nearer after some steps."""
    kind, fields = 'linear', {}
    if cls is methods.TrainableTokens:
      kind, fields = 'embedding', {'indices': (1, 3)}
    if 'rank' in {field.name for field in dataclasses.fields(cls)}:
      fields['rank'] = 2
    if cls is methods.Oft:
      fields['block_size'] = 4
    method = cls(**fields)
    weight = method_lib.Weight((12,), (8,), kind)
    rng = np.random.default_rng(0)
    value = rng.normal(size=(12, 8)).astype('f4')
    specs = method.variables(weight)
    start = method.init(jax.random.key(0), weight, value)
    trained = {n: v for n, v in start.items() if specs[n].trainable}
    frozen = {n: v for n, v in start.items() if not specs[n].trainable}
    base = value
    if method.residual:
      base = value - (method.merge(value, start) - value)
    x = rng.normal(size=(30, 12)).astype('f4')
    op = linear_op.LinearOp(base)
    if kind == 'embedding':
      x, op = np.array([0, 1, 2, 3]), linear_op.LookupOp(base)
    target = op(jnp.asarray(x)) * 1.2

    def loss(trained):
      out = method.apply(jnp.asarray(x), op, {**frozen, **trained})
      return jnp.mean((out - target) ** 2)

    tx = optax.adam(0.01)

    @method_cases.jit
    def train(trained):
      def step(carry, _):
        trained, state = carry
        now, gradient = jax.value_and_grad(loss)(trained)
        updates, state = tx.update(gradient, state, trained)
        return (optax.apply_updates(trained, updates), state), now

      carry = trained, tx.init(trained)
      return jax.lax.scan(step, carry, None, length=60)[1]

    losses = train(trained)
    self.assertTrue(np.isfinite(losses).all())
    self.assertLess(losses[-1], 0.99 * losses[0])


if __name__ == '__main__':
  absltest.main()
