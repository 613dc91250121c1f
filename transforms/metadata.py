"""The one place that knows how flax annotates a Variable for sharding.

Flax keeps a spec as a tuple, a `PartitionSpec` or a `NamedSharding` under the
key `out_sharding`; `sharding` and `sharding_names` are its older keys, which
still turn up, since `Variable.replace(sharding=...)` doesn't translate them.
The metadata is a static part of the pytree: a spec that changes its *type*
makes a jitted function compile again and a scan fail. So everything here keeps
the type.
"""

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx
import jax

from transforms import _checks

SPEC_KEYS = ('out_sharding', 'sharding', 'sharding_names')
SCAN_AXIS_KEY = 'param_scan_axis'
MESH_KEY = 'mesh'

type Entries = tuple[Any, ...]


def sharding_specs(found: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the specs that a Variable is annotated with.

  Example:
    >>> variable = nnx.Param(1.0).replace(out_sharding=('embed',))
    >>> sharding_specs(variable.get_metadata())
    {'out_sharding': ('embed',)}

  Args:
    found: The metadata of a Variable.

  Returns:
    The spec by metadata key, for the keys of `SPEC_KEYS` that are there and
    not None.
  """
  specs = {}
  for key in SPEC_KEYS:
    spec = found.get(key, None)
    if spec is not None:
      specs[key] = spec
  return specs


def scan_name(found: Mapping[str, Any], default: str | None) -> str | None:
  """Returns the name of a Variable's scan axis.

  Args:
    found: The metadata of a Variable.
    default: The name if the Variable has none of its own.

  Returns:
    The metadata `nnx.PARTITION_NAME` if the Variable has it, else `default`.
  """
  own: str | None = found.get(nnx.PARTITION_NAME, None)
  return default if own is None else own


def scan_axis(found: Mapping[str, Any], default: int) -> int:
  """Returns the index at which a Variable keeps its scan axis.

  Args:
    found: The metadata of a Variable.
    default: The index if the Variable has none of its own.

  Returns:
    The metadata `param_scan_axis` if the Variable has it, else `default`.
  """
  own: int | None = found.get(SCAN_AXIS_KEY, None)
  return default if own is None else own


def update_sharding_metadata(
  variable: nnx.Variable[Any], fn: Callable[[Entries], Entries]
) -> nnx.Variable[Any]:
  """Returns a Variable with each of its specs passed through `fn`.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> kernel = nnx.Param(1.0).replace(out_sharding=('layers', 'embed'))
    >>> sliced = update_sharding_metadata(kernel, lambda entries: entries[1:])
    >>> sliced.get_metadata('out_sharding')
    ('embed',)

  Args:
    variable: A Variable with a value of any kind. It isn't changed.
    fn: From the entries of a spec, one for each dimension (None, a name, or a
      tuple of names), to the new ones. Called once for each key of `SPEC_KEYS`
      that is there and not None. It may raise ValueError to refuse a spec.

  Returns:
    The very same Variable if `fn` left all specs equal; else a new one of the
    same class with the same value and otherwise the same metadata. A tuple
    stays a tuple, a list a list, a `PartitionSpec` one with the same
    `unreduced` and `reduced` axes, a `NamedSharding` one on the same mesh and
    memory.

  Raises:
    TypeError: `variable` is no Variable, or a spec is of another type.
    ValueError: What `fn` raised, with the key and the spec put in front.
  """
  if not isinstance(variable, nnx.Variable):
    _checks.check_no_module('update_sharding_metadata', variable)
    raise TypeError(
      'update_sharding_metadata: expected an nnx.Variable, got '
      f'{type(variable).__name__}.'
    )
  changed = updated_specs(variable.get_metadata(), fn)
  if not changed:
    return variable
  return replace(variable, variable.get_raw_value(), changed)


def updated_specs(
  found: Mapping[str, Any], fn: Callable[[Entries], Entries]
) -> dict[str, Any]:
  """Returns the specs that `update_sharding_metadata` would change.

  Args:
    found: The metadata of a Variable.
    fn: As for `update_sharding_metadata`.

  Returns:
    The new spec by metadata key, for those alone that `fn` changed.

  Raises:
    TypeError: A spec is of a type that has no entries.
    ValueError: What `fn` raised, with the key and the spec put in front.
  """
  changed = {}
  for key in SPEC_KEYS:
    spec = found.get(key, None)
    if spec is None:
      continue
    try:
      entries = spec_entries(spec)
      new = fn(entries)
      # Within the try: jax refuses, say, a mesh axis that comes up twice.
      if new != entries:
        changed[key] = with_entries(spec, new)
    except (TypeError, ValueError) as error:
      kind = TypeError if isinstance(error, TypeError) else ValueError
      raise kind(f'{key} {spec!r}: {error}') from error
  return changed


def agreeing_metadata(
  variable: nnx.Variable[Any], sharding: jax.sharding.Sharding | None
) -> dict[str, Any]:
  """Returns what has to change in the metadata of a value on a mesh.

  Args:
    variable: A Variable with a value of any kind.
    sharding: Where its value is; only a `NamedSharding` says something.

  Returns:
    The new metadata by key, for what doesn't agree with `sharding`: the mesh,
    and specs of axes of this mesh alone. Other names are logical ones.
  """
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return {}
  found = variable.get_metadata()
  changed: dict[str, Any] = {}
  for key, spec in sharding_specs(found).items():
    if isinstance(spec, jax.sharding.NamedSharding):
      if spec != sharding:
        changed[key] = sharding
      continue
    entries = spec_entries(spec)
    new = _agreeing(entries, sharding)
    if new != entries:
      changed[key] = with_entries(spec, new)
  mesh = found.get(MESH_KEY)
  if mesh is not None and mesh != sharding.mesh:
    changed[MESH_KEY] = sharding.mesh
  return changed


def _agreeing(
  entries: Entries, sharding: jax.sharding.NamedSharding
) -> Entries:
  names = sharding.mesh.axis_names
  for entry in entries:
    for name in entry if isinstance(entry, tuple) else (entry,):
      if name is not None and name not in names:
        return entries
  target = tuple(sharding.spec.partitions)
  size = max(len(entries), len(_trimmed(target)))
  return (target + (None,) * size)[:size]


def spec_key(found: Mapping[str, Any]) -> tuple[Any, ...]:
  """Returns what tells Variables apart that are annotated differently.

  Args:
    found: The metadata of a Variable.

  Returns:
    A key for a dict: equal for equal specs of equal types under equal keys. It
    has no hash if a spec is a list.
  """
  first, second, third = map(found.get, SPEC_KEYS)
  return first, type(first), second, type(second), third, type(third)


def replace(
  variable: nnx.Variable[Any],
  value: Any,
  metadata: Mapping[str, Any],
  found: Mapping[str, Any] | None = None,
) -> nnx.Variable[Any]:
  """Returns a Variable of the same class with other value and metadata.

  Neither hooks nor flax's eager sharding run: what comes in is what is stored.

  Args:
    variable: The Variable to follow. It isn't changed.
    value: The raw value of the new one.
    metadata: What to set in its metadata; all else is kept.
    found: Its metadata, from a caller that has asked for it already.

  Returns:
    A new Variable.
  """
  attributes = variable.get_metadata() if found is None else dict(found)
  if attributes.get('ref', False):
    # Makes a new mutable reference for the new value.
    return variable.replace(value, **metadata)
  attributes.update(metadata)
  return type(variable).from_metadata(value, attributes)


def spec_entries(spec: Any) -> Entries:
  """Returns the entries of a spec, one for each dimension that it covers.

  Args:
    spec: A tuple, a list, a `PartitionSpec` or a `NamedSharding`.

  Returns:
    A tuple of None, names, tuples of names, or `PartitionSpec.UNCONSTRAINED`.

  Raises:
    TypeError: `spec` is of another type.
  """
  if type(spec) is tuple:
    return spec
  if isinstance(spec, jax.sharding.PartitionSpec):
    return tuple(spec.partitions)
  if isinstance(spec, (tuple, list)):
    return tuple(spec)
  if isinstance(spec, jax.sharding.NamedSharding):
    return tuple(spec.spec.partitions)
  raise TypeError(
    f'a spec of type {type(spec).__name__} has no entries; expected a tuple, a '
    'PartitionSpec or a NamedSharding.'
  )


def with_entries(spec: Any, entries: Entries) -> Any:
  """Returns a spec of the same type with other entries.

  Args:
    spec: As for `spec_entries`.
    entries: The new entries.

  Returns:
    A tuple, list, `PartitionSpec` or `NamedSharding`, as `spec` is; all that
    isn't entries (`unreduced`, `reduced`, mesh, memory kind) is kept.

  Raises:
    TypeError: `spec` is of another type.
    ValueError: jax refuses the entries.
  """
  if type(spec) is tuple:
    return entries
  if isinstance(spec, jax.sharding.PartitionSpec):
    # P(*spec) would lose the unreduced and reduced axes.
    return spec.update(partitions=entries)
  if isinstance(spec, jax.sharding.NamedSharding):
    return spec.update(spec=spec.spec.update(partitions=entries))
  if isinstance(spec, list):
    return list(entries)
  if isinstance(spec, tuple):
    return type(spec)(entries)
  spec_entries(spec)
  raise AssertionError('spec_entries raises for every other type.')


def _trimmed(entries: Entries) -> Entries:
  while entries and entries[-1] is None:
    entries = entries[:-1]
  return entries
