"""Reading adapter directories of HF peft."""

from collections.abc import Iterable, Mapping
import dataclasses
import os
import re
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlib import _checks
from peftlib import config as config_lib
from peftlib import injection
from peftlib import methods
from peftlib import slots as slots_lib
from peftlib.hf import bridges
from peftlib.hf import convolutions
from peftlib.hf import directories
from peftlib.hf import names
from peftlib.hf import parameters
from peftlib.hf import projections as projections_lib
from peftlib.hf import prompts
from peftlib.hf import selection

_TOKENS = 'token_adapter.trainable_tokens_delta'
# Copies of the base's weight that peft saves beside the adapter of a table.
_COPIES = 'base_layer.weight'
_WHOLE = ('ln_tuning_layers.weight', 'weight')
_SHARED = ('vera_A', 'vera_B')


class Loaded(NamedTuple):
  """A model with an adapter of HF peft.

  Attributes:
    graphdef: Graph definition of the model with the adapter.
    state: Its whole state.
    config: What was injected; `peftlib.trainable_filter(config)` picks it.
    fields: The fields of `adapter_config.json`, for `save_adapter`.
  """

  graphdef: nnx.GraphDef[Any]
  state: nnx.State[Any, Any]
  config: config_lib.AdapterConfig
  fields: dict[str, Any]


def load_adapter(
  directory: str | os.PathLike[str],
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  *inputs: Any,
  adapter: str = slots_lib.DEFAULT_ADAPTER,
  places: Mapping[str, names.Place] | None = None,
  projections: projections_lib.Projections | None = None,
) -> Loaded:
  """Puts an adapter that HF peft has saved into a model.

  Every field of `adapter_config.json` is honoured, or the load stops and names
  the field. Layers that HF numbers are stacked as the model has them.

  Example::

    graphdef, state = models.load('SmolLM2.gguf')
    loaded = hf.load_adapter('my-lora', graphdef, state)
    logits = nnx.merge(loaded.graphdef, loaded.state)(tokens)

  Args:
    directory: With `adapter_config.json` and `adapter_model.safetensors`.
    graphdef: Graph definition of the base model.
    state: Its whole state, of concrete arrays.
    *inputs: Inputs of the model's `__call__`, of which only shapes and dtypes
      matter; may be left out for a `peftlib.models.Decoder`.
    adapter: Name that it gets in the model.
    places: HF's modules in a model of your own; known for a `Decoder`.
    projections: Modules that HF may have in parts where the model has them
      whole, or whole where it has parts: the name of the whole, and the parts'
      names and widths in order, `{'qkv_proj': {'q_proj': 64, 'k_proj': 32,
      'v_proj': 32}}`. LoRA, DoRA, HiRA, OFT and (IA)3 are cut and joined
      without loss; ranks of parts that differ add up. Those of Phi-3 are known
      for a `Decoder`.

  Returns:
    The model with the adapter. What was trained whole replaces the base's
    variables; all others are the very objects.

  Raises:
    FileNotFoundError: If a file isn't there.
    ValueError: If a file is malformed or pickled, a field can't be honoured,
      or tensors are missing, left over, or of another shape.
  """
  function = 'peftlib.hf.load_adapter'
  _checks.check_split(function, graphdef, state)
  fields, tensors = directories.read(directory)
  if fields.get('peft_type') in prompts.TYPES:
    names.places_of(nnx.merge(graphdef, state, copy=True))
    graphdef, state, config = prompts.load(
      graphdef, state, fields, tensors, adapter
    )
    return Loaded(graphdef, state, config, fields)
  bridge = bridges.bridge_of(fields)
  model = nnx.merge(graphdef, state, copy=True)
  if places is None:
    places = names.places_of(model)
  theirs = fields
  if projections is None:
    projections = projections_lib.of_model(model)
  turned = projections_lib.between(projections, places, tensors)
  if any(turned):
    fields, tensors = projections_lib.to_model(
      function, bridge, fields, tensors, turned, places
    )
  if names.table_of_head(model):
    tensors = _of_tied(bridge, fields, tensors)
  if not inputs:
    inputs = (jax.ShapeDtypeStruct((1, 8), jnp.int32),)
  of_parameters = parameters.chosen(function, fields, places)
  tensors = parameters.renamed(tensors, of_parameters)
  grouped, shared = _by_module(tensors, places)
  chosen = _chosen(bridge, fields, places, grouped, of_parameters)
  rules, whole = _rules(bridge, fields, places, grouped, shared, chosen)
  config = config_lib.AdapterConfig(rules, tuple(sorted(whole)))
  # Every value is overwritten; no key of the caller's is of use.
  graphdef, state = injection.inject(
    graphdef, state, config, *inputs, key=jax.random.key(0), adapter=adapter
  )
  state = _filled(graphdef, state, adapter, bridge, places, grouped, shared)
  state = _with_whole(state, places, grouped)
  return Loaded(graphdef, state, config, theirs)


