"""What the starts share: slots, gradients of them, all layers at once."""

from collections.abc import Callable, Iterable
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlib import _checks
from peftlib import interception
from peftlib import slots as slots_lib
from peftlib import training
from peftlib import weight_ops
from peftlib.methods import lora


def merged(
  what: str,
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  adapter: str,
) -> nnx.Module:
  _checks.check_split(what, graphdef, state)
  model: nnx.Module = nnx.merge(graphdef, state, copy=True)
  names = slots_lib.names_of(model)
  if adapter not in names:
    raise ValueError(
      f'{what}: adapter={adapter!r}: the model has {names or "no adapters"}.'
    )
  return model


def slots_of(
  what: str, model: nnx.Module, adapter: str
) -> list[tuple[nnx.Module, Any]]:
  found = [
    (module, slot)
    for module, slot in slots_lib.of_model(model)
    if slot.adapter == adapter
  ]
  for _, slot in found:
    if not isinstance(slot.method, lora.Lora) or slot.method.residual:
      raise ValueError(
        f'{what}: {slot.op.label} has a {slot.method.name} adapter; this start'
        ' is for LoRA.'
      )
  return found


def is_quantized(module: nnx.Module, slot: slots_lib.Slot) -> bool:
  return isinstance(
    weight_ops.get_weight(module, slot.op.name), interception.QuantizedWeight
  )


def path_of(path: tuple[Any, ...], slot: slots_lib.Slot) -> tuple[str, ...]:
  return (*map(str, path), *slot.op.name.split('/'))


def batched(f: Callable[..., Any], op: weight_ops.WeightOp) -> Any:
  for _ in op.batch:
    f = jax.vmap(f)
  return f


def run_on_layers(
  start: Any, slot: slots_lib.Slot, values: Any, key: jax.Array | None = None
) -> dict[str, Any]:
  """What `start` makes of the arrays of all layers; `key` is split for them."""
  # The same for all weights of their kind.
  op = dataclasses.replace(slot.op, path=(), name='weight')
  run = _runner(start, op, len(slot.axes), slot.axis)
  keys = key
  if key is not None and slot.axes:
    keys = jax.random.split(key, slot.axes)
  out: dict[str, Any] = run(keys, values)
  return out


# Cached, since weights of equal shape are many and a compilation is slow.
@functools.lru_cache(maxsize=256)
def _runner(
  start: Any, op: weight_ops.WeightOp, stacked: int, axis: int
) -> Any:
  run = functools.partial(start, op)
  for _ in range(stacked):
    run = jax.vmap(run, in_axes=(0, axis), out_axes=axis)
  return jax.jit(run)


def of_layers(slot: slots_lib.Slot, old: jax.Array, new: jax.Array) -> Any:
  """`new` for the layers that have the adapter, `old` for the others."""
  if slot.layers is None:
    return new
  index = (slice(None),) * slot.axis + (jnp.asarray(slot.layers),)
  return old.at[index].set(new[index])


def set_variables(
  module: nnx.Module,
  path: tuple[Any, ...],
  slot: slots_lib.Slot,
  values: dict[str, jax.Array],
) -> set[tuple[str, ...]]:
  """Sets variables of an adapter, of all layers; returns their paths."""
  for name, value in values.items():
    variable = getattr(module, slot.attribute(name))
    old = variable.get_raw_value()
    if slot.layers is not None:
      value = jnp.take(value, jnp.asarray(slot.layers), axis=slot.axis)
    value = value.reshape(old.shape).astype(old.dtype)
    if not isinstance(old, jax.core.Tracer):
      value = jax.device_put(value, old.sharding)
    setattr(module, slot.attribute(name), variable.replace(value))
  return {(*map(str, path), slot.attribute(name)) for name in values}


def summed_gradients(
  what: str,
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  filter_: Any,
  loss_fn: training.LossFn,
  batches: Iterable[training.Batch],
  key: jax.Array,
) -> tuple[nnx.State[Any, Any], int]:
  """Gradients of the picked variables, added up, and number of batches."""
  picked, rest = nnx.split_state(state, filter_, ...)

  def loss(
    picked: nnx.State[Any, Any], rest: nnx.State[Any, Any], batch: Any, key: Any
  ) -> Any:
    whole = nnx.merge_state(picked, rest)
    model = nnx.merge(graphdef, whole, copy=True)
    return loss_fn(model, batch, nnx.Rngs(key))[0]

  gradient = jax.jit(jax.grad(loss))
  total, number = None, 0
  for number, batch in enumerate(batches, start=1):
    new = gradient(picked, rest, batch, jax.random.fold_in(key, number))
    total = new if total is None else jax.tree.map(jnp.add, total, new)
  if total is None:
    raise ValueError(f'{what}: there is no batch.')
  return total, number
