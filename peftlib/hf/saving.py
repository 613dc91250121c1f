"""Writing adapter directories of HF peft."""

from collections.abc import Mapping
import os
import re
from typing import Any, NamedTuple

from flax import nnx
import numpy as np

from peftlib import _checks
from peftlib import methods
from peftlib import models
from peftlib import slots as slots_lib
from peftlib.hf import bridges
from peftlib.hf import convolutions
from peftlib.hf import directories
from peftlib.hf import names
from peftlib.hf import parameters
from peftlib.hf import projections as projections_lib
from peftlib.hf import prompts
from peftlib.hf import selection

_VERSION = '0.21.2'
_TYPES: dict[str, str] = {
  'lora': 'LORA',
  'rslora': 'LORA',
  'dora': 'LORA',
  'pissa': 'LORA',
  'olora': 'LORA',
  'lora_fa': 'LORA',
  'lora_orthogonal': 'LORA',
  'hira': 'HIRA',
  'shira': 'SHIRA',
  'miss': 'MISS',
  'gralora': 'GRALORA',
  'oft': 'OFT',
  'ia3': 'IA3',
  'loha': 'LOHA',
  'lokr': 'LOKR',
  'vera': 'VERA',
}
# What `from_pretrained` of peft needs although it says nothing.
_DEFAULTS: dict[str, dict[str, Any]] = {
  'LORA': {'bias': 'none', 'fan_in_fan_out': False, 'lora_bias': False},
  'SHIRA': {'mask_type': 'random'},
}


class _Unit(NamedTuple):
  """One adapter of one HF module."""

  place: names.Place
  module: nnx.Module
  slot: slots_lib.Slot
  variables: dict[str, np.ndarray]


def save_adapter(
  directory: str | os.PathLike[str],
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  *,
  adapter: str = slots_lib.DEFAULT_ADAPTER,
  train: tuple[str, ...] = (),
  fields: Mapping[str, Any] | None = None,
  places: Mapping[str, names.Place] | None = None,
  projections: projections_lib.Projections | None = None,
  overwrite: bool = False,
) -> None:
  """Writes an adapter as HF peft reads it.

  Stacked layers are numbered, matrices turned, and `adapter_config.json` says
  what the adapter is; `PeftModel.from_pretrained` puts it into the base model
  of `transformers`. The directory appears only when it is complete.

  Example::

    hf.save_adapter('my-lora', graphdef, state)

  Args:
    directory: Where to; its parents are made.
    graphdef: Graph definition of the model with the adapter.
    state: Its whole state.
    adapter: Which adapter.
    train: What else was trained whole, as `AdapterConfig.train`; written as
      `modules_to_save`.
    fields: Fields of `adapter_config.json` to keep, those of `hf.Loaded` for
      example; what the adapter itself says must not differ.
    places: HF's modules in a model of your own; known for a `Decoder`.
    projections: Modules that HF has in parts where the model has them whole, or
      whole where it has parts, as in `load_adapter`; see
      `hf.fused_projections`. None: HF has what `places` say.
    overwrite: Whether a directory that is there already is replaced.

  Raises:
    FileExistsError: If the directory exists and `overwrite` is False.
    ValueError: If the model has no such adapter, peft has no configuration for
      it, or `fields` describe another one.
  """
  function = 'peftlib.hf.save_adapter'
  _checks.check_split(function, graphdef, state)
  model = nnx.merge(graphdef, state, copy=True)
  if places is None:
    places = names.places_of(model)
  virtual = prompts.save(model, state, adapter)
  units = list(_units(function, model, adapter, places))
  whole = _whole(function, state, places, train)
  if virtual is not None:
    if units or whole:
      raise ValueError(
        f'{function}: adapter {adapter!r} has virtual tokens and more; peft has'
        ' no one configuration for that.'
      )
    own, tensors = virtual
    _check_virtual(function, own, fields)
    directories.write(
      directory, dict(fields or own), tensors, overwrite=overwrite
    )
    return
  if not units and not whole:
    raise ValueError(
      f'{function}: the model has no adapter {adapter!r}; it has'
      f' {slots_lib.names_of(model)}.'
    )
  _check_units(function, units, whole)
  turned = projections_lib.between(projections or {}, places)
  theirs = fields
  if fields is not None and any(turned):
    fields = projections_lib.fields_to_model(
      function,
      bridges.bridge_of(fields),
      fields,
      turned,
      places,
      {
        u.place.name: u.slot.method.rank
        for u in units
        if hasattr(u.slot.method, 'rank')
      },
    )
  task = 'CAUSAL_LM' if isinstance(model, models.Decoder) else None
  config, bridge = _config(function, units, whole, places, fields, task)
  for unit in units:
    convolutions.check(
      function, bridge.peft_type, unit.place.name, unit.module, unit.slot
    )
  of_parameters = parameters.chosen(function, config, places)
  tensors = _tensors(function, bridge, units, parameters.nested(of_parameters))
  tuned = _tuned(bridge, config, whole, places)
  for name, values in whole.items():
    infix = 'ln_tuning_layers.' if name in tuned else ''
    for suffix, value in values.items():
      tensors[f'{names.PREFIX}{name}.{infix}{suffix}'] = value
  tensors |= _copies(config, state, units, places)
  if names.table_of_head(model):
    _tie(function, bridge, config, tensors, fields is None)
  _check_chosen(function, bridge, config, units, whole, tuned, places)
  if any(turned):
    config, tensors = projections_lib.to_hf(
      function, bridge, config, tensors, turned, places, theirs
    )
  directories.write(directory, config, tensors, overwrite=overwrite)