def _of_tied(
  bridge: bridges.Bridge,
  fields: Mapping[str, Any],
  tensors: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
  """The tensors less those of the head, where it is the table.

  With `ensure_weight_tying` peft saves them twice; without it, what it trains
  of one is no longer what the other has.
  """
  same = lambda x: x
  twins = {
    'weight': ('weight', same),
    _COPIES: (_COPIES, same),
    'lora_A.weight': ('lora_embedding_B', lambda x: x.T),
    'lora_B.weight': ('lora_embedding_A', lambda x: x.T),
  }
  table = f'{names.PREFIX}{names.TABLE}.'
  head = f'{names.PREFIX}{names.HEAD}.'
  tied = bool(fields.get('ensure_weight_tying'))
  own = [n for n in tensors if n.startswith(head)]
  strangers = []
  for name in own:
    suffix, turned = twins.get(name.removeprefix(head), ('', same))
    twin = tensors.get(table + suffix)
    if (
      not tied
      or twin is None
      or not np.array_equal(turned(twin), tensors[name])
    ):
      strangers.append(name)
  if not tied:
    strangers += [
      n for n in tensors if n.startswith(table) and not n.endswith(_TOKENS)
    ]
  if strangers:
    raise ValueError(
      f'peftlib.hf.load_adapter: {bridge.peft_type} with'
      f' {_checks.some(strangers)}:'
      ' the head of this model is its table (tie_embeddings=True); peft'
      ' adapts only one of them without ensure_weight_tying=True.'
    )
  return {n: t for n, t in tensors.items() if n not in own}


def _by_module(
  tensors: Mapping[str, np.ndarray], places: Mapping[str, names.Place]
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
  """Tensors by module and suffix, and those that modules share."""
  grouped: dict[str, dict[str, np.ndarray]] = {}
  shared = {}
  strangers = []
  for name, tensor in tensors.items():
    own = name.removeprefix(names.PREFIX)
    if name.removeprefix('base_model.') in _SHARED:
      shared[name.removeprefix('base_model.')] = tensor
      continue
    parts = own.split('.')
    end = next(
      (n for n in range(len(parts), 0, -1) if '.'.join(parts[:n]) in places), 0
    )
    if not end or not name.startswith(names.PREFIX):
      strangers.append(name)
      continue
    module = grouped.setdefault('.'.join(parts[:end]), {})
    module['.'.join(parts[end:])] = tensor
  if strangers:
    raise ValueError(
      'peftlib.hf.load_adapter: tensors of modules that the model has not:'
      f' {_checks.some(strangers)}.'
    )
  return grouped, shared


def _chosen(
  bridge: bridges.Bridge,
  fields: Mapping[str, Any],
  places: Mapping[str, names.Place],
  grouped: Mapping[str, Mapping[str, np.ndarray]],
  of_parameters: list[str],
) -> list[str]:
  """The modules that the fields mean, which have to be those with tensors."""
  chosen = names.chosen(fields, places)
  strange = [m for m in chosen if places[m].weight not in bridge.weights]
  if strange:
    raise ValueError(
      f'peftlib.hf.load_adapter: {bridge.peft_type} of'
      f' {_checks.some(strange)}: not a'
      f' {" or ".join(bridge.weights)}, and nothing else is known here.'
    )
  chosen += of_parameters
  whole = (*_WHOLE, 'bias', _COPIES, _TOKENS)
  suffixes = {t.suffix for t in bridge.tensors}
  have = {m for m, own in grouped.items() if suffixes & own.keys()}
  if bridge.peft_type == 'LN_TUNING':
    have = {m for m, own in grouped.items() if _WHOLE[0] in own}
  missing = [m for m in chosen if m not in have]
  surplus = sorted(have - set(chosen))
  if missing or surplus:
    raise ValueError(
      'peftlib.hf.load_adapter: target_modules and its companions mean'
      f' {len(chosen)} modules; without tensors: {_checks.some(missing)}; with'
      f' tensors though not meant: {_checks.some(surplus)}.'
    )
  _check_whole(fields, places, grouped)
  unknown = [
    f'{m}.{suffix}'
    for m, own in grouped.items()
    for suffix in own
    if suffix not in suffixes and suffix not in whole
  ]
  if unknown:
    raise ValueError(
      f'peftlib.hf.load_adapter: tensors that {bridge.peft_type} has not:'
      f' {_checks.some(unknown)}.'
    )
  return chosen


def _check_whole(
  fields: Mapping[str, Any],
  places: Mapping[str, names.Place],
  grouped: Mapping[str, Mapping[str, np.ndarray]],
) -> None:
  """Raises ValueError unless what is trained whole has its tensors."""
  for field, meant, have in (
    (
      'modules_to_save',
      set(selection.whole(fields, places)),
      {m for m, own in grouped.items() if 'weight' in own},
    ),
    (
      'trainable_token_indices',
      _with_tokens(fields, places),
      {m for m, own in grouped.items() if _TOKENS in own},
    ),
  ):
    if meant != have:
      raise ValueError(
        f'peftlib.hf.load_adapter: {field}={fields.get(field)!r} means'
        f' {len(meant)} modules; without tensors:'
        f' {_checks.some(sorted(meant - have))}; with tensors though not meant:'
        f' {_checks.some(sorted(have - meant))}.'
      )
  for name in fields.get('modules_to_save') or ():
    if not selection.whole({'modules_to_save': [name]}, places):
      raise ValueError(
        f'peftlib.hf.load_adapter: modules_to_save has {name!r}, of which the'
        ' model has no weight.'
      )


def _with_tokens(
  fields: Mapping[str, Any], places: Mapping[str, names.Place]
) -> set[str]:
  tokens = fields.get('trainable_token_indices')
  if not tokens:
    return set()
  if not isinstance(tokens, dict):
    return {names.TABLE}
  return {m for m in places for n in tokens if m == n or m.endswith(f'.{n}')}


def _rules(
  bridge: bridges.Bridge,
  fields: Mapping[str, Any],
  places: Mapping[str, names.Place],
  grouped: Mapping[str, Mapping[str, np.ndarray]],
  shared: Mapping[str, np.ndarray],
  chosen: Iterable[str],
) -> tuple[tuple[config_lib.Rule, ...], set[str]]:
  """One rule for each weight and method, with the layers that have it."""
  found: dict[tuple[tuple[str, ...], methods.Method], list[int | None]] = {}
  trained: dict[tuple[str, ...], list[int | None]] = {}
  tokens = fields.get('trainable_token_indices')
  for module, own in grouped.items():
    place = places[module]
    if _TOKENS in own:
      method: methods.Method = methods.TrainableTokens(
        indices=tuple(_indices(tokens, module)), dtype=_dtype(own[_TOKENS])
      )
      found.setdefault((place.path, method), []).append(place.layer)
    for name in _whole_of(place, own):
      trained.setdefault((*place.path, name), []).append(place.layer)
  if bridge.peft_type != 'LN_TUNING':
    for module in chosen:
      place = places[module]
      method = bridge.method(
        bridge.of_module(fields, module), {**shared, **grouped[module]}
      )
      method = dataclasses.replace(
        method, dtype=_dtype_of(bridge, grouped[module])
      )
      if (
        isinstance(method, methods.Ia3)
        and place.bias
        and (not method.feedforward)
      ):
        raise ValueError(
          f'peftlib.hf.load_adapter: IA3 of {module}, which has a bias: peft'
          ' scales it too, which is not known here.'
        )
      parameters.check('peftlib.hf.load_adapter', place, method)
      found.setdefault((place.target, method), []).append(place.layer)
  counts: dict[tuple[str, ...], int] = {}
  for place in places.values():
    counts[place.target] = counts.get(place.target, 0) + 1
  for path, layers in trained.items():
    if None not in layers and len(layers) != counts[path[:-1]]:
      raise ValueError(
        f'peftlib.hf.load_adapter: layers {sorted(layers)} of {"/".join(path)}'  # type: ignore[type-var]
        ' are trained whole, the others are not; here a stack is one variable,'
        ' trained whole or not at all.'
      )
  rules = []
  for (path, method), layers in found.items():
    every = None in layers or len(layers) == counts[path]
    rules.append(
      config_lib.Rule(
        re.escape('/'.join(path)),
        method,
        layers=None
        if every
        else tuple(sorted(i for i in layers if i is not None)),
      )
    )
  return tuple(rules), {'/'.join(path) for path in trained}


def _dtype(tensor: np.ndarray) -> str:
  return str(tensor.dtype) if tensor.dtype.itemsize < 4 else 'float32'


def _dtype_of(bridge: bridges.Bridge, own: Mapping[str, np.ndarray]) -> str:
  """The dtype of an adapter's variables: that of its tensors."""
  for tensor in bridge.tensors:
    if tensor.suffix in own:
      return _dtype(own[tensor.suffix])
  return 'float32'


def _indices(tokens: Any, module: str) -> list[int]:
  """The token ids of a table, from a list or from lists by module."""
  if isinstance(tokens, dict):
    for name, indices in tokens.items():
      if module == name or module.endswith(f'.{name}'):
        return indices
  if isinstance(tokens, list):
    return tokens
  raise ValueError(
    f'peftlib.hf.load_adapter: trainable_token_indices={tokens!r} has none for'
    f' {module}, of which there is a tensor.'
  )


def _whole_of(
  place: names.Place, own: Mapping[str, np.ndarray]
) -> dict[str, str]:
  """Variables of a module that were trained whole, and their tensors."""
  found = {}
  for suffix in _WHOLE:
    if suffix in own:
      found[place.weight] = suffix
  if 'bias' in own:
    found['bias'] = 'bias'
  return found


def _filled(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  adapter: str,
  bridge: bridges.Bridge,
  places: Mapping[str, names.Place],
  grouped: Mapping[str, Mapping[str, np.ndarray]],
  shared: Mapping[str, np.ndarray],
) -> nnx.State[Any, Any]:
  """The State with the tensors as values of the adapter's variables."""
  model = nnx.merge(graphdef, state, copy=True)
  modules: dict[tuple[Any, ...], dict[int | None, str]] = {}
  for place in places.values():
    modules.setdefault(place.variable, {})[place.layer] = place.name
  new: dict[tuple[Any, ...], Any] = {}
  used: dict[str, set[str]] = {}
  for module, slot in slots_lib.of_model(model):
    if slot.adapter != adapter:
      continue
    by_layer = modules[(*map(str, slot.op.path), slot.op.name)]
    wanted: list[int | None] = (
      list(slot.layers)
      if slot.layers is not None
      else list(range(slot.axes[0]))
      if slot.axes
      else [None]
    )
    for variable, spec in slot.variables.items():
      shape = slot.op.variable_shape(spec)
      shape = (*(1,) * slot.filled(len(shape)), *shape)
      values = []
      for layer in wanted:
        name = by_layer[layer]
        convolutions.check(
          'peftlib.hf.load_adapter', bridge.peft_type, name, module, slot
        )
        value, suffix = _value(
          bridge, slot, variable, grouped[name], shared, places[name]
        )
        used.setdefault(name, set()).add(suffix)
        expected = (*slot.op.batch_shape, *spec.shape(slot.op.weight))
        if value.shape != expected:
          raise ValueError(
            f'peftlib.hf.load_adapter: {name}.{suffix} has shape'
            f' {grouped[name].get(suffix, value).shape}, which is'
            f' {value.shape} here; the fields and the model make it {expected}.'
          )
        values.append(value.reshape(shape))
      stacked = np.stack(values, slot.axis) if slot.axes else values[0]
      attribute = slot.attribute(variable)
      old = getattr(module, attribute)
      dtype = old.get_value().dtype
      placed = (
        jax.device_put(stacked.astype(dtype), old.get_value().sharding)
        if old.get_value().committed
        else jnp.asarray(stacked.astype(dtype))
      )
      new[(*slot.op.path, attribute)] = placed
  _check_used(bridge, grouped, used)
  flat = [
    (path, variable.replace(new[path]) if path in new else variable)
    for path, variable in nnx.to_flat_state(state)
  ]
  return nnx.from_flat_state(flat)


def _value(
  bridge: bridges.Bridge,
  slot: slots_lib.Slot,
  variable: str,
  own: Mapping[str, np.ndarray],
  shared: Mapping[str, np.ndarray],
  place: names.Place,
) -> tuple[np.ndarray, str]:
  if variable == 'trainable_tokens':
    return own[_TOKENS], _TOKENS
  if variable == 'vera_a':
    return shared['vera_A'][:, : slot.op.weight.rows].T, 'vera_A'
  if variable == 'vera_b':
    return shared['vera_B'][: slot.op.weight.columns].T, 'vera_B'
  suffixes = [t for t in bridge.tensors if t.variable == variable]
  for tensor in suffixes:
    if tensor.suffix in own:
      value = own[tensor.suffix]
      if place.parameter:
        experts = int(np.prod(slot.op.batch_shape))
        return parameters.split(tensor.suffix, value, experts), tensor.suffix
      if slot.op.kind == 'conv':
        value = convolutions.flattened(tensor.suffix, value)
      return tensor.load(value), tensor.suffix
  raise ValueError(
    f'peftlib.hf.load_adapter: {place.name} has no tensor'
    f' {" or ".join(t.suffix for t in suffixes)}, which the fields ask for.'
  )


def _check_used(
  bridge: bridges.Bridge,
  grouped: Mapping[str, Mapping[str, np.ndarray]],
  used: Mapping[str, set[str]],
) -> None:
  suffixes = {t.suffix for t in bridge.tensors}
  left = [
    f'{module}.{suffix}'
    for module, own in grouped.items()
    for suffix in own
    if suffix in suffixes and suffix not in used.get(module, set())
  ]
  if left:
    raise ValueError(
      'peftlib.hf.load_adapter: tensors for which the fields have no use:'
      f' {_checks.some(left)}.'
    )


def _with_whole(
  state: nnx.State[Any, Any],
  places: Mapping[str, names.Place],
  grouped: Mapping[str, Mapping[str, np.ndarray]],
) -> nnx.State[Any, Any]:
  """The State with the modules that were trained whole."""
  values: dict[tuple[str, ...], dict[int | None, np.ndarray]] = {}
  for module, own in grouped.items():
    place = places[module]
    found = _whole_of(place, own)
    if _COPIES in own:
      found.setdefault(place.weight, _COPIES)
    for variable, suffix in found.items():
      value = own[suffix]
      if variable == place.weight:
        value = place.from_hf(value)
      values.setdefault((*place.path, variable), {})[place.layer] = value
  flat = []
  for path, variable in nnx.to_flat_state(state):
    own_values = values.get(tuple(map(str, path)))
    if own_values is not None:
      old = np.array(variable.get_value())
      for layer, value in own_values.items():
        target = old if layer is None else old[layer]
        if target.shape != value.shape:
          raise ValueError(
            f'peftlib.hf.load_adapter: {"/".join(map(str, path))} has shape'
            f' {target.shape}, the tensor of the adapter {value.shape}.'
          )
        target[...] = value
      variable = variable.replace(jnp.asarray(old))
    flat.append((path, variable))
  return nnx.from_flat_state(flat)
