"""The base model's ops as adapter methods get them."""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp

from peftlib import contractions
from peftlib import slots as slots_lib
from peftlib import weight_ops
from peftlib.methods import method as method_lib

Using = Callable[[jax.Array, jax.Array], jax.Array]
LowRank = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Op:
  """A frozen op of one call; see `methods.FrozenOp`."""

  def __init__(
    self,
    x: jax.Array,
    y: jax.Array,
    weight: Callable[[], jax.Array],
    using: Using,
    low_rank: LowRank,
    plain: bool,
  ) -> None:
    """Notes what the op is.

    Args:
      x: Its input.
      y: What it makes of it.
      weight: Makes the dense weight, when it is asked for.
      using: The op with another weight.
      low_rank: The op with a weight in two factors.
      plain: Whether `x @ weight` is what it computes.
    """
    self._x = x
    self._y = y
    self._weight = weight
    self._using = using
    self._low_rank = low_rank
    self._plain = plain
    self._rate = 0.0
    self._key: jax.Array | None = None
    # What the adapters so far make of another input than `x`.
    self._other = lambda x: using(weight(), x)

  @property
  def weight(self) -> jax.Array:
    """The dense weight."""
    return self._weight()

  def __call__(self, x: jax.Array) -> jax.Array:
    """What base and earlier adapters make of `x`."""
    return self._y if x is self._x else self._other(x).astype(self._y.dtype)

  def using(self, weight: jax.Array, x: jax.Array) -> jax.Array:
    """The op with another weight."""
    return self._using(weight, x).astype(self._y.dtype)

  def low_rank(self, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """The op with the weight `a @ b`."""
    return self._low_rank(x, a, b)

  def dropout(self, x: jax.Array) -> jax.Array:
    """`x` with elements dropped where dropout is on."""
    if self._key is None or not jnp.issubdtype(x.dtype, jnp.inexact):
      return x
    keep = jax.random.bernoulli(self._key, 1.0 - self._rate, x.shape)
    return jnp.where(keep, x / (1.0 - self._rate), jnp.zeros_like(x))

  def adapted(self, slot: slots_lib.Slot, values: slots_lib.Values) -> 'Op':
    """The op that base and adapter are together."""
    own = Op(
      self._x,
      self._y,
      self._weight,
      self._using,
      self._low_rank,
      self._plain,
    )
    own._other = self._other
    own._rate, own._key = slot.method.dropout, values.key
    apply = slot.method.apply
    if slot.method.linear_apply and not self._plain:
      apply = functools.partial(method_lib.Method.apply, slot.method)

    def call(x: jax.Array) -> jax.Array:
      before = own(x)
      after = apply(x, own, values.variables).astype(before.dtype)
      return _gated(values.gate, after, before, slot.op.label)

    out = Op(
      self._x,
      call(self._x),
      self._weight,
      self._using,
      self._low_rank,
      self._plain,
    )
    out._other = call
    return out


def _gated(
  gate: jax.Array | None, on: jax.Array, off: jax.Array, label: str
) -> jax.Array:
  if gate is None:
    return on
  if gate.ndim == 1:
    # Models flatten (batch, length) to one axis before their linear layers.
    rows, leading = gate.shape[0], on.shape[0] if on.ndim > 1 else 0
    if not leading or leading % rows:
      raise ValueError(
        f'peftlib: {label} is used on {leading} rows, the adapters were'
        f' assigned to a batch of {rows}; the first axis of the input has to'
        ' be the batch, or batch and length as one.'
      )
    gate = jnp.repeat(gate, leading // rows)
    gate = gate.reshape(leading, *(1,) * (on.ndim - 1))
  return jnp.where(gate, on, off)


def contracted(
  slots: tuple[slots_lib.Slot, ...],
  values: list[slots_lib.Values],
  contraction: contractions.Contraction,
  x: jax.Array,
  y: jax.Array,
  weight: Callable[[Any], jax.Array],
  stored: Any,
  precision: Any,
  quantized: bool,
) -> jax.Array:
  """What the adapters make of a contraction.

  Args:
    slots: The adapters of the weight, all of one `op`.
    values: Their arrays.
    contraction: The subscripts of this call, on the axes of `op.shape`.
    x: The activation.
    y: The base's result.
    weight: Makes the dense weight of `op.shape` from `stored`.
    stored: The weight as it is kept.
    precision: Of the matrix products.
    quantized: Whether `stored` is.
  """
  op = slots[0].op
  swapped = contraction.axes(contraction.contracted) != op.inputs

  def run(
    x: jax.Array,
    y: jax.Array,
    matrix: Callable[[], jax.Array],
    values: list[slots_lib.Values],
  ) -> jax.Array:
    dot = functools.partial(contractions.dot, precision=precision)
    if swapped:
      using = lambda w, x: dot(x, w.T)
      low_rank = lambda x, a, b: dot(dot(x, b.T), a.T)
    else:
      using = lambda w, x: dot(x, w)
      low_rank = lambda x, a, b: dot(dot(x, a), b)
    frozen = Op(x, y, matrix, using, low_rank, not swapped)
    for slot, value in zip(slots, values, strict=True):
      frozen = frozen.adapted(slot, value)
    return frozen(x)

  def all_of_it(
    x: jax.Array, y: jax.Array, stored: Any, values: list[slots_lib.Values]
  ) -> jax.Array:
    matrix = lambda: op.to_matrix(weight(stored)).astype(x.dtype)
    x, y = contraction.x_matrix(x), contraction.y_matrix(y)
    values = [_as_matrices(s, v) for s, v in zip(slots, values, strict=True)]
    if not op.batch:
      return run(x, y, matrix, values)
    run_batched = lambda x, y, w, v: run(x, y, lambda: w, v)
    axes: Any = [(dict.fromkeys(v.variables, 0), None, None) for v in values]
    axes = [slots_lib.Values(*own) for own in axes]
    for _ in op.batch:
      run_batched = jax.vmap(run_batched, in_axes=(0, 0, 0, axes))
    return run_batched(x, y, matrix(), values)

  if quantized and any(slot.method.reads_weight for slot in slots):
    # Kept, the dense weights of all layers of a scan would be residuals.
    all_of_it = jax.checkpoint(all_of_it)
  out = all_of_it(x, y, stored, values)
  return contraction.y_from_matrix(out, op.shape)


def convolved(
  slots: tuple[slots_lib.Slot, ...],
  values: list[slots_lib.Values],
  convolve: Callable[[jax.Array, jax.Array], jax.Array],
  channels_last: bool,
  x: jax.Array,
  y: jax.Array,
  weight: Callable[[Any], jax.Array],
  stored: Any,
) -> jax.Array:
  """What the adapters make of a convolution.

  Args:
    slots: The adapters of the kernel.
    values: Their arrays.
    convolve: The convolution with a kernel of `op.shape`.
    channels_last: Whether the result has its channels last, and all channels
      see all inputs.
    x: The images.
    y: The base's result.
    weight: Makes the dense kernel from `stored`.
    stored: The kernel as it is kept.
  """
  op = slots[0].op

  def using(matrix: jax.Array, x: jax.Array) -> jax.Array:
    return convolve(x, op.from_matrix(matrix).astype(x.dtype))

  def low_rank(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    if not channels_last:
      return using(a @ b, x)
    # The kernel of r channels first, then a 1x1 map to the output's.
    kernel = a.reshape(*op.weight.inputs, a.shape[-1]).astype(x.dtype)
    return contractions.dot(convolve(x, kernel), b)

  return _run(slots, values, x, y, weight, stored, using, low_rank)


def looked_up(
  slots: tuple[slots_lib.Slot, ...],
  values: list[slots_lib.Values],
  look_up: Callable[[jax.Array, jax.Array], jax.Array],
  ids: jax.Array,
  y: jax.Array,
  weight: Callable[[Any], jax.Array],
  stored: Any,
) -> jax.Array:
  """What the adapters make of a lookup of rows.

  Args:
    slots: The adapters of the table.
    values: Their arrays.
    look_up: The lookup in a given table of (rows, columns).
    ids: Which rows.
    y: The base's result.
    weight: Makes the dense table from `stored`.
    stored: The table as it is kept.
  """

  def low_rank(ids: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return contractions.dot(look_up(a.astype(y.dtype), ids), b)

  return _run(slots, values, ids, y, weight, stored, look_up, low_rank)


def _run(
  slots: tuple[slots_lib.Slot, ...],
  values: list[slots_lib.Values],
  x: jax.Array,
  y: jax.Array,
  weight: Callable[[Any], jax.Array],
  stored: Any,
  using: Using,
  low_rank: LowRank,
) -> jax.Array:
  op = slots[0].op
  frozen = Op(
    x, y, lambda: op.to_matrix(weight(stored)), using, low_rank, False
  )
  for slot, value in zip(slots, values, strict=True):
    frozen = frozen.adapted(slot, _as_matrices(slot, value))
  return frozen(x)


def _as_matrices(
  slot: slots_lib.Slot, values: slots_lib.Values
) -> slots_lib.Values:
  """The variables in the shapes that the method's functions know."""
  return values._replace(
    variables=as_matrices(slot.op, slot.variables, values.variables)
  )


def as_matrices(
  op: weight_ops.WeightOp,
  specs: Mapping[str, method_lib.VariableSpec],
  variables: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
  """One layer's variables as (*batch, *spec.shape)."""
  return {
    name: value.reshape(*op.batch_shape, *specs[name].shape(op.weight))
    for name, value in variables.items()
  }
