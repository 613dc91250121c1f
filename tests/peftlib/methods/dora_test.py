from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlib
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


def _torch_convolution(x, weight, stride):
  """x (N, C, *spatial) with weight (O, C, *kernel), as torch has them."""
  windows = np.lib.stride_tricks.sliding_window_view(
    x, weight.shape[2:], axis=tuple(range(2, x.ndim))
  )
  steps = (slice(None, None, stride),) * (x.ndim - 2)
  windows = windows[(slice(None), slice(None), *steps)]
  kernel = tuple(range(x.ndim, windows.ndim))
  out = np.tensordot(
    windows, weight, ((1, *kernel), (1, *range(2, weight.ndim)))
  )
  return np.moveaxis(out, -1, 1)


def _peft_convolution(x, weight, bias, a, b, magnitude, scale, stride):
  """peft's Conv layer with its DoraConvLayer; all as torch has them.

  The norm of (1, out, 1, 1) is over the kernel's inputs and spatial axes; the
  base's bias is left out of what the magnitude scales.
  """
  update = b.reshape(b.shape[0], -1) @ a.reshape(a.shape[0], -1)
  inner = tuple(range(1, weight.ndim))
  norm = np.sqrt(
    ((weight + scale * update.reshape(weight.shape)) ** 2).sum(
      inner, keepdims=True
    )
  ).swapaxes(0, 1)
  factor = magnitude.reshape(norm.shape) / norm
  base = _torch_convolution(x, weight, stride)
  low_rank = _torch_convolution(_torch_convolution(x, a, stride), b, 1)
  own_bias = bias.reshape(1, -1, *(1,) * (x.ndim - 2))
  return (
    base + own_bias + (factor - 1) * base + factor * low_rank * scale
  ), norm


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

  @parameterized.parameters((1, 1), (2, 1), (2, 2), (3, 1))
  def test_convolution_is_peft_s(self, dims, stride):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    model = nnx.Conv(
      *(4, 6, (3,) * dims, (stride,) * dims),
      padding='VALID',
      rngs=nnx.Rngs(0),
    )
    model.bias = nnx.Param(jnp.asarray(draw(6)))
    x = draw(2, *(5,) * dims, 4)
    graphdef, state = peftlib.inject(
      *nnx.split(model),
      peftlib.AdapterConfig(
        rules=(peftlib.Rule('.*', dora.Dora(rank=2, alpha=3)),)
      ),
      x,
      key=jax.random.key(0),
    )
    started = np.asarray(state['kernel_lora_magnitude'].get_value())
    for name in ('lora_a', 'lora_b', 'lora_magnitude'):
      variable = state[f'kernel_{name}']
      state[f'kernel_{name}'] = variable.replace(
        jnp.asarray(draw(*variable.shape))
      )
    # (*spatial, in, out) is torch's (out, in, *spatial).
    to_torch = lambda w: np.moveaxis(np.asarray(w), (-1, -2), (0, 1))
    value = lambda name: np.asarray(state[name].get_value())
    kernel = to_torch(value('kernel'))
    a = to_torch(value('kernel_lora_a').reshape(*(3,) * dims, 4, 2))
    b = value('kernel_lora_b').T.reshape(6, 2, *(1,) * dims)
    of_peft = lambda b, magnitude: _peft_convolution(
      np.moveaxis(x, -1, 1),
      *(kernel, value('bias'), a, b, magnitude, 1.5, stride),
    )
    expected, _ = of_peft(b, value('kernel_lora_magnitude'))
    expected = np.moveaxis(expected, 1, -1)
    run = jax.jit(lambda s: nnx.merge(graphdef, s, copy=True)(x))
    np.testing.assert_allclose(run(state), expected, rtol=1e-4, atol=1e-4)
    merged_graphdef, merged = peftlib.merge_adapters(graphdef, state)
    np.testing.assert_allclose(
      nnx.merge(merged_graphdef, merged)(x), expected, rtol=1e-4, atol=1e-4
    )
    _, norm = of_peft(0 * b, started)
    np.testing.assert_allclose(started, norm.ravel(), rtol=1e-6)

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
