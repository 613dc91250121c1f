"""Where a module keeps its adapters: a static list, and variables beside it."""

import dataclasses
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from peftlib import weight_ops
from peftlib.methods import method as method_lib

DEFAULT_ADAPTER = 'default'

_SLOTS = 'peft_slots'
_DROPOUT = 'adapter_dropout'


class AdapterConstant(nnx.Variable[Any]):
  """A variable of an adapter that isn't trained, e.g. VeRA's projections."""


class AdapterKey(nnx.RngKey):
  """PRNG key of one adapter's dropout, one per layer of a scanned stack."""


class AdapterGate(nnx.Variable[Any]):
  """Whether an adapter is on: bool, one per layer, or per layer and row.

  Beside a weight whose stack isn't its first axis it has as many axes as the
  weight, so that the axis that a scan takes is the same for both.
  """


@dataclasses.dataclass(frozen=True)
class Slot:
  """One adapter of one weight; static, so part of the graphdef.

  Attributes:
    adapter: Name of the adapter.
    index: Number of the rule that made it. Two rules can meet in one weight of
      a stack, each with layers of its own.
    method: The method and its hyperparameters.
    op: What the weight does.
    layers: The layers of the stack that have the adapter; None is all. The
      variables hold only those.
    axes: Extents of the axes of the stack; () for a weight that isn't in one.
    axis: Axis of the variables at which they are. Where it isn't the first,
      variables have at least as many axes as the weight: it is the same one
      counted from either end.
    gate_axis: The same for gate and dropout key, which a scan can slice by
      another axis than the parameters.
  """

  adapter: str
  index: int
  method: method_lib.Method
  op: weight_ops.WeightOp
  layers: tuple[int, ...] | None = None
  axes: tuple[int, ...] = ()
  axis: int = 0
  gate_axis: int = 0

  def attribute(self, variable: str) -> str:
    """Attribute of the module that holds a variable of the method.

    For the default adapter and LoRA they are qwix's: `kernel_lora_a`.
    """
    return self._prefix + variable + self._suffix

  @property
  def key(self) -> str:
    """Attribute that holds the dropout key."""
    return self.attribute('lora_key')

  @property
  def gate(self) -> str:
    """Attribute that holds the gate."""
    return self.attribute('adapter_gate')

  @property
  def _prefix(self) -> str:
    return f'{self.op.name.replace("/", "_")}_'

  @property
  def _suffix(self) -> str:
    adapter = '' if self.adapter == DEFAULT_ADAPTER else f'_{self.adapter}'
    return f'{adapter}_{self.index}' if self.index else adapter

  @property
  def variables(self) -> dict[str, method_lib.VariableSpec]:
    """The method's variables for this weight."""
    return self.method.variables(self.op.weight)

  def filled(self, ndim: int) -> int:
    """How many axes of extent 1 a variable of one layer has in front."""
    return max(0, len(self.op.shape) - ndim) if self.axis else 0

  def spread(self, value: jax.Array) -> jax.Array:
    """What is (*axes, *rows) in the layout of gates and dropout keys."""
    if not self.gate_axis:
      return value
    count = len(self.axes)
    rows = value.shape[count:]
    ones = (1,) * (len(self.op.shape) - len(rows))
    return jnp.moveaxis(
      value.reshape(*self.axes, *ones, *rows),
      range(count),
      range(self.gate_axis, self.gate_axis + count),
    )

  def gathered(self, value: jax.Array) -> jax.Array:
    """What `spread` did, undone; a single row is none."""
    if not self.gate_axis:
      return value
    count = len(self.axes)
    value = jnp.moveaxis(
      value, range(self.gate_axis, self.gate_axis + count), range(count)
    )
    return _without_fill(value, self.axes)

  @property
  def attributes(self) -> tuple[str, ...]:
    """All attributes that the adapter may have in the module."""
    return (*map(self.attribute, self.variables), self.key, self.gate)


class Values(NamedTuple):
  """The arrays of one slot in a forward pass.

  Attributes:
    variables: The method's, by name.
    key: PRNG key of the dropout, or None where it is off.
    gate: Bool scalar or one a row, or None: on.
  """

  variables: dict[str, jax.Array]
  key: jax.Array | None
  gate: jax.Array | None