def _check_units(
  function: str,
  units: list[_Unit],
  whole: Mapping[str, Mapping[str, np.ndarray]],
) -> None:
  """Raises ValueError where peft would compute something else."""
  for unit in units:
    parameters.check(function, unit.place, unit.slot.method)
    if unit.slot.op.batch and not unit.place.parameter:
      raise ValueError(
        f'{function}: {unit.place.name} is of experts, one matrix each; HF has'
        ' those as parameters: say so by Place(parameter=True).'
      )
    if unit.place.name in whole:
      raise ValueError(
        f'{function}: {unit.place.name} has an adapter and is trained whole;'
        ' peft has one or the other.'
      )
    method = unit.slot.method
    if isinstance(method, methods.Ia3) and (
      unit.place.bias and not method.feedforward
    ):
      raise ValueError(
        f'{function}: IA3 of {unit.place.name}, which has a bias: peft would'
        ' scale it too.'
      )


def _tuned(
  bridge: bridges.Bridge,
  config: Mapping[str, Any],
  whole: Mapping[str, Any],
  places: Mapping[str, names.Place],
) -> list[str]:
  """Modules that are trained whole by LN tuning and not besides."""
  if bridge.peft_type != 'LN_TUNING':
    return []
  chosen = selection.modules(
    config, names.linear(places), names.others(places), []
  )
  return [n for n in chosen if n in whole]


def _tie(
  function: str,
  bridge: bridges.Bridge,
  config: dict[str, Any],
  tensors: dict[str, np.ndarray],
  own: bool,
) -> None:
  """Gives a head that is the table what the table has, as peft saves it."""
  twins = {
    'weight': ('weight', False),
    'base_layer.weight': ('base_layer.weight', False),
    'lora_embedding_B': ('lora_A.weight', True),
    'lora_embedding_A': ('lora_B.weight', True),
  }
  table = f'{names.PREFIX}{names.TABLE}.'
  found = [
    n for n in tensors if n.startswith(table) and 'trainable_tokens' not in n
  ]
  if not found:
    return
  if own and bridge.peft_type == 'LORA':
    config['ensure_weight_tying'] = True
  if not config.get('ensure_weight_tying') or any(
    n.removeprefix(table) not in twins for n in found
  ):
    raise ValueError(
      f'{function}: {names.TABLE} is the head too (tie_embeddings=True); peft'
      ' adapts both only by LoRA and modules_to_save with'
      ' ensure_weight_tying=True.'
    )
  for name in found:
    suffix, turned = twins[name.removeprefix(table)]
    value = tensors[name].T if turned else tensors[name]
    tensors[f'{names.PREFIX}{names.HEAD}.{suffix}'] = value


