"""What an adapter method is: four functions of one weight seen as a matrix."""

import abc
from collections.abc import Mapping
import dataclasses
import difflib
import math
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

INPUTS = 'inputs'
OUTPUTS = 'outputs'

Variables = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Weight:
  """One layer's weight: a matrix from inputs to outputs, whatever its axes.

  Attributes:
    inputs: Extents of the axes that the op sums over: (in,) of a linear layer,
      (height, width, channels / groups) of a convolution, (rows,) of an
      embedding.
    outputs: Extents of the axes that it adds to the result.
    kind: 'linear' for any dot_general, matmul or einsum, 'conv', or
      'embedding' for a lookup of rows.
    label: What error messages call it, e.g. 'layers/q_proj.kernel'.
  """

  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  kind: Literal['linear', 'conv', 'embedding'] = 'linear'
  label: str = 'weight'

  @property
  def rows(self) -> int:
    """Number of inputs: rows of the matrix."""
    return math.prod(self.inputs)

  @property
  def columns(self) -> int:
    """Number of outputs: columns of the matrix."""
    return math.prod(self.outputs)


class VariableSpec(NamedTuple):
  """What one variable of a method looks like.

  Attributes:
    axes: For each axis its extent, or `INPUTS` / `OUTPUTS` for the inputs and
      outputs of the weight. Those are one axis for the method's functions; the
      variable in the State has the weight's own axes there, so that their
      sharding carries over.
    trainable: Whether the optimizer may move it.
    dtype: Its dtype; None is the method's.
  """

  axes: tuple[int | str, ...]
  trainable: bool = True
  dtype: str | None = None

  def shape(self, weight: Weight) -> tuple[int, ...]:
    """The shape with which the method's functions see it."""
    extents = {INPUTS: weight.rows, OUTPUTS: weight.columns}
    return tuple(
      extents[axis] if isinstance(axis, str) else axis for axis in self.axes
    )


