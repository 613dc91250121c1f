"""Adding, removing and moving the axis that a scan runs over.

The layers of a scanned model are stacked along one axis of every Variable. The
body of the scan sees one slice: `remove_scan_axis` makes the metadata fit it.
What a scan returns is stacked along axis 0: `add_scan_axis` puts values and
metadata where the model keeps them.

A Variable's own `nnx.PARTITION_NAME` metadata wins over the argument `name`,
its own `param_scan_axis` over the argument `axis`. All arrays of a composite
value are moved alike, and share one spec. No hook of a Variable is run.
Values that are shardings have no shape to go by: `move_scan_axis` alone takes
them. Everything else raises ValueError rather than guess; nothing is changed in
place, and a Variable to which nothing has to be done is returned as it is.
"""

import collections
from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from transforms import _checks
from transforms import _leaves
from transforms import metadata

# Arrays of a kind in one call of a compiled transpose.
_MOVED_AT_ONCE = 64


def remove_scan_axis[T](tree: T, name: str = 'layers') -> T:
  """Removes the scan axis from the metadata of values that are one slice.

  For use in the body of a scan: the values have lost the axis already, their
  metadata hasn't.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> kernel = nnx.Param(jnp.zeros((4, 5))).replace(
    ...   out_sharding=('layers', 'embed', 'mlp')
    ... )
    >>> sliced = remove_scan_axis(nnx.State({'kernel': kernel}))
    >>> sliced['kernel'].get_metadata('out_sharding')
    ('embed', 'mlp')

  Args:
    tree: A State, or another pytree of Variables and raw values.
    name: The name of the scan axis.

  Returns:
    The tree with `name` gone from every spec. Within a tuple of names it's
    taken out of the tuple. A spec that doesn't have it and fits the value, one
    that is empty and a missing one stay as they are.

  Raises:
    TypeError: A module or a sharding is in the tree.
    ValueError: A spec has the name twice, or is still longer than the value's
      rank afterwards.
  """

  def remove(leaf: Any) -> Any:
    value = _leaves.raw_value(leaf)
    _refuse_sharding(value)
    if not _leaves.is_variable(leaf):
      return leaf
    found = leaf.get_metadata()
    own = metadata.scan_name(found, name)
    rank = _leaves.rank(value)
    changed = metadata.updated_specs(
      found, lambda entries: _known(_removed, entries, own, rank)
    )
    return metadata.replace(leaf, value, changed) if changed else leaf

  result: T = _leaves.map_leaves('remove_scan_axis', remove, tree)
  return result


def add_scan_axis[T](tree: T, name: str = 'layers', axis: int = 0) -> T:
  """Puts the scan axis of what a scan returned where the model keeps it.

  A scan stacks along axis 0. The values are moved from there to `axis`, and the
  name is inserted there into the specs, which are padded to the value's rank.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> kernel = nnx.Param(jnp.zeros((3, 4, 5))).replace(
    ...   out_sharding=('embed', 'mlp')
    ... )
    >>> stacked = add_scan_axis(nnx.State({'kernel': kernel}), axis=1)
    >>> stacked['kernel'].shape, stacked['kernel'].get_metadata('out_sharding')
    ((4, 3, 5), ('embed', 'layers', 'mlp'))

  Args:
    tree: A State, or another pytree of Variables and raw values.
    name: The name of the scan axis.
    axis: Where it belongs; negative counts from the end.

  Returns:
    The tree with values and specs moved. A Variable whose specs have the name
    in its place already is returned as it is, its value too. No metadata is
    made where there is none.

  Raises:
    TypeError: A module or a sharding is in the tree.
    ValueError: A value is a scalar, `axis` is out of range, a spec has no room
      for a further name, or it has the name elsewhere.
  """

  def plan(leaf: Any) -> Any:
    variable = _leaves.is_variable(leaf)
    value = _leaves.raw_value(leaf)
    rank = _stacked_rank(value)
    if rank is None:
      return leaf
    found = leaf.get_metadata() if variable else {}
    wanted = metadata.scan_axis(found, axis)
    target = _axis_in(wanted, rank, 'axis')
    if not variable:
      return _planned(leaf, value, _steps(value, 0, wanted), {})
    own = metadata.scan_name(found, name)
    in_place = []

    def insert(entries: metadata.Entries) -> metadata.Entries:
      new = _known(_inserted, entries, own, target, rank)
      in_place.append(new == entries)
      return new

    changed = metadata.updated_specs(found, insert)
    if not target:
      return _planned(leaf, value, (), changed)
    if not any(in_place):
      return _planned(leaf, value, _steps(value, 0, wanted), changed)
    if not all(in_place):
      raise ValueError(
        f'{own!r} is in some specs but not in others '
        f'({metadata.sharding_specs(found)}), so whether the value has been '
        'moved is unknown.'
      )
    return leaf

  result: T = _leaves.map_leaves(
    'add_scan_axis', plan, tree, finish=_carried_out
  )
  return result


