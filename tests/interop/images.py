"""A model of convolutions; its other half is `Images` in peft_interop.py."""

import os

from flax import nnx
import jax
import numpy as np
from safetensors import numpy as safetensors_numpy

from peftlib import hf

PLACES = {
  place.name: place
  for place in (
    hf.Place('wide', ('wide',), 'kernel', None, True, True),
    hf.Place('deep', ('deep',), 'kernel', None, True),
    hf.Place('head', ('head',), 'kernel', None, True, True),
  )
}


class Images(nnx.Module):
  """Logits of images (batch, channels, height, width), as torch has them."""

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


def load(path: str | os.PathLike[str]) -> Images:
  """The model with the weights that torch has saved."""
  tensors = safetensors_numpy.load_file(path)
  model = Images(rngs=nnx.Rngs(0))
  for name in PLACES:
    module = getattr(model, name)
    weight = tensors[f'{name}.weight']
    outputs_last = (*range(2, weight.ndim), 1, 0)
    module.kernel.set_value(
      np.ascontiguousarray(weight.transpose(outputs_last))
    )
    if f'{name}.bias' in tensors:
      module.bias.set_value(tensors[f'{name}.bias'])
  return model
