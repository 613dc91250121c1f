"""Reading a State: a table of what is in it, and what differs between two."""

from typing import Any, NamedTuple

from flax import nnx
import jax
import numpy as np

from transforms import _checks
from transforms import _leaves
from transforms import mapping
from transforms import metadata

_HEADER = ('path', 'type', 'shape', 'dtype', 'spec', 'bytes')


class Difference(NamedTuple):
  """One thing in which two States differ.

  Attributes:
    path: The keys to the leaf, joined by `/`.
    what: 'missing', 'type', 'structure', 'shape', 'dtype', 'spec', 'metadata'
      or 'values'.
    a: What the first State has. For 'values' a text with the element that
      differs most.
    b: What the second one has.
  """

  path: str
  what: str
  a: Any
  b: Any

  def __str__(self) -> str:
    return f'{self.path}: {self.what} {self.a} != {self.b}'


def diff(
  a: nnx.State[Any, Any], b: nnx.State[Any, Any]
) -> tuple[Difference, ...]:
  """Returns all that differs between two States, ordered by path.

  Two NaNs at the same place are equal. Values are compared if both are
  concrete and of equal shape and dtype.

  Used in: peftlib/guide/your_own_loop.md.

  Example:
    >>> one = nnx.State({'w': nnx.Param(np.zeros(2, np.int32))})
    >>> two = nnx.State({'w': nnx.Param(np.zeros(3, np.int32))})
    >>> print(*diff(one, two))
    w: shape (2,) != (3,)

  Args:
    a: A State of arrays, or of shardings.
    b: Another one.

  Returns:
    The differences; none if the States are equal.

  Raises:
    TypeError: An argument is no State.
  """
  _checks.check_state('diff', a)
  _checks.check_state('diff', b)
  left, right = dict(nnx.to_flat_state(a)), dict(nnx.to_flat_state(b))
  found: list[Difference] = []
  for path in sorted(left.keys() | right.keys()):
    text = _checks.path_text(path)
    if path not in left or path not in right:
      kinds = [
        type(side[path]).__name__ if path in side else None
        for side in (left, right)
      ]
      found.append(Difference(text, 'missing', *kinds))
    else:
      found += [
        Difference(text, *difference)
        for difference in _leaf_differences(left[path], right[path])
      ]
  return tuple(found)


def describe(state: nnx.State[Any, Any]) -> str:
  """Returns a table of the leaves of a State.

  Layers that aren't scanned, and so have an index in their path, share a row if
  they agree in everything else; the path then has the range of indices.

  Used in: peftlib/guide/your_own_model.md.

  Example:
    >>> w = nnx.Param(np.zeros((2, 3), np.float32))
    >>> print(describe(nnx.State({0: {'w': w}, 1: {'w': w}})))
    path    type  shape  dtype   spec bytes
    {0-1}/w Param (2, 3) float32 -       48
    total   2 leaves, 12 elements        48

  Args:
    state: A State of arrays, abstract ones too.

  Returns:
    Lines of equal columns, without a line break at the end.

  Raises:
    TypeError: `state` is no State, or one of shardings.
  """
  _checks.check_state('describe', state)
  rows: dict[tuple[Any, ...], tuple[list[Any], int]] = {}
  for path, leaf in nnx.to_flat_state(state):
    pattern = tuple('*' if isinstance(key, int) else key for key in path)
    for part in _leaves.parts(_leaves.raw_value(leaf)):
      if _leaves.is_sharding(part):
        raise TypeError(
          f'describe: {_checks.path_text(path)} is a sharding; expected a '
          'State of arrays.'
        )
      key = (pattern, _kind(leaf), _leaves.shape(part))
      key += (str(_leaves.dtype(part)), _spec_text(leaf))
      paths, size = rows.get(key, ([], 0))
      rows[key] = ([*paths, path], size + mapping.array_bytes(part))
  table = [_HEADER]
  for (_, kind, shape, dtype, spec), (paths, size) in rows.items():
    table.append(
      (_range_text(paths), kind, str(shape), dtype, spec, f'{size:,}')
    )
  widths = [max(map(len, column)) for column in zip(*table, strict=True)]
  lines = [
    ' '.join(
      [text.ljust(width) for text, width in zip(row[:-1], widths, strict=False)]
      + [row[-1].rjust(widths[-1])]
    )
    for row in table
  ]
  leaves = len(nnx.to_flat_state(state))
  total = f'{mapping.param_bytes(state):,}'
  text = f'{leaves:,} leaves, {mapping.param_count(state):,} elements'
  start = f'{"total".ljust(widths[0])} {text} '
  lines.append(start + total.rjust(len(lines[0]) - len(start)))
  return '\n'.join(lines)


