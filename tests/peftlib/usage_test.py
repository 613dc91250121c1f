from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp

from peftlib import usage

W = jnp.ones((4, 4))
STACK = jnp.ones((3, 4, 4))
X = jnp.ones((2, 4))


def _used(f, *args, count=1):
  return usage.contracted_inputs(jax.make_jaxpr(f)(*args), count)


@jax.custom_vjp
def _custom_vjp(w, x):
  return x @ w


_custom_vjp.defvjp(
  lambda w, x: (_custom_vjp(w, x), (w, x)), lambda r, g: (r[1].T @ g, g)
)


@jax.custom_jvp
def _custom_jvp(w, x):
  return x @ w


_custom_jvp.defjvp(lambda p, t: (_custom_jvp(*p), _custom_jvp(*t)))


def _scan_constant(w, x):
  return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0]


def _scan_slices(stack, x):
  return jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0]


def _scan_carried_weight(w, x):
  def body(carry, _):
    w, x = carry
    return (w, x @ w), None

  return jax.lax.scan(body, (w, x), None, length=3)[0]


def _while_constant(w, x):
  return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)


def _while_carried(w, x):
  return jax.lax.while_loop(
    lambda c: c[1].sum() < 9, lambda c: (c[0], c[1] @ c[0]), (w, x)
  )


def _fori(w, x):
  return jax.lax.fori_loop(0, 3, lambda i, x: x @ w, x)


def _cond(w, x):
  return jax.lax.cond(x.sum() > 0, lambda w, x: x @ w, lambda w, x: x, w, x)


def _second_branch(w, x):
  branches = [lambda w, x: x, lambda w, x: x, lambda w, x: x @ w]
  return jax.lax.switch(x[0, 0].astype(int), branches, w, x)


def _result_of_a_loop(w, x):
  """A weight that a loop hands out as it came in."""
  w, _ = jax.lax.scan(lambda w, _: (w, None), w, None, length=2)
  return x @ w


def _result_of_a_jitted_function(w, x):
  return x @ jax.jit(lambda w: w.T * 2)(w)


class WaysInTest(parameterized.TestCase):
  """What an adapter would have to follow is seen, wherever it happens."""

  @parameterized.named_parameters(
    ('dot', lambda w, x: x @ w, W),
    ('dot_the_other_way', lambda w, x: w @ x.T, W),
    ('jit', jax.jit(lambda w, x: x @ w), W),
    ('jit_in_jit', jax.jit(lambda w, x: jax.jit(jnp.dot)(x, w)), W),
    ('remat', jax.checkpoint(lambda w, x: jnp.sin(x @ w)), W),
    ('custom_vjp', _custom_vjp, W),
    ('custom_jvp', _custom_jvp, W),
    ('scan_constant', _scan_constant, W),
    ('scan_slices', _scan_slices, STACK),
    ('scan_carried_weight', _scan_carried_weight, W),
    ('while_constant', _while_constant, W),
    ('while_carried', _while_carried, W),
    ('fori', _fori, W),
    ('cond', _cond, W),
    ('second_branch', _second_branch, W),
    ('result_of_a_loop', _result_of_a_loop, W),
    ('result_of_a_jitted_function', _result_of_a_jitted_function, W),
    ('vmap', lambda w, x: jax.vmap(lambda w: x @ w)(w), STACK),
    ('grad', lambda w, x: jax.grad(lambda x: (x @ w).sum())(x), W),
    ('nested', lambda w, x: jax.jit(jax.checkpoint(_scan_constant))(w, x), W),
    ('remat_of_scan', jax.checkpoint(_scan_slices), STACK),
  )
  def test_body(self, f, w):
    self.assertEqual(_used(f, w, X), ['dot_general'])

  @parameterized.named_parameters(
    ('cast', lambda w: w.astype(jnp.bfloat16).astype(jnp.float32)),
    ('transpose', lambda w: w.T),
    ('reshape', lambda w: w.reshape(2, 8).reshape(4, 4)),
    ('slice', lambda w: jnp.concatenate([w[:2], w[2:]])),
    ('scale_of_a_constant', lambda w: w / jnp.sqrt(4.0)),
    ('mask', lambda w: jnp.where(jnp.tril(jnp.ones((4, 4))) > 0, w, 0)),
    ('norm_of_itself', lambda w: w / jnp.linalg.norm(w)),
    ('stop_gradient', jax.lax.stop_gradient),
    ('dynamic_slice', lambda w: jax.lax.dynamic_slice(w, (0, 0), (4, 4))),
    ('flip', lambda w: w[::-1]),
    ('activation_function', jnp.tanh),
    ('product_with_a_constant', lambda w: jnp.eye(4) * 2 + w),
  )
  def test_on_the_way(self, f):
    self.assertEqual(_used(lambda w, x: x @ f(w), W, X), ['dot_general'])

  @parameterized.named_parameters(
    ('take', lambda w, i: jnp.take(w, i, axis=0)),
    ('index', lambda w, i: w[i]),
    ('index_of_a_cast', lambda w, i: w.astype(jnp.bfloat16)[i]),
    ('under_jit', jax.jit(lambda w, i: w[i])),
  )
  def test_lookup(self, f):
    self.assertEqual(_used(f, W, jnp.array([0, 1])), ['gather'])

  def test_convolution(self):
    f = lambda w, x: jax.lax.conv_general_dilated(x, w, (1,), 'SAME')
    used = _used(f, jnp.ones((4, 2, 3)), jnp.ones((1, 2, 8)))
    self.assertEqual(used, ['conv_general_dilated'])

  def test_ragged_dot(self):
    f = lambda w, x: jax.lax.ragged_dot(x, w, jnp.array([1, 1, 0]))
    (used,) = _used(f, STACK, X)
    self.assertStartsWith(used, 'ragged_dot')

  def test_a_scale_that_is_a_variable_of_its_own(self):
    f = lambda w, scale, x: x @ (w * scale)
    self.assertEqual(_used(f, W, jnp.ones(4), X, count=2)[0], 'dot_general')

  def test_each_of_several(self):
    f = lambda a, b, c, x: (x @ a + c) @ b
    self.assertEqual(
      _used(f, W, W, jnp.ones(4), X, count=3),
      ['dot_general', 'dot_general', ''],
    )

  def test_product_of_two_weights_that_meets_an_activation(self):
    f = lambda a, b, x: x @ (a @ b)
    self.assertEqual(_used(f, W, W, X, count=2)[0], 'dot_general')

  @parameterized.named_parameters(
    (
      'scan',
      lambda start, w, x: jax.lax.scan(
        lambda h, row: (jnp.tanh(h @ w + row), None), start, x
      )[0],
    ),
    (
      'while',
      lambda start, w, x: jax.lax.while_loop(
        lambda h: h.sum() < 9, lambda h: jnp.tanh(h @ w + x[0]), start
      ),
    ),
    (
      'scan_of_two',
      lambda start, w, x: jax.lax.scan(
        lambda c, row: ((c[1] @ w, c[0] + row), None), (start, start), x
      )[0],
    ),
  )
  def test_a_learned_start_of_a_loop(self, f):
    self.assertEqual(_used(f, jnp.ones(4), W, X, count=2), ['', 'dot_general'])

  def test_the_first_op_counts(self):
    f = lambda w, i: w[i] @ w.T
    self.assertEqual(_used(f, W, jnp.array([0, 1])), ['gather'])


