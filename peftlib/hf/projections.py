"""Projections that HF has as one module and the model as several, or reversed.

Phi-3 has `qkv_proj` where Llama has `q_proj`, `k_proj` and `v_proj`. The weight
of the one is those of the others side by side, so that adapters which treat
each output by itself can be cut and joined, and compute the same.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import math
from typing import Any, NamedTuple

from flax import nnx
import numpy as np

from peftlib import _checks
from peftlib import models
from peftlib.hf import bridges
from peftlib.hf import names
from peftlib.hf import selection

Projections = Mapping[str, Mapping[str, int]]
Tensors = Mapping[str, np.ndarray]

# How the tensor of a whole projection follows from those of its parts.
_ROWS = ('lora_B.weight', 'lora_B.bias', 'hira_B', 'weight', 'bias')
_LOW_RANK = {'lora_A.weight': 'lora_B.weight', 'hira_A': 'hira_B'}
_EQUAL = ('oft_R.weight',)
_MAGNITUDE = 'lora_magnitude_vector'
_IA3 = 'ia3_l'
_KNOWN = 'only LoRA, HiRA, OFT and IA3 can be cut and joined'
# Trained whole, not adapters.
_WHOLE = {'weight', 'bias'}
# What a part that has no adapter stands for.
_NEUTRAL = {'lora_B.weight': 0.0, 'lora_B.bias': 0.0, 'hira_B': 0.0, _IA3: 1.0}


class Turned(NamedTuple):
  """Where HF and the model differ: parts and their widths, by the whole.

  Attributes:
    split: Modules that HF has whole and the model in parts.
    fused: Modules that the model has whole and HF in parts.
  """

  split: dict[str, dict[str, int]]
  fused: dict[str, dict[str, int]]

  @property
  def back(self) -> 'Turned':
    """From the model to HF."""
    return Turned(self.fused, self.split)

  @property
  def names(self) -> dict[str, tuple[str, ...]]:
    """What the modules of HF that differ are in the model."""
    joined = {
      part: (whole,) for whole, parts in self.fused.items() for part in parts
    }
    return joined | {whole: tuple(parts) for whole, parts in self.split.items()}


def fused_projections(
  graphdef: nnx.GraphDef[Any], state: nnx.State[Any, Any]
) -> Projections:
  """The projections that Phi-3 has fused and a `Decoder` in parts.

  For `save_adapter`, so that the adapter fits a model of HF that has
  `qkv_proj` and `gate_up_proj`.

  Example::

    hf.save_adapter(
      'for-phi',
      graphdef,
      state,
      projections=hf.fused_projections(graphdef, state),
    )

  Args:
    graphdef: Graph definition of a `peftlib.models.Decoder`.
    state: Its whole state.

  Returns:
    For each fused name its parts in order, with their number of outputs.

  Raises:
    TypeError: If the model isn't a `Decoder`.
  """
  _checks.check_split('peftlib.hf.fused_projections', graphdef, state)
  model = nnx.merge(graphdef, state, copy=True)
  if not isinstance(model, models.Decoder):
    raise TypeError(
      'peftlib.hf.fused_projections: only of peftlib.models.Decoder are the'
      f' widths known; this is a {type(model).__name__}. Write them as'
      " {'qkv_proj': {'q_proj': 64, 'k_proj': 32, 'v_proj': 32}}."
    )
  return of_model(model)


def of_model(model: nnx.Module) -> Projections:
  """`fused_projections` of a merged model; none of one that isn't ours."""
  if not isinstance(model, models.Decoder):
    return {}
  config = model.config
  kv_width = config.num_kv_heads * config.head_dim
  return {
    'qkv_proj': {
      'q_proj': config.num_heads * config.head_dim,
      'k_proj': kv_width,
      'v_proj': kv_width,
    },
    'gate_up_proj': {
      'gate_proj': config.intermediate_size,
      'up_proj': config.intermediate_size,
    },
  }