def _leaf_differences(a: Any, b: Any) -> list[tuple[str, Any, Any]]:
  if (isinstance(a, nnx.Variable) or isinstance(b, nnx.Variable)) and type(
    a
  ) is not type(b):
    return [('type', type(a).__name__, type(b).__name__)]
  found: list[tuple[str, Any, Any]] = []
  if isinstance(a, nnx.Variable):
    have, want = a.get_metadata(), b.get_metadata()
    for key in sorted(have.keys() | want.keys()):
      one, two = have.get(key, None), want.get(key, None)
      # A tuple and an equal list or spec are different pytrees.
      if type(one) is not type(two) or one != two:
        if key in metadata.SPEC_KEYS:
          found.append(('spec', one, two))
        else:
          found.append(('metadata', {key: one}, {key: two}))
  values = [_leaves.raw_value(leaf) for leaf in (a, b)]
  structures: list[Any] = list(map(jax.tree.structure, values))
  if structures[0] != structures[1]:
    return [*found, ('structure', *structures)]
  for one, two in zip(*map(_leaves.parts, values), strict=True):
    found += _part_differences(one, two)
  return found


def _part_differences(one: Any, two: Any) -> list[tuple[str, Any, Any]]:
  if one is two:
    return []
  if _leaves.is_sharding(one) or _leaves.is_sharding(two):
    same = type(one) is type(two) and one == two
    return [] if same else [('values', one, two)]
  found: list[tuple[str, Any, Any]] = []
  for what, get in (('shape', _leaves.shape), ('dtype', _leaves.dtype)):
    if get(one) != get(two):
      found.append((what, get(one), get(two)))
  abstract = (jax.ShapeDtypeStruct, jax.core.Tracer)
  if found or isinstance(one, abstract) or isinstance(two, abstract):
    return found
  left, right = _to_numpy(one), _to_numpy(two)
  unequal = ~((left == right) | ((left != left) & (right != right)))
  if unequal.any():
    found.append(('values', *_most_different(left, right, unequal)))
  return found


def _to_numpy(part: Any) -> np.ndarray:
  if isinstance(part, jax.Array) and jax.numpy.issubdtype(
    part.dtype, jax.dtypes.prng_key
  ):
    part = jax.random.key_data(part)
  array = np.asarray(part)
  # Neither 4-bit nor 8-bit floats know how to subtract everywhere.
  if array.dtype.kind == 'V' or array.dtype.itemsize < 4:
    return array.astype(np.float32)
  return array


def _most_different(
  left: np.ndarray, right: np.ndarray, unequal: np.ndarray
) -> tuple[str, str]:
  wide = complex if left.dtype.kind == 'c' else float
  distance = np.abs(left.astype(wide) - right.astype(wide))
  distance = np.where(unequal, np.nan_to_num(distance, nan=np.inf), -1.0)
  at = np.unravel_index(np.argmax(distance), left.shape)
  index = '[' + ', '.join(map(str, at)) + ']'
  count = f'{int(unequal.sum())} of {unequal.size}'
  return f'{left[at]} at {index}', f'{right[at]} ({count} differ)'


def _kind(leaf: Any) -> str:
  return type(leaf).__name__ if isinstance(leaf, nnx.Variable) else '-'


def _spec_text(leaf: Any) -> str:
  if not isinstance(leaf, nnx.Variable):
    return '-'
  specs = list(metadata.sharding_specs(leaf.get_metadata()).values())
  return str(specs[0]) if specs else '-'


def _range_text(paths: list[tuple[Any, ...]]) -> str:
  keys = []
  for column in zip(*paths, strict=True):
    values = list(dict.fromkeys(column))
    if len(values) == 1:
      keys.append(str(values[0]))
    elif values == list(range(values[0], values[-1] + 1)):
      keys.append(f'{{{values[0]}-{values[-1]}}}')
    else:
      keys.append('{' + ','.join(map(str, values)) + '}')
  return '/'.join(keys)
