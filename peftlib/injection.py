"""Adding adapters to a split model."""

import difflib
import functools
import math
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlib import _checks
from peftlib import config as config_lib
from peftlib import interception

SHARDING_KEYS = ('out_sharding', 'sharding', 'sharding_names')


def inject(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State,
  config: config_lib.LoraConfig,
  *inputs: Any,
  key: jax.Array,
  adapter: str = interception.DEFAULT_ADAPTER,
  **named_inputs: Any,
) -> tuple[nnx.GraphDef[Any], nnx.State]:
  """Adds a LoRA adapter to every weight that `config.module_path` matches.

  The forward pass is traced once, abstractly, to see which weights take part
  in which contractions; then the variables `<weight>_lora_a` and
  `<weight>_lora_b` (`nnx.LoRAParam`) are made beside each matched weight. In a
  scanned or vmapped stack each layer has its own, along the axis that the
  weight has. `a` starts by `config.lora_a_initializer`, `b` as zeros, so that
  the model's output is the base's bit for bit.

  Works on concrete arrays, under `jax.jit`, and on abstract arrays (the state
  of `nnx.eval_shape`, or under `jax.eval_shape`), where nothing is allocated.
  Base variables in the result are the very objects that came in.

  Example:
    >>> import peftlib
    >>> model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    >>> graphdef, state = nnx.split(model)
    >>> graphdef, state = peftlib.inject(
    ...   graphdef,
    ...   state,
    ...   peftlib.LoraConfig(rank=2),
    ...   jnp.ones((1, 8)),
    ...   key=jax.random.key(0),
    ... )
    >>> state['kernel_lora_a'].shape, state['kernel_lora_b'].shape
    ((8, 2), (2, 4))

  Args:
    graphdef: Graph definition of the model, from `nnx.split`.
    state: Its whole state.
    config: What to add.
    *inputs: Inputs of the model's `__call__`, arrays or
      `jax.ShapeDtypeStruct`s; only shapes and dtypes matter.
    key: PRNG key from which all `a` are drawn.
    adapter: Name of the adapter; a model can carry several, whose updates add
      up.
    **named_inputs: Further inputs by name.

  Returns:
    The graphdef and state of the model with adapters. Equal arguments give
    equal graphdefs. Base outputs are unchanged until `b` moves.

  Raises:
    TypeError: If a Module is given instead of graphdef and state.
    ValueError: If the pattern matches no weight (the text has the nearest
      paths), or the model has an adapter of this name already.
  """
  _checks.check_split('peftlib.inject', graphdef, state)
  model = nnx.merge(graphdef, state, copy=True)
  present = interception.adapters_of(model)
  _check_name(adapter, [a.name for a in present])
  ops = interception.record(model, *inputs, **named_inputs)
  matched = matching(ops, config.module_path)
  adapters = (*present, interception.Adapter(adapter, config))
  out = interception.wrapped(model, adapters, *inputs)
  modules = dict(nnx.iter_modules(out))
  for i, op in enumerate(matched):
    module = modules[op.path]
    _add_factors(module, op, config, adapter, jax.random.fold_in(key, i))
  return split_onto(out, state)


def matching(
  ops: list[interception.WeightOp], pattern: str
) -> list[interception.WeightOp]:
  """The ops whose module path the pattern matches as a whole.

  Args:
    ops: From `interception.record`.
    pattern: Regular expression, as in `LoraConfig.module_path`.

  Raises:
    ValueError: If there is none; the text has the nearest paths.
  """
  matched = [op for op in ops if re.fullmatch(pattern, op.module_path)]
  if matched:
    return matched
  paths = list(dict.fromkeys(op.module_path for op in ops))
  # The words of the pattern, since its operators are in no path.
  words = ' '.join(re.findall(r'\w+', pattern))
  near = difflib.get_close_matches(words, paths, n=5, cutoff=0.2) or paths[:5]
  raise ValueError(
    f'peftlib: module_path {pattern!r} matches no module with a weight'
    f' that takes part in a contraction. It has to match the whole path;'
    f' nearest: {near}.'
  )