def _check_chosen(
  function: str,
  bridge: bridges.Bridge,
  config: Mapping[str, Any],
  units: list[_Unit],
  whole: Mapping[str, Any],
  tuned: list[str],
  places: Mapping[str, names.Place],
) -> None:
  """Raises ValueError unless the fields mean the modules that are there."""
  tokens = {u.place.name for u in units if 'trainable_tokens' in u.variables}
  adapted = {u.place.name for u in units} - tokens
  for field, meant, have in (
    (
      'target_modules',
      names.chosen(config, places)
      + parameters.chosen(function, config, places),
      adapted | set(tuned),
    ),
    ('modules_to_save', selection.whole(config, places), whole.keys() - tuned),
  ):
    wrong = sorted(set(meant) ^ set(have))
    if wrong:
      raise ValueError(
        f'{function}: {field}={config.get(field)!r} means other modules than'
        f' those that the adapter has; the difference: {", ".join(wrong[:5])}.'
      )


def _check_virtual(
  function: str, own: Mapping[str, Any], fields: Mapping[str, Any] | None
) -> None:
  for name, value in own.items():
    if fields is None or prompts.projected(name, fields):
      continue
    if fields.get(name) != value:
      raise ValueError(
        f'{function}: fields have {name}={fields.get(name)!r}, the adapter has'
        f' {value!r}.'
      )


def _units(
  function: str,
  model: nnx.Module,
  adapter: str,
  places: Mapping[str, names.Place],
) -> Any:
  by_path: dict[tuple[str, ...], dict[int | None, names.Place]] = {}
  for place in places.values():
    by_path.setdefault(place.variable, {})[place.layer] = place
  for module, slot in slots_lib.of_model(model):
    if slot.adapter != adapter:
      continue
    path = (*map(str, slot.op.path), slot.op.name)
    if path not in by_path:
      raise ValueError(
        f'{function}: {slot.op.label} has no counterpart in the model of HF.'
      )
    values = {
      name: np.asarray(getattr(module, slot.attribute(name)).get_value())
      for name in slot.variables
    }
    layers = (
      list(slot.layers)
      if slot.layers is not None
      else list(range(slot.axes[0]))
      if slot.axes
      else [None]
    )
    for i, layer in enumerate(layers):
      own = {
        name: np.take(value, i, slot.axis) if slot.axes else value
        for name, value in values.items()
      }
      shaped = {
        name: own[name].reshape(
          *slot.op.batch_shape, *spec.shape(slot.op.weight)
        )
        for name, spec in slot.variables.items()
      }
      yield _Unit(by_path[path][layer], module, slot, shaped)


def _whole(
  function: str,
  state: nnx.State[Any, Any],
  places: Mapping[str, names.Place],
  train: tuple[str, ...],
) -> dict[str, dict[str, np.ndarray]]:
  """Modules that were trained whole: all that they have, by HF's names."""
  flat = {tuple(map(str, p)): v for p, v in nnx.to_flat_state(state)}
  found: dict[str, dict[str, np.ndarray]] = {}
  for pattern in train:
    matched = False
    for place in places.values():
      own = [place.weight, *(['bias'] if place.bias else [])]
      ends = ['/'.join(place.path)]
      ends += ['/'.join((*place.path, name)) for name in own]
      if not any(end == pattern or end.endswith(f'/{pattern}') for end in ends):
        continue
      matched = True
      if place.parameter:
        raise ValueError(
          f'{function}: train={pattern!r} is {place.name}, a parameter; peft'
          ' has modules to save only.'
        )
      values = {}
      for name in own:
        value = np.asarray(flat[(*place.path, name)].get_value())
        value = value if place.layer is None else value[place.layer]
        suffix = 'bias' if name == 'bias' else 'weight'
        own_weight = name == place.weight
        values[suffix] = place.to_hf(value) if own_weight else value
      found[place.name] = values
    if not matched:
      raise ValueError(
        f'{function}: train={pattern!r} is no weight with a counterpart in the'
        ' model of HF.'
      )
  return found