def move_scan_axis[T](tree: T, source: int, destination: int) -> T:
  """Moves an axis of every value, and the entries of its specs alike.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> kernel = nnx.Param(jnp.zeros((3, 4, 5))).replace(
    ...   out_sharding=('layers', 'embed', 'mlp')
    ... )
    >>> moved = move_scan_axis(nnx.State({'kernel': kernel}), 0, -1)
    >>> moved['kernel'].shape, moved['kernel'].get_metadata('out_sharding')
    ((4, 5, 3), ('embed', 'mlp', 'layers'))

  Args:
    tree: A State, or another pytree of Variables and raw values.
    source: The axis to move; negative counts from the end.
    destination: Where to, as in `jnp.moveaxis`.

  Returns:
    The tree with values and specs moved. A spec is padded as far as the move
    needs it, and no further: there and back gives the very specs, except that
    one shorter than its value comes back padded with None if something was
    moved to the last axis.

  Raises:
    TypeError: A module is in the tree.
    ValueError: A value's rank is too small, a spec is longer than it, or an
      axis is negative where a sharding leaves the rank open.
  """
  alike: dict[Any, Any] = {}

  def plan(leaf: Any) -> Any:
    value = _leaves.raw_value(leaf)
    if not _leaves.is_concrete(value) or not _leaves.is_variable(leaf):
      return plan_any(leaf, value)
    # What holds for one array holds for all of this rank annotated alike.
    found = leaf.get_metadata()
    key = (len(value.shape), metadata.spec_key(found))
    try:
      known = alike.get(key)
    except TypeError:  # A spec that is a list has no hash.
      return plan_any(leaf, value)
    if known is not None:
      steps, changed = known
      return _Moving(leaf, value, steps, changed, found)
    planned = plan_any(leaf, value)
    if type(planned) is _Moving:
      alike[key] = planned.steps, planned.specs
    return planned

  def plan_any(leaf: Any, value: Any) -> Any:
    rank = _leaves.rank(value)
    if rank is not None:
      start = _axis_in(source, rank, 'source')
      end = _axis_in(destination, rank, 'destination')
    elif _leaves.parts(value):
      start = _axis_of_any(source, 'source')
      end = _axis_of_any(destination, 'destination')
    else:
      return leaf
    steps = _steps(value, source, destination)
    changed = {}
    if _leaves.is_variable(leaf):
      changed = metadata.updated_specs(
        leaf.get_metadata(),
        lambda entries: _known(_moved, entries, start, end, rank),
      )
    return _planned(leaf, value, steps, changed)

  result: T = _leaves.map_leaves(
    'move_scan_axis', plan, tree, finish=_carried_out
  )
  return result