def with_dropout(
  graphdef: nnx.GraphDef[Any], state: nnx.State, key: jax.Array
) -> tuple[nnx.GraphDef[Any], nnx.State]:
  """Turns adapter dropout on, with masks drawn from `key`.

  Without this, dropout is off. Equal keys give equal masks. Does nothing to a
  model without dropout.

  Args:
    graphdef: Graph definition of an injected model.
    state: Its whole state.
    key: PRNG key; give a new one at each step.

  Returns:
    Graphdef and state with dropout active.
  """
  _checks.check_split('peftlib.with_dropout', graphdef, state)
  flat = nnx.to_flat_state(state)
  if not any(isinstance(v, interception.AdapterKey) for _, v in flat):
    return graphdef, state
  new = []
  for i, (path, variable) in enumerate(flat):
    if isinstance(variable, interception.AdapterKey):
      old = variable.get_raw_value()
      keys = jax.random.split(
        jax.random.fold_in(key, i), old.shape if old.shape else 1
      )
      variable = variable.replace(keys.reshape(old.shape))
    new.append((path, variable))
  model = nnx.merge(graphdef, nnx.from_flat_state(new), copy=True)
  interception.set_dropout(model, True)
  return nnx.split(model)


def _check_name(adapter: str, present: list[str]) -> None:
  if not adapter.isidentifier():
    raise ValueError(
      f'peftlib.inject: adapter={adapter!r}: a name is letters, digits and'
      " underscores, not starting with a digit, e.g. 'style_2'."
    )
  if adapter in present:
    raise ValueError(
      f'peftlib.inject: the model has an adapter {adapter!r} already; inject'
      ' into the base model, or give another adapter name.'
    )


def split_onto(
  model: nnx.Module, state: nnx.State
) -> tuple[nnx.GraphDef[Any], nnx.State]:
  """Splits `model` and puts the variables of `state` back where they were."""
  graphdef, new = nnx.split(model)
  old = dict(nnx.to_flat_state(state))
  flat = [
    (path, old.get(path, value)) for path, value in nnx.to_flat_state(new)
  ]
  return graphdef, nnx.from_flat_state(flat)


def _add_factors(
  module: nnx.Module,
  op: interception.WeightOp,
  config: config_lib.LoraConfig,
  adapter: str,
  key: jax.Array,
) -> None:
  weight = getattr(module, op.name)
  if isinstance(weight, interception.QuantizedWeight):
    weight = weight.array.qvalue
  value = weight.get_raw_value()
  axes, axis = stack_axes(op, weight)
  shapes = op.factor_shapes(config.rank)
  names = interception.variable_names(op.name, adapter)
  initializers = (config.lora_a_initializer, config.lora_b_initializer)
  for name, shape, sources, init, k in zip(
    names[:2],
    shapes,
    op.factor_axes(),
    initializers,
    jax.random.split(key),
    strict=True,
  ):
    make = _layered(
      init,  # type: ignore[arg-type]  # A protocol says nothing of hashing.
      shape,
      jnp.dtype(config.dtype),
      axes,
      axis,
    )
    if isinstance(value, jax.ShapeDtypeStruct):
      made: Any = jax.eval_shape(make, k)
    else:
      made = make(k)
    metadata = _metadata(weight, sources, len(axes), axis, op.exact)
    made = _placed_like(made, value, sources, len(axes), axis, op.exact)
    setattr(module, name, nnx.LoRAParam.from_metadata(made, metadata))
  if config.dropout > 0:
    keys: Any = jax.ShapeDtypeStruct(axes, key.dtype)
    if not isinstance(value, jax.ShapeDtypeStruct):
      # Zero keys until `with_dropout` draws some: nothing depends on them.
      keys = jax.random.split(key, axes) if axes else key
    setattr(
      module,
      names.key,
      interception.AdapterKey.from_metadata(
        keys, {**_plain_metadata(weight), 'tag': 'adapter_dropout'}
      ),
    )
    interception.mark_dropout(module)


