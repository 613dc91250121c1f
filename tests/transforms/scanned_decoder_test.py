"""Scanned decoders with the transforms around the body equal Python loops."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import transforms
from transforms import testing

_WIDTH = 8


def _param(key, shape, names, stack):
  value = jax.random.normal(key, shape) / _WIDTH**0.5
  with nnx.use_eager_sharding(False):
    return nnx.Param(value, out_sharding=names, **{nnx.PARTITION_NAME: stack})


class Dense(nnx.Module):
  """A residual MLP whose specs are tuples."""

  def __init__(self, key):
    up, down = jax.random.split(key)
    stack = 'dense_layers'
    self.scale = _param(key, (_WIDTH,), ('embed',), stack)
    self.up = _param(up, (_WIDTH, 12), ('embed', 'mlp'), stack)
    self.down = _param(down, (12, _WIDTH), ('mlp', 'embed'), stack)

  def __call__(self, x):
    hidden = jnp.tanh(self.scale[...] * x @ self.up[...])
    return x + hidden @ self.down[...]


class Experts(nnx.Module):
  """A residual mixture whose specs are PartitionSpecs."""

  def __init__(self, key):
    gate, expert = jax.random.split(key)
    stack = 'moe_layers'
    self.gate = _param(gate, (_WIDTH, 3), jax.P('embed', None), stack)
    self.experts = _param(
      expert, (3, _WIDTH, _WIDTH), jax.P('expert', 'embed', None), stack
    )

  def __call__(self, x):
    weights = jax.nn.softmax(x @ self.gate[...])
    return x + jnp.einsum('bd,edf,be->bf', x, self.experts[...], weights)


def _layers(kind, count, seed):
  keys = jax.random.split(jax.random.key(seed), count)
  split = [nnx.split(kind(key)) for key in keys]
  return split[0][0], [state for _, state in split]


def _loop(graphdef, layers, x):
  for layer in layers:
    x = nnx.merge(graphdef, layer)(x)
  return x


def _lax_scan(graphdef, stacked, x, axis, seen):
  """Returns the output and the State, as it comes back from the body."""

  def body(x, layer):
    layer = transforms.remove_scan_axis(layer)
    seen.append(layer)
    return nnx.merge(graphdef, layer, copy=True)(x), layer

  first = transforms.move_scan_axis(stacked, axis, 0)
  x, layers = jax.lax.scan(body, x, first)
  return x, transforms.add_scan_axis(layers, axis=axis)


def _nnx_scan(graphdef, stacked, x, axis, seen):
  @nnx.scan(in_axes=(nnx.Carry, axis), out_axes=(nnx.Carry, 0))
  def body(x, layer):
    layer = transforms.remove_scan_axis(layer)
    seen.append(layer)
    output = nnx.merge(graphdef, layer, copy=True)(x)
    # nnx refuses to let a Variable of the input out a second time.
    return output, jax.tree.map(lambda value: value + 0, layer)

  x, layers = body(x, stacked)
  return x, transforms.add_scan_axis(layers, axis=axis)


class ScannedDecoderTest(parameterized.TestCase):
  @parameterized.product(
    scan=(_lax_scan, _nnx_scan),
    axis=(0, 1),
    stacks=(
      (('dense', Dense, 3),),
      (('dense', Dense, 2), ('moe', Experts, 3)),
    ),
    jitted=(False, True),
  )
  def test_equals_a_loop(self, scan, axis, stacks, jitted):
    graphdefs, layers, stacked = {}, {}, {}
    for seed, (name, kind, count) in enumerate(stacks):
      graphdefs[name], layers[name] = _layers(kind, count, seed)
      # For vectors too the axis is 1: (embed, layers).
      stacked[name] = transforms.stack_layers(layers[name], axis=axis)
    x = jax.random.normal(jax.random.key(9), (4, _WIDTH))
    seen = []

    def loop_loss(layers, x):
      for name, _, _ in stacks:
        x = _loop(graphdefs[name], layers[name], x)
      return jnp.sum(x**2), x

    def scan_loss(stacked, x):
      returned = {}
      for name, _, _ in stacks:
        x, returned[name] = scan(graphdefs[name], stacked[name], x, axis, seen)
      return jnp.sum(x**2), (x, returned)

    loop = jax.value_and_grad(loop_loss, has_aux=True)
    scanned = jax.value_and_grad(scan_loss, has_aux=True)
    if jitted:
      loop, scanned = jax.jit(loop), jax.jit(scanned)
    (_, expected), expected_grads = loop(layers, x)
    (_, (actual, returned)), grads = scanned(stacked, x)
    chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-6)
    for name, _, _ in stacks:
      self.assertEqual(
        jax.tree.structure(returned[name]), jax.tree.structure(stacked[name])
      )
      chex.assert_trees_all_equal(returned[name], stacked[name])
      self.assertEqual(
        jax.tree.structure(grads[name]), jax.tree.structure(stacked[name])
      )
      for gradient, layer_gradients in zip(
        jax.tree.leaves(grads[name]),
        zip(*map(jax.tree.leaves, expected_grads[name]), strict=True),
        strict=True,
      ):
        expected = np.stack(layer_gradients, axis=axis)
        # An element is a sum, so its error goes by the size of the summands.
        np.testing.assert_allclose(
          gradient, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max()
        )
    dense = [layer for layer in seen if 'up' in layer]
    self.assertNotEmpty(dense)
    for layer in dense:
      self.assertEqual(layer['scale'].get_metadata('out_sharding'), ('embed',))
      self.assertEqual(
        layer['up'].get_metadata('out_sharding'), ('embed', 'mlp')
      )
    for layer in seen:
      if 'experts' in layer:
        self.assertEqual(
          layer['experts'].get_metadata('out_sharding'),
          jax.P('expert', 'embed', None),
        )

  def test_same_program_as_without(self):
    graphdef, layers = _layers(Dense, 3, 0)
    stacked = transforms.stack_layers(layers)
    plain = transforms.map_variables(
      lambda variable: type(variable)(variable[...]), stacked
    )
    x = jnp.ones((4, _WIDTH))

    def with_transforms(stacked, x):
      x, stacked = _lax_scan(graphdef, stacked, x, 0, [])
      return x, stacked

    def without(stacked, x):
      def body(x, layer):
        return nnx.merge(graphdef, layer, copy=True)(x), layer

      return jax.lax.scan(body, x, stacked)

    def hlo(fn, state):
      lowered = jax.jit(fn).lower(state, x)
      text = lowered.compile().as_text()
      # The rest of the lines names where in Python an operation came from.
      return [
        line.split(', metadata=')[0]
        for line in text.splitlines()
        if ' = ' in line
      ]

    operations = hlo(with_transforms, stacked)
    self.assertNotEmpty(operations)
    self.assertEqual(operations, hlo(without, plain))
    step = testing.assert_max_compilations(jax.jit(with_transforms), 1)
    for _ in range(3):
      x, stacked = step(stacked, x)


if __name__ == '__main__':
  absltest.main()