def stack_layers(
  states: Sequence[nnx.State[Any, Any]],
  name: str | None = 'layers',
  axis: int = 0,
) -> nnx.State[Any, Any]:
  """Stacks the States of single layers into the State of a scanned model.

  The exact inverse of `unstack_layers`.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> layer = nnx.State(
    ...   {'scale': nnx.Param(jnp.ones(4)).replace(out_sharding=('embed',))}
    ... )
    >>> stacked = stack_layers([layer, layer, layer])
    >>> stacked['scale'].shape, stacked['scale'].get_metadata('out_sharding')
    ((3, 4), ('layers', 'embed'))

  Args:
    states: The State of each layer. They have to agree in all but the values.
    name: The name of the new axis in the specs. None leaves it unnamed.
    axis: Where it goes, in the stacked value.

  Returns:
    A State of stacked values. The name is inserted into every spec that isn't
    empty; a spec is padded only as far as that needs.

  Raises:
    TypeError: `states` isn't a sequence of States, or they have shardings in
      them.
    ValueError: There is no layer, layers differ, `axis` is out of range, or a
      spec has the name already or is longer than its value's rank.
  """
  if isinstance(states, nnx.State):
    raise TypeError('stack_layers: expected a sequence of States, got a State.')
  _checks.check_no_module('stack_layers', states)
  states = tuple(states)
  for state in states:
    _checks.check_state('stack_layers', state)
  if not states:
    raise ValueError('stack_layers: there is no layer to stack.')
  _check_equal(states)

  def stack(first: Any, *others: Any) -> Any:
    value = _leaves.raw_value(first)
    _refuse_sharding(value)
    rank = _leaves.rank(value)
    if rank is None:
      return first
    variable = _leaves.is_variable(first)
    found = first.get_metadata() if variable else {}
    wanted = metadata.scan_axis(found, axis)
    target = _axis_in(wanted, rank + 1, 'axis')
    _, treedef = jax.tree.flatten(value)
    layers = [_leaves.parts(value)]
    layers += [_leaves.parts(_leaves.raw_value(other)) for other in others]
    stacked = jax.tree.unflatten(
      treedef,
      [_stack(list(column), wanted) for column in zip(*layers, strict=True)],
    )
    if not variable:
      return stacked
    own = metadata.scan_name(found, name) if name is not None else None
    changed = metadata.updated_specs(
      found, lambda entries: _stacked(entries, own, target, rank)
    )
    return metadata.replace(first, stacked, changed)

  result: nnx.State[Any, Any] = _leaves.map_leaves(
    'stack_layers', stack, *states
  )
  return result


def unstack_layers(
  state: nnx.State[Any, Any], name: str | None = 'layers', axis: int = 0
) -> list[nnx.State[Any, Any]]:
  """Splits the State of a scanned model into the States of its layers.

  The exact inverse of `stack_layers`.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> scale = nnx.Param(jnp.ones((3, 4))).replace(
    ...   out_sharding=('layers', 'embed')
    ... )
    >>> layers = unstack_layers(nnx.State({'scale': scale}))
    >>> len(layers), layers[0]['scale'].get_metadata('out_sharding')
    (3, ('embed',))

  Args:
    state: A State of stacked values.
    name: The name of the axis in the specs. None if it's unnamed.
    axis: Where it is, in the stacked value.

  Returns:
    A State for each layer. The entry at `axis` is gone from each spec.

  Raises:
    TypeError: `state` is no State, or it has shardings in it.
    ValueError: The State is empty, leaves differ in their number of layers, a
      value is a scalar, `axis` is out of range, or a spec that isn't empty has
      something else than `name` at `axis`, or `name` twice.
  """
  _checks.check_state('unstack_layers', state)
  plans: list[_Unstacking] = []

  def plan(leaf: Any) -> Any:
    plans.append(_plan_unstacking(leaf, name, axis))
    return leaf

  _leaves.map_leaves('unstack_layers', plan, state)
  count = _layer_count(state, plans)
  # Only now, with everything checked, is anything allocated.
  layers: list[list[Any]] = [[] for _ in range(count)]
  for leaf, wanted, _, changed in plans:
    found, inner = jax.tree.flatten(_leaves.raw_value(leaf))
    if wanted is None:
      rows = [tuple(found)] * count
    else:
      rows = list(zip(*(_unstack(part, wanted) for part in found), strict=True))
    for layer, row in zip(layers, rows, strict=True):
      value = jax.tree.unflatten(inner, row)
      if _leaves.is_variable(leaf):
        value = metadata.replace(leaf, value, changed)
      layer.append(value)
  return [_leaves.unflatten_like(state, layer) for layer in layers]