def _config(
  function: str,
  units: list[_Unit],
  whole: Mapping[str, Mapping[str, np.ndarray]],
  places: Mapping[str, names.Place],
  fields: Mapping[str, Any] | None,
  task_type: str | None,
) -> tuple[dict[str, Any], bridges.Bridge]:
  tokens = [u for u in units if u.slot.method.name == 'trainable_tokens']
  adapted = [u for u in units if u not in tokens]
  kinds = sorted({u.slot.method.name for u in adapted})
  types = {_TYPES.get(kind) for kind in kinds}
  if None in types or len(types) > 1:
    raise ValueError(
      f'{function}: peft has no one configuration for the methods {kinds}.'
    )
  if fields is not None and not adapted:
    peft_type = str(fields.get('peft_type'))
  else:
    peft_type = str(types.pop()) if types else 'LN_TUNING'
  if tokens and peft_type != 'LORA':
    raise ValueError(
      f'{function}: peft has trainable tokens beside LoRA only, not'
      f' {peft_type}.'
    )
  bridge = bridges.BRIDGES[peft_type]
  own = {u.place.name: bridge.fields(u.slot.method) for u in adapted}
  if fields is not None:
    _check_fields(function, bridge, fields, adapted)
    return dict(fields), bridge
  config: dict[str, Any] = {
    'peft_type': peft_type,
    'task_type': task_type,
    'inference_mode': True,
    'peft_version': _VERSION,
    'base_model_name_or_path': None,
    **_DEFAULTS.get(peft_type, {}),
  }
  if own:
    config |= bridges.common(function, bridge, own)
    if peft_type == 'OFT':
      config |= _blocks(function, adapted)
    modules = [n for n in own if not places[n].parameter]
    config['target_modules'] = selection.targets(modules, places)
    if len(modules) < len(own):
      of_parameters = [n for n in own if places[n].parameter]
      config['target_parameters'] = selection.targets(of_parameters, places)
  if peft_type == 'IA3':
    ff = [u.place.name for u in adapted if u.slot.method.feedforward]  # type: ignore[attr-defined]
    config['feedforward_modules'] = selection.targets(ff, places) if ff else []
  if tokens:
    config['trainable_token_indices'] = {
      u.place.name: list(u.slot.method.indices)  # type: ignore[attr-defined]
      for u in tokens
    }
  besides = list(whole)
  if peft_type == 'LN_TUNING':
    scales = [n for n in besides if places[n].weight == 'scale']
    config['target_modules'] = selection.targets(scales or besides, places)
    besides = [n for n in besides if scales and n not in scales]
  if besides:
    config['modules_to_save'] = _ends(besides, places)
  return config, bridge


