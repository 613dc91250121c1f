"""Adding adapters to a split model."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from peftlib import _checks
from peftlib import config as config_lib
from peftlib import interception
from peftlib import slots as slots_lib
from peftlib import targets
from peftlib import virtual_tokens
from peftlib import weight_ops
from peftlib.methods import method as method_lib

SHARDING_KEYS = ('out_sharding', 'sharding', 'sharding_names')


def inject(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  config: config_lib.Config,
  *inputs: Any,
  key: jax.Array,
  adapter: str = slots_lib.DEFAULT_ADAPTER,
  **named_inputs: Any,
) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
  """Adds an adapter to every weight that the rules of `config` mean.

  The forward pass is traced once, abstractly, to see which weights take part
  in which ops; then the variables of the rule's method are made beside each
  weight, `<weight>_lora_a` and `<weight>_lora_b` for LoRA (`nnx.LoRAParam`; a
  method's constants are `peftlib.AdapterConstant`). In a scanned or vmapped
  stack each layer has its own, along the axis that the weight has. The model's
  output starts as the base's bit for bit, unless the method says otherwise.

  Works on concrete arrays, under `jax.jit`, and on abstract arrays (the state
  of `nnx.eval_shape`, or under `jax.eval_shape`), where nothing is allocated.
  Base variables in the result are the very objects that came in, but for a
  method with `residual`, which replaces the weights that it adapts.

  Used in: tests/consumers/own_step.py.

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
    key: PRNG key from which all variables are drawn.
    adapter: Name of the adapter; a model can carry several, which are applied
      one after the other: the updates of LoRA add up.
    **named_inputs: Further inputs by name.

  Returns:
    The graphdef and state of the model with adapters. Equal arguments give
    equal graphdefs.

  Raises:
    TypeError: If a Module is given instead of graphdef and state.
    ValueError: If a rule means no weight (the text has the nearest paths) or
      one that can't be adapted (the text has the reason), or the model has an
      adapter of this name already. Nothing is allocated then.
  """
  _checks.check_split('peftlib.inject', graphdef, state)
  model = nnx.merge(graphdef, state, copy=True)
  check_name('peftlib.inject', adapter, virtual_tokens.names_of(model))
  tokens = config.virtual_tokens
  shapes = {}
  if tokens is not None:
    shapes = virtual_tokens.check(model, tokens, adapter)
  planned = plan(model, config, adapter, inputs, named_inputs)
  out = interception.wrapped(model) if planned else model
  modules = dict(nnx.iter_modules(out))
  replaced = set()
  for i, slot in enumerate(planned):
    module = modules[slot.op.path]
    if add_slot(module, slot, jax.random.fold_in(key, i)):
      replaced.add((*slot.op.path, *slot.op.name.split('/')))
  if tokens is not None:
    abstract = any(
      isinstance(v.get_raw_value(), jax.ShapeDtypeStruct)
      for _, v in nnx.to_flat_state(state)
    )
    virtual_tokens.add(out, shapes, tokens, adapter, key, abstract)
  return split_onto(out, state, replaced)


def plan(
  model: nnx.Module,
  config: config_lib.Config,
  adapter: str,
  inputs: tuple[Any, ...],
  named_inputs: dict[str, Any],
) -> list[slots_lib.Slot]:
  """The adapters that `inject` would make, in its order.

  Args:
    model: A merged model, of concrete or abstract arrays. Not changed.
    config: What to add.
    adapter: Its name.
    inputs: Inputs of the model's `__call__`.
    named_inputs: Further ones by name.

  Raises:
    ValueError: As `inject`.
  """
  if not any(rule.method is not None for rule in config.rules):
    if config.train or config.virtual_tokens is not None:
      return []
    raise ValueError(
      'peftlib.inject: no rule of the config has a method; give one, e.g.'
      " Rule('all-linear', methods.Lora(rank=8))."
    )
  recording = interception.record(model, *inputs, **named_inputs)
  modules = dict(nnx.iter_modules(model))
  free: dict[str, set[int]] = {}
  slots = []
  for index, rule in enumerate(config.rules):
    for op in targets.matching(recording, rule.module_path, rule.exclude):
      weight = weight_ops.get_weight(modules[op.path], op.name)
      axes, axis = stack_axes(op, variable_of(weight))
      layers = range(axes[0] if axes else 1)
      left = free.setdefault(op.label, set(layers))
      wanted = sorted(
        left & set(layers if rule.layers is None else rule.layers)
      )
      _check_layers(rule, op, axes)
      left -= set(wanted)
      if rule.method is None or not wanted:
        continue
      rule.method.check(op.weight)
      part = len(wanted) < len(layers)
      slots.append(
        slots_lib.Slot(
          adapter,
          index if part else 0,
          rule.method,
          op,
          tuple(wanted) if part else None,
          axes,
          axis,
          axis,
        )
      )
  return _scannable(model, slots, inputs, named_inputs)


def _scannable(
  model: nnx.Module,
  slots: list[slots_lib.Slot],
  inputs: tuple[Any, ...],
  named_inputs: dict[str, Any],
) -> list[slots_lib.Slot]:
  """The slots, with gates where the model's own scans slice them.

  A scan over axis 0 takes a layer off every variable. One over another can
  have an axis for each type of variable (`nnx.StateAxes`), which only a trial
  shows.
  """
  others = [slot for slot in slots if slot.axis]
  if not others:
    return slots
  at_front = [dataclasses.replace(slot, gate_axis=0) for slot in slots]
  problem = None
  for tried in (slots, at_front):
    problem = _problem(model, tried, inputs, named_inputs)
    if problem is None:
      return tried
  alone = (
    (slot, _problem(model, [slot], inputs, named_inputs)) for slot in others
  )
  slot, problem = next(
    ((s, why) for s, why in alone if why is not None), (others[0], problem)
  )
  raise ValueError(
    f'peftlib.inject: {slot.op.label} is a stack of layers along axis'
    f' {slot.axis}, and its adapter would be too; but the model scans other'
    f' variables along another axis: {problem}. Give that axis to every'
    ' nnx.Param and peftlib.AdapterConstant, e.g.'
    ' nnx.StateAxes({(nnx.Param, peftlib.AdapterConstant):'
    f' {slot.axis}, ...: 0}}).'
  )


def _problem(
  model: nnx.Module,
  slots: list[slots_lib.Slot],
  inputs: tuple[Any, ...],
  named_inputs: dict[str, Any],
) -> str | None:
  """What an abstract pass with these adapters and all their gates raises."""
  graphdef, state = nnx.split(model)
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state
  )
  out = interception.wrapped(nnx.merge(graphdef, abstract))
  modules = dict(nnx.iter_modules(out))
  for slot in slots:
    module = modules[slot.op.path]
    add_slot(module, slot, jax.random.key(0))
    gate = jax.eval_shape(lambda s=slot: _gates(s))
    setattr(module, slot.gate, slots_lib.AdapterGate(gate))
  try:
    interception.record(out, *inputs, **named_inputs)
  except (IndexError, TypeError, ValueError) as e:
    return ' '.join(str(e).split()).rstrip('.')
  return None


def variable_of(weight: Any) -> nnx.Variable[Any]:
  """The variable whose shape and metadata are those of a weight."""
  if isinstance(weight, interception.QuantizedWeight):
    return weight.array.qvalue
  return weight


def with_dropout(
  graphdef: nnx.GraphDef[Any], state: nnx.State[Any, Any], key: jax.Array
) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
  """Turns adapter dropout on, with masks drawn from `key`.

  Without this, dropout is off. Equal keys give equal masks. Does nothing to a
  model without dropout.

  Used in: peftlib/guide/your_own_loop.md.

  Args:
    graphdef: Graph definition of an injected model.
    state: Its whole state; of arrays alone (`nnx.as_pure`) too.
    key: PRNG key; give a new one at each step.

  Returns:
    Graphdef and state with dropout active.
  """
  _checks.check_split('peftlib.with_dropout', graphdef, state)
  flat = nnx.to_flat_state(state)
  if not all(isinstance(v, nnx.Variable) for _, v in flat):
    # Of arrays the graphdef alone knows which ones are keys.
    graphdef, state = nnx.split(nnx.merge(graphdef, state, copy=True))
    flat = nnx.to_flat_state(state)
  if not any(isinstance(v, slots_lib.AdapterKey) for _, v in flat):
    return graphdef, state
  new = []
  for i, (path, variable) in enumerate(flat):
    if isinstance(variable, slots_lib.AdapterKey):
      old = variable.get_raw_value()
      keys = jax.random.split(
        jax.random.fold_in(key, i), old.shape if old.shape else 1
      )
      variable = variable.replace(keys.reshape(old.shape))
    new.append((path, variable))
  model = nnx.merge(graphdef, nnx.from_flat_state(new), copy=True)
  slots_lib.set_dropout(model, True)
  return nnx.split(model)


def check_name(function: str, adapter: str, present: list[str]) -> None:
  """Raises ValueError unless `adapter` can be the name of a new one."""
  if not adapter.isidentifier():
    raise ValueError(
      f'{function}: adapter={adapter!r}: a name is letters, digits and'
      " underscores, not starting with a digit, e.g. 'style_2'."
    )
  if adapter in present:
    raise ValueError(
      f'{function}: the model has an adapter {adapter!r} already; start from'
      ' the base model, or give another adapter name.'
    )


def _check_layers(
  rule: config_lib.Rule, op: weight_ops.WeightOp, axes: tuple[int, ...]
) -> None:
  if rule.layers is None:
    return
  if not axes:
    raise ValueError(
      f'peftlib: layers={rule.layers}: {op.label} is not in a stack of layers;'
      ' choose its layer by module_path.'
    )
  if rule.layers[-1] >= axes[0]:
    raise ValueError(
      f'peftlib: layers={rule.layers}: {op.label} has layers 0 to'
      f' {axes[0] - 1}.'
    )


def split_onto(
  model: nnx.Module,
  state: nnx.State[Any, Any],
  replaced: set[tuple[Any, ...]] | frozenset[Any] = frozenset(),
) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
  """Splits `model` and puts the variables of `state` back where they were.

  Args:
    model: The merged model.
    state: What it was merged from.
    replaced: Paths, their parts as strings, whose new value is kept.
  """
  graphdef, new = nnx.split(model)
  old = dict(nnx.to_flat_state(state))
  kept = {tuple(map(str, path)) for path in replaced}
  flat = [
    (path, value if tuple(map(str, path)) in kept else old.get(path, value))
    for path, value in nnx.to_flat_state(new)
  ]
  return graphdef, nnx.from_flat_state(flat)


class _Start(NamedTuple):
  """What a method makes of one weight, all layers of it."""

  variables: dict[str, Any]
  weight: Any


def add_slot(module: nnx.Module, slot: slots_lib.Slot, key: jax.Array) -> bool:
  """Adds an adapter to a weight of a module of the caller's own.

  Args:
    module: What holds the weight, in a model that `interception.wrapped` made.
      Changed in place.
    slot: The adapter.
    key: PRNG key of its variables.

  Returns:
    Whether the weight is a new one too.
  """
  slots_lib.put(module, (*slots_lib.of_module(module), slot))
  node = weight_ops.get_weight(module, slot.op.name)
  weight = variable_of(node)
  value = weight.get_raw_value()
  axes, axis = stack_axes(slot.op, weight)
  quantized = isinstance(node, interception.QuantizedWeight)
  residual = slot.method.residual
  if residual and quantized:
    raise ValueError(
      f'peftlib.inject: {slot.op.label} is quantized; a {slot.method.name}'
      ' adapter changes the base weight, so inject before quantize_base.'
    )
  exact = not slot.op.route
  stored = interception.stored(node)
  make = _starter(
    slot.method,
    # The same for all weights of its kind.
    dataclasses.replace(slot.op, path=(), name='weight'),
    axes,
    axis,
    slot.layers,
    tuple(value.shape),
    tuple(
      (name, slot.filled(len(slot.op.variable_shape(spec))))
      for name, spec in slot.variables.items()
    ),
  )
  # Not by `make`: split once for all, it is compiled once.
  keys: Any = jax.random.split(key, math.prod(axes)) if axes else key
  if isinstance(value, jax.ShapeDtypeStruct):
    start = jax.eval_shape(make, keys, stored)
  elif any(
    isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((keys, stored))
  ):
    start = make(keys, stored)
  else:
    start = _compiled(make)(keys, stored)
  for name, spec in slot.variables.items():
    sources = tuple(source for _, source in slot.op.variable_axes(spec))
    sources = (*(None,) * slot.filled(len(sources)), *sources)
    metadata = _metadata(weight, sources, len(axes), axis, exact)
    made = _placed_like(
      start.variables[name], value, sources, len(axes), axis, exact
    )
    cls: Any = nnx.LoRAParam if spec.trainable else slots_lib.AdapterConstant
    metadata |= {'adapter': slot.adapter, 'role': name}
    setattr(module, slot.attribute(name), cls.from_metadata(made, metadata))
  if slot.method.dropout > 0:
    # Nothing depends on these keys until `with_dropout` draws some.
    def draw(key: jax.Array) -> jax.Array:
      return slot.spread(jax.random.split(key, axes)) if axes else key

    abstract = isinstance(value, jax.ShapeDtypeStruct)
    masks: Any = jax.eval_shape(draw, key) if abstract else draw(key)
    setattr(
      module,
      slot.key,
      slots_lib.AdapterKey.from_metadata(
        masks, {**plain_metadata(weight), 'tag': 'adapter_dropout'}
      ),
    )
    slots_lib.mark_dropout(module)
  if slot.layers is not None:
    gates = functools.partial(_gates, slot)
    setattr(
      module,
      slot.gate,
      slots_lib.AdapterGate.from_metadata(
        jax.eval_shape(gates)
        if isinstance(value, jax.ShapeDtypeStruct)
        else gates(),
        plain_metadata(weight),
      ),
    )
  if residual:
    new = weight.replace(start.weight)
    weight_ops.set_weight(module, slot.op.name, new)
  return residual


def _gates(slot: slots_lib.Slot) -> jax.Array:
  """On in the layers that have the adapter."""
  if slot.layers is None:
    return slot.spread(jnp.ones(slot.axes, bool))
  gates = jnp.zeros(slot.axes, bool)
  return slot.spread(gates.at[jnp.asarray(slot.layers)].set(True))


def stack_axes(
  op: weight_ops.WeightOp, weight: nnx.Variable[Any]
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
  inside = [
    i for i in range(1, len(one) + 1) if full[:i] + full[i + extra :] == one
  ]
  if extra > 1 and len(inside) == 1:
    # Scans in scans, all over the same axis.
    axis = inside[0]
    return full[axis : axis + extra], axis
  raise ValueError(
    f'peftlib: {op.label} has shape {full} but takes part in'
    f' {op.kind} with shape {one}; an adapter can follow a stack of layers'
    ' or a reshape, not this.'
  )


# Cached, since weights of equal shape are many and a compilation is slow.
@functools.lru_cache(maxsize=256)
def _starter(
  method: method_lib.Method,
  op: weight_ops.WeightOp,
  axes: tuple[int, ...],
  axis: int,
  layers: tuple[int, ...] | None,
  shape: tuple[int, ...],
  filled: tuple[tuple[str, int], ...],
) -> Any:
  """A function of a key a layer and stored weight that makes the variables.

  Args:
    method: The method.
    op: What the weight does.
    axes: Extents of the axes of the stack.
    axis: Where they are.
    layers: Which layers of the stack; None is all.
    shape: Shape of the variable.
    filled: How many axes of extent 1 each of the method's variables has.
  """
  ones = {name: (1,) * count for name, count in filled}
  specs = method.variables(op.weight)
  one_shape = shape[:axis] + shape[axis + len(axes) :]

  def of_matrix(key: jax.Array, value: jax.Array) -> Any:
    v = method.init(key, op.weight, value.astype(jnp.float32))
    if not method.residual:
      return v, None
    left = value - (method.merge(value, v) - value)
    return v, left.astype(value.dtype)

  def of_layer(key: jax.Array, stored: Any) -> _Start:
    over = of_matrix
    matrix = jnp.zeros((*op.batch_shape, op.weight.rows, op.weight.columns))
    if method.starts_from_weight:
      matrix = op.to_matrix(op.from_variable(interception.dense(stored)))
    keys = key
    if op.batch:
      for _ in op.batch:
        over = jax.vmap(over)
      keys = jax.random.split(key, op.batch_shape)
    variables, left = over(keys, matrix)
    if left is not None:
      left = op.to_variable(op.from_matrix(left), one_shape)
    return _Start(
      {
        name: value.reshape(
          *ones[name], *op.variable_shape(specs[name])
        ).astype(specs[name].dtype or method.dtype)
        for name, value in variables.items()
      },
      left,
    )

  def make(keys: jax.Array, stored: Any) -> _Start:
    if not axes:
      return of_layer(keys, stored)
    count = math.prod(axes)
    # The scale of a tiled weight has as many axes as the weight.
    flat = jax.tree.map(
      lambda x: _front(x, len(axes), axis).reshape(
        count, *_one(x, len(axes), axis)
      ),
      stored,
    )
    if layers is not None:
      rest = count // axes[0]
      chosen = jnp.asarray(
        [i * rest + j for i in layers for j in range(rest)], jnp.int32
      )
      flat, keys = jax.tree.map(lambda x: x[chosen], (flat, keys))
    if method.starts_from_weight:
      start = jax.vmap(of_layer)(keys, flat)
    else:
      # XLA:CPU takes four times as long to compile draws of all layers at once.
      start = jax.lax.map(lambda key: of_layer(key, None), keys)
    lead = axes if layers is None else (len(layers), *axes[1:])
    variables = {
      name: _back(value.reshape(*lead, *value.shape[1:]), len(axes), axis)
      for name, value in start.variables.items()
    }
    left = start.weight
    if left is not None:
      left = _back(left.reshape(*lead, *left.shape[1:]), len(axes), axis)
      if layers is not None:
        index = (slice(None),) * axis + (jnp.asarray(layers),)
        left = stored.at[index].set(left)
    return _Start(variables, left)

  return make


@functools.lru_cache(maxsize=256)
def _compiled(make: Any) -> Any:
  """What `_starter` returns, jitted; not for a call under another jit."""
  # It runs once: XLA:CPU would optimize it for longer than it ever runs.
  options = {'xla_backend_optimization_level': 1}
  on_cpu = jax.default_backend() == 'cpu'
  return jax.jit(make, compiler_options=options if on_cpu else None)


def _one(x: Any, count: int, axis: int) -> tuple[int, ...]:
  return tuple(x.shape[:axis] + x.shape[axis + count :])


def _front(x: jax.Array, count: int, axis: int) -> jax.Array:
  return jnp.moveaxis(x, range(axis, axis + count), range(count))


def _back(x: jax.Array, count: int, axis: int) -> jax.Array:
  return jnp.moveaxis(x, range(count), range(axis, axis + count))


def plain_metadata(variable: nnx.Variable[Any]) -> dict[str, Any]:
  """The metadata of a variable without shardings, hooks, and what is ours."""
  return {
    k: v
    for k, v in variable.get_metadata().items()
    if k not in (*SHARDING_KEYS, 'adapter', 'role') and not k.endswith('_hooks')
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
  metadata = plain_metadata(weight)
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
