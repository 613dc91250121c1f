"""Walking over the leaves of a State, and over the parts of one leaf's value.

A leaf is a Variable, or whatever else sits in a State or other pytree: a raw
array, an abstract value, a sharding. Its value may be composite, such as a
`QArray` of quantized values and scales, and then has several parts.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import math
from typing import Any

from flax import nnx
import jax
import numpy as np

from transforms import _checks


def map_leaves(
  function: str,
  fn: Callable[..., Any],
  tree: Any,
  *rest: Any,
  finish: Callable[[list[Any]], list[Any]] | None = None,
) -> Any:
  """Maps `fn` over the leaves of a tree of Variables.

  Args:
    function: The public function that was called, for messages.
    fn: From a leaf to a leaf. `TypeError`s and `ValueError`s that it raises get
      the function, and the path and shape of the leaf, put in front.
    tree: A State or any other pytree that has no module in it.
    *rest: Trees of the same structure, handed to `fn` as further arguments.
    finish: From all that `fn` returned to the leaves of the result, so that
      nothing is done before every leaf has been checked.

  Returns:
    A tree of the same structure.

  Raises:
    TypeError: There is an `nnx.Module` in `tree`, or `fn` raised it.
    ValueError: `fn` raised it.
  """
  _checks.check_no_module(function, tree)
  leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_leaf)
  others = [jax.tree.leaves(other, is_leaf=_is_leaf) for other in rest]
  # Modules are pytrees: one inside of a tree would else pass unnoticed.
  if any(map(_is_module_type, map(type, leaves))):
    _checks.check_no_module(function, *leaves)
  results = []
  try:
    for result in map(fn, leaves, *others):
      results.append(result)
  except (TypeError, ValueError):
    number = len(results)
    with located(function, leaf_paths(tree)[number], leaves[number]):
      raise
  if finish is not None:
    results = finish(results)
  return jax.tree.unflatten(treedef, results)


@contextlib.contextmanager
def located(function: str, path: _checks.Path, leaf: Any) -> Iterator[None]:
  """Puts the function, and path and shape of the leaf, in front of errors."""
  try:
    yield
  except (TypeError, ValueError) as error:
    # A subclass may need other arguments, so that only these are made anew.
    kind = TypeError if isinstance(error, TypeError) else ValueError
    raise kind(
      f'{function}: {_checks.path_text(path)}{describe(leaf)}: {error}'
    ) from error


def leaf_paths(tree: Any) -> list[_checks.Path]:
  """Returns the path of each leaf, in the order of `map_leaves`."""
  return [
    tuple(map(_key, path))
    for path, _ in jax.tree.leaves_with_path(tree, is_leaf=_is_leaf)
  ]


def leaves(tree: Any) -> list[Any]:
  """Returns the leaves, in the order of `map_leaves`."""
  return jax.tree.leaves(tree, is_leaf=_is_leaf)


def raw_value(leaf: Any) -> Any:
  """Returns the value in a leaf as it is stored, without running hooks."""
  if not is_variable(leaf):
    return leaf
  value = leaf.get_raw_value()
  if is_array(value) or is_sharding(value):
    return value
  if isinstance(value, jax.Ref):
    return value[...]
  return value


def parts(value: Any) -> list[Any]:
  """Returns the arrays, scalars or shardings that a value is made of."""
  if is_array(value) or is_sharding(value):
    return [value]
  return jax.tree.leaves(value)


def map_parts(fn: Callable[[Any], Any], value: Any) -> Any:
  """Maps `fn` over the parts of a value; the very same value if all are."""
  if is_array(value) or is_sharding(value):
    return fn(value)
  leaves, treedef = jax.tree.flatten(value)
  results = [fn(leaf) for leaf in leaves]
  if all(new is old for new, old in zip(results, leaves, strict=True)):
    return value
  return jax.tree.unflatten(treedef, results)


def with_parts(value: Any, results: list[Any]) -> Any:
  """Returns a value like `value` of other parts, in the order of `parts`."""
  if is_array(value) or is_sharding(value):
    (result,) = results
    return result
  return jax.tree.unflatten(jax.tree.structure(value), results)


def with_value(variable: nnx.Variable[Any], value: Any) -> nnx.Variable[Any]:
  """Returns a Variable like `variable` with a raw value of any kind.

  In contrast to `Variable.replace` a sharding can be the value of a Variable
  that holds a mutable reference.
  """
  return type(variable).from_metadata(value, variable.get_metadata())


def is_variable(leaf: Any) -> bool:
  """Returns whether a leaf is a Variable, of whichever of flax's kinds."""
  kind: Any = type(leaf)
  return _is_variable_type(kind) or isinstance(leaf, nnx.Variable)


