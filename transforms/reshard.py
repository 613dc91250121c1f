"""Placing the values of a State on a mesh, and entering that mesh.

Values are placed with `jax.make_array_from_callback`: every device takes its
part from one view of the value in host memory, which takes half of the time of
`jax.device_put` or less, and no copy for each shard.
"""

import collections
from collections.abc import Iterator
from concurrent import futures
import contextlib
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import numpy as np

from transforms import _checks
from transforms import _leaves
from transforms import metadata
from transforms import partitioning

_SHOWN_PATHS = 5
# XLA:CPU takes over a numpy buffer without copying it from this alignment on.
_ALIGNMENT = 64
# Bytes from which a copy takes longer than to start a thread.
_LARGE = 4 << 20
_COPYING_THREADS = 4


def reshard(
  state: nnx.State[Any, Any], shardings: Any, *, donate: bool = False
) -> nnx.State[Any, Any]:
  """Returns the State with its values placed as `shardings` say.

  Values may be numpy arrays, arrays on one device, on another mesh, in pinned
  host memory, or global ones that no host sees whole. What is placed already is
  returned as it is. Leaves are placed one after the other: beyond the results,
  at most one value is held in host memory. As with `jax.device_put`, a result
  on a CPU may share the memory of a numpy array, so don't write to that.

  Under `jax.jit` this is a sharding constraint; a mesh with Explicit axes has
  to be the surrounding one then, see `mesh_context`. An abstract value gets its
  sharding.

  Metadata is made to agree: `mesh` becomes the new mesh, and a spec of mesh
  axes the new spec, in its own type. A spec with a name that is no axis of the
  mesh names dimensions logically; that stays true wherever the value is, so
  it's kept.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> mesh = jax.make_mesh((1,), ('data',))
    >>> state = nnx.State({'w': nnx.Param(np.ones((4, 2), np.float32))})
    >>> placed = reshard(state, jax.NamedSharding(mesh, jax.P('data')))
    >>> placed['w'].get_raw_value().sharding.spec == jax.P('data')
    True

  Args:
    state: A State of arrays.
    shardings: Where to put them: one sharding for all, or a State with one at
      each path of `state`, such as `named_shardings` returns. A `PartitionSpec`
      is for the surrounding mesh. A spec may be shorter than the value's rank.
      One sharding for a composite value holds for all arrays in it; the smaller
      ones are replicated along dimensions that it doesn't divide.
    donate: Whether to delete each array of `state` as soon as it's placed.

  Returns:
    A State of the same structure.

  Raises:
    TypeError: `state` is no State, or something in `shardings` no sharding.
    ValueError: Paths differ; a spec is longer than its value's rank, or doesn't
      divide it; there's no surrounding mesh for a `PartitionSpec`; a global
      array should go to other devices. Nothing has been placed then.
  """
  _checks.check_state('reshard', state)
  targets = iter(_targets(state, shardings))
  known = _Known({}, {}, set(), set())

  def plan(leaf: Any) -> Any:
    return _plan(leaf, next(targets), known)

  def place(plans: list[Any]) -> list[Any]:
    return list(map(_placing(plans, known, donate), plans))

  result: nnx.State[Any, Any] = _leaves.map_leaves(
    'reshard', plan, state, finish=place
  )
  return result


@contextlib.contextmanager
def mesh_context(mesh: jax.sharding.Mesh | None) -> Iterator[None]:
  """Makes `mesh` the surrounding mesh; can be used while tracing too.

  Outside of tracing this is `jax.set_mesh`. `jax.set_mesh` raises under any jax
  transformation; this function leaves the surrounding mesh as it is there if
  it's the same one, so that one piece of code can run eagerly and jitted.
  Contexts nest, each thread has its own, and the mesh from before is restored
  also after an exception.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> mesh = jax.make_mesh((1,), ('data',))
    >>> with mesh_context(mesh):
    ...   print(jax.sharding.get_abstract_mesh().axis_names)
    ('data',)

  Args:
    mesh: The mesh to enter; None changes nothing.

  Yields:
    Nothing.

  Raises:
    TypeError: `mesh` is no `jax.sharding.Mesh`.
    ValueError: While tracing, the surrounding mesh differs from `mesh`.
  """
  if mesh is None:
    yield
    return
  if not isinstance(mesh, jax.sharding.Mesh):
    raise TypeError(
      f'mesh_context: expected a jax.sharding.Mesh, got {type(mesh).__name__}.'
    )
  if not _tracing():
    with jax.set_mesh(mesh):
      yield
    return
  surrounding = jax.sharding.get_abstract_mesh()
  if not _same_mesh(surrounding, mesh.abstract_mesh):
    raise ValueError(
      f'mesh_context: tracing with the surrounding mesh {_text(surrounding)}, '
      f'which differs from {_text(mesh.abstract_mesh)}; a mesh can be entered '
      'only outside of jax.jit, so put the mesh_context around the call of the '
      'traced function.'
    )
  yield


