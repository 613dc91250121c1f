"""Where arrays lie when `--mesh` names several devices."""

from collections.abc import Mapping
import math
from typing import Any

from flax import nnx
import jax
import numpy as np

from peftlib.cli import errors
from peftlib.cli import options as options_lib

P = jax.sharding.PartitionSpec


def make_mesh(text: str | None) -> jax.sharding.Mesh | None:
  """Makes the mesh of `--mesh`, None without the flag.

  Raises:
    errors.UserError: There are fewer devices.
  """
  if text is None:
    return None
  axes = options_lib.parse_mesh(text)
  count = math.prod(axes.values())
  devices = jax.devices()
  if count > len(devices):
    raise errors.UserError(
      f'--mesh={text}: needs {count} devices; there are {len(devices)}'
      f' ({devices[0].platform})'
    )
  return jax.make_mesh(
    tuple(axes.values()),
    tuple(axes),
    axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
    devices=devices[:count],
  )


def shard_state(
  state: nnx.State[Any, Any], mesh: jax.sharding.Mesh | None
) -> nnx.State[Any, Any]:
  """Splits each array over the axis `fsdp`, along its longest dimension.

  Args:
    state: A State of arrays.
    mesh: None leaves them where they are.

  Returns:
    The State, placed on the mesh; arrays that no dimension allows to split are
    on every device whole.
  """
  if mesh is None:
    return state
  parts = mesh.shape.get('fsdp', 1)

  def place(x: jax.Array) -> jax.Array:
    spec: list[str | None] = [None] * x.ndim
    fitting = [i for i, n in enumerate(x.shape) if n % parts == 0]
    if parts > 1 and fitting:
      spec[max(fitting, key=lambda i: x.shape[i])] = 'fsdp'
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))

  return jax.tree.map(place, state)


def replicate_rest(tree: Any, mesh: jax.sharding.Mesh | None) -> Any:
  """Puts arrays that are not on the mesh yet on each of its devices."""
  if mesh is None:
    return tree
  everywhere = jax.sharding.NamedSharding(mesh, P())
  return jax.tree.map(
    lambda x: (
      x
      if isinstance(x.sharding, jax.sharding.NamedSharding)
      else jax.device_put(x, everywhere)
    ),
    tree,
  )


def shard_batch(
  batch: Mapping[str, np.ndarray], mesh: jax.sharding.Mesh | None
) -> dict[str, Any]:
  """Splits a batch along its first axis over all axes of the mesh."""
  if mesh is None:
    return dict(batch)
  sharding = jax.sharding.NamedSharding(mesh, P(mesh.axis_names))
  return {k: jax.device_put(v, sharding) for k, v in batch.items()}
