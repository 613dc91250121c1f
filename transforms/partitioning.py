"""From logical axis names to shardings on a mesh.

The metadata of a Variable names its dimensions ('embed', 'mlp'). Rules say
which mesh axes each name stands for, so the same model fits any mesh.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import difflib
import math
from typing import Any
import warnings

from flax import nnx
import jax

from transforms import _checks
from transforms import _leaves
from transforms import metadata

_RULES_KEY = 'sharding_rules'

type MeshAxes = str | tuple[str, ...] | None
type Rules = Sequence[tuple[str, MeshAxes]] | Mapping[str, MeshAxes]


def partition_specs(
  state: nnx.State[Any, Any],
  rules: Rules,
  *,
  mesh: jax.sharding.Mesh | None = None,
) -> nnx.State[Any, Any]:
  """Returns the `PartitionSpec` of every leaf by logical axis rules.

  The semantics are those of `flax.linen.logical_to_mesh_axes`: rules are tried
  in their order, and the first one for a name whose mesh axes are still free in
  this spec wins; a name that gets none is replicated. With `mesh`, a rule also
  needs its axes to exist there, and the names of mesh axes stand for themselves
  unless a rule says otherwise.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> kernel = nnx.Param(jax.numpy.ones((4, 8))).replace(
    ...   out_sharding=('embed', 'mlp')
    ... )
    >>> rules = (('embed', 'fsdp'), ('mlp', None))
    >>> specs = partition_specs(nnx.State({'kernel': kernel}), rules)
    >>> specs['kernel'].get_raw_value() == jax.P('fsdp', None)
    True

  Args:
    state: A State of arrays, abstract ones too.
    rules: Pairs of a logical name and the mesh axis that it stands for, or
      several, or None; or a mapping of these. A name may come up in several
      rules. A Variable's own `sharding_rules` metadata goes before them.
    mesh: Where the specs are for, if that's known.

  Returns:
    A State of the same structure with a `PartitionSpec` for each array. It's
    empty for arrays without metadata. An array in a composite value that is
    smaller than the whole is replicated where its extent is 1.

  Raises:
    TypeError: `state` is no State, or the rules are no rules.
    ValueError: A name is in no rule, or twice in a spec; a spec is longer than
      its value's rank; two metadata keys of a Variable disagree.
  """
  _checks.check_state('partition_specs', state)
  pairs = _pairs('partition_specs', rules)
  cached = _by_annotation(lambda leaf: _part_specs(leaf, pairs, mesh)[2])
  result: nnx.State[Any, Any] = _leaves.map_leaves(
    'partition_specs', lambda leaf: _rebuilt(leaf, cached(leaf)), state
  )
  return result


def named_shardings(
  state: nnx.State[Any, Any],
  mesh: jax.sharding.Mesh,
  rules: Rules,
  *,
  replicate_indivisible: bool = False,
) -> nnx.State[Any, Any]:
  """Returns the `NamedSharding` of every leaf by logical axis rules.

  The result has the structure of `state`. It can be given to `jax.jit` as
  `in_shardings`, to orbax, and to `reshard`.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> mesh = jax.make_mesh((1,), ('fsdp',))
    >>> kernel = nnx.Param(jax.numpy.ones((4, 8))).replace(
    ...   out_sharding=('embed', 'mlp')
    ... )
    >>> shardings = named_shardings(
    ...   nnx.State({'kernel': kernel}), mesh, {'embed': 'fsdp', 'mlp': None}
    ... )
    >>> shardings['kernel'].get_raw_value().spec == jax.P('fsdp', None)
    True

  Args:
    state: A State of arrays, abstract ones too.
    mesh: The mesh to shard over.
    rules: As for `partition_specs`.
    replicate_indivisible: Whether a dimension that its mesh axes don't divide
      is replicated, and reported in one warning for all, instead of an error.

  Returns:
    A State of the same structure with a `NamedSharding` for each array. An
    array in a composite value that is smaller than the whole is replicated
    along dimensions that the mesh axes don't divide.

  Raises:
    TypeError: `state` is no State, or the rules are no rules.
    ValueError: As for `partition_specs`, or mesh axes don't divide a dimension.
  """
  _checks.check_state('named_shardings', state)
  pairs = _pairs('named_shardings', rules)
  replicated: list[list[str]] = []

  def placed(leaf: Any) -> tuple[list[Any], list[str]]:
    parts, whole, specs = _part_specs(leaf, pairs, mesh)
    sharded, bad = [], []
    for part, spec in zip(parts, specs, strict=True):
      spec, wrong = divisible_spec(spec, _leaves.shape(part), mesh, whole=whole)
      bad += wrong
      sharded.append(jax.sharding.NamedSharding(mesh, spec))
    if bad and not replicate_indivisible:
      raise ValueError('; '.join(bad) + '.')
    return sharded, bad

  cached = _by_annotation(placed)

  def shard(leaf: Any) -> Any:
    sharded, bad = cached(leaf)
    replicated.append(bad)
    return _rebuilt(leaf, sharded)

  result: nnx.State[Any, Any] = _leaves.map_leaves(
    'named_shardings', shard, state
  )
  if any(replicated):
    paths = map(_checks.path_text, _leaves.leaf_paths(state))
    reported = [
      f'{path}: {text}'
      for path, bad in zip(paths, replicated, strict=True)
      for text in bad
    ]
    warnings.warn(
      'named_shardings: replicated instead: ' + '; '.join(reported) + '.',
      stacklevel=2,
    )
  return result


def divisible_spec(
  spec: jax.sharding.PartitionSpec,
  shape: tuple[int, ...],
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
  *,
  whole: tuple[int, ...] | None = None,
) -> tuple[jax.sharding.PartitionSpec, list[str]]:
  """Returns a spec without the entries that don't divide an array.

  Args:
    spec: Mesh axes by dimension, no more than there are.
    shape: The shape of the array.
    mesh: The mesh that the axes are of.
    whole: The shape of the value that the array is a part of. Where the array
      is smaller, an entry that doesn't divide it's left out without a word.

  Returns:
    The spec with None for each entry that doesn't divide, and the texts that
    say which those were.
  """
  entries = list(spec.partitions)
  bad = []
  for index, entry in enumerate(entries):
    if entry is None or entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
      continue
    axes = entry if isinstance(entry, tuple) else (entry,)
    size = math.prod(mesh.shape[axis] for axis in axes)
    if shape[index] % size == 0:
      continue
    entries[index] = None
    if (
      whole is None
      or len(whole) != len(shape)
      or whole == shape
      or (whole[index] == shape[index])
    ):
      bad.append(
        f'dimension {index} of extent {shape[index]} is not divisible by '
        f'{size}, the size of mesh axes {", ".join(map(repr, axes))}'
      )
  if tuple(entries) == tuple(spec.partitions):
    return spec, bad
  return spec.update(partitions=tuple(entries)), bad


def whole_shape(parts: list[Any]) -> tuple[int, ...]:
  """Returns the shape of the value that some arrays make up together.

  The array that a composite value stands for is as large as its largest part.

  Args:
    parts: The arrays of one value.

  Returns:
    The shape of the largest one; `()` if there's none.
  """
  if len(parts) == 1:
    return _leaves.shape(parts[0])
  return max(
    map(_leaves.shape, parts),
    key=lambda shape: (len(shape), math.prod(shape)),
    default=(),
  )


def _by_annotation(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
  """Keeps the results of `fn` for leaves of equal annotation and shape."""
  results: dict[Any, Any] = {}

  def cached(leaf: Any) -> Any:
    value = _leaves.raw_value(leaf)
    if not _leaves.is_array(value):
      return fn(leaf)
    key: tuple[Any, ...] = (value.shape,)
    if _leaves.is_variable(leaf):
      found = leaf.get_metadata()
      if found.get(_RULES_KEY) is not None:
        return fn(leaf)
      key += tuple(
        (name, type(spec), tuple(spec) if isinstance(spec, list) else spec)
        for name, spec in metadata.sharding_specs(found).items()
      )
    if key not in results:
      results[key] = fn(leaf)
    return results[key]

  return cached


def _part_specs(
  leaf: Any,
  pairs: list[tuple[str, MeshAxes]],
  mesh: jax.sharding.Mesh | None,
) -> tuple[list[Any], tuple[int, ...], list[jax.sharding.PartitionSpec]]:
  parts = _leaves.parts(_leaves.raw_value(leaf))
  if any(map(_leaves.is_sharding, parts)):
    raise TypeError('it is a sharding already; expected an array.')
  spec = jax.sharding.PartitionSpec()
  if _leaves.is_variable(leaf):
    pairs = [*_pairs('sharding_rules', _own_rules(leaf)), *pairs]
    spec = _resolved(leaf, pairs, mesh)
  whole = whole_shape(parts)
  if len(spec.partitions) > len(whole):
    raise ValueError(
      f'{metadata.sharding_specs(leaf.get_metadata())} has more than '
      f'{len(whole)} entries.'
    )
  return parts, whole, [_of_part(spec, part, whole) for part in parts]


def _own_rules(variable: nnx.Variable[Any]) -> Rules:
  rules: Rules | None = variable.get_metadata(_RULES_KEY, None)
  return () if rules is None else rules


def _of_part(
  spec: jax.sharding.PartitionSpec, part: Any, whole: tuple[int, ...]
) -> jax.sharding.PartitionSpec:
  shape = _leaves.shape(part)
  if shape == whole:
    return spec
  if len(shape) != len(whole):
    # Its dimensions have no counterpart, so names say nothing about them.
    return spec.update(partitions=())
  entries = tuple(
    None if shape[index] == 1 != whole[index] else entry
    for index, entry in enumerate(spec.partitions)
  )
  return spec.update(partitions=entries)


def _rebuilt(leaf: Any, results: list[Any]) -> Any:
  value = _leaves.with_parts(_leaves.raw_value(leaf), results)
  if _leaves.is_variable(leaf):
    return _leaves.with_value(leaf, value)
  return value


def _resolved(
  variable: nnx.Variable[Any],
  pairs: list[tuple[str, MeshAxes]],
  mesh: jax.sharding.Mesh | None,
) -> jax.sharding.PartitionSpec:
  specs = metadata.sharding_specs(variable.get_metadata())
  entries = {key: metadata.spec_entries(spec) for key, spec in specs.items()}
  if len(set(entries.values())) > 1:
    raise ValueError(f'metadata keys disagree: {specs}.')
  if not specs:
    return jax.sharding.PartitionSpec()
  spec = next(iter(specs.values()))
  dimensions = [
    entry if isinstance(entry, tuple) else (entry,)
    for entry in next(iter(entries.values()))
  ]
  names = [
    name for names in dimensions for name in names if isinstance(name, str)
  ]
  assigned = _assigned(names, pairs, mesh)
  result = []
  for dimension in dimensions:
    axes: list[Any] = []
    for name in dimension:
      if isinstance(name, str):
        axes += assigned[name]
      elif name is not None:
        axes.append(name)
    result.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
  base = spec.spec if isinstance(spec, jax.sharding.NamedSharding) else spec
  if isinstance(base, jax.sharding.PartitionSpec):
    return base.update(partitions=tuple(result))
  return jax.sharding.PartitionSpec(*result)


def _assigned(
  names: list[str],
  pairs: list[tuple[str, MeshAxes]],
  mesh: jax.sharding.Mesh | None,
) -> dict[str, tuple[str, ...]]:
  twice = [name for name, n in collections.Counter(names).items() if n > 1]
  if twice:
    raise ValueError(
      f'{", ".join(map(repr, twice))} comes up more than once in one spec.'
    )
  known = {name for name, _ in pairs}
  own = set(mesh.axis_names) if mesh is not None else set()
  for name in names:
    if name not in known | own:
      near = difflib.get_close_matches(name, sorted(known | own))
      hint = f'; near: {", ".join(near)}' if near else ''
      raise ValueError(
        f'no rule for logical axis {name!r}{hint}; rules exist for '
        f'{", ".join(sorted(known)) or "nothing"}.'
      )
  assigned: dict[str, tuple[str, ...]] = {}
  taken: set[str] = set()
  own_pairs = [(name, name) for name in names if name not in known]
  for name, axes in [*pairs, *own_pairs]:
    if name not in names or name in assigned:
      continue
    wanted = _axes(axes)
    if taken & set(wanted) or (mesh is not None and set(wanted) - own):
      continue
    assigned[name] = wanted
    taken |= set(wanted)
  return {name: assigned.get(name, ()) for name in names}


def _axes(axes: MeshAxes) -> tuple[str, ...]:
  if axes is None:
    return ()
  return axes if isinstance(axes, tuple) else (axes,)


def _pairs(function: str, rules: Rules) -> list[tuple[str, MeshAxes]]:
  items = rules.items() if isinstance(rules, Mapping) else rules
  pairs: list[tuple[str, MeshAxes]] = []
  for item in items:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
      raise TypeError(
        f'{function}: {item!r} is no rule; expected a pair of a logical name '
        'and its mesh axes.'
      )
    name, axes = item
    axes = tuple(axes) if isinstance(axes, list) else axes
    if not isinstance(name, str) or not all(
      isinstance(axis, str) for axis in _axes(axes)
    ):
      raise TypeError(
        f'{function}: {item!r} is no rule; the logical name has to be a str, '
        'its mesh axes a str, a tuple of str, or None.'
      )
    pairs.append((name, axes))
  return pairs
