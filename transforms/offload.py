"""Keeping a part of a State in host memory, and bringing it back."""

from typing import Any
import warnings

from flax import nnx
import jax

from transforms import _checks
from transforms import _leaves
from transforms import filtering

_HOST = 'pinned_host'


def host_offload(
  state: nnx.State[Any, Any], filters: filtering.Filter = ...
) -> nnx.State[Any, Any]:
  """Moves the selected leaves to pinned host memory.

  Each array keeps its devices and its spec: every device's part goes to the
  host memory of that device. Works under `jax.jit` too.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> state = nnx.State({'w': nnx.Param(jax.numpy.ones(4))})
    >>> away = host_offload(state, nnx.Param)
    >>> away['w'].get_raw_value().sharding.memory_kind
    'pinned_host'

  Args:
    state: A State of arrays.
    filters: An nnx filter for what to move.

  Returns:
    A State of the same structure. If the backend has no pinned host memory a
    warning says so, and the State is as it was.

  Raises:
    TypeError: `state` is no State, or the filter is no filter.
  """
  return _move('host_offload', state, filters, to_host=True)


def to_device(
  state: nnx.State[Any, Any], filters: filtering.Filter = ...
) -> nnx.State[Any, Any]:
  """Moves the selected leaves to the memory that their devices compute in.

  The inverse of `host_offload`.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> state = nnx.State({'w': nnx.Param(jax.numpy.ones(4))})
    >>> back = to_device(host_offload(state))
    >>> kind = jax.devices()[0].default_memory().kind
    >>> back['w'].get_raw_value().sharding.memory_kind == kind
    True

  Args:
    state: A State of arrays.
    filters: An nnx filter for what to move.

  Returns:
    A State of the same structure.

  Raises:
    TypeError: `state` is no State, or the filter is no filter.
  """
  return _move('to_device', state, filters, to_host=False)


def _move(
  function: str,
  state: nnx.State[Any, Any],
  filters: filtering.Filter,
  *,
  to_host: bool,
) -> nnx.State[Any, Any]:
  _checks.check_state(function, state)
  selected, rest = filtering.partition(state, filters, ...)
  parts = [
    part
    for leaf in _leaves.leaves(selected)
    for part in _leaves.parts(_leaves.raw_value(leaf))
  ]
  if to_host and (poor := sorted(filter(None, map(_lacks_host, parts)))):
    warnings.warn(
      f'{function}: the {poor[0]} backend has no memory of kind {_HOST!r}; '
      'everything stays where it is.',
      stacklevel=3,
    )
    return filtering.merge(state)

  def move(leaf: Any) -> Any:
    value = _leaves.raw_value(leaf)
    moved = _leaves.map_parts(lambda part: _moved(part, to_host), value)
    if moved is value:
      return leaf
    if isinstance(leaf, nnx.Variable):
      return leaf.replace(moved)
    return moved

  return filtering.merge(_leaves.map_leaves(function, move, selected), rest)


def _device(part: Any) -> Any:
  # One of this process: others don't tell which memories they have.
  own = part.sharding.addressable_devices if _leaves.is_concrete(part) else ()
  return next(iter(own), jax.local_devices()[0])


def _lacks_host(part: Any) -> str | None:
  device = _device(part)
  kinds = {memory.kind for memory in device.addressable_memories()}
  return None if _HOST in kinds else str(device.platform)


def _moved(part: Any, to_host: bool) -> Any:
  if _leaves.is_sharding(part):
    raise TypeError('it is a sharding; expected an array.')
  if isinstance(part, jax.core.Tracer):
    space = jax.memory.Space.Host if to_host else jax.memory.Space.Device
    return jax.device_put(part, space)
  kind = _HOST if to_host else _device(part).default_memory().kind
  if isinstance(part, jax.ShapeDtypeStruct):
    if part.sharding is None:
      raise TypeError(
        'an abstract value without a sharding is in no memory; give it one '
        'with reshard first.'
      )
    return part.update(sharding=part.sharding.with_memory_kind(kind))
  if not isinstance(part, jax.Array):
    part = jax.numpy.asarray(part)
  if part.sharding.memory_kind == kind:
    return part
  target = part.sharding.with_memory_kind(kind)
  if part.is_fully_addressable:
    return jax.device_put(part, target)
  # device_put refuses arrays that are spread over processes, even where no
  # device needs anything of another one.
  if jax.numpy.issubdtype(part.dtype, jax.dtypes.prng_key):
    data = _moved(jax.random.key_data(part), to_host)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(part))
  shards = [
    jax.device_put(shard.data, shard.data.sharding.with_memory_kind(kind))
    for shard in part.addressable_shards
  ]
  return jax.make_array_from_single_device_arrays(
    part.shape, target, shards, dtype=part.dtype
  )