def of_module(module: nnx.Module) -> tuple[Slot, ...]:
  """The adapters of a module's weights, in the order of injection."""
  return getattr(module, _SLOTS, ())


def of_model(model: nnx.Module) -> list[tuple[nnx.Module, Slot]]:
  """Every adapter of every module."""
  return [
    (module, slot)
    for _, module in nnx.iter_modules(model)
    for slot in of_module(module)
  ]


def names_of(model: nnx.Module) -> list[str]:
  """Names of the adapters in a model, in the order of injection."""
  return list(dict.fromkeys(slot.adapter for _, slot in of_model(model)))


def put(module: nnx.Module, slots: tuple[Slot, ...]) -> None:
  """Sets the list of a module's adapters; an empty one leaves no trace."""
  if slots:
    setattr(module, _SLOTS, slots)
  else:
    for name in (_SLOTS, _DROPOUT):
      if hasattr(module, name):
        delattr(module, name)


def values_of(module: nnx.Module, slot: Slot, *, whole: bool = False) -> Values:
  """Reads the arrays of one adapter.

  Args:
    module: What holds them.
    slot: The adapter.
    whole: Whether the module has all layers of the stack, and not the one that
      a scan has taken off. Gates then are (*axes, *rows).

  Raises:
    ValueError: If a scan has taken no layer off the gate or key.
  """
  variables = {
    name: getattr(module, slot.attribute(name)).get_value()
    for name in slot.variables
  }
  key = getattr(module, slot.key, None)
  gate = getattr(module, slot.gate, None)
  if key is not None and not getattr(module, _DROPOUT, False):
    key = None
  read = slot.gathered if whole else lambda value: _of_one_layer(slot, value)
  return Values(
    variables,
    None if key is None else read(key.get_value()),
    None if gate is None else read(gate.get_value()),
  )


def _of_one_layer(slot: Slot, value: jax.Array) -> jax.Array:
  if not slot.gate_axis:
    return value
  if value.ndim != len(slot.op.shape):
    raise ValueError(
      f'peftlib: {slot.op.label} is one layer of a stack, but the gate or'
      f' dropout key of its adapter {slot.adapter!r} has all,'
      f' {list(value.shape)}; scan it along axis {slot.gate_axis}.'
    )
  return _without_fill(value, ())


def _without_fill(value: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  rows = value.size // math.prod(axes)
  return value.reshape(*axes, *((rows,) if rows > 1 else ()))


def set_dropout(model: nnx.Module, active: bool) -> None:
  """Turns adapter dropout on or off in a merged model of the caller's own."""
  model.set_attributes(**{_DROPOUT: active}, raise_if_not_found=False)


def mark_dropout(module: nnx.Module) -> None:
  """Gives a module the static flag that `set_dropout` sets; off at first."""
  setattr(module, _DROPOUT, False)


def expanded(
  value: jax.Array, *, layers: tuple[int, ...], stack: int, axis: int
) -> jax.Array:
  """A variable of some layers as one of all, with zeros for the others."""
  shape = (*value.shape[:axis], stack, *value.shape[axis + 1 :])
  index = (slice(None),) * axis + (jnp.asarray(layers),)
  return jnp.zeros(shape, value.dtype).at[index].set(value)


def expand_layers(model: nnx.Module) -> list[tuple[nnx.Module, str, Any]]:
  """Gives all layers of each stack a variable, as its scan needs it.

  Args:
    model: A merged model; changed in place.

  Returns:
    What was there before, for `restore_layers`.
  """
  before = []
  for module, slot in of_model(model):
    if slot.layers is None:
      continue
    for name in map(slot.attribute, slot.variables):
      variable = getattr(module, name)
      before.append((module, name, variable))
      value = expanded(
        variable.get_value(),
        layers=slot.layers,
        stack=slot.axes[0],
        axis=slot.axis,
      )
      # Not by setattr, which nnx refuses in a trace that is not the module's.
      vars(module)[name] = type(variable).from_metadata(
        value, variable.get_metadata()
      )
  return before


def restore_layers(before: list[tuple[nnx.Module, str, Any]]) -> None:
  """Undoes `expand_layers`."""
  for module, name, variable in before:
    vars(module)[name] = variable