def stack_axes(
  op: interception.WeightOp, weight: nnx.Variable[Any]
) -> tuple[tuple[int, ...], int]:
  """Extents of the axes that a scan or vmap takes off a weight, and where.

  Args:
    op: The op, with one layer's shape.
    weight: The variable, whose value has all layers.

  Returns:
    The extents, () for a weight that isn't stacked, and the first such axis.

  Raises:
    ValueError: If the variable's shape doesn't follow from the op's.
  """
  full, one = tuple(weight.get_raw_value().shape), op.shape
  if math.prod(full) == math.prod(one):
    return (), 0
  extra = len(full) - len(one)
  if extra >= 1 and full[extra:] == one:
    declared = weight.get_metadata().get('param_scan_axis', 0)
    if extra > 1 or declared == 0:
      return full[:extra], 0
  if extra == 1:
    fits = [i for i in range(len(full)) if full[:i] + full[i + 1 :] == one]
    declared = weight.get_metadata().get('param_scan_axis')
    if declared in fits:
      return (full[declared],), declared
    if len(fits) == 1:
      return (full[fits[0]],), fits[0]
    if fits:
      raise ValueError(
        f'peftlib: {op.label} of shape {full} is used with shape {one}: its'
        f' scan axis could be any of {fits}. Say which by the metadata'
        ' param_scan_axis of the variable.'
      )
  if extra >= 1 and math.prod(full[extra:]) == math.prod(one):
    return full[:extra], 0
  raise ValueError(
    f'peftlib: {op.label} has shape {full} but takes part in'
    f' {op.kind} with shape {one}; an adapter can follow a stack of layers'
    ' or a reshape, not this.'
  )


# Cached, since weights of equal shape are many and a compilation is slow.
@functools.lru_cache(maxsize=256)
def _layered(
  init: Any,
  shape: tuple[int, ...],
  dtype: Any,
  axes: tuple[int, ...],
  axis: int,
) -> Any:
  """An initializer of all layers, each from a key of its own."""

  def make(key: jax.Array) -> jax.Array:
    if not axes:
      return init(key, shape, dtype)
    keys = jax.random.split(key, math.prod(axes))
    values = jax.vmap(lambda k: init(k, shape, dtype))(keys)
    return jnp.moveaxis(values.reshape(*axes, *shape), 0, axis)

  return jax.jit(make)


def _plain_metadata(weight: nnx.Variable[Any]) -> dict[str, Any]:
  return {
    k: v
    for k, v in weight.get_metadata().items()
    if k not in SHARDING_KEYS and not k.endswith('_hooks')
  }


def _derived_names(
  names: Any,
  ndim: int,
  sources: tuple[int | None, ...],
  stacked: int,
  axis: int,
  exact: bool,
) -> Any:
  """A factor's axis names from its weight's, of the same type."""
  padded = (*names, *(None,) * (ndim - len(names)))
  layers = padded[axis : axis + stacked]
  rest = padded[:axis] + padded[axis + stacked :]
  own = [
    rest[i] if i is not None and exact and i < len(rest) else None
    for i in sources
  ]
  derived = (*own[:axis], *layers, *own[axis:])
  if isinstance(names, jax.sharding.PartitionSpec):
    return jax.sharding.PartitionSpec(*derived)
  return type(names)(derived)


def _metadata(
  weight: nnx.Variable[Any],
  sources: tuple[int | None, ...],
  stacked: int,
  axis: int,
  exact: bool,
) -> dict[str, Any]:
  metadata = _plain_metadata(weight)
  ndim = len(weight.get_raw_value().shape)
  for name in SHARDING_KEYS:
    names = weight.get_metadata().get(name)
    if names is not None:
      metadata[name] = _derived_names(
        names, ndim, sources, stacked, axis, exact
      )
  return metadata


def _placed_like(
  value: Any,
  weight: Any,
  sources: tuple[int | None, ...],
  stacked: int,
  axis: int,
  exact: bool,
) -> Any:
  """Puts a new value on the mesh of a weight that is there already."""
  if isinstance(weight, jax.core.Tracer) or isinstance(
    value, jax.core.Tracer | jax.ShapeDtypeStruct
  ):
    return value
  sharding = getattr(weight, 'sharding', None)
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return value
  spec = _derived_names(
    sharding.spec, weight.ndim, sources, stacked, axis, exact
  )
  return jax.device_put(value, jax.sharding.NamedSharding(sharding.mesh, spec))
