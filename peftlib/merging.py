"""Putting adapters into the weights, and taking them out again."""

import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import qwix

from peftlib import _checks
from peftlib import frozen_ops
from peftlib import injection
from peftlib import interception
from peftlib import slots as slots_lib
from peftlib import weight_ops


def merge_adapters(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  *,
  dtype: Any = None,
  requantize: bool = False,
) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
  """Puts every adapter into its weight; what is left is a plain model.

  The result has the graphdef of the model before `inject` (unless other
  weights are quantized), and computes what base and adapters did. Weights
  without adapters are the very objects that came in, and the State that came in
  is not touched: keeping it, or the base's, is how a merge is undone bit for
  bit; see `unmerge_adapters`. Works under `jax.jit` and on abstract arrays.

  Used in: peftlib/guide/your_own_method.md.

  Example:
    >>> import peftlib
    >>> base = nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    >>> injected = peftlib.inject(
    ...   *base,
    ...   peftlib.LoraConfig(rank=2),
    ...   jnp.ones((1, 8)),
    ...   key=jax.random.key(0),
    ... )
    >>> graphdef, state = merge_adapters(*injected)
    >>> graphdef == base[0], sorted(state)
    (True, ['bias', 'kernel'])

  Args:
    graphdef: Graph definition of an injected model.
    state: Its whole state.
    dtype: Dtype of the merged weights; None keeps each one's own, and for a
      quantized one that of its scales.
    requantize: Whether a quantized weight is quantized again after the merge,
      as it was; it is left in floating point otherwise. The rounding that this
      adds is what `quantization_error` tells.

  Returns:
    Graphdef and state of the merged model.

  Raises:
    TypeError: If a Module is given instead of graphdef and state.
    ValueError: If the model has no adapters, or one that no weight can stand
      for (adapters assigned to rows of a batch; a method with a bias).
  """
  _checks.check_split('peftlib.merge_adapters', graphdef, state)
  model = nnx.merge(graphdef, state, copy=True)
  owned: dict[tuple[int, str], list[tuple[nnx.Module, slots_lib.Slot]]] = {}
  for module, slot in slots_lib.of_model(model):
    owned.setdefault((id(module), slot.op.name), []).append((module, slot))
  if not owned:
    raise ValueError('peftlib.merge_adapters: the model has no adapters.')
  paths = {id(m): p for p, m in nnx.iter_modules(model)}
  replaced = set()
  for pairs in owned.values():
    module = pairs[0][0]
    slots = tuple(slot for _, slot in pairs)
    name = slots[0].op.name
    node = weight_ops.get_weight(module, name)
    new = _merged(module, node, slots, dtype, requantize)
    weight_ops.set_weight(module, name, new)
    own = (*map(str, paths[id(module)]), *name.split('/'))
    if isinstance(new, interception.QuantizedWeight):
      replaced |= interception.paths_of_parts(own)
    else:
      replaced.add(own)
  for module, slot in slots_lib.of_model(model):
    drop(module, slot)
  if not interception.is_quantized(model):
    model = interception.unwrapped(model)
  return injection.split_onto(model, state, replaced)


def unmerge_adapters(
  state: nnx.State[Any, Any], base: nnx.State[Any, Any]
) -> nnx.State[Any, Any]:
  """Puts the weights of the base back into a merged State.

  Used in: peftlib/guide/your_own_method.md.

  Args:
    state: From `merge_adapters`.
    base: The State from before the merge, or of the base before `inject`; it
      may have more variables.

  Returns:
    `state` with each variable of `base` that has its path, the very object.

  Raises:
    TypeError: If a Module is given instead of a State.
    ValueError: If a variable of `state` is not in `base`.
  """
  for name, value in (('state', state), ('base', base)):
    _checks.check_state('peftlib.unmerge_adapters', name, value)
  old = dict(nnx.to_flat_state(base))
  flat = []
  for path, _ in nnx.to_flat_state(state):
    if path not in old:
      raise ValueError(
        f'peftlib.unmerge_adapters: {"/".join(map(str, path))} is not in the'
        ' base.'
      )
    flat.append((path, old[path]))
  return nnx.from_flat_state(flat)


def quantization_error(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  reference: nnx.State[Any, Any],
) -> dict[str, jax.Array]:
  """How far quantized weights are from those that they stand for.

  Used in: peftlib/guide/your_own_method.md.

  Args:
    graphdef: Graph definition of a model with quantized weights.
    state: Its whole state.
    reference: State with the weights in floating point, by the same paths:
      the base's, or one merged without `requantize`.

  Returns:
    For each quantized weight, by its path, the norm of the difference divided
    by the norm of the reference: a scalar in f32.
  """
  _checks.check_split('peftlib.quantization_error', graphdef, state)
  plain = {
    tuple(map(str, path)): variable
    for path, variable in nnx.to_flat_state(reference)
  }
  model = nnx.merge(graphdef, state, copy=True)
  errors = {}
  for path, module in nnx.iter_modules(model):
    for name, node in weight_ops.weights_of(module):
      if not isinstance(node, interception.QuantizedWeight):
        continue
      own = (*map(str, path), *name.split('/'))
      if own not in plain:
        raise ValueError(
          f'peftlib.quantization_error: {"/".join(own)} is not in the'
          ' reference.'
        )
      errors['/'.join(own)] = _relative(
        interception.stored(node), plain[own].get_value()
      )
  return errors