class FrozenOp(Protocol):
  """The op of the base model, as `Method.apply` gets it."""

  @property
  def weight(self) -> jax.Array:
    """The weight, (rows, columns), dequantized, in the dtype of the input."""

  def __call__(self, x: jax.Array) -> jax.Array:
    """What the model computes without this adapter: (..., columns)."""

  def using(self, weight: jax.Array, x: jax.Array) -> jax.Array:
    """The same op on `x` with another weight of (rows, columns)."""

  def low_rank(self, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """The op with the weight `a @ b`, which is never formed.

    Args:
      x: The op's input.
      a: (rows, r); cast to the dtype of `x`.
      b: (r, columns); cast to the dtype of `x`.
    """

  def dropout(self, x: jax.Array) -> jax.Array:
    """`x` with elements dropped in training, as it is otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
  """An adapter method: which variables a weight gets and what they do.

  A subclass is a frozen, hashable dataclass of hyperparameters, since it is
  part of what identifies a graphdef. It has to define `name`, `variables`,
  `init` and `merge`; `apply` computes with the merged weight unless a cheaper
  way is given. All functions are pure and see one layer of one weight: the
  stack of a scan and the batch axes of expert weights are mapped outside.

  Example:
    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Shift(Method):
    ...   name = 'shift'
    ...
    ...   def variables(self, weight):
    ...     return {'shift': VariableSpec((OUTPUTS,))}
    ...
    ...   def init(self, key, weight, value):
    ...     return {'shift': jnp.zeros(weight.columns)}
    ...
    ...   def merge(self, value, v):
    ...     return value + v['shift'].astype(value.dtype)

  Attributes:
    name: Name in the registry.
    linear_apply: Whether `apply` computes with `x @ ...` and so is for linear
      ops alone; convolutions and embeddings then use the merged weight.
    reads_weight: Whether `apply` reads `op.weight`. Over a quantized base it
      is then computed anew in the backward pass, so that no dense weight is
      kept for it.
    starts_from_weight: Whether `init` reads the weight's value; it gets zeros
      otherwise.
    residual: Whether the start is what the variables leave over: the frozen
      weight W becomes W - (merge(W) - W), so that the output is unchanged at
      the start although the update isn't zero (PiSSA, OLoRA).
    dropout: Probability with which an element of the adapter's input is zeroed
      in training, in [0, 1).
    dtype: Floating-point dtype of the variables, whatever the base's is.
  """

  name: ClassVar[str]
  linear_apply: ClassVar[bool] = False
  reads_weight: ClassVar[bool] = True
  starts_from_weight: ClassVar[bool] = True

  dropout: float = 0.0
  dtype: str = 'float32'

  def __post_init__(self) -> None:
    check_field(
      self,
      'dropout',
      is_number(self.dropout) and 0 <= self.dropout < 1,
      'a number in [0, 1)',
    )
    check_field(
      self, 'dtype', is_float_dtype(self.dtype), 'a floating-point dtype'
    )

  @property
  def residual(self) -> bool:
    """Whether the frozen weight becomes what the variables leave over."""
    return False

  def check(self, weight: Weight) -> None:  # noqa: B027  # Optional.
    """Raises ValueError, naming `weight.label`, where it can't be adapted."""

  def check_merge(self, weight: Weight) -> None:  # noqa: B027  # Optional.
    """Raises ValueError where no weight does what the adapter does."""

  @abc.abstractmethod
  def variables(self, weight: Weight) -> dict[str, VariableSpec]:
    """Returns the variables that the weight gets, by name."""

  @abc.abstractmethod
  def init(
    self, key: jax.Array, weight: Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """Returns the variables at the start.

    Args:
      key: PRNG key of this layer.
      weight: What the weight is.
      value: Its value, (rows, columns) in f32.
    """

  @abc.abstractmethod
  def merge(self, value: jax.Array, v: Variables) -> jax.Array:
    """Returns the weight that does in one what base and adapter do.

    Args:
      value: The base's weight, (rows, columns).
      v: The variables.
    """

  def apply(self, x: jax.Array, op: FrozenOp, v: Variables) -> jax.Array:
    """Returns the op's output with the adapter: (..., columns).

    Args:
      x: The op's input, (..., rows); ids of an embedding; images of a
        convolution. To be handed on to `op` or its functions.
      op: The op of the base model.
      v: The variables.
    """
    weight, dropped = op.weight, op.dropout(x)
    merged = self.merge(weight, v)
    if dropped is x:
      return op.using(merged, x)
    return op(x) + op.using(merged - weight, dropped)

  def factors(self, v: Variables) -> tuple[jax.Array, jax.Array] | None:
    """Returns the update in two factors, where it has low rank.

    For a method whose `apply` is `op(x) + op.low_rank(op.dropout(x), a, b)`:
    adapters that rows of a batch have are then computed as one. Not asked
    where a subclass has an `apply` and no `factors` of its own.

    Args:
      v: The variables.

    Returns:
      (rows, r) and (r, columns), or None: `apply` does something else.
    """
    del v
    return None


_METHODS: dict[str, type[Method]] = {}


def register(method: type[Method]) -> type[Method]:
  """Makes a method known by its name; use it as a class decorator.

  Raises:
    ValueError: If another class has the name.
  """
  other = _METHODS.setdefault(method.name, method)
  if (other.__module__, other.__qualname__) != (
    method.__module__,
    method.__qualname__,
  ):
    raise ValueError(
      f'peftlib.methods: the name {method.name!r} belongs to'
      f' {other.__qualname__} already; give {method.__qualname__} another one.'
    )
  _METHODS[method.name] = method
  return method


def registry() -> dict[str, type[Method]]:
  """The registered methods by name, sorted."""
  return dict(sorted(_METHODS.items()))


def by_name(name: str) -> type[Method]:
  """The method of this name.

  Raises:
    ValueError: If there is none; the text has the nearest names.
  """
  if name in _METHODS:
    return _METHODS[name]
  near = difflib.get_close_matches(name, _METHODS, n=3, cutoff=0.4)
  raise ValueError(
    f'peftlib.methods: there is no method {name!r}; nearest:'
    f' {near or sorted(_METHODS)}.'
  )


def check_field(method: Any, field: str, ok: bool, right: str) -> None:
  """Raises ValueError naming class, field and value unless `ok`."""
  if not ok:
    raise ValueError(
      f'{type(method).__name__}.{field}={getattr(method, field)!r}: must be'
      f' {right}.'
    )


def check_argument(
  function: str, name: str, given: Any, ok: bool, right: str
) -> None:
  """Raises ValueError naming a function's argument and value unless `ok`."""
  if not ok:
    raise ValueError(f'{function}: {name}={given!r} must be {right}.')


def check_positive(method: Any, field: str) -> None:
  """Raises ValueError unless the field is a whole number above zero."""
  value = getattr(method, field)
  check_field(method, field, is_int(value) and value >= 1, 'an int >= 1')


def check_scale(method: Any, field: str) -> None:
  """Raises ValueError unless the field is a finite number above zero."""
  value = getattr(method, field)
  check_field(
    method, field, is_number(value) and value > 0, 'a finite number > 0'
  )


def check_no_dropout(method: Any) -> None:
  """Raises ValueError if a method that drops nothing is asked to."""
  check_field(
    method, 'dropout', method.dropout == 0, '0: the method has no dropout'
  )


def is_int(x: Any) -> bool:
  """Whether `x` is a whole number and not a bool."""
  return isinstance(x, int) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
  """Whether `x` is a finite number and not a bool."""
  return (
    isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
  )


def is_float_dtype(x: Any) -> bool:
  """Whether `x` names a floating-point dtype."""
  try:
    return jnp.issubdtype(jnp.dtype(x), jnp.floating)
  except TypeError:
    return False