class _Plan(NamedTuple):
  """Where the parts of one leaf go, and what its metadata has to agree with."""

  leaf: Any
  value: Any
  parts: list[Any]
  targets: list[jax.sharding.Sharding]
  done: list[bool]
  whole: jax.sharding.Sharding | None


class _Known(NamedTuple):
  """What was found out during one call, mostly about leaves that agree."""

  # By shape of the array and of the whole value, and sharding wanted.
  resolved: dict[tuple[Any, ...], jax.sharding.Sharding]
  # By shape, and sharding there and wanted.
  placed: dict[tuple[Any, ...], bool]
  # The ids of arrays that are a part of the result.
  kept: set[int]
  # By shape, sharding there and wanted, and metadata.
  agreeing: set[tuple[Any, ...]]


def _targets(state: nnx.State[Any, Any], shardings: Any) -> list[Any]:
  if _leaves.is_sharding(shardings):
    return [shardings] * len(_leaves.leaves(state))
  _checks.check_no_module('reshard', shardings)
  if not isinstance(shardings, nnx.State):
    raise TypeError(
      'reshard: expected a sharding, or an nnx.State of shardings, got '
      f'{type(shardings).__name__}.'
    )
  found = _leaves.leaves_if_alike(shardings, state)
  if found is not None:
    return found
  paths, have = _leaves.leaf_paths(state), _leaves.leaf_paths(shardings)
  for what, missing in (
    ('no sharding for', sorted(set(paths) - set(have))),
    ('no value for', sorted(set(have) - set(paths))),
  ):
    if missing:
      shown = ', '.join(map(_checks.path_text, missing[:_SHOWN_PATHS]))
      more = len(missing) - _SHOWN_PATHS
      raise ValueError(
        f'reshard: {what} {shown}' + (f' and {more} more.' if more > 0 else '.')
      )
  return _leaves.leaves(shardings)


def _plan(leaf: Any, target: Any, known: _Known) -> Any:
  """Returns where the leaf goes; the finished leaf if it's there already."""
  value = _leaves.raw_value(leaf)
  target = _leaves.raw_value(target)
  if not _leaves.is_concrete(value) or not _leaves.is_variable(leaf):
    return _plan_parts(leaf, value, target, known)
  # What holds for one leaf that is as it should be holds for all like it.
  found = leaf.get_metadata()
  mesh = found.get(metadata.MESH_KEY)
  specs = metadata.spec_key(found)
  key = (value.shape, value.sharding, target, type(target), mesh, specs)
  try:
    agrees = key in known.agreeing
  except TypeError:  # A spec that is a list has no hash.
    return _plan_parts(leaf, value, target, known)
  if agrees:
    known.kept.add(id(value))
    return leaf
  planned = _plan_parts(leaf, value, target, known)
  if planned is leaf:
    known.agreeing.add(key)
  return planned


def _plan_parts(leaf: Any, value: Any, target: Any, known: _Known) -> Any:
  parts = _leaves.parts(value)
  given = _leaves.parts(target)
  if len(given) == 1 and len(parts) != 1:
    given *= len(parts)
  if len(given) != len(parts):
    raise ValueError(
      f'{len(given)} shardings are given for a value of {len(parts)} arrays.'
    )
  whole = partitioning.whole_shape(parts)
  targets: list[jax.sharding.Sharding] = []
  done = []
  main = None
  for part, sharding in zip(parts, given, strict=True):
    targets.append(_target_of_part(part, sharding, whole, known))
    done.append(_is_placed(part, targets[-1], known))
    if main is None and _leaves.shape(part) == whole:
      main = targets[-1]
  known.kept.update(
    id(part) for part, there in zip(parts, done, strict=True) if there
  )
  if all(done):
    return _agreeing(leaf, value, value, main)
  return _Plan(leaf, value, parts, targets, done, main)


def _agreeing(
  leaf: Any, value: Any, placed: Any, sharding: jax.sharding.Sharding | None
) -> Any:
  """Returns the leaf with a value that was placed, and metadata that agrees."""
  if not _leaves.is_variable(leaf):
    return placed
  changed = metadata.agreeing_metadata(leaf, sharding)
  if placed is value and not changed:
    return leaf
  return metadata.replace(leaf, placed, changed)


