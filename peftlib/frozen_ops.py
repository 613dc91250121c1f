"""The base model's ops as adapter methods get them."""

from collections.abc import Callable, Mapping, Sequence
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from peftlib import contractions
from peftlib import slots as slots_lib
from peftlib import weight_ops
from peftlib.methods import method as method_lib

Using = Callable[[jax.Array, jax.Array], jax.Array]


class InTwo(NamedTuple):
  """The op with the weight `a @ b`, as two ops.

  Attributes:
    down: From (x, a, b) to (..., r).
    up: From (what `down` made, a, b) to (..., columns).
  """

  down: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
  up: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class _Update(NamedTuple):
  """What an adapter of low rank adds to the output.

  Attributes:
    a: (rows, r).
    b: (r, columns).
    gate: Bool, one a row.
    label: Of the weight, for messages.
  """

  a: jax.Array
  b: jax.Array
  gate: jax.Array
  label: str


class Op:
  """A frozen op of one call; see `methods.FrozenOp`."""

  def __init__(
    self,
    x: jax.Array,
    y: jax.Array,
    weight: Callable[[], jax.Array],
    using: Using,
    in_two: InTwo | None,
    plain: bool,
  ) -> None:
    """Notes what the op is.

    Args:
      x: Its input.
      y: What it makes of it.
      weight: Makes the dense weight, when it is asked for.
      using: The op with another weight.
      in_two: The op with a weight in two factors; None where it needs the
        product.
      plain: Whether `x @ weight` is what it computes.
    """
    self._x = x
    self._y = y
    self._weight = weight
    self._using = using
    self._in_two = in_two
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
    if self._in_two is None:
      return self._using(a @ b, x)
    return self._in_two.up(self._in_two.down(x, a, b), a, b)

  def dropout(self, x: jax.Array) -> jax.Array:
    """`x` with elements dropped where dropout is on."""
    if self._key is None or not jnp.issubdtype(x.dtype, jnp.inexact):
      return x
    keep = jax.random.bernoulli(self._key, 1.0 - self._rate, x.shape)
    return jnp.where(keep, x / (1.0 - self._rate), jnp.zeros_like(x))

  def adapted(
    self, slots: Sequence[slots_lib.Slot], values: Sequence[slots_lib.Values]
  ) -> 'Op':
    """The op that base and adapters are together."""
    op = self
    updates = [
      None if self._in_two is None else _update(slot, value)
      for slot, value in zip(slots, values, strict=True)
    ]
    # Low-rank updates of one input add up: neighbours are one product. Where
    # adapters are on for all rows each stays apart, to the last bit what it is
    # alone.
    for low_rank, group in itertools.groupby(
      zip(slots, values, updates, strict=True), lambda one: one[2] is not None
    ):
      members = list(group)
      if low_rank:
        known = [update for *_, update in members if update is not None]
        op = op._after(functools.partial(op._with_updates, known))
        continue
      for slot, value, _ in members:
        op = op._after(op._with_one(slot, value))
    return op

  def _after(self, call: Callable[[jax.Array], jax.Array]) -> 'Op':
    """The op that computes `call`."""
    out = self._copy()
    out._y, out._other = call(self._x), call
    return out

  def _copy(self) -> 'Op':
    out = Op(
      self._x, self._y, self._weight, self._using, self._in_two, self._plain
    )
    out._other = self._other
    return out

  def _with_one(
    self, slot: slots_lib.Slot, values: slots_lib.Values
  ) -> Callable[[jax.Array], jax.Array]:
    own = self._copy()
    own._rate, own._key = slot.method.dropout, values.key
    apply = slot.method.apply
    if slot.method.linear_apply and not self._plain:
      apply = functools.partial(method_lib.Method.apply, slot.method)

    def call(x: jax.Array) -> jax.Array:
      before = own(x)
      after = apply(x, own, values.variables).astype(before.dtype)
      if values.gate is None:
        return after
      gate = _spread(values.gate, after, slot.op.label)
      return jnp.where(gate, after, before)

    return call

  def _with_updates(
    self, updates: Sequence[_Update], x: jax.Array
  ) -> jax.Array:
    assert self._in_two is not None
    before = self(x)
    # Variables can be of dtypes that promote to no common one.
    floating = jnp.issubdtype(x.dtype, jnp.inexact)
    dtype = x.dtype if floating else before.dtype
    factors = []
    for update in updates:
      # Nothing of an adapter that no row has comes through, NaN included.
      on = update.gate.any()
      pair = (update.a.astype(dtype), update.b.astype(dtype))
      factors.append([jnp.where(on, factor, 0) for factor in pair])
    a = jnp.concatenate([a for a, _ in factors], axis=-1)
    b = jnp.concatenate([b for _, b in factors])
    inner = self._in_two.down(x, a, b)
    mask = [
      jnp.repeat(_spread(u.gate, inner, u.label), len(u.b), axis=-1)
      for u in updates
    ]
    inner = jnp.where(jnp.concatenate(mask, axis=-1), inner, 0)
    return before + self._in_two.up(inner, a, b).astype(before.dtype)


