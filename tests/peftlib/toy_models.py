"""Small models of a user's, plain and scanned, for tests of the toolkit."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

WIDTH = 8
HIDDEN = 16
LAYERS = 3


class Block(nnx.Module):
  """A residual feed-forward layer."""

  def __init__(self, rngs: nnx.Rngs, names: tuple[Any, ...] | None = None):
    init = nnx.initializers.lecun_normal()
    up_init = nnx.with_partitioning(init, names) if names else init
    self.up = nnx.Linear(
      WIDTH, HIDDEN, use_bias=False, kernel_init=up_init, rngs=rngs
    )
    self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return x + self.down(jax.nn.silu(self.up(x)))


class Plain(nnx.Module):
  """Layers in a Python loop, with a bias and a norm around them."""

  def __init__(self, rngs: nnx.Rngs):
    self.embed = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
    self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = self.embed(x)
    for block in self.blocks:
      x = block(x)
    return self.norm(x)


def _stack(rngs: nnx.Rngs, names: tuple[Any, ...] | None) -> Block:
  @nnx.split_rngs(splits=LAYERS)
  @nnx.vmap(
    in_axes=0,
    out_axes=0,
    axis_size=LAYERS,
    transform_metadata={nnx.PARTITION_NAME: 'layers'},
  )
  def make(rngs: nnx.Rngs) -> Block:
    return Block(rngs, names)

  return make(rngs)


class LaxScan(nnx.Module):
  """Stacked layers under `jax.lax.scan` over the split State."""

  def __init__(self, rngs: nnx.Rngs, names: tuple[Any, ...] | None = None):
    self.layers = _stack(rngs, names)

  def __call__(self, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(self.layers)

    def body(x: jax.Array, layer: nnx.State) -> tuple[jax.Array, None]:
      return nnx.merge(graphdef, layer, copy=True)(x), None

    return jax.lax.scan(body, x, state)[0]


class NnxScan(LaxScan):
  """Stacked layers under `nnx.scan`."""

  def __call__(self, x: jax.Array) -> jax.Array:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def body(x: jax.Array, layer: Block) -> jax.Array:
      return layer(x)

    return body(x, self.layers)


class Odd(nnx.Module):
  """Weights used otherwise than by nnx.Linear, and state beside them."""

  def __init__(self, rngs: nnx.Rngs):
    init = nnx.initializers.lecun_normal()
    self.left = nnx.Param(init(rngs.params(), (6, WIDTH)))
    self.experts = nnx.Param(init(rngs.params(), (2, 6, 5)))
    self.general = nnx.LinearGeneral(
      (2, 5), (3, 2), axis=(-2, -1), use_bias=False, rngs=rngs
    )
    self.conv = nnx.Conv(2, 4, (3,), use_bias=False, rngs=rngs)
    self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))

  def __call__(self, x: jax.Array) -> jax.Array:
    self.count.set_value(self.count.get_value() + 1)
    x = jnp.einsum('oi,bi->bo', self.left[...], x)
    x = jnp.einsum('b...d,edf->be...f', x[:, None], self.experts[...])
    x = self.general(x[:, :, 0])
    return self.conv(x)


def inputs(batch: int = 4) -> jax.Array:
  return jax.random.normal(jax.random.key(7), (batch, WIDTH))


def values(state: nnx.State) -> dict[str, jax.Array]:
  """Values of a State by path."""
  return {
    '/'.join(map(str, path)): variable.get_value()
    for path, variable in nnx.to_flat_state(state)
  }
