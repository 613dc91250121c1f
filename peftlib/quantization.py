"""Storing the frozen base in few bits, and back."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import qwix

from peftlib import _checks
from peftlib import config as config_lib
from peftlib import injection
from peftlib import interception
from peftlib import slots as slots_lib
from peftlib import targets
from peftlib import weight_ops


def quantize_base(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  config: config_lib.Config,
  *inputs: Any,
  **named_inputs: Any,
) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
  """Quantizes the weights that `config.module_path` matches.

  Each weight that takes part in a contraction is replaced by its quantized
  value, scale (and zero point); the model dequantizes it in the op, in the
  forward and again in the backward pass. Scales run along the contracted axis
  in tiles of `config.tile_size`. A stack is quantized one layer after the
  other. Everything else is left as it is: adapters, embedding tables (and a
  head tied to one). May be called before or after `inject`, under `jax.jit` and
  on abstract arrays.

  Used in: peftlib/guide/your_own_method.md.

  Example:
    >>> import peftlib
    >>> config = peftlib.LoraConfig(weight_qtype='int8')
    >>> model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    >>> graphdef, state = quantize_base(
    ...   *nnx.split(model), config, jnp.ones((1, 8))
    ... )
    >>> state['kernel']['array']['qvalue'].dtype
    dtype('int8')

  Args:
    graphdef: Graph definition of the model.
    state: Its whole state.
    config: Of each weight's first rule, `weight_qtype`, `tile_size`,
      `double_quantize` and `weight_calibration_method` are used.
    *inputs: Inputs of the model's `__call__`; only shapes and dtypes matter.
    **named_inputs: Further inputs by name.

  Returns:
    Graphdef and state of the quantized model.

  Raises:
    TypeError: If a Module is given instead of graphdef and state.
    ValueError: If `config.weight_qtype` is None, the pattern matches no
      weight, a matched weight is quantized already, is reshaped on its way to
      the op, or is not divided by the tile size. Nothing is allocated then.

  References:
    Dettmers et al., QLoRA, 2023 (nf4); the numerics are qwix's.
  """
  graphdef, state, _ = _quantized(graphdef, state, config, inputs, named_inputs)
  return graphdef, state


class Planned(NamedTuple):
  """A quantized model of which the weights are still to come.

  Attributes:
    graphdef: Its graph definition.
    state: Its whole state; abstract.
    quantizers: What `quantize_base` does to one layer of each weight that is
      quantized, by the weight's path.
  """

  graphdef: nnx.GraphDef[Any]
  state: nnx.State[Any, Any]
  quantizers: dict[tuple[str, ...], Callable[[jax.Array], qwix.QArray]]


def plan_base(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  config: config_lib.Config,
  *inputs: Any,
) -> Planned:
  """Plans `quantize_base` for weights that come a layer at a time.

  Args:
    graphdef: Graph definition of the model.
    state: Its whole state; abstract.
    config: As for `quantize_base`.
    *inputs: As for `quantize_base`.
  """
  graphdef, state, parts = _quantized(graphdef, state, config, inputs, {})
  return Planned(
    graphdef,
    state,
    {
      (*map(str, part.op.path), *part.op.name.split('/')): part.quantize_layer
      for part in parts
    },
  )


def _quantized(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  config: config_lib.Config,
  inputs: tuple[Any, ...],
  named_inputs: dict[str, Any],
) -> tuple[nnx.GraphDef[Any], nnx.State, list['_Part']]:
  """The quantized model, and what was done to which weight."""
  _checks.check_split('peftlib.quantize_base', graphdef, state)
  model = nnx.merge(graphdef, state, copy=True)
  modules = dict(nnx.iter_modules(model))
  parts = _plan(model, config, inputs, named_inputs)
  for part in parts:
    module = modules[part.op.path]
    weight = weight_ops.get_weight(module, part.op.name)
    value = weight.get_raw_value()
    if isinstance(value, jax.ShapeDtypeStruct):
      array = jax.eval_shape(part.quantize, value)
    else:
      array = part.quantize(value)
    wrap = functools.partial(_like, weight)
    weight_ops.set_weight(
      module,
      part.op.name,
      interception.QuantizedWeight(jax.tree.map(wrap, array), part.how),
    )
  graphdef, state = injection.split_onto(interception.wrapped(model), state)
  return graphdef, state, parts


class _Part(NamedTuple):
  """One weight to quantize, and how."""

  op: weight_ops.WeightOp
  how: Any
  quantize: Callable[[Any], Any]
  quantize_layer: Callable[[Any], Any]


def _plan(
  model: nnx.Module,
  config: config_lib.Config,
  inputs: tuple[Any, ...],
  named_inputs: dict[str, Any],
) -> list[_Part]:
  if not any(rule.weight_qtype for rule in config.rules):
    raise ValueError(
      f'peftlib.quantize_base: {type(config).__name__}.weight_qtype is None; it'
      f' must be one of {sorted(config_lib.WEIGHT_QTYPES)}.'
    )
  recording = interception.record(model, *inputs, **named_inputs)
  modules = dict(nnx.iter_modules(model))
  parts = []
  for op, rule in _choose(recording, modules, config):
    weight = weight_ops.get_weight(modules[op.path], op.name)
    axes, axis = injection.stack_axes(op, weight)
    how = interception.how_to_quantize(
      op,
      qtype=str(rule.weight_qtype),
      tile_size=rule.tile_size,
      calibration_method=rule.weight_calibration_method,
    )
    quantizer = functools.partial(_quantizer, how, rule.double_quantize)
    parts.append(_Part(op, how, quantizer(len(axes), axis), quantizer(0, 0)))
  return parts


def dequantize_base(
  graphdef: nnx.GraphDef[Any], state: nnx.State[Any, Any], *, dtype: Any = None
) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
  """Puts floating-point weights in place of all quantized ones.

  Used in: peftlib/guide/your_own_method.md.

  Args:
    graphdef: Graph definition of a quantized model.
    state: Its whole state.
    dtype: Dtype of the weights; None takes that of their scales.

  Returns:
    Graphdef and state of the model with plain weights; of its own class again
    if it has no adapters.

  Raises:
    TypeError: If a Module is given instead of graphdef and state.
  """
  _checks.check_split('peftlib.dequantize_base', graphdef, state)
  model = nnx.merge(graphdef, state, copy=True)
  for _, module in nnx.iter_modules(model):
    for name, weight in list(weight_ops.weights_of(module)):
      if not isinstance(weight, interception.QuantizedWeight):
        continue
      variable = weight.array.qvalue
      array = interception.stored(weight)
      dequantize = functools.partial(_dequantized, dtype=dtype)
      if isinstance(array.qvalue, jax.ShapeDtypeStruct):
        value = jax.eval_shape(dequantize, array)
      else:
        value = jax.jit(dequantize)(array)
      weight_ops.set_weight(
        module,
        name,
        type(variable).from_metadata(value, variable.get_metadata()),
      )
  if not slots_lib.of_model(model):
    model = interception.unwrapped(model)
  return injection.split_onto(model, state)


def _dequantized(array: qwix.QArray, dtype: Any) -> jax.Array:
  value = interception.dequantize(array)
  return value if dtype is None else value.astype(dtype)


def _choose(
  recording: interception.Recording,
  modules: dict[Any, nnx.Module],
  config: config_lib.Config,
) -> list[tuple[weight_ops.WeightOp, config_lib.Rule]]:
  """The weights to quantize, each with the first rule that means it."""
  chosen: dict[str, tuple[weight_ops.WeightOp, config_lib.Rule]] = {}
  for rule in config.rules:
    for op in targets.matching(recording, rule.module_path, rule.exclude):
      # A table is read by rows, and often the head too.
      if op.kind != 'embedding':
        chosen.setdefault(op.label, (op, rule))
  pairs = [pair for pair in chosen.values() if pair[1].weight_qtype]
  misfits: dict[int, list[str]] = {}
  for op, rule in pairs:
    weight = weight_ops.get_weight(modules[op.path], op.name)
    if isinstance(weight, interception.QuantizedWeight):
      raise ValueError(
        f'peftlib.quantize_base: {op.label} is quantized already, to'
        f' {weight.how.qtype}; dequantize_base it first.'
      )
    if not op.exact:
      raise ValueError(
        f'peftlib.quantize_base: {op.label} is reshaped or transposed on its'
        ' way to the op, which a quantized weight does not allow; exclude it'
        ' by module_path.'
      )
    if rule.tile_size and op.contracted_width % rule.tile_size:
      misfits.setdefault(rule.tile_size, []).append(
        f'{op.label} ({op.contracted_width})'
      )
  for tile_size, labels in misfits.items():
    raise ValueError(
      f'peftlib.quantize_base: tile_size={tile_size} does not divide'
      f' the contracted width of {", ".join(labels)}.'
    )
  return pairs


# Cached, since weights of equal shape are many and a compilation is slow.
@functools.lru_cache(maxsize=256)
def _quantizer(
  how: Any, double: bool, stacked: int, axis: int
) -> Callable[[Any], Any]:
  """A compiled function that quantizes a stack of layers."""
  quantize = functools.partial(interception.quantize, how=how, double=double)
  return jax.jit(_over_layers(quantize, stacked, axis))


def _over_layers(
  f: Callable[[Any], Any], stacked: int, axis: int
) -> Callable[[Any], Any]:
  """`f` on one layer after the other, so that only one is in flight."""
  if not stacked:
    return f

  def call(array: jax.Array) -> Any:
    out = jax.lax.map(
      _over_layers(f, stacked - 1, 0), jnp.moveaxis(array, axis, 0)
    )
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), out)

  return call


def _like(weight: nnx.Variable[Any], value: Any) -> nnx.Variable[Any]:
  """A variable for a part of the quantized weight, with its metadata."""
  shape = weight.get_raw_value().shape
  metadata = dict(weight.get_metadata())
  for key in injection.SHARDING_KEYS:
    names = metadata.get(key)
    if names is None:
      continue
    # Scales have fewer elements than the axis that the name shards.
    padded = (*names, *(None,) * (len(shape) - len(names)))
    kept = [
      n if a == b else None
      for n, a, b in zip(padded, shape, value.shape, strict=True)
    ]
    if isinstance(names, jax.sharding.PartitionSpec):
      metadata[key] = jax.sharding.PartitionSpec(*kept)
    else:
      metadata[key] = type(names)(kept)
  return type(weight).from_metadata(value, metadata)
