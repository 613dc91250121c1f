"""Stacks of layers along any axis compute what the layers by themselves do."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlib
from peftlib import methods

LAYERS = 3
WIDTH = 8
SCALE = 2.0
ROWS = (0, -1, 0, -1)


def _by_type(axis):
  return nnx.StateAxes({(nnx.Param, peftlib.AdapterConstant): axis, ...: 0})


FORMS = (
  ('front', 0, 0),
  ('middle', 1, 1),
  ('last', 2, 2),
  ('last_from_end', -1, 2),
  ('middle_from_end', -2, 1),
  ('middle_by_type', _by_type(1), 1),
  ('last_by_type', _by_type(-1), 2),
)


class Scanned(nnx.Module):
  def __init__(self, axes):
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=0, out_axes=axes)
    def make(rngs):
      return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    self.axes = axes
    self.layers = make(nnx.Rngs(0))

  def __call__(self, x):
    @nnx.scan(in_axes=(nnx.Carry, self.axes), out_axes=nnx.Carry)
    def forward(x, layer):
      return x + jnp.tanh(layer(x))

    return forward(x, self.layers)


class NestedScan(nnx.Module):
  """A scan in a scan, both along `axis`."""

  def __init__(self, axis):
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=axis)
    def outer(rngs):
      @nnx.split_rngs(splits=LAYERS)
      @nnx.vmap(in_axes=0, out_axes=axis)
      def inner(rngs):
        return nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

      return inner(rngs)

    self.axis = axis
    self.layers = outer(nnx.Rngs(0))

  def __call__(self, x):
    @nnx.scan(in_axes=(nnx.Carry, self.axis), out_axes=nnx.Carry)
    def inner(x, layer):
      return x + jnp.tanh(layer(x))

    @nnx.scan(in_axes=(nnx.Carry, self.axis), out_axes=nnx.Carry)
    def outer(x, layers):
      return inner(x, layers)

    return outer(x, self.layers)


def _config(method, layers=None):
  return peftlib.AdapterConfig(
    rules=(peftlib.Rule('layers', method, layers=layers),)
  )


def _x():
  return np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)


def _injected(model, method=None, layers=None):
  """With factors that are not at their start."""
  method = method or methods.Lora(rank=2, alpha=2 * SCALE)
  graphdef, state = peftlib.inject(
    *nnx.split(model), _config(method, layers), _x(), key=jax.random.key(0)
  )
  moved = jax.tree.map_with_path(
    lambda path, v: v + 0.2 if 'lora_b' in jax.tree_util.keystr(path) else v,
    state,
  )
  return graphdef, moved


def _run(graphdef, state, x):
  return jax.jit(lambda s: nnx.merge(graphdef, s, copy=True)(x))(state)


def _gradients(graphdef, state, x):
  def loss(picked, rest):
    whole = nnx.merge_state(picked, rest)
    return jnp.sum(nnx.merge(graphdef, whole, copy=True)(x) ** 2)

  picked, rest = nnx.split_state(state, nnx.LoRAParam, ...)
  return jax.jit(jax.grad(loss))(picked, rest)


def _in_front(value, axis, count=1):
  value = np.moveaxis(value, range(axis, axis + count), range(count))
  return value.reshape(-1, *value.shape[count:])


def _values(state, axis, count=1):
  """Weights and factors, layers in front."""
  return [
    _in_front(np.asarray(state['layers'][name][...]), axis, count)
    for name in ('kernel', 'kernel_lora_a', 'kernel_lora_b')
  ]


def _unrolled(x, kernels, a, b, factors):
  """Layer by layer; `factors` (layers, rows or 1, 1) is 0 where it is off."""
  for w, u, v, on in zip(kernels, a, b, factors, strict=True):
    x = x + jnp.tanh(x @ w + SCALE * on * (x @ u @ v))
  return x


def _factors(rows=None, on=None):
  out = np.ones((LAYERS, 1 if rows is None else len(rows), 1), np.float32)
  if rows is not None:
    out *= (np.asarray(rows) == 0)[None, :, None]
  if on is not None:
    out *= np.isin(np.arange(LAYERS), on)[:, None, None]
  return out


class ScanAxesTest(parameterized.TestCase):
  def _check(self, graphdef, state, axis, factors):
    x = _x()
    kernels, a, b = _values(state, axis)
    got = _run(graphdef, state, x)
    expected = _unrolled(x, kernels, a, b, factors)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    gradients = _gradients(graphdef, state, x)
    wanted = jax.grad(
      lambda a, b: jnp.sum(_unrolled(x, kernels, a, b, factors) ** 2), (0, 1)
    )(a, b)
    for name, one in zip(('lora_a', 'lora_b'), wanted, strict=True):
      own = np.asarray(gradients['layers'][f'kernel_{name}'][...])
      np.testing.assert_allclose(
        _in_front(own, axis), one, atol=1e-4, rtol=1e-4
      )

  @parameterized.named_parameters(*FORMS)
  def test_on_off_and_by_row(self, axes, axis):
    injected = _injected(Scanned(axes))
    self._check(*injected, axis, _factors())
    for names in (['default'], []):
      graphdef, state = peftlib.set_active(*injected, names)
      self._check(graphdef, state, axis, _factors() * len(names))
    graphdef, state = peftlib.assign_rows(
      *injected, ['default'], np.array(ROWS)
    )
    self._check(graphdef, state, axis, _factors(ROWS))
    self.assertEqual(peftlib.adapters.assigned_rows(graphdef, state), 4)
    taken = peftlib.adapters.take_rows(graphdef, state, [2, 1])
    np.testing.assert_allclose(
      _run(graphdef, taken, _x()[[2, 1]]),
      _run(graphdef, state, _x())[np.array([2, 1])],
      atol=1e-5,
    )

  @parameterized.named_parameters(*FORMS)
  def test_some_layers(self, axes, axis):
    injected = _injected(Scanned(axes), layers=(0, 2))
    x = _x()
    kernels, a, b = _values(injected[1], axis)
    self.assertLen(a, 2)
    padded = [np.insert(value, 1, 0, axis=0) for value in (a, b)]
    expected = _unrolled(x, kernels, *padded, _factors(on=(0, 2)))
    np.testing.assert_allclose(_run(*injected, x), expected, atol=1e-5)
    merged = peftlib.merge_adapters(*injected)
    np.testing.assert_allclose(_run(*merged, x), expected, atol=1e-5)
    rows = peftlib.assign_rows(*injected, ['default'], np.array(ROWS))
    np.testing.assert_allclose(
      _run(*rows, x),
      _unrolled(x, kernels, *padded, _factors(ROWS)),
      atol=1e-5,
    )

  @parameterized.named_parameters(*FORMS[1:])
  def test_dropout_has_the_masks_of_the_first_axis(self, axes, axis):
    method = methods.Lora(rank=2, dropout=0.5)
    state_of = lambda axes: peftlib.with_dropout(
      *_injected(Scanned(axes), method), jax.random.key(3)
    )
    front_graphdef, front = state_of(0)
    graphdef, state = state_of(axes)
    # The same weights and factors in both.
    layers = state['layers']
    for name, value in zip(
      ('kernel', 'kernel_lora_a', 'kernel_lora_b'),
      _values(front, 0),
      strict=True,
    ):
      layers[name] = layers[name].replace(
        jnp.asarray(np.moveaxis(value, 0, axis))
      )
    got = _run(graphdef, state, _x())
    np.testing.assert_allclose(
      got, _run(front_graphdef, front, _x()), atol=1e-5
    )
    off = _unrolled(_x(), *_values(state, axis), _factors() / 4)
    self.assertGreater(float(jnp.abs(got - off).max()), 1e-2)

  @parameterized.product(
    form=[form[1:] for form in FORMS[2:]],
    method=[methods.Ia3(), methods.Dora(rank=2), methods.Vera(rank=2)],
  )
  def test_variables_with_fewer_axes_than_the_weight(self, form, method):
    axes, _ = form
    base = Scanned(axes)
    x = _x()
    expected = base(x)
    injected = _injected(base, method)
    off = peftlib.set_active(*injected, [])
    np.testing.assert_allclose(_run(*off, x), expected, atol=1e-5)
    moved = jax.tree.map(
      lambda v: v * 1.1 if v.dtype == jnp.float32 else v, injected[1]
    )
    merged = peftlib.merge_adapters(injected[0], moved)
    np.testing.assert_allclose(
      _run(*merged, x), _run(injected[0], moved, x), atol=1e-4
    )

  @parameterized.parameters((0, 0), (1, 1), (2, 2))
  def test_a_scan_in_a_scan(self, axes, axis):
    injected = _injected(NestedScan(axes))
    x = _x()
    values = _values(injected[1], axis, 2)
    on = np.ones((2 * LAYERS, 1, 1), np.float32)
    np.testing.assert_allclose(
      _run(*injected, x), _unrolled(x, *values, on), atol=1e-5
    )
    rows = peftlib.assign_rows(*injected, ['default'], np.array(ROWS))
    by_row = on * (np.array(ROWS) == 0)[None, :, None]
    np.testing.assert_allclose(
      _run(*rows, x), _unrolled(x, *values, by_row), atol=1e-5
    )

  def test_abstract(self):
    graphdef, state = nnx.split(Scanned(2))
    method = methods.Lora(rank=2, dropout=0.5)
    config = _config(method, layers=(0, 2))
    concrete = peftlib.inject(
      graphdef, state, config, _x(), key=jax.random.key(0)
    )
    abstract = peftlib.inject(
      graphdef,
      jax.eval_shape(lambda: state),
      config,
      _x(),
      key=jax.random.key(0),
    )
    self.assertEqual(abstract[0], concrete[0])
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract[1], concrete[1])

  @parameterized.parameters(
    (nnx.PathContains('kernel'), methods.Lora(rank=2)),
    (nnx.Param, methods.Vera(rank=2)),
  )
  def test_axes_that_leave_adapters_out(self, filter_, method):
    axes = nnx.StateAxes({filter_: 2, ...: 0})
    with self.assertRaisesRegex(
      ValueError,
      r'^peftlib.inject: layers.kernel is a stack of layers along axis 2, and'
      r' its adapter would be too; but the model scans other variables along'
      r' another axis: .+\. Give that axis to every nnx.Param and'
      r' peftlib.AdapterConstant, e.g. nnx.StateAxes\(\{\(nnx.Param,'
      r' peftlib.AdapterConstant\): 2, ...: 0\}\)\.$',
    ):
      _injected(Scanned(axes), method)


if __name__ == '__main__':
  absltest.main()