def between(
  projections: Projections,
  places: Mapping[str, names.Place],
  tensors: Iterable[str] | None = None,
) -> Turned:
  """Finds the modules that differ.

  Args:
    projections: Names of fused modules, and of their parts with their widths,
      in order.
    places: The model's modules.
    tensors: Names of HF's tensors, which tell whether HF differs at all; None
      where it is known to.
  """
  out = Turned({}, {})
  short = {t.removeprefix(names.PREFIX) for t in tensors or ()}
  named = {part for t in short for part in t.split('.')}
  for fused, parts in projections.items():
    first = next(iter(parts))
    for name in places:
      prefix, dot, last = name.rpartition('.')
      own = {f'{prefix}{dot}{part}': width for part, width in parts.items()}
      whole = f'{prefix}{dot}{fused}'
      if last == first and own.keys() <= places.keys():
        if tensors is None or fused in named:
          out.split[whole] = own
      elif last == fused and (tensors is None or named & parts.keys()):
        out.fused[whole] = own
  return out


def to_model(
  function: str,
  bridge: bridges.Bridge,
  fields: Mapping[str, Any],
  tensors: Tensors,
  turned: Turned,
  places: Mapping[str, names.Place],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Fields and tensors of HF's modules as those of the model's.

  Raises:
    ValueError: If an adapter can't be cut or joined.
  """
  theirs = _their_places(places, turned)
  given = _given(bridge, fields, theirs)
  own: dict[str, dict[str, Any]] = {}
  out = _cut(function, tensors, turned.split)
  for whole, parts in turned.fused.items():
    out, joined = _join(function, bridge, out, whole, parts, given)
    if joined is not None:
      own[whole] = joined
  own = _by_other_names(given, turned) | own
  own = {m: own[m] for m in places if m in own}
  return _renamed(function, bridge, fields, own, theirs, places, turned), out


def fields_to_model(
  function: str,
  bridge: bridges.Bridge,
  fields: Mapping[str, Any],
  turned: Turned,
  places: Mapping[str, names.Place],
  ranks: Mapping[str, int],
) -> dict[str, Any]:
  """The fields of HF's modules as those of the model's.

  Args:
    function: The public function that asks.
    bridge: The peft type.
    fields: What HF has or shall have.
    turned: Where they differ.
    places: The model's modules.
    ranks: Ranks of the model's adapters, by module.
  """
  theirs = _their_places(places, turned)
  own = _by_other_names(_given(bridge, fields, theirs), turned)
  for whole in turned.fused.keys() & own.keys() & ranks.keys():
    own[whole] = _with_rank(own[whole], ranks[whole])
  own = {m: own[m] for m in places if m in own}
  return _renamed(function, bridge, fields, own, theirs, places, turned)


def to_hf(
  function: str,
  bridge: bridges.Bridge,
  config: Mapping[str, Any],
  tensors: Tensors,
  turned: Turned,
  places: Mapping[str, names.Place],
  fields: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """What `to_model` did, undone.

  Args:
    function: The public function that asks.
    bridge: The peft type.
    config: Fields of the model's modules.
    tensors: Their tensors.
    turned: Where they differ.
    places: The model's modules.
    fields: Fields that the result shall have, or None.

  Raises:
    ValueError: If an adapter can't be cut or joined, or not to the ranks that
      `fields` have.
  """
  theirs = _their_places(places, turned)
  given = _given(bridge, config, places)
  wanted = None if fields is None else _given(bridge, fields, theirs)
  own: dict[str, dict[str, Any]] = {}
  out = dict(tensors)
  for whole, parts in turned.split.items():
    out, joined = _join(function, bridge, out, whole, parts, given)
    if joined is not None:
      own[whole] = joined
  out = _cut(function, out, turned.fused)
  if fields is not None and wanted is not None:
    for whole, parts in turned.fused.items():
      _check_wanted(function, whole, parts, given, wanted)
      if whole in given:
        out = _narrowed(function, out, parts, given[whole], wanted)
    return dict(fields), out
  own = _by_other_names(given, turned.back) | own
  own = {m: own[m] for m in theirs if m in own}
  return (
    _renamed(function, bridge, config, own, places, theirs, turned.back),
    out,
  )


def _their_places(
  places: Mapping[str, names.Place], turned: Turned
) -> dict[str, names.Place]:
  known = turned.back.names
  return {
    own: dataclasses.replace(place, name=own)
    for name, place in places.items()
    for own in known.get(name, (name,))
  }


def _given(
  bridge: bridges.Bridge,
  fields: Mapping[str, Any],
  places: Mapping[str, names.Place],
) -> dict[str, dict[str, Any]]:
  """What the fields say of each module that they mean."""
  chosen = names.chosen(fields, places)
  return {module: bridge.of_module(fields, module) for module in chosen}


def _by_other_names(
  own: Mapping[str, dict[str, Any]], turned: Turned
) -> dict[str, dict[str, Any]]:
  """The same by the names on the other side; a whole has its first part's."""
  known = turned.names
  out: dict[str, dict[str, Any]] = {}
  for module, fields in own.items():
    for name in known.get(module, (module,)):
      out.setdefault(name, fields)
  return out


def _renamed(
  function: str,
  bridge: bridges.Bridge,
  fields: Mapping[str, Any],
  own: Mapping[str, Mapping[str, Any]],
  before: Mapping[str, names.Place],
  after: Mapping[str, names.Place],
  turned: Turned,
) -> dict[str, Any]:
  """The fields as they mean modules by other names.

  Args:
    function: The public function that asks.
    bridge: The peft type.
    fields: The fields.
    own: What they say of each module, by its name then.
    before: The modules that they mean now.
    after: Those that they shall mean.
    turned: From the one to the other.
  """
  out = dict(fields)
  for name in ('exclude_modules', 'layers_to_transform', 'layers_pattern'):
    if name in out:
      out[name] = None
  if fields.get('target_modules') is not None:
    out['target_modules'] = selection.targets(list(own), after)
  if fields.get('feedforward_modules'):
    means = {'target_modules': fields['feedforward_modules']}
    out['feedforward_modules'] = selection.targets(
      list(_by_other_names(_given(bridge, means, before), turned)), after
    )
  for pattern in bridge.patterns:
    out.pop(pattern, None)
  ranked = [f for f in ('r', *bridge.patterns.values()) if f in fields]
  if own and ranked:
    out |= bridges.common(
      function,
      bridge,
      {m: {f: values[f] for f in ranked} for m, values in own.items()},
    )
  if fields.get('modules_to_save'):
    whole = selection.whole(fields, before)
    renamed = list(_by_other_names({name: {} for name in whole}, turned))
    if renamed != whole:
      out['modules_to_save'] = renamed
  return out


def _of_module(tensors: Tensors, module: str) -> dict[str, np.ndarray]:
  """Tensors of a module by suffix."""
  prefix = f'{names.PREFIX}{module}.'
  return {
    name.removeprefix(prefix): tensor
    for name, tensor in tensors.items()
    if name.startswith(prefix)
  }


def _replaced(
  tensors: Tensors,
  modules: Iterable[str],
  new: Mapping[str, Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
  """The tensors, those of `modules` left out and those of `new` put in."""
  gone = tuple(f'{names.PREFIX}{module}.' for module in modules)
  out = {n: t for n, t in tensors.items() if not n.startswith(gone)}
  for module, own in new.items():
    out |= {f'{names.PREFIX}{module}.{n}': t for n, t in own.items()}
  return out


def _cut(
  function: str, tensors: Tensors, wholes: Mapping[str, Mapping[str, int]]
) -> dict[str, np.ndarray]:
  """The tensors with those of whole projections as those of their parts."""
  out = dict(tensors)
  for whole, parts in wholes.items():
    new: dict[str, dict[str, np.ndarray]] = {part: {} for part in parts}
    for suffix, tensor in _of_module(tensors, whole).items():
      same = suffix in (*_LOW_RANK, *_EQUAL) or (
        # Of a feed-forward module: on its inputs.
        suffix == _IA3 and tensor.shape[0] == 1
      )
      if not same and suffix not in (*_ROWS, _MAGNITUDE, _IA3):
        raise ValueError(
          f'{function}: {whole}.{suffix} is of a projection that is'
          f' {", ".join(parts)} together; {_KNOWN}.'
        )
      if not same and tensor.shape[0] != sum(parts.values()):
        raise ValueError(
          f'{function}: {whole}.{suffix} has {tensor.shape[0]} rows; its parts'
          f' {dict(parts)} have {sum(parts.values())}.'
        )
      start = 0
      for part, width in parts.items():
        new[part][suffix] = tensor if same else tensor[start : start + width]
        start += width
    out = _replaced(out, [whole], {p: own for p, own in new.items() if own})
  return out


def _join(
  function: str,
  bridge: bridges.Bridge,
  tensors: Tensors,
  whole: str,
  parts: Mapping[str, int],
  given: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[str, np.ndarray], dict[str, Any] | None]:
  """The tensors with those of the parts as those of the whole projection.

  Returns:
    They, and the fields of the whole; None if no part has an adapter.
  """
  own = {part: _of_module(tensors, part) for part in parts}
  suffixes = list(dict.fromkeys(s for tensor in own.values() for s in tensor))
  if not suffixes:
    return dict(tensors), None
  present = [part for part in parts if part in given]
  adapted = [part for part in parts if own[part].keys() - _WHOLE]
  if adapted != present:
    raise ValueError(
      f'{function}: the fields mean {present} of {", ".join(parts)}; those with'
      f' tensors are {adapted}.'
    )
  fields = dict(given[present[0]]) if present else None
  new: dict[str, np.ndarray] = {}
  factors = {}
  if fields is not None:
    first = _scale(fields)
    # One module has one scale: the first part's.
    factors = {p: _scale(given[p]) / first for p in present}
  for suffix in suffixes:
    have = {p: own[p][suffix] for p in parts if suffix in own[p]}
    values = list(have.values())
    equal = all(np.array_equal(values[0], v) for v in values)
    if suffix in _LOW_RANK:
      up = _LOW_RANK[suffix]
      ups = {p: own[p][up] for p in have if up in own[p]}
      if ups.keys() != have.keys():
        raise ValueError(f'{function}: {suffix} of {whole} without its {up}.')
      for part, width in parts.items():
        if part in ups and ups[part].shape[0] != width:
          raise ValueError(
            f'{function}: {part}.{up} has {ups[part].shape[0]} rows, not'
            f' {width} as projections={{...}} says.'
          )
      new[suffix] = values[0] if equal else np.concatenate(values)
      new[up] = _stacked_up(parts, ups, factors, equal)
      if fields is not None:
        fields = _with_rank(fields, new[suffix].shape[0])
    elif suffix in _LOW_RANK.values():
      continue
    elif suffix in _EQUAL or (suffix == _IA3 and values[0].shape[0] == 1):
      if len(have) < len(parts) or not equal:
        raise ValueError(
          f'{function}: {suffix} differs among {", ".join(parts)}, which are'
          f' one module, {whole}, on the other side.'
        )
      new[suffix] = values[0]
    elif suffix in (*_ROWS, _MAGNITUDE, _IA3):
      if len(have) < len(parts) and suffix not in _NEUTRAL:
        missing = [p for p in parts if p not in have]
        raise ValueError(
          f'{function}: {", ".join(missing)} have no {suffix}, and'
          f' {", ".join(have)} have; they are one module, {whole}, on the'
          ' other side.'
        )
      rows = []
      for part, width in parts.items():
        if part not in have:
          shape = (width, *values[0].shape[1:])
          rows.append(np.full(shape, _NEUTRAL[suffix], values[0].dtype))
        else:
          factor = factors.get(part, 1.0) if suffix == 'lora_B.bias' else 1.0
          rows.append(_scaled(have[part], factor))
      new[suffix] = np.concatenate(rows)
    else:
      raise ValueError(
        f'{function}: {suffix} of {", ".join(have)}, which are one module,'
        f' {whole}, on the other side; {_KNOWN}.'
      )
  return _replaced(tensors, parts, {whole: new}), fields


def _stacked_up(
  parts: Mapping[str, int],
  ups: Mapping[str, np.ndarray],
  factors: Mapping[str, float],
  shared: bool,
) -> np.ndarray:
  """The up-projections below one another; side by side too unless `shared`."""
  first = next(iter(ups.values()))
  total = first.shape[1] if shared else sum(u.shape[1] for u in ups.values())
  out = np.zeros((sum(parts.values()), total), first.dtype)
  row = column = 0
  for part, width in parts.items():
    if part in ups:
      up = ups[part]
      scaled = _scaled(up, factors.get(part, 1.0))
      out[row : row + width, column : column + up.shape[1]] = scaled
      column += 0 if shared else up.shape[1]
    row += width
  return out


def _check_wanted(
  function: str,
  whole: str,
  parts: Mapping[str, int],
  given: Mapping[str, Any],
  wanted: Mapping[str, Any],
) -> None:
  present = [p for p in parts if p in wanted]
  if bool(present) != (whole in given):
    raise ValueError(
      f'{function}: fields mean {present} of {", ".join(parts)}; the adapter'
      f' has {"them all" if whole in given else "none"}.'
    )


def _narrowed(
  function: str,
  tensors: Tensors,
  parts: Mapping[str, int],
  given: Mapping[str, Any],
  wanted: Mapping[str, Mapping[str, Any]],
) -> dict[str, np.ndarray]:
  """The tensors of the parts with the ranks that the fields have.

  A part's adapter that was joined with others has columns of zeros where those
  have their own; they go.
  """
  out = dict(tensors)
  present = [p for p in parts if p in wanted]
  starts = np.cumsum([0, *(wanted[p].get('r', 0) for p in present)])
  for part in parts:
    own = _of_module(out, part)
    bias = own.get('lora_B.bias')
    if part not in wanted and bias is not None and bias.any():
      raise ValueError(
        f'{function}: fields have no adapter for {part}, whose bias is not'
        ' zero. Leave fields out.'
      )
    for down, up in _LOW_RANK.items():
      if down not in own:
        continue
      rank = own[down].shape[0]
      keep = np.ones(rank, bool)
      if part not in wanted:
        keep[:] = False
      elif wanted[part]['r'] != rank:
        index = present.index(part)
        keep[:] = False
        keep[starts[index] : starts[index + 1]] = True
      if np.any(own[up][:, ~keep]):
        asked = f'r={wanted[part]["r"]}' if part in wanted else 'no adapter'
        raise ValueError(
          f'{function}: fields have {asked} for {part}; of the fused adapter it'
          f' needs rank {rank}. Leave fields out.'
        )
      own[down], own[up] = own[down][keep], own[up][:, keep]
      if part in wanted:
        own[up] = _scaled(own[up], _scale(given) / _scale(wanted[part]))
    out = _replaced(out, [part], {part: own} if part in wanted else {})
  return out


def _scaled(x: np.ndarray, factor: float) -> np.ndarray:
  """`x` times a factor in its own dtype; itself if the factor is 1."""
  return x if factor == 1 else x * np.asarray(factor, x.dtype)


def _scale(fields: Mapping[str, Any]) -> float:
  """The factor on a low-rank update."""
  if 'lora_alpha' not in fields:
    return 1.0
  rank = fields['r']
  root = math.sqrt(rank) if fields.get('use_rslora') else rank
  return float(fields['lora_alpha'] / root)


def _with_rank(fields: Mapping[str, Any], rank: int) -> dict[str, Any]:
  """The fields of an adapter with another rank and the same scale."""
  out = dict(fields)
  if 'r' not in fields or fields['r'] == rank:
    return out
  out['r'] = rank
  if 'lora_alpha' in fields:
    ratio = rank / fields['r']
    out['lora_alpha'] = fields['lora_alpha'] * (
      math.sqrt(ratio) if fields.get('use_rslora') else ratio
    )
  return out
