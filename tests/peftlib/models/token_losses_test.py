import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from peftlib.models import token_losses

_WIDTH, _VOCABULARY = 6, 11


def _inputs(rows, length, vocabulary=_VOCABULARY):
  rng = np.random.default_rng(0)
  hidden = rng.normal(size=(rows, length, _WIDTH)).astype(np.float32)
  weight = rng.normal(size=(_WIDTH, vocabulary)).astype(np.float32)
  targets = rng.integers(0, vocabulary, (rows, length)).astype(np.int32)
  cotangents = rng.normal(size=(rows, length)).astype(np.float32)
  return hidden, weight, targets, cotangents


def _losses(hidden, weight, targets, **kwargs):
  head = lambda x: jnp.dot(x, weight, preferred_element_type=jnp.float32)
  return token_losses.token_losses(head, hidden, targets, **kwargs)


def _by_hand(hidden, weight, targets, cotangents):
  """Losses, and the gradients of their sum times cotangents, in float64."""
  hidden, weight = hidden.astype(np.float64), weight.astype(np.float64)
  logits = hidden @ weight
  normalizers = np.log(np.exp(logits).sum(-1, keepdims=True))
  tokens = np.eye(weight.shape[1])[targets]
  losses = ((normalizers - logits) * tokens).sum(-1)
  change = (np.exp(logits - normalizers) - tokens) * cotangents[..., None]
  return losses, change @ weight.T, np.einsum('bkd,bkv->dv', hidden, change)


class TokenLossesTest(parameterized.TestCase):
  # Chunks of a row: one, three of 32, three of 24 with a place to spare.
  @parameterized.product(
    size=((3, 5), (9, 96), (4, 71), (1, 1), (2, 0)),
    whole=(False, True),
    jit=(False, True),
  )
  def test_values_and_gradients(self, size, whole, jit):
    hidden, weight, targets, cotangents = _inputs(*size)
    losses, to_hidden, to_weight = _by_hand(hidden, weight, targets, cotangents)
    call = functools.partial(_losses, whole=whole)
    wrap = jax.jit if jit else lambda f: f
    got = wrap(call)(hidden, weight, targets)
    chex.assert_type(got, jnp.float32)
    np.testing.assert_allclose(got, losses, atol=1e-5)

    def total(hidden, weight):
      out = call(hidden, weight, targets)
      return jnp.sum(out * cotangents), out

    for argnums, expected in (
      ((0,), (to_hidden,)),
      ((1,), (to_weight,)),
      ((0, 1), (to_hidden, to_weight)),
    ):
      grad = wrap(jax.grad(total, argnums=argnums, has_aux=True))
      grads, out = grad(hidden, weight)
      np.testing.assert_allclose(out, losses, atol=1e-5)
      chex.assert_trees_all_close(
        grads, tuple(x.astype(np.float32) for x in expected), atol=1e-4
      )

  def test_large_logits(self):
    hidden, weight, targets, _ = _inputs(2, 40)
    loss = lambda h: jnp.sum(_losses(h, weight, targets))
    value, grad = jax.value_and_grad(loss)(hidden * 1e4)
    logits = hidden.astype(np.float64) @ weight * 1e4
    picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(
      value, (logits.max(-1) - picked).sum(), rtol=1e-4
    )
    chex.assert_tree_all_finite(grad)

  def test_bfloat16(self):
    hidden, weight, targets, cotangents = _inputs(4, 71)
    hidden = np.asarray(jnp.asarray(hidden, jnp.bfloat16))
    weight = np.asarray(jnp.asarray(weight, jnp.bfloat16))
    losses, to_hidden, _ = _by_hand(hidden, weight, targets, cotangents)
    got, grad = jax.value_and_grad(
      lambda h: jnp.sum(_losses(h, weight, targets) * cotangents)
    )(hidden)
    self.assertEqual(grad.dtype, jnp.bfloat16)
    np.testing.assert_allclose(got, (losses * cotangents).sum(), rtol=1e-4)
    np.testing.assert_allclose(
      np.asarray(grad, np.float32), to_hidden, atol=0.03
    )

  @parameterized.parameters(False, True)
  def test_vmap(self, jit):
    hidden, weight, targets, cotangents = _inputs(8, 71)
    hidden = hidden.reshape(2, 4, 71, -1)
    targets, cotangents = (x.reshape(2, 4, 71) for x in (targets, cotangents))

    def grad(hidden, targets, cotangents):
      total = lambda h: jnp.sum(_losses(h, weight, targets) * cotangents)
      return jax.grad(total)(hidden)

    wrap = jax.jit if jit else lambda f: f
    got = wrap(jax.vmap(grad))(hidden, targets, cotangents)
    for i in range(2):
      expected = _by_hand(hidden[i], weight, targets[i], cotangents[i])[1]
      np.testing.assert_allclose(got[i], expected, atol=1e-4)

  def test_forward_mode_and_second_derivatives(self):
    hidden, weight, targets, cotangents = _inputs(1, 2)
    ones = np.ones_like(cotangents)
    _, to_hidden, to_weight = _by_hand(hidden, weight, targets, ones)
    moved = _inputs(1, 2)[0][:, ::-1]
    loss = lambda h, w: jnp.sum(_losses(h, w, targets))
    _, tangent = jax.jvp(loss, (hidden, weight), (moved, weight))
    expected = (moved * to_hidden).sum() + (weight * to_weight).sum()
    np.testing.assert_allclose(tangent, expected, rtol=1e-4)
    # W (diag p - p p^T) W^T at each place.
    hessian = jax.hessian(loss)(hidden, weight)
    logits = hidden.astype(np.float64) @ weight
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for k in range(2):
      curvature = np.diag(p[0, k]) - np.outer(p[0, k], p[0, k])
      np.testing.assert_allclose(
        hessian[0, k, :, 0, k], weight @ curvature @ weight.T, atol=1e-4
      )

  def test_logits_are_not_stored_and_nothing_is_computed_twice(self):
    hidden, weight, targets, _ = _inputs(4, 512, vocabulary=997)
    loss = lambda h, w: jnp.sum(_losses(h, w, targets))
    logits_bytes = 4 * 512 * 997 * 4
    # Chunks of 32 places: a sixteenth of the logits, and their gradients.
    for f in (loss, jax.grad(loss)):
      compiled = jax.jit(f).lower(hidden, weight).compile()
      temp = compiled.memory_analysis().temp_size_in_bytes
      self.assertLess(temp, 0.2 * logits_bytes)
    products = lambda f: str(jax.make_jaxpr(f)(hidden, weight)).count(
      'dot_general'
    )
    self.assertEqual(products(loss), 1)
    self.assertEqual(products(jax.grad(loss)), 2)
    self.assertEqual(products(jax.grad(loss, argnums=(0, 1))), 3)


if __name__ == '__main__':
  absltest.main()
