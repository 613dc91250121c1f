"""Adapters in models that know nothing of them, each against merged weights."""

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlib
from peftlib import interception
from tests.peftlib import toy_models

KEY = jax.random.key(0)
WIDTH = 8


def _param(rngs, *shape):
  return nnx.Param(nnx.initializers.normal(0.5)(rngs.params(), shape))


class Operators(nnx.Module):
  """`@`, matmul, tensordot, both sides, on arrays and on Variables."""

  def __init__(self, rngs):
    self.at = _param(rngs, 8, 6)
    self.variable = _param(rngs, 6, 6)
    self.left = _param(rngs, 5, 6)
    self.matmul = _param(rngs, 3, 5, 4)
    self.tensordot = _param(rngs, 3, 4, 8)

  def __call__(self, x):
    x = (x @ self.at[...]) @ self.variable
    x = (self.left[...] @ x.T).T
    x = jnp.matmul(x[None, :, None], self.matmul[...][:, None])[:, :, 0]
    x = jnp.swapaxes(x, 0, 1)
    return jnp.tensordot(x, self.tensordot[...], axes=((1, 2), (0, 1)))


class Lists(nnx.Module):
  """Weights in a list and in a dict of the module."""

  def __init__(self, rngs):
    self.weights = nnx.List([_param(rngs, 8, 8) for _ in range(2)])
    self.named = nnx.Dict({'last': _param(rngs, 8, 8)})

  def __call__(self, x):
    for weight in self.weights:
      x = jnp.dot(x, weight[...])
    return x @ self.named['last'][...]


class Reshaping(nnx.Module):
  """Weights cast, reshaped and transposed before their use."""

  def __init__(self, rngs):
    self.heads = _param(rngs, 2, 4, 8)
    self.flipped = _param(rngs, 6, 8)
    self.both = _param(rngs, 4, 2, 6)

  def __call__(self, x):
    x = x @ self.heads[...].astype(jnp.float32).reshape(8, 8)
    x = x @ self.flipped[...].T
    return x @ self.both[...].reshape(8, 6).T


class Tied(nnx.Module):
  """One table for the lookup and the head, and a head over an index."""

  def __init__(self, rngs):
    self.table = nnx.Embed(7, 8, rngs=rngs)
    self.second = _param(rngs, 7, 8)

  def __call__(self, x):
    ids = (jnp.abs(x[:, :3]) * 3).astype(jnp.int32) % 7
    h = self.table(ids) + self.second[...][ids]
    return self.table.attend(h)


class Convolutions(nnx.Module):
  """1-D to 3-D, grouped, strided."""

  def __init__(self, rngs):
    self.one = nnx.Conv(2, 4, (3,), rngs=rngs)
    self.grouped = nnx.Conv(4, 6, (3,), feature_group_count=2, rngs=rngs)
    self.two = nnx.Conv(6, 4, (1, 2), strides=(1, 2), rngs=rngs)
    self.three = nnx.Conv(4, 3, (1, 1, 2), rngs=rngs)

  def __call__(self, x):
    x = self.grouped(self.one(x.reshape(-1, 4, 2)))
    x = self.two(x[:, None])
    return self.three(x[:, None])


class Attention(nnx.Module):
  """nnx's own attention and general linear layers."""

  def __init__(self, rngs):
    self.attention = nnx.MultiHeadAttention(
      2, 8, qkv_features=8, decode=False, rngs=rngs
    )
    self.einsum = nnx.Einsum('abc,cde->abde', (8, 2, 4), None, rngs=rngs)

  def __call__(self, x):
    return self.einsum(self.attention(x[None]))


class NestedScan(nnx.Module):
  """A scan in a scan, rematerialized, by nnx's own transforms."""

  def __init__(self, rngs):
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def outer(rngs):
      @nnx.split_rngs(splits=3)
      @nnx.vmap(in_axes=0, out_axes=0)
      def inner(rngs):
        return nnx.Linear(8, 8, rngs=rngs)

      return inner(rngs)

    self.layers = outer(rngs)

  def __call__(self, x):
    @nnx.remat
    def one(x, layer):
      return x + jnp.tanh(layer(x))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def inner(x, layer):
      return one(x, layer)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def outer(x, layers):
      return inner(x, layers)

    return outer(x, self.layers)


class LastAxisScan(nnx.Module):
  """A scan over the last axis of its variables."""

  def __init__(self, rngs):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=2)
    def make(rngs):
      return nnx.Linear(8, 8, use_bias=False, rngs=rngs)

    self.layers = make(rngs)

  def __call__(self, x):
    @nnx.scan(in_axes=(nnx.Carry, 2), out_axes=nnx.Carry)
    def forward(x, layer):
      return x + jnp.tanh(layer(x))

    return forward(x, self.layers)


class BareScan(nnx.Module):
  """A `lax.scan` body that uses a layer's weights by itself."""

  def __init__(self, rngs):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
      return nnx.Linear(8, 8, rngs=rngs)

    self.layers = make(rngs)

  def __call__(self, x):
    graphdef, state = nnx.split(self.layers)

    def body(x, state):
      layer = nnx.merge(graphdef, state, copy=True)
      return jnp.tanh(x @ layer.kernel[...] + layer.bias[...]), None

    return jax.lax.scan(body, x, state)[0]