def _update(slot: slots_lib.Slot, values: slots_lib.Values) -> _Update | None:
  """What the adapter adds, where rows have it and it is `x @ a @ b`."""
  if values.gate is None or not values.gate.ndim:
    return None
  method = slot.method
  # What a class says of its `apply` isn't true of a subclass's own.
  cls = next(c for c in type(method).__mro__ if 'apply' in vars(c))
  if 'factors' not in vars(cls) or (values.key is not None and method.dropout):
    return None
  factors = method.factors(values.variables)
  if factors is None:
    return None
  return _Update(*factors, values.gate, slot.op.label)


def _spread(gate: jax.Array, like: jax.Array, label: str) -> jax.Array:
  """The gate as something that broadcasts against `like`."""
  if not gate.ndim:
    return gate
  # Models flatten (batch, length) to one axis before their linear layers.
  rows, leading = gate.shape[0], like.shape[0] if like.ndim > 1 else 0
  if not leading or leading % rows:
    raise ValueError(
      f'peftlib: {label} is used on {leading} rows, the adapters were'
      f' assigned to a batch of {rows}; the first axis of the input has to'
      ' be the batch, or batch and length as one.'
    )
  gate = jnp.repeat(gate, leading // rows)
  return gate.reshape(leading, *(1,) * (like.ndim - 1))


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
    dot_narrow = functools.partial(contractions.dot_narrow, precision=precision)
    if swapped:
      using = lambda w, x: dot(x, w.T)
      down = lambda x, a, b: dot_narrow(x, b.T)
      up = lambda inner, a, b: dot(inner, a.T)
    else:
      using = lambda w, x: dot(x, w)
      down = lambda x, a, b: dot_narrow(x, a)
      up = lambda inner, a, b: dot(inner, b)
    frozen = Op(x, y, matrix, using, InTwo(down, up), not swapped)
    return frozen.adapted(slots, values)(x)

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

  # The kernel of r channels first, then a 1x1 map to the output's.
  def down(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    kernel = a.reshape(*op.weight.inputs, a.shape[-1]).astype(x.dtype)
    return convolve(x, kernel)

  up = lambda inner, a, b: contractions.dot(inner, b)
  in_two = InTwo(down, up) if channels_last else None
  return _run(slots, values, x, y, weight, stored, using, in_two)


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
  in_two = InTwo(
    lambda ids, a, b: look_up(a.astype(y.dtype), ids),
    lambda inner, a, b: contractions.dot(inner, b),
  )
  return _run(slots, values, ids, y, weight, stored, look_up, in_two)


def _run(
  slots: tuple[slots_lib.Slot, ...],
  values: list[slots_lib.Values],
  x: jax.Array,
  y: jax.Array,
  weight: Callable[[Any], jax.Array],
  stored: Any,
  using: Using,
  in_two: InTwo | None,
) -> jax.Array:
  op = slots[0].op
  frozen = Op(x, y, lambda: op.to_matrix(weight(stored)), using, in_two, False)
  values = [_as_matrices(s, v) for s, v in zip(slots, values, strict=True)]
  return frozen.adapted(slots, values)(x)


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