class _Unstacking(NamedTuple):
  """How one leaf is unstacked; `axis` is None for one that has no value."""

  leaf: Any
  axis: int | None
  lengths: tuple[int, ...]
  specs: dict[str, Any]


def _plan_unstacking(leaf: Any, name: str | None, axis: int) -> _Unstacking:
  value = _leaves.raw_value(leaf)
  rank = _stacked_rank(value)
  if rank is None:
    return _Unstacking(leaf, None, (), {})
  lengths = []
  specs: dict[str, Any] = {}
  found = leaf.get_metadata() if _leaves.is_variable(leaf) else {}
  axis = metadata.scan_axis(found, axis)
  target = _axis_in(axis, rank, 'axis')
  if _leaves.is_variable(leaf):
    own = None if name is None else metadata.scan_name(found, name)
    specs = metadata.updated_specs(
      found, lambda entries: _unstacked(entries, own, target, rank)
    )
  for part in _leaves.parts(value):
    shape = _leaves.shape(part)
    lengths.append(shape[_axis_in(axis, len(shape), 'axis')])
  return _Unstacking(leaf, axis, tuple(lengths), specs)


def _layer_count(
  state: nnx.State[Any, Any], plans: Sequence[_Unstacking]
) -> int:
  seen: dict[int, int] = {}
  for number, plan in enumerate(plans):
    for length in plan.lengths:
      seen.setdefault(length, number)
  if not seen:
    raise ValueError('unstack_layers: there is nothing to unstack.')
  if len(seen) > 1:
    paths = _leaves.leaf_paths(state)
    (one, first), (two, second) = list(seen.items())[:2]
    raise ValueError(
      f'unstack_layers: {_checks.path_text(paths[first])} has {one} layers '
      f'along axis {plans[first].axis}, but '
      f'{_checks.path_text(paths[second])} has {two} along axis '
      f'{plans[second].axis}.'
    )
  return next(iter(seen))


def _known(
  fn: Callable[..., metadata.Entries], entries: metadata.Entries, *rest: Any
) -> metadata.Entries:
  """Returns `fn(entries, *rest)`, computed once for the leaves that agree."""
  try:
    return _computed(fn, entries, *rest)
  except TypeError:  # A list among the entries has no hash.
    return fn(entries, *rest)


@functools.lru_cache(maxsize=4096)
def _computed(
  fn: Callable[..., metadata.Entries], entries: metadata.Entries, *rest: Any
) -> metadata.Entries:
  return fn(entries, *rest)


def _removed(
  entries: metadata.Entries, name: str | None, rank: int | None
) -> metadata.Entries:
  count = _count(entries, name)
  if count > 1:
    raise ValueError(f'scan axis {name!r} comes up {count} times.')
  new = entries
  for position, entry in enumerate(entries) if count else ():
    if _is_only(entry, name):
      new = entries[:position] + entries[position + 1 :]
    elif isinstance(entry, tuple) and name in entry:
      left = tuple(item for item in entry if item != name)
      inner = left[0] if len(left) == 1 else left
      new = (*entries[:position], inner, *entries[position + 1 :])
  if rank is not None and len(new) > rank:
    if count:
      raise ValueError(
        f'without scan axis {name!r} it has {len(new)} entries, still more '
        f'than the rank {rank} of the value.'
      )
    raise ValueError(
      f'scan axis {name!r} is not in it, and its {len(new)} entries are more '
      f'than the rank {rank} of the value.'
    )
  return new