def _blocks(function: str, units: list[_Unit]) -> dict[str, int]:
  """OFT's block size, or number of blocks, that makes each module's."""
  sizes = {(u.slot.op.weight.rows, u.slot.method.block_size) for u in units}  # type: ignore[attr-defined]
  for candidate in sorted({size for _, size in sizes}):
    if all(_block_size(rows, 0, candidate) == size for rows, size in sizes):
      return {'r': 0, 'oft_block_size': candidate}
  for candidate in sorted({rows // size for rows, size in sizes}):
    if all(_block_size(rows, candidate, 0) == size for rows, size in sizes):
      return {'r': candidate, 'oft_block_size': 0}
  raise ValueError(
    f'{function}: block_size differs from module to module:'
    f' {sorted({size for _, size in sizes})}; peft has one size, or one number'
    ' of blocks, for all.'
  )


def _block_size(rows: int, blocks: int, size: int) -> int | None:
  """What peft makes of its fields r and oft_block_size for `rows` inputs."""
  if blocks:
    return None if rows % blocks else rows // blocks
  if size >= rows:
    return rows
  lower = next(n for n in range(size, 0, -1) if rows % n == 0)
  higher = next(n for n in range(size, rows + 1) if rows % n == 0)
  return lower if size - lower <= higher - size else higher


def _ends(chosen: list[str], places: Mapping[str, names.Place]) -> list[str]:
  """Names whose ends mean exactly these modules; see `selection.whole`."""
  out: list[str] = []
  for short in dict.fromkeys(name.rpartition('.')[2] for name in chosen):
    own = [n for n in chosen if n.rpartition('.')[2] == short]
    meant = selection.whole({'modules_to_save': [short]}, places)
    out.extend([short] if set(meant) <= set(chosen) else own)
  return out


def _check_fields(
  function: str,
  bridge: bridges.Bridge,
  fields: Mapping[str, Any],
  units: list[_Unit],
) -> None:
  if fields.get('peft_type') != bridge.peft_type:
    raise ValueError(
      f'{function}: fields are of a {fields.get("peft_type")}, the adapter is a'
      f' {bridge.peft_type}.'
    )
  for unit in units:
    given = bridge.of_module(fields, unit.place.name)
    for field, value in bridge.fields(unit.slot.method).items():
      if bridge.peft_type == 'OFT' and field == 'r':
        continue
      if bridge.peft_type == 'OFT' and field == 'oft_block_size':
        blocks, size = given.get('r') or 0, given.get(field) or 0
        if _block_size(unit.slot.op.weight.rows, blocks, size) == value:
          continue
      if field == 'init_weights' and value is True and not given.get(field):
        continue  # A start that is random.
      if field == 'init_lora_weights' and value is True:
        continue
      if field in given and given[field] != value:
        raise ValueError(
          f'{function}: fields have {field}={given[field]!r} for'
          f' {unit.place.name}, the adapter has {value!r}.'
        )


def _tensors(
  function: str,
  bridge: bridges.Bridge,
  units: list[_Unit],
  nested: Mapping[str, str],
) -> dict[str, np.ndarray]:
  out = {}
  shared: dict[str, list[np.ndarray]] = {'vera_A': [], 'vera_B': []}
  for unit in units:
    name_of_module = nested.get(unit.place.name, unit.place.name)
    prefix = f'{names.PREFIX}{name_of_module}'
    table = unit.slot.op.kind == 'embedding'
    for name, value in unit.variables.items():
      if name == 'trainable_tokens':
        out[f'{prefix}.token_adapter.trainable_tokens_delta'] = value
        continue
      if name in ('vera_a', 'vera_b'):
        shared[f'vera_{name[-1].upper()}'].append(value.T)
        continue
      matching = [t for t in bridge.tensors if t.variable == name]
      tensor = next(
        (t for t in matching if ('_embedding_' in t.suffix) == table),
        matching[0],
      )
      if unit.place.parameter:
        experts = value.reshape(-1, *value.shape[-2:])
        out[f'{prefix}.{tensor.suffix}'] = parameters.joined(
          tensor.suffix, experts
        )
        continue
      saved = tensor.save(value)
      if tensor.suffix == 'ia3_l':
        ff = unit.slot.method.feedforward  # type: ignore[attr-defined]
        saved = saved.reshape(1, -1) if ff else saved.reshape(-1, 1)
      if unit.slot.op.kind == 'conv':
        saved = convolutions.unflattened(
          tensor.suffix, saved, unit.slot.op.weight.inputs
        )
      out[f'{prefix}.{tensor.suffix}'] = saved
  for name, slices in shared.items():
    if slices:
      out[f'base_model.{name}'] = _whole_projection(function, name, slices)
  return out


def _whole_projection(
  function: str, name: str, slices: list[np.ndarray]
) -> np.ndarray:
  """The shared projection, of which every module has the first part."""
  largest = max(slices, key=lambda x: x.size)
  for part in slices:
    own = largest[:, : part.shape[1]]
    if name == 'vera_B':
      own = largest[: part.shape[0]]
    if not np.array_equal(own, part):
      raise ValueError(
        f'{function}: the projections {name} of modules of unequal size are not'
        ' parts of one, as peft has them. Give Vera a projection_shape.'
      )
  return largest


def _copies(
  config: Mapping[str, Any],
  state: nnx.State[Any, Any],
  units: list[_Unit],
  places: Mapping[str, names.Place],
) -> dict[str, np.ndarray]:
  """The base weights that peft saves beside adapters of tables and heads."""
  target = config.get('target_modules') or ()
  short = (names.HEAD, names.TABLE.rpartition('.')[2])
  if isinstance(target, str):
    tables = [n for n in places if n.rpartition('.')[2] in short]
    targeted = any(re.fullmatch(target, n) for n in tables)
  else:
    # By the short name alone, not as part of a whole one.
    targeted = any(n in target for n in short)
  if not targeted or config.get('trainable_token_indices') is not None:
    return {}
  flat = {tuple(map(str, p)): v for p, v in nnx.to_flat_state(state)}
  heads = names.heads(places)
  out = {}
  for unit in units:
    place = unit.place
    if unit.slot.method.name == 'trainable_tokens':
      continue
    if unit.slot.op.kind == 'embedding' or place.name in heads:
      value = np.asarray(flat[(*place.path, place.weight)].get_value())
      out[f'{names.PREFIX}{place.name}.base_layer.weight'] = place.to_hf(value)
  return out