class NoFalseAlarmTest(parameterized.TestCase):
  """What merely is added or multiplied is no weight of a contraction."""

  @parameterized.named_parameters(
    ('bias', lambda b, x: (x + b) @ x.T),
    ('bias_before_a_constant', lambda b, x: (x + b) @ jnp.ones((4, 3))),
    ('scale', lambda b, x: (x * b) @ x.T),
    ('broadcast_to_an_activation', lambda b, x: (b[None] + x) @ x.T),
    ('unused', lambda b, x: x @ x.T),
    ('handed_out', lambda b, x: b),
    (
      'in_a_scan',
      lambda b, x: jax.lax.scan(
        lambda x, _: (jnp.tanh((x + b) @ jnp.ones((4, 4))), None),
        x,
        None,
        length=2,
      )[0],
    ),
    (
      'in_a_while',
      lambda b, x: jax.lax.while_loop(
        lambda h: h.sum() < 9, lambda h: (h + b) @ jnp.ones((4, 4)), x
      ),
    ),
    (
      'in_the_condition_of_a_while',
      lambda b, x: jax.lax.while_loop(
        lambda h: (h + b).sum() < 9, lambda h: h + 1, x
      ),
    ),
    (
      'in_a_branch',
      lambda b, x: jax.lax.cond(
        x.sum() > 0, lambda b: (x + b) @ x.T, lambda b: x @ x.T, b
      ),
    ),
    ('under_remat', jax.checkpoint(lambda b, x: (x + b) @ x.T)),
    ('under_jit', jax.jit(lambda b, x: (x + b) @ x.T)),
  )
  def test_vector(self, f):
    self.assertEqual(_used(f, jnp.ones(4), X), [''])

  def test_position_table(self):
    f = lambda table, x: jnp.tanh(x + table[:2]) @ x.T
    self.assertEqual(_used(f, W, X), [''])

  def test_counter_and_batch_statistics(self):
    f = lambda mean, count, x: ((x - mean) @ x.T, count + 1)
    self.assertEqual(_used(f, jnp.ones(4), jnp.array(0), X, count=2), ['', ''])

  def test_two_activations(self):
    self.assertEqual(_used(lambda b, x: x @ x.T, W, X), [''])


if __name__ == '__main__':
  absltest.main()