def _target_of_part(
  part: Any, target: Any, whole: tuple[int, ...], known: _Known
) -> jax.sharding.Sharding:
  if _leaves.is_sharding(part):
    raise TypeError('it is a sharding itself; expected an array.')
  if not _leaves.is_sharding(target):
    raise TypeError(
      f'{target!r} of type {type(target).__name__} is no sharding.'
    )
  shape = _leaves.shape(part)
  key = (shape, whole, type(target), target)
  resolved = known.resolved.get(key)
  if resolved is None:
    resolved = known.resolved[key] = _resolved(shape, target, whole)
  if (
    _is_global(part)
    and not _is_placed(part, resolved, known)
    and part.sharding.device_set != resolved.device_set
  ):
    raise ValueError(
      f'it is spread over processes, and {resolved} is on other devices; no '
      'process sees enough of it to move it there.'
    )
  return resolved


def _resolved(
  shape: tuple[int, ...], target: Any, whole: tuple[int, ...]
) -> jax.sharding.Sharding:
  if isinstance(target, jax.sharding.PartitionSpec):
    target = jax.sharding.NamedSharding(_surrounding_mesh(target), target)
  if not isinstance(target, jax.sharding.NamedSharding):
    # Raises ValueError if it does not divide the shape.
    target.shard_shape(shape)
    return target
  spec = target.spec
  if len(spec.partitions) > len(shape):
    if shape == whole:
      raise ValueError(
        f'{spec} has {len(spec.partitions)} entries, more than the rank '
        f'{len(shape)} of the value.'
      )
    spec = spec.update(partitions=())
  spec, bad = partitioning.divisible_spec(spec, shape, target.mesh, whole=whole)
  if bad:
    raise ValueError(f'{target.spec}: ' + '; '.join(bad) + '.')
  return target if spec is target.spec else target.update(spec=spec)


def _surrounding_mesh(spec: Any) -> Any:
  tracing = _tracing()
  mesh = (
    jax.sharding.get_abstract_mesh() if tracing else jax.sharding.get_mesh()
  )
  if not mesh.axis_names:
    raise ValueError(f'{spec} needs a surrounding mesh; use mesh_context.')
  return mesh


def _placing(plans: list[Any], known: _Known, donate: bool) -> Any:
  uses: dict[int, int] = collections.defaultdict(int)
  for plan in plans:
    if type(plan) is _Plan:
      for part, done in zip(plan.parts, plan.done, strict=True):
        uses[id(part)] += not done
  # Arrays that several Variables share are placed once, and stay shared.
  shared: dict[tuple[int, jax.sharding.Sharding], Any] = {}

  def place_part(part: Any, target: jax.sharding.Sharding, done: bool) -> Any:
    if done:
      return part
    uses[id(part)] -= 1
    result = shared.get((id(part), target), None)
    if result is None:
      result = _place(part, target)
    if uses[id(part)]:
      shared[id(part), target] = result
    elif donate and id(part) not in known.kept and _leaves.is_concrete(part):
      # The devices may still be reading from its memory.
      jax.block_until_ready(result)
      part.delete()
    return result

  def place(plan: Any) -> Any:
    if type(plan) is not _Plan:
      return plan
    placed = list(map(place_part, plan.parts, plan.targets, plan.done))
    return _agreeing(
      plan.leaf, plan.value, _leaves.with_parts(plan.value, placed), plan.whole
    )

  return place


def _is_global(part: Any) -> bool:
  return (
    _leaves.is_concrete(part)
    and not part.is_fully_addressable
    and not part.is_fully_replicated
  )


def _is_placed(part: Any, target: jax.sharding.Sharding, known: _Known) -> bool:
  if isinstance(part, jax.ShapeDtypeStruct):
    return part.sharding == target
  if not _leaves.is_concrete(part):
    return False
  have = part.sharding
  if have is target:
    return True
  key = (part.shape, have, target)
  answer = known.placed.get(key)
  if answer is None:
    answer = known.placed[key] = _same_place(have, target, part.ndim)
  return answer


def _same_place(have: Any, target: Any, rank: int) -> bool:
  if have == target:
    return True
  # Equal devices are not enough: the mesh is a part of the type of an array
  # with Explicit axes.
  return (
    isinstance(target, jax.sharding.NamedSharding)
    and isinstance(have, jax.sharding.NamedSharding)
    and have.mesh == target.mesh
    and have.memory_kind == target.memory_kind
    and have.is_equivalent_to(target, rank)
  )


def _place(part: Any, target: jax.sharding.Sharding) -> Any:
  if isinstance(part, jax.ShapeDtypeStruct):
    return part.update(sharding=target)
  if isinstance(part, jax.core.Tracer):
    return _constrained(part, target)
  if _is_global(part):
    return _identity_onto(target)(part)
  if isinstance(part, jax.Array) and jax.numpy.issubdtype(
    part.dtype, jax.dtypes.prng_key
  ):
    data = _from_host(jax.random.key_data(part), target)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(part))
  return _from_host(part, target)