def _inserted(
  entries: metadata.Entries, name: str | None, target: int, rank: int
) -> metadata.Entries:
  count = _count(entries, name)
  if count > 1:
    raise ValueError(f'scan axis {name!r} comes up {count} times.')
  if count:
    if target >= len(entries) or not _is_only(entries[target], name):
      raise ValueError(
        f'scan axis {name!r} is there already, but not by itself at axis '
        f'{target}.'
      )
    _check_length(entries, rank)
    return entries
  if len(entries) >= rank:
    raise ValueError(
      f'has no room for scan axis {name!r} at axis {target}: {len(entries)} '
      f'entries for a value of rank {rank} with the scan axis.'
    )
  padded = entries + (None,) * (rank - 1 - len(entries))
  return (*padded[:target], name, *padded[target:])


def _moved(
  entries: metadata.Entries, start: int, end: int, rank: int | None
) -> metadata.Entries:
  if rank is not None:
    _check_length(entries, rank)
  if start == end or not entries:
    return entries
  size = max(len(entries), start + 1, end + 1)
  padded = list(entries + (None,) * (size - len(entries)))
  padded.insert(end, padded.pop(start))
  while len(padded) > len(entries) and padded[-1] is None:
    padded.pop()
  return tuple(padded)


def _stacked(
  entries: metadata.Entries, name: str | None, target: int, rank: int
) -> metadata.Entries:
  _check_length(entries, rank)
  if name is not None and _count(entries, name):
    raise ValueError(f'scan axis {name!r} is there already.')
  if not entries:
    return entries
  if target >= len(entries) and name is None:
    return entries
  padded = entries + (None,) * (target - len(entries))
  return (*padded[:target], name, *padded[target:])


def _unstacked(
  entries: metadata.Entries, name: str | None, target: int, rank: int
) -> metadata.Entries:
  _check_length(entries, rank)
  if not entries:
    return entries
  if name is None:
    if target < len(entries) and entries[target] is not None:
      raise ValueError(
        f'axis {target} is named {entries[target]!r}; give that name.'
      )
  elif (
    target >= len(entries)
    or not _is_only(entries[target], name)
    or _count(entries, name) > 1
  ):
    raise ValueError(
      f'expected scan axis {name!r} at axis {target} and nowhere else; give '
      'name=None if the axis has no name.'
    )
  return entries[:target] + entries[target + 1 :]


def _count(entries: metadata.Entries, name: str | None) -> int:
  count = entries.count(name)
  for entry in entries:
    if isinstance(entry, tuple):
      count += entry.count(name)
  return count


def _is_only(entry: Any, name: str | None) -> bool:
  return entry == name or entry == (name,)


def _check_length(entries: metadata.Entries, rank: int) -> None:
  if len(entries) > rank:
    raise ValueError(
      f'has {len(entries)} entries, more than the rank {rank} of the value.'
    )


def _axis_in(axis: int, rank: int, what: str) -> int:
  if not -rank <= axis < rank:
    raise ValueError(f'{what} {axis} is out of range for rank {rank}.')
  return axis % rank


def _axis_of_any(axis: int, what: str) -> int:
  if axis < 0:
    raise ValueError(
      f'{what} {axis} is negative, and a sharding does not say how many axes '
      'there are.'
    )
  return axis


def _stacked_rank(value: Any) -> int | None:
  if _leaves.is_array(value) and value.shape:
    return len(value.shape)
  _refuse_sharding(value)
  parts = _leaves.parts(value)
  if any(not _leaves.shape(part) for part in parts):
    raise ValueError('a scalar cannot have come out of a scan stacked.')
  return _leaves.rank(value)


def _refuse_sharding(value: Any) -> None:
  if not _leaves.is_array(value) and any(
    map(_leaves.is_sharding, _leaves.parts(value))
  ):
    raise TypeError(
      'a sharding does not say how many axes its value has; transform the '
      'State of values, then make the shardings of that.'
    )


class _Moving(NamedTuple):
  """How one leaf is moved: an axis of each part, and the specs alike."""

  leaf: Any
  value: Any
  # From where to where, for each part.
  steps: tuple[tuple[int, int], ...]
  specs: dict[str, Any]
  # The leaf's metadata, where somebody has asked for it already.
  found: dict[str, Any] | None = None