@jax.jit
def _relative(stored: qwix.QArray, reference: jax.Array) -> jax.Array:
  reference = reference.astype(jnp.float32)
  difference = interception.dense(stored).astype(jnp.float32) - reference
  return jnp.linalg.norm(difference.ravel()) / jnp.linalg.norm(
    reference.ravel()
  )


def drop(module: nnx.Module, slot: slots_lib.Slot) -> None:
  """Takes one adapter of one weight out of a module of the caller's own."""
  for name in slot.attributes:
    if hasattr(module, name):
      delattr(module, name)
  slots_lib.put(
    module, tuple(s for s in slots_lib.of_module(module) if s != slot)
  )


def _merged(
  module: nnx.Module,
  node: Any,
  slots: tuple[slots_lib.Slot, ...],
  dtype: Any,
  requantize: bool,
) -> Any:
  op = slots[0].op
  variable = injection.variable_of(node)
  shape = tuple(variable.get_raw_value().shape)
  axes, axis = injection.stack_axes(op, variable)
  quantized = isinstance(node, interception.QuantizedWeight)
  values = [_full(module, slot, axes) for slot in slots]
  for slot, value in zip(slots, values, strict=True):
    slot.method.check_merge(op.weight)
    if value.gate is not None and value.gate.ndim > len(axes):
      raise ValueError(
        f'peftlib.merge_adapters: adapter {slot.adapter!r} of {op.label} is'
        ' assigned to rows of a batch; no single weight does what they do.'
      )
  requantize_it = quantized and requantize
  run = _merger(
    # The same for all weights of their kind.
    tuple(
      dataclasses.replace(
        slot, op=dataclasses.replace(op, path=(), name='weight')
      )
      for slot in slots
    ),
    len(axes),
    axis,
    shape[:axis] + shape[axis + len(axes) :],
    None if dtype is None else jnp.dtype(dtype),
    node.how if requantize_it else None,
    requantize_it and interception.is_double(node.array),
  )
  stored = interception.stored(node)
  if isinstance(variable.get_raw_value(), jax.ShapeDtypeStruct):
    merged = jax.eval_shape(run, stored, values)
  else:
    merged = run(stored, values)
  if requantize_it:
    parts = jax.tree.unflatten(
      jax.tree.structure(merged),
      [
        old.replace(new)
        for old, new in zip(
          jax.tree.leaves(
            node.array, is_leaf=lambda v: isinstance(v, nnx.Variable)
          ),
          jax.tree.leaves(merged),
          strict=True,
        )
      ],
    )
    return interception.QuantizedWeight(parts, node.how)
  return type(variable).from_metadata(merged, variable.get_metadata())


# Cached, since weights of equal shape are many and a compilation is slow.
@functools.lru_cache(maxsize=256)
def _merger(
  slots: tuple[slots_lib.Slot, ...],
  stacked: int,
  axis: int,
  shape: tuple[int, ...],
  dtype: Any,
  how: Any,
  double: bool,
) -> Any:
  """A compiled function of stored weight and adapters' values.

  Args:
    slots: The adapters, all of one op.
    stacked: Number of axes of the stack.
    axis: Where they are.
    shape: One layer's shape of the variable.
    dtype: Dtype of the result; None is the weight's.
    how: How the result is quantized; None leaves it in floating point.
    double: Whether its scales are quantized too.
  """
  op = slots[0].op

  def of_layer(stored: Any, values: list[slots_lib.Values]) -> Any:
    weight = interception.dense(stored)
    matrix = op.to_matrix(op.from_variable(weight))
    for slot, value in zip(slots, values, strict=True):
      merge = slot.method.merge
      for _ in op.batch:
        merge = jax.vmap(merge)
      after = merge(
        matrix.astype(jnp.float32),
        frozen_ops.as_matrices(op, slot.variables, value.variables),
      )
      if value.gate is not None:
        after = jnp.where(value.gate, after, matrix)
      matrix = after
    out = op.to_variable(op.from_matrix(matrix), shape)
    out = out.astype(weight.dtype if dtype is None else dtype)
    return out if how is None else interception.quantize(out, how, double)

  run = of_layer
  in_axes = (axis, [slots_lib.Values(axis, None, 0)] * len(slots))  # type: ignore[arg-type]
  for _ in range(stacked):
    run = jax.vmap(run, in_axes=in_axes, out_axes=axis)
  return jax.jit(run)


def _full(
  module: nnx.Module, slot: slots_lib.Slot, axes: tuple[int, ...]
) -> slots_lib.Values:
  """The arrays of an adapter with all layers; without dropout."""
  values = slots_lib.values_of(module, slot, whole=True)._replace(key=None)
  if slot.layers is None:
    return values
  expand = functools.partial(
    slots_lib.expanded, layers=slot.layers, stack=axes[0], axis=slot.axis
  )
  return values._replace(
    variables={k: _traced(expand, v) for k, v in values.variables.items()}
  )


def _traced(f: Any, x: Any) -> Any:
  return jax.eval_shape(f, x) if isinstance(x, jax.ShapeDtypeStruct) else f(x)
