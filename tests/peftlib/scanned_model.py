"""A scanned model that compiles fast, and is three lines when written down."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

LAYERS = 2


class Block(nnx.Module):
  def __init__(self, *, rngs):
    self.up_proj = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
    self.down_proj = nnx.Linear(32, 16, use_bias=False, rngs=rngs)

  def __call__(self, x):
    return x + self.down_proj(jnp.tanh(self.up_proj(x)))


class Stack(nnx.Module):
  def __init__(self, *, rngs, axis=0):
    self.axis = axis
    self.embed_tokens = nnx.Embed(32, 16, rngs=rngs)
    self.head = nnx.Linear(16, 32, use_bias=False, rngs=rngs)

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(in_axes=0, out_axes=axis)
    def make(rngs):
      return Block(rngs=rngs)

    self.layers = make(rngs)

  def hidden(self, tokens):
    @nnx.scan(in_axes=(self.axis, nnx.Carry), out_axes=nnx.Carry)
    def run(block, x):
      return block(x)

    return run(self.layers, self.embed_tokens(tokens))

  def __call__(self, tokens: jax.Array) -> jax.Array:
    return self.head(jnp.tanh(self.hidden(tokens)))


def values_of(state):
  """The weights in numpy, without the head."""
  layers = state['layers']
  return {
    'embedding': np.asarray(state['embed_tokens']['embedding'][...]),
    'up': np.asarray(layers['up_proj']['kernel'][...]),
    'down': np.asarray(layers['down_proj']['kernel'][...]),
  }