def _steps(
  value: Any, source: int, destination: int
) -> tuple[tuple[int, int], ...]:
  """Returns the steps of all parts, having checked that they can be taken."""
  if _leaves.is_array(value):
    rank = len(value.shape)
    start, end = source % rank, destination % rank
    return ((start, end),) if start != end else ()
  steps = []
  for part in _leaves.parts(value):
    if _leaves.is_sharding(part):
      if not isinstance(
        part, (jax.sharding.NamedSharding, jax.sharding.PartitionSpec)
      ):
        raise TypeError(f'{type(part).__name__} has no axes to move.')
      steps.append((source, destination))
      continue
    rank = len(_leaves.shape(part))
    start = _axis_in(source, rank, 'source')
    steps.append((start, _axis_in(destination, rank, 'destination')))
  return tuple(steps) if any(start != end for start, end in steps) else ()


def _planned(
  leaf: Any,
  value: Any,
  steps: tuple[tuple[int, int], ...],
  specs: dict[str, Any],
) -> Any:
  """Returns a plan for a leaf that is to be moved; else the finished leaf."""
  if steps:
    return _Moving(leaf, value, steps, specs)
  return metadata.replace(leaf, value, specs) if specs else leaf


def _carried_out(plans: list[Any]) -> list[Any]:
  """Returns the leaves, with those that have a plan moved."""
  pending = [plan for plan in plans if type(plan) is _Moving]
  if not pending:
    return plans
  parts: list[Any] = []
  steps: list[tuple[int, int]] = []
  for plan in pending:
    parts += _leaves.parts(plan.value)
    steps += plan.steps
  moved = iter(_move_all(parts, steps))

  def finish(plan: Any) -> Any:
    if type(plan) is not _Moving:
      return plan
    if _leaves.is_concrete(plan.value):
      value = next(moved)
    else:
      value = _leaves.with_parts(plan.value, [next(moved) for _ in plan.steps])
    if not _leaves.is_variable(plan.leaf):
      return value
    return metadata.replace(plan.leaf, value, plan.specs, plan.found)

  return list(map(finish, plans))


def _move_all(parts: list[Any], steps: list[tuple[int, int]]) -> list[Any]:
  results = list(parts)
  alike: dict[Any, list[int]] = collections.defaultdict(list)
  for number, (part, step) in enumerate(zip(parts, steps, strict=True)):
    if step[0] == step[1]:
      continue
    if _leaves.is_concrete(part):
      key = (step, part.shape, part.dtype, part.sharding, part.committed)
      alike[key].append(number)
    else:
      results[number] = _move(part, *step)
  for (step, *_), numbers in alike.items():
    # Few aren't worth to compile a function of many.
    size = _MOVED_AT_ONCE if len(numbers) >= 4 * _MOVED_AT_ONCE else 1
    move = _compiled_move(*step)
    while numbers:
      size = size if len(numbers) >= size else 1
      batch, numbers = numbers[:size], numbers[size:]
      for number, result in zip(
        batch, move(*(parts[number] for number in batch)), strict=True
      ):
        results[number] = result
  return results


def _move(part: Any, start: int, end: int) -> Any:
  if _leaves.is_sharding(part):
    entries = metadata.spec_entries(part)
    new = _moved(entries, start, end, None)
    return part if new == entries else metadata.with_entries(part, new)
  if isinstance(part, jax.ShapeDtypeStruct):
    shape = list(part.shape)
    shape.insert(end, shape.pop(start))
    return _abstract(
      part,
      tuple(shape),
      lambda entries: _moved(entries, start, end, len(shape)),
    )
  if isinstance(part, np.ndarray):
    return np.moveaxis(part, start, end)
  return jnp.moveaxis(part, start, end)


