"""What is known of a weight that takes part in an op, and where it is kept."""

from collections.abc import Iterator
import dataclasses
import math
from typing import Any, Literal

from flax import nnx
import jax

from peftlib.methods import method as method_lib

# One step on the way from a variable to an op: a transpose's permutation, or
# the shape that a reshape gave it.
Step = tuple[Literal['transpose', 'reshape'], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class WeightOp:
  """One weight that takes part in an op, seen in an abstract forward pass.

  Attributes:
    path: Path of the module that holds the weight.
    name: Attribute under which the module holds it; 'weights/0' is the first
      one of an `nnx.List` called 'weights'.
    kind: 'dot_general', 'einsum', 'conv' or 'embedding'.
    shape: One layer's shape. It is the variable's unless the weight was
      reshaped on the way to the op, then the op's.
    batch: Axes of `shape` that batch the op, e.g. that of experts.
    inputs: Axes that are summed over.
    outputs: Axes that the weight adds to the result.
    dtype: Dtype with which it takes part.
    route: What reshaped it on the way to the op; () where nothing did.
    exact: Whether the op used it as it is: neither reshaped nor transposed.
  """

  path: tuple[Any, ...]
  name: str
  kind: str
  shape: tuple[int, ...]
  batch: tuple[int, ...]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  dtype: Any
  route: tuple[Step, ...]
  exact: bool

  @property
  def module_path(self) -> str:
    """The path of the module as a rule's pattern matches it."""
    return '/'.join(map(str, self.path))

  @property
  def label(self) -> str:
    """How error messages call the weight."""
    return f'{self.module_path}.{self.name}' if self.path else self.name

  @property
  def form(self) -> str:
    """How error messages call the op."""
    batched = f', batched over {self.batch}' if self.batch else ''
    return f'{self.kind} summing over axes {self.inputs}{batched}'

  @property
  def weight(self) -> method_lib.Weight:
    """The weight as a method sees it."""
    return method_lib.Weight(
      tuple(self.shape[i] for i in self.inputs),
      tuple(self.shape[i] for i in self.outputs),
      self.kind if self.kind in ('conv', 'embedding') else 'linear',  # type: ignore[arg-type]
      self.label,
    )

  @property
  def batch_shape(self) -> tuple[int, ...]:
    """Extents of the batch axes."""
    return tuple(self.shape[i] for i in self.batch)

  @property
  def contracted_width(self) -> int:
    """Extent of the innermost contracted axis: the one that is tiled."""
    return self.shape[self.inputs[-1]] if self.inputs else 1

  def variable_axes(
    self, spec: method_lib.VariableSpec
  ) -> tuple[tuple[int, int | None], ...]:
    """Extent and source axis of each axis of a method's variable.

    The axes of a dot_general's weight that are contracted together are one
    axis of the variable, as qwix has it, whose source is the first of them;
    an einsum's stay apart.
    """
    axes: list[tuple[int, int | None]] = [
      (self.shape[i], i) for i in self.batch
    ]
    groups = {
      method_lib.INPUTS: self.inputs,
      method_lib.OUTPUTS: self.outputs,
    }
    for axis in spec.axes:
      if not isinstance(axis, str):
        axes.append((axis, None))
      elif self.kind == 'dot_general':
        sources = groups[axis]
        axes.append(
          (
            math.prod(self.shape[i] for i in sources),
            sources[0] if sources else None,
          )
        )
      else:
        axes.extend((self.shape[i], i) for i in groups[axis])
    return tuple(axes)

  def variable_shape(self, spec: method_lib.VariableSpec) -> tuple[int, ...]:
    """One layer's shape of a method's variable."""
    return tuple(extent for extent, _ in self.variable_axes(spec))

  def to_matrix(self, weight: jax.Array) -> jax.Array:
    """`weight` of `shape` as (*batch, rows, columns)."""
    weight = weight.transpose(*self.batch, *self.inputs, *self.outputs)
    return weight.reshape(
      *self.batch_shape, self.weight.rows, self.weight.columns
    )

  def from_matrix(self, matrix: jax.Array) -> jax.Array:
    """What `to_matrix` did, undone."""
    order = (*self.batch, *self.inputs, *self.outputs)
    split = matrix.reshape([self.shape[i] for i in order])
    return split.transpose([order.index(i) for i in range(len(order))])

  def from_variable(self, value: jax.Array) -> jax.Array:
    """One layer's variable in the `shape` of the op."""
    for kind, how in self.route:
      value = (
        value.transpose(how) if kind == 'transpose' else value.reshape(how)
      )
    return value

  def to_variable(self, value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """What `from_variable` did, undone; `shape` is the variable's."""
    shapes = [shape]
    for kind, how in self.route:
      last = shapes[-1]
      shapes.append(
        tuple(last[i] for i in how) if kind == 'transpose' else tuple(how)
      )
    for (kind, how), before in zip(
      reversed(self.route), reversed(shapes[:-1]), strict=True
    ):
      if kind == 'transpose':
        value = value.transpose([how.index(i) for i in range(len(how))])
      else:
        value = value.reshape(before)
    return value


def weights_of(module: nnx.Module) -> Iterator[tuple[str, Any]]:
  """Names and nodes of the variables that a module holds by itself.

  Those in lists and dicts of the module are its own too; their names have the
  index or key after a slash.
  """
  for name, node in vars(module).items():
    if not name.startswith('_pytree__'):
      yield from _within(name, node)


def _within(name: str, node: Any) -> Iterator[tuple[str, Any]]:
  if isinstance(node, nnx.List):
    for i, element in enumerate(node):
      yield from _within(f'{name}/{i}', element)
  elif isinstance(node, nnx.Dict | dict):
    for key, element in node.items():
      yield from _within(f'{name}/{key}', element)
  elif isinstance(node, list | tuple):
    for i, element in enumerate(node):
      yield from _within(f'{name}/{i}', element)
  elif not isinstance(node, nnx.Module):
    yield name, node


def get_weight(module: nnx.Module, name: str) -> Any:
  """The node that `weights_of` gives under this name."""
  first, *rest = name.split('/')
  node = getattr(module, first)
  for part in rest:
    node = _element(node, part)
  return node


def set_weight(module: nnx.Module, name: str, node: Any) -> None:
  """Puts a node in the place of the one of this name."""
  *front, last = name.split('/')
  if not front:
    _set_attribute(module, last, node)
    return
  holder = get_weight(module, '/'.join(front))
  if isinstance(holder, tuple):
    # Which can't be changed: a new one takes its place.
    items = list(holder)
    items[int(last)] = node
    made = holder._make(items) if hasattr(holder, '_make') else tuple(items)
    set_weight(module, '/'.join(front), made)
  else:
    holder[_key(holder, last)] = node


def _set_attribute(module: nnx.Module, name: str, node: Any) -> None:
  # A tuple that holds variables is data only if it is said to be.
  setattr(module, name, nnx.data(node) if isinstance(node, tuple) else node)


def _element(node: Any, part: str) -> Any:
  return node[_key(node, part)]


def _key(node: Any, part: str) -> Any:
  if isinstance(node, nnx.List | list | tuple):
    return int(part)
  return next((key for key in node if str(key) == part), part)
