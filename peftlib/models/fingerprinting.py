"""A short name for the weights that an adapter belongs to."""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlib import _checks

_SAMPLES = 64


@jax.jit
def _sample(arrays: list[jax.Array]) -> list[jax.Array]:
  result = []
  for array in arrays:
    # Indices are made by numpy: they may be beyond int32 in a large array.
    index = np.unravel_index(sampled_indices(array.size), array.shape)
    result.append(array[tuple(map(jnp.asarray, index))])
  return result


def sampled_indices(size: int) -> np.ndarray:
  """Which values of an array of `size` a fingerprint looks at, int64.

  They are spread evenly, the first and the last value among them.
  """
  spread = np.linspace(0, size - 1, min(_SAMPLES, size))
  return spread.round().astype(np.int64)


def fingerprint(state: nnx.State[Any, Any]) -> str:
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
  names = sorted(weights)
  samples = jax.device_get(_sample([weights[name] for name in names]))
  return of_samples(
    {
      name: (weights[name].shape, values)
      for name, values in zip(names, samples)
    }
  )


def of_samples(
  samples: Mapping[str, tuple[tuple[int, ...], np.ndarray]],
) -> str:
  """The fingerprint of weights of which only some values are at hand.

  Args:
    samples: Shape of each weight, and its values at `sampled_indices`, by the
      parts of its variable's path, joined by '.'.

  Returns:
    64 hexadecimal digits.
  """
  digest = hashlib.sha256()
  for name in sorted(samples):
    shape, values = samples[name]
    digest.update(f'{name} {shape} {values.dtype.name}\n'.encode())
    digest.update(np.ascontiguousarray(values).tobytes())
  return digest.hexdigest()