def _from_host(part: Any, target: jax.sharding.Sharding) -> jax.Array:
  if not isinstance(part, jax.Array):
    view = np.asarray(part)
  elif part.is_fully_replicated:
    view = np.asarray(part.addressable_data(0))
  else:
    return _from_gathered(part, target)
  copies = _copies(view, target) if view.nbytes >= _LARGE else {}
  return jax.make_array_from_callback(
    view.shape, target, lambda index: copies.get(index, view[index])
  )


def _copies(
  view: np.ndarray, target: jax.sharding.Sharding
) -> dict[Any, np.ndarray]:
  """Copies of the parts that aren't contiguous, by index, made in parallel.

  The runtime copies such parts one after the other, and more slowly; what is
  contiguous and aligned it takes over as it is.
  """
  blocks = {}
  for index in target.addressable_devices_indices_map(view.shape).values():
    block = view[index]
    if not block.flags.c_contiguous:
      raw = np.empty(block.nbytes + _ALIGNMENT, np.uint8)
      start = -raw.ctypes.data % _ALIGNMENT
      copy = raw[start : start + block.nbytes].view(block.dtype)
      blocks[index] = copy.reshape(block.shape), block
  with futures.ThreadPoolExecutor(_COPYING_THREADS) as pool:
    list(pool.map(lambda pair: np.copyto(*pair), blocks.values()))
  return {index: copy for index, (copy, _) in blocks.items()}


def _from_gathered(part: Any, target: jax.sharding.Sharding) -> jax.Array:
  # jax lets go of host memory that it has read only when it's called again, so
  # the last value would still be there next to this one.
  jax.device_put(0)
  whole = np.empty(part.shape, part.dtype)
  for shard in part.addressable_shards:
    if shard.replica_id == 0:
      # np.asarray keeps what it copied from a device for as long as the array
      # lives; another array of the same memory won't live long.
      data = jax.make_array_from_single_device_arrays(
        shard.data.shape, shard.data.sharding, [shard.data]
      )
      whole[shard.index] = np.asarray(data)
  result = jax.make_array_from_callback(
    whole.shape, target, lambda index: whole[index]
  )
  # Else the copies of several values would be in memory at the same time.
  return jax.block_until_ready(result)


# One jitted function for each sharding, so that equal shapes compile once.
@functools.cache
def _identity_onto(target: jax.sharding.Sharding) -> Any:
  return jax.jit(lambda array: array, out_shardings=target)


def _constrained(part: jax.Array, target: jax.sharding.Sharding) -> jax.Array:
  if not isinstance(target, jax.sharding.NamedSharding):
    return jax.lax.with_sharding_constraint(part, target)
  mesh = target.mesh
  if mesh.are_all_axes_auto:
    return jax.lax.with_sharding_constraint(part, target)
  if mesh.are_all_axes_explicit:
    return jax.sharding.reshard(part, target)
  # jax takes the axes of one kind only at a time.
  auto = jax.sharding.AxisType.Auto
  kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  part = jax.sharding.reshard(
    part, _keeping(target, {name for name in kinds if kinds[name] is not auto})
  )
  return jax.lax.with_sharding_constraint(
    part, _keeping(target, {name for name in kinds if kinds[name] is auto})
  )


def _keeping(
  target: jax.sharding.NamedSharding, names: set[str]
) -> jax.sharding.NamedSharding:
  entries = []
  for entry in target.spec.partitions:
    axes = entry if isinstance(entry, tuple) else (entry,)
    left = tuple(axis for axis in axes if axis in names)
    entries.append(left if left else None)
  return target.update(spec=target.spec.update(partitions=tuple(entries)))


def _tracing() -> bool:
  # jax has no public query for this, but get_mesh is public, free of effects,
  # and documented to raise under a transformation and only there.
  try:
    jax.sharding.get_mesh()
  except ValueError:
    return True
  return False


def _same_mesh(
  surrounding: jax.sharding.AbstractMesh, wanted: jax.sharding.AbstractMesh
) -> bool:
  if (
    surrounding.axis_names != wanted.axis_names
    or surrounding.axis_sizes != wanted.axis_sizes
  ):
    return False
  # shard_map makes axes Manual within its body: still the same mesh.
  manual = jax.sharding.AxisType.Manual
  return all(
    have is manual or have is want
    for have, want in zip(
      surrounding.axis_types, wanted.axis_types, strict=True
    )
  )


def _text(mesh: jax.sharding.AbstractMesh) -> str:
  if not mesh.axis_names:
    return '(none)'
  axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
  return (
    '('
    + ', '.join(f'{name}={size} {kind.name}' for name, size, kind in axes)
    + ')'
  )