def is_array(value: Any) -> bool:
  """Returns whether a value is an array, concrete, traced or abstract."""
  # Tracers are arrays too, but their classes aren't subclasses.
  kind: Any = type(value)
  return _is_array_type(kind) or isinstance(value, jax.Array)


def is_concrete(value: Any) -> bool:
  """Returns whether a value is a JAX array, and no tracer."""
  kind: Any = type(value)
  return _is_concrete_type(kind)


def is_sharding(value: Any) -> bool:
  """Returns whether a value says where to put an array."""
  kind: Any = type(value)
  return _is_sharding_type(kind)


def shape(part: Any) -> tuple[int, ...]:
  """Returns the shape of a part."""
  return tuple(part.shape) if hasattr(part, 'shape') else np.shape(part)


def rank(value: Any) -> int | None:
  """Returns the rank of a value; None if it holds no array.

  The parts of a composite value are annotated by one spec. They may have
  fewer dimensions than it, as a scale for the whole tensor has.
  """
  if is_array(value):
    return len(value.shape)
  ranks = [len(shape(part)) for part in parts(value) if not is_sharding(part)]
  return max(ranks) if ranks else None


def leaves_if_alike(tree: Any, like: Any) -> list[Any] | None:
  """Returns the leaves of `tree` if the two have theirs at the same paths."""
  found, structure = jax.tree.flatten(tree, is_leaf=_is_leaf)
  other: Any = jax.tree.structure(like, is_leaf=_is_leaf)
  return found if structure == other else None


def unflatten_like(tree: Any, leaves: list[Any]) -> Any:
  """Returns a tree like `tree` with other leaves, ordered as `leaf_paths`."""
  return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=_is_leaf), leaves)


def dtype(part: Any) -> Any:
  """Returns the dtype of a part, extended ones such as that of keys too."""
  return part.dtype if hasattr(part, 'dtype') else np.result_type(part)


def describe(leaf: Any) -> str:
  """Returns the text on type and shape that follows a path in a message."""
  value = raw_value(leaf)
  found = parts(value)
  if not found:
    return ' without a value'
  if any(map(is_sharding, found)):
    return f' with {type(found[0]).__name__}'
  shapes = [_shape_text(shape(part)) for part in found]
  if len(shapes) == 1:
    return f' of shape {shapes[0]}'
  return f' with parts of shapes {", ".join(shapes)}'


def size(part: Any) -> int:
  """Returns the number of elements of a part."""
  return math.prod(shape(part))


def _shape_text(dimensions: tuple[int, ...]) -> str:
  return '(' + ','.join(map(str, dimensions)) + ')'


def _is_leaf(node: Any) -> bool:
  kind: Any = type(node)
  if kind is dict or kind is nnx.State:
    return False
  return _is_leaf_type(kind) or isinstance(node, nnx.Variable)


# isinstance is slow for classes with a metaclass or an ABC, and every leaf goes
# through several of these.
@functools.cache
def _is_leaf_type(kind: Any) -> bool:
  return issubclass(kind, (nnx.Variable, nnx.Module))


@functools.cache
def _is_variable_type(kind: Any) -> bool:
  return issubclass(kind, nnx.Variable)


@functools.cache
def _is_module_type(kind: Any) -> bool:
  return issubclass(kind, nnx.Module)


@functools.cache
def _is_sharding_type(kind: Any) -> bool:
  return issubclass(kind, (jax.sharding.Sharding, jax.sharding.PartitionSpec))


@functools.cache
def _is_concrete_type(kind: Any) -> bool:
  return issubclass(kind, jax.Array) and not issubclass(kind, jax.core.Tracer)


@functools.cache
def _is_array_type(kind: Any) -> bool:
  return issubclass(kind, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))


def _key(entry: Any) -> Any:
  for name in ('key', 'name', 'idx'):
    if hasattr(entry, name):
      return getattr(entry, name)
  return entry