# A compiled transpose starts in a third of the time of jnp.moveaxis, and one of
# many arrays in half of the time of many.
@functools.cache
def _compiled_move(start: int, end: int) -> Callable[..., list[jax.Array]]:
  return jax.jit(
    lambda *arrays: [jnp.moveaxis(array, start, end) for array in arrays]
  )


def _stack(parts: list[Any], axis: int) -> Any:
  first = parts[0]
  rank = len(_leaves.shape(first))
  target = _axis_in(axis, rank + 1, 'axis')
  if isinstance(first, jax.ShapeDtypeStruct):
    shape = list(first.shape)
    shape.insert(target, len(parts))
    return _abstract(
      first, tuple(shape), lambda entries: _stacked(entries, None, target, rank)
    )
  if isinstance(first, np.ndarray):
    return np.stack(parts, axis=target)
  return jnp.stack(parts, axis=target)


def _unstack(part: Any, axis: int) -> list[Any]:
  shape = list(_leaves.shape(part))
  target = _axis_in(axis, len(shape), 'axis')
  if isinstance(part, jax.ShapeDtypeStruct):
    count = shape.pop(target)
    layer = _abstract(
      part,
      tuple(shape),
      lambda entries: entries[:target] + entries[target + 1 :],
    )
    return [layer] * count
  if isinstance(part, np.ndarray):
    return list(np.moveaxis(part, target, 0))
  return list(jnp.unstack(part, axis=target))


def _abstract(
  part: jax.ShapeDtypeStruct, shape: tuple[int, ...], fn: Any
) -> jax.ShapeDtypeStruct:
  sharding = part.sharding
  if isinstance(sharding, jax.sharding.NamedSharding):
    sharding = metadata.with_entries(
      sharding, fn(metadata.spec_entries(sharding))
    )
  return part.update(shape=shape, sharding=sharding)


def _check_equal(states: Sequence[nnx.State[Any, Any]]) -> None:
  first = dict(nnx.to_flat_state(states[0]))
  for number, state in enumerate(states[1:], start=1):
    other = dict(nnx.to_flat_state(state))
    found = [
      f'{_checks.path_text(path)} is in layer {0 if path in first else number} '
      'alone'
      for path in sorted(first.keys() ^ other.keys())
    ]
    for path in first:
      if path in other:
        found += [
          f'{_checks.path_text(path)} has {what} {one} in layer 0 and {two}'
          for what, one, two in _differences(first[path], other[path])
        ]
    if found:
      raise ValueError(
        f'stack_layers: layer {number} is unlike layer 0: '
        f'{_checks.listed(found)}.'
      )


def _differences(one: Any, two: Any) -> list[tuple[str, Any, Any]]:
  found: list[tuple[str, Any, Any]] = []
  if type(one) is not type(two) and isinstance(one, nnx.Variable) | isinstance(
    two, nnx.Variable
  ):
    return [('type', type(one).__name__, type(two).__name__)]
  if isinstance(one, nnx.Variable):
    have, want = one.get_metadata(), two.get_metadata()
    for key in sorted(have.keys() | want.keys()):
      if type(have.get(key)) is not type(want.get(key)) or have.get(
        key
      ) != want.get(key):
        found.append((f'metadata {key}', have.get(key), want.get(key)))
    one, two = _leaves.raw_value(one), _leaves.raw_value(two)
  structures: tuple[Any, Any] = (
    jax.tree.structure(one),
    jax.tree.structure(two),
  )
  if structures[0] != structures[1]:
    return [*found, ('structure', *structures)]
  for part, other in zip(_leaves.parts(one), _leaves.parts(two), strict=True):
    abstract = [
      isinstance(item, jax.ShapeDtypeStruct) for item in (part, other)
    ]
    if abstract[0] != abstract[1]:
      found.append(('kind', type(part).__name__, type(other).__name__))
    if _leaves.shape(part) != _leaves.shape(other):
      found.append(('shape', _leaves.shape(part), _leaves.shape(other)))
    if _leaves.dtype(part) != _leaves.dtype(other):
      found.append(('dtype', _leaves.dtype(part), _leaves.dtype(other)))
  return found
