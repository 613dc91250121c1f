"""Models that users write; their other halves are in peft_interop.py."""

import os

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors_numpy

from peftlib import hf


class Images(nnx.Module):
  """Logits of images (batch, channels, height, width), as torch has them."""

  places = {
    'wide': hf.Place('wide', ('wide',), 'kernel', None, True, True),
    'deep': hf.Place('deep', ('deep',), 'kernel', None, True),
    'head': hf.Place('head', ('head',), 'kernel', None, True, True),
  }

  def __init__(self, *, rngs: nnx.Rngs):
    # Height and width differ, so that mixing them up would show.
    self.wide = nnx.Conv(3, 8, (3, 2), padding='VALID', rngs=rngs)
    self.deep = nnx.Conv(
      8, 6, (2, 3), strides=2, padding='VALID', use_bias=False, rngs=rngs
    )
    self.head = nnx.Linear(6, 10, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    x = jax.nn.relu(self.wide(images.transpose(0, 2, 3, 1)))
    return self.head(jax.nn.relu(self.deep(x)).mean((1, 2)))


class Mixture(nnx.Module):
  """The weights of experts, (experts, inputs, outputs)."""

  def __init__(self, *, rngs: nnx.Rngs):
    draw = nnx.initializers.normal()
    self.gate_up_proj = nnx.Param(draw(rngs(), (3, 8, 20)))
    self.down_proj = nnx.Param(draw(rngs(), (3, 10, 8)))

  def __call__(self, x: jax.Array) -> jax.Array:
    # To each expert its own rows: peft has an adapter for each, too.
    x = jnp.broadcast_to(x, (3, *x.shape))
    both = jnp.einsum('ebi,eio->ebo', x, self.gate_up_proj.get_value())
    gate, up = jnp.split(both, 2, axis=-1)
    inner = jax.nn.silu(gate) * up
    return jnp.einsum('ebi,eio->ebo', inner, self.down_proj.get_value())


class Experts(nnx.Module):
  """Logits of rows (batch, 8)."""

  places = {
    'experts.gate_up_proj': hf.Place(
      *('experts.gate_up_proj', ('experts',), 'gate_up_proj', None, True),
      parameter=True,
    ),
    'experts.down_proj': hf.Place(
      *('experts.down_proj', ('experts',), 'down_proj', None, True),
      parameter=True,
    ),
    'router': hf.Place('router', ('router',), 'kernel', None, True),
    'head': hf.Place('head', ('head',), 'kernel', None, True),
  }

  def __init__(self, *, rngs: nnx.Rngs):
    self.router = nnx.Linear(8, 3, use_bias=False, rngs=rngs)
    self.experts = Mixture(rngs=rngs)
    self.head = nnx.Linear(8, 10, use_bias=False, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    shares = jax.nn.softmax(self.router(x))
    mixed = jnp.einsum('ebo,be->bo', self.experts(x), shares)
    return self.head(x + mixed)


KINDS: dict[str, type[Images] | type[Experts]] = {
  'images': Images,
  'experts': Experts,
}


def load(kind: str, path: str | os.PathLike[str]) -> Images | Experts:
  """The model with the weights that torch has saved."""
  tensors = safetensors_numpy.load_file(path)
  model = KINDS[kind](rngs=nnx.Rngs(0))
  for place in model.places.values():
    module = getattr(model, place.path[0])
    if place.parameter:
      weight = np.swapaxes(tensors[place.name], 1, 2)
    else:
      weight = tensors[f'{place.name}.weight']
      weight = weight.transpose(*range(2, weight.ndim), 1, 0)
    getattr(module, place.weight).set_value(np.ascontiguousarray(weight))
    if place.bias:
      module.bias.set_value(tensors[f'{place.name}.bias'])
  return model