class Shared(nnx.Module):
  """One module used twice, under two names."""

  def __init__(self, rngs):
    self.first = nnx.Linear(8, 8, rngs=rngs)
    self.second = self.first

  def __call__(self, x):
    return self.second(jnp.tanh(self.first(x)))


class Experts(nnx.Module):
  """Expert kernels, batched, under vmap."""

  def __init__(self, rngs):
    self.up = _param(rngs, 3, 8, 6)

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
      return nnx.Linear(6, 8, rngs=rngs)

    self.down = make(rngs)

  def __call__(self, x):
    x = jnp.einsum('ebi,eio->ebo', jnp.stack([x] * 3), self.up[...])
    y = jnp.einsum('ebo,eio->ebi', x, self.up[...])

    @nnx.vmap(in_axes=(0, 0), out_axes=0)
    def down(layer, x):
      return layer(x)

    return down(self.down, x) + y


MODELS = {
  Operators: ['at', 'left', 'matmul', 'tensordot', 'variable'],
  Lists: ['named/last', 'weights/0', 'weights/1'],
  Reshaping: ['both', 'flipped', 'heads'],
  Tied: ['second', 'table.embedding'],
  Convolutions: [f'{k}.kernel' for k in ('grouped', 'one', 'three', 'two')],
  Attention: [
    'attention/key.kernel',
    'attention/out.kernel',
    'attention/query.kernel',
    'attention/value.kernel',
    'einsum.kernel',
  ],
  NestedScan: ['layers.kernel'],
  LastAxisScan: ['layers.kernel'],
  BareScan: ['layers.kernel'],
  Shared: ['first.kernel'],
  Experts: ['down.kernel', 'up'],
}


class ForeignModelsTest(parameterized.TestCase):
  @parameterized.named_parameters((m.__name__, m) for m in MODELS)
  def test_every_weight_is_found(self, cls):
    recording = interception.record(cls(nnx.Rngs(0)), toy_models.inputs())
    self.assertEqual(recording.missed, ())
    self.assertEqual(sorted(op.label for op in recording.ops), MODELS[cls])

  @parameterized.named_parameters((m.__name__, m) for m in MODELS)
  def test_start_and_update(self, cls):
    model = cls(nnx.Rngs(0))
    x = toy_models.inputs()
    base_graphdef, base = nnx.split(model)
    graphdef, state = peftlib.inject(
      base_graphdef, base, peftlib.LoraConfig(rank=2, alpha=4.0), x, key=KEY
    )
    run = jax.jit(lambda g, s: nnx.merge(g, s, copy=True)(x), static_argnums=0)
    expected = run(base_graphdef, base)
    chex.assert_trees_all_equal(run(graphdef, state), expected)
    lora = nnx.to_flat_state(nnx.split_state(state, nnx.LoRAParam, ...)[0])
    self.assertLen(lora, 2 * len(MODELS[cls]))
    state = jax.tree.map(lambda v: v, state)
    moved = []
    for i, (path, variable) in enumerate(nnx.to_flat_state(state)):
      if isinstance(variable, nnx.LoRAParam):
        value = 0.1 * jax.random.normal(jax.random.key(i), variable.shape)
        variable = variable.replace(value)
      moved.append((path, variable))
    state = nnx.from_flat_state(moved)
    got = run(graphdef, state)
    self.assertGreater(float(jnp.abs(got - expected).max()), 1e-2)
    # Each weight's update in numpy, from the shapes of the variables alone.
    values = {k: np.asarray(v) for k, v in toy_models.values(state).items()}
    merged = []
    for path, variable in nnx.to_flat_state(base):
      *front, last = map(str, path)
      candidates = [
        '/'.join((*front[:n], '_'.join((*front[n:], last))))
        for n in range(len(front) + 1)
      ]
      name = next((c for c in candidates if f'{c}_lora_a' in values), None)
      if name is not None:
        update = 2.0 * _update(
          cls, name, values[f'{name}_lora_a'], values[f'{name}_lora_b']
        )
        variable = variable.replace(
          np.asarray(variable.get_value()) + update.reshape(variable.shape)
        )
      merged.append((path, variable))
    chex.assert_trees_all_close(
      got, run(base_graphdef, nnx.from_flat_state(merged)), atol=2e-4
    )


def _update(cls, name, a, b):
  if name == 'layers/kernel' and cls is NestedScan:
    return np.einsum('xyir,xyro->xyio', a, b)
  if name == 'layers/kernel' and cls is LastAxisScan:
    return np.einsum('irx,rox->iox', a, b)
  if name == 'matmul':
    # Each row meets all three matrices: one linear map to 3 * 4 outputs.
    return (a @ b).reshape(5, 3, 4).transpose(1, 0, 2)
  if name in ('up', 'layers/kernel', 'down/kernel'):
    return np.einsum('eir,ero->eio', a, b)
  if name in ('left', 'flipped', 'both'):
    return (a @ b).T
  return np.tensordot(a, b, 1)


if __name__ == '__main__':
  absltest.main()
