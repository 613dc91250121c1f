"""A short name for the weights that an adapter belongs to."""

from __future__ import annotations

import hashlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlib import _checks

_SAMPLES = 64


@jax.jit
def _sample(arrays: list[jax.Array]) -> list[jax.Array]:
  """Evenly spread values of each array, its first and last among them."""
  result = []
  for array in arrays:
    # Indices are made by numpy: they may be beyond int32 in a large array.
    flat = np.linspace(0, array.size - 1, min(_SAMPLES, array.size))
    index = np.unravel_index(flat.round().astype(np.int64), array.shape)
    result.append(array[tuple(map(jnp.asarray, index))])
  return result


def fingerprint(state: nnx.State) -> str:
  """Identifies the base weights of a model.

  Covers path, shape and dtype of every `nnx.Param` that isn't an
  `nnx.LoRAParam`, and 64 values of each, spread evenly: enough to tell models
  apart, and cheap. It doesn't notice that someone changed a few single values.
  The same in every process, whatever the file format the weights came from;
  another one for weights of another dtype, or quantized ones.

  Args:
    state: The model's variables, concrete; adapters in it don't matter.

  Returns:
    64 hexadecimal digits.

  Raises:
    TypeError: `state` isn't an `nnx.State`.
    ValueError: There are no base weights in it.

  Example:
    >>> linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> len(fingerprint(nnx.state(linear)))
    64
  """
  _checks.check_state('peftlib.models.fingerprint', 'state', state)
  is_base = nnx.filterlib.to_predicate(
    nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
  )
  weights = {
    '.'.join(map(str, path)): variable.get_value()
    for path, variable in nnx.to_flat_state(state)
    if is_base(path, variable)
  }
  if not weights:
    raise ValueError('peftlib.models.fingerprint: no base weights in state.')
  digest = hashlib.sha256()
  names = sorted(weights)
  samples = jax.device_get(_sample([weights[name] for name in names]))
  for name, values in zip(names, samples):
    weight = weights[name]
    digest.update(f'{name} {weight.shape} {weight.dtype.name}\n'.encode())
    digest.update(np.ascontiguousarray(values).tobytes())
  return digest.hexdigest()
