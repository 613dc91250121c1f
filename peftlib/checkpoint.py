"""Saving and restoring: adapters alone, and whole training runs."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any, Literal, NamedTuple, overload

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from peftlib import _checks
from peftlib import config as config_lib
from peftlib import methods
from peftlib import training

__all__ = [
  'Manifest',
  'config_of',
  'leaves_of',
  'make_manifest',
  'open_run',
  'read_manifest',
  'restore_adapter',
  'restore_run',
  'save_adapter',
  'save_run',
]

# An adapter fits another run only if the others agree; these may differ between
# the run that made it and the one that goes on.
_FREE_FIELDS = (
  'dropout',
  'dtype',
  'weight_qtype',
  'tile_size',
  'double_quantize',
  'weight_calibration_method',
)
_ARRAYS = 'arrays'
_MANIFEST = 'manifest.json'


class Manifest(NamedTuple):
  """What a checkpoint is of; compared before anything is restored.

  Attributes:
    config: Fields of the `LoraConfig` or `AdapterConfig` (its initializers
      excepted), or None where the whole model was trained.
    leaves: Shape and dtype of each saved variable, by its path.
    base_fingerprint: Identifies the base model, see
      `peftlib.models.fingerprint`.
  """

  config: dict[str, Any] | None
  leaves: dict[str, tuple[tuple[int, ...], str]]
  base_fingerprint: str


def make_manifest(
  state: nnx.State[Any, Any],
  config: config_lib.Config | None,
  base_fingerprint: str,
) -> Manifest:
  """Describes what is saved of a run.

  Args:
    state: What is saved, of arrays or abstract values: the trainable State of
      a run, or what `peftlib.saved_filter` picks for an adapter.
    config: What was injected, or None.
    base_fingerprint: Identifies the base.
  """
  _checks.check_state('peftlib.make_manifest', 'state', state)
  fields = None
  if config is not None:
    fields = _config_to_json(config)
  return Manifest(fields, leaves_of(state), base_fingerprint)


def leaves_of(
  state: nnx.State[Any, Any],
) -> dict[str, tuple[tuple[int, ...], str]]:
  """Shape and dtype of each leaf, by its path."""
  return {
    name: (tuple(leaf.shape), str(leaf.dtype))
    for name, leaf in _named(jax.tree.map(_untyped, state)).items()
  }


def config_of(manifest: Manifest) -> config_lib.Config | None:
  """The config that a manifest was made with, or None.

  Initializers are the default ones: they have done their work.

  Raises:
    ValueError: If it has a method that isn't registered.
  """
  if manifest.config is None:
    return None
  if 'rules' not in manifest.config:
    return config_lib.LoraConfig(**_with_tuples(manifest.config))
  rules = []
  for saved in manifest.config['rules']:
    fields = _with_tuples(saved)
    method = fields.pop('method')
    if method is not None:
      method = _with_tuples(method)
      method = methods.by_name(method.pop('name'))(**method)
    rules.append(config_lib.Rule(method=method, **fields))
  return config_lib.AdapterConfig(
    tuple(rules), tuple(manifest.config.get('train', ()))
  )


def _config_to_json(config: config_lib.Config) -> dict[str, Any]:
  if isinstance(config, config_lib.LoraConfig):
    return _fields(config)
  rules = []
  for rule in config.rules:
    fields = _fields(rule)
    fields['method'] = None
    if rule.method is not None:
      fields['method'] = {'name': rule.method.name, **_fields(rule.method)}
    rules.append(fields)
  return {'rules': rules, 'train': list(config.train)}


def _fields(value: Any) -> dict[str, Any]:
  """Fields of a dataclass as JSON has them; functions are left out."""
  found = {}
  for field in dataclasses.fields(value):
    own = getattr(value, field.name)
    if not callable(own):
      found[field.name] = list(own) if isinstance(own, tuple) else own
  return found


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
  return {
    name: tuple(value) if isinstance(value, list) else value
    for name, value in fields.items()
  }


def save_adapter(
  directory: str | os.PathLike[str],
  trainable: nnx.State[Any, Any],
  manifest: Manifest,
  *,
  overwrite: bool = False,
) -> None:
  """Writes trained variables and their manifest into a new directory.

  The directory appears under its name only when it is complete.

  Args:
    directory: Where to; its parents are made.
    trainable: The State to save. It may as well be a whole one, its base
      quantized: what comes back is the same bit for bit.
    manifest: From `make_manifest` on the same State.
    overwrite: Whether an adapter that is there already is replaced.

  Raises:
    FileExistsError: If the directory exists and `overwrite` is False.
    ValueError: If the manifest describes another State.
  """
  _checks.check_state('peftlib.save_adapter', 'trainable', trainable)
  path = pathlib.Path(directory).absolute()
  if path.exists() and not overwrite:
    raise FileExistsError(
      f'peftlib.save_adapter: {path} exists; give another directory, or'
      ' overwrite=True.'
    )
  own = leaves_of(trainable)
  if own != manifest.leaves:
    raise ValueError(
      'peftlib.save_adapter: the manifest describes another State than the'
      f' one to save:\n{_differences(manifest.leaves, own)}'
    )
  path.parent.mkdir(parents=True, exist_ok=True)
  fresh = path.with_name(f'.{path.name}.new')
  shutil.rmtree(fresh, ignore_errors=True)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(fresh / _ARRAYS, _named_leaves(trainable))
  with open(fresh / _MANIFEST, 'w', encoding='utf-8') as f:
    json.dump(_to_json(manifest), f, indent=1)
    f.flush()
    os.fsync(f.fileno())
  if path.exists():
    stale = path.with_name(f'.{path.name}.old')
    shutil.rmtree(stale, ignore_errors=True)
    path.rename(stale)
    fresh.rename(path)
    shutil.rmtree(stale)
  else:
    fresh.rename(path)


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
  """Reads the manifest of an adapter directory.

  Raises:
    FileNotFoundError: If the directory isn't one that `save_adapter` wrote.
  """
  path = pathlib.Path(directory).absolute()
  if not (path / _MANIFEST).is_file() or not (path / _ARRAYS).is_dir():
    raise FileNotFoundError(
      f'peftlib.read_manifest: {path} is not an adapter directory: it lacks'
      f' {_MANIFEST} or {_ARRAYS}/, which save_adapter writes.'
    )
  return _from_json(json.loads((path / _MANIFEST).read_text('utf-8')))


@overload
def restore_adapter(
  directory: str | os.PathLike[str],
  like: nnx.State[Any, Any],
  manifest: Manifest,
  *,
  strict: Literal[True] = True,
) -> nnx.State[Any, Any]: ...


@overload
def restore_adapter(
  directory: str | os.PathLike[str],
  like: nnx.State[Any, Any],
  manifest: Manifest,
  *,
  strict: Literal[False],
) -> tuple[nnx.State[Any, Any], list[str]]: ...


def restore_adapter(
  directory: str | os.PathLike[str],
  like: nnx.State[Any, Any],
  manifest: Manifest,
  *,
  strict: bool = True,
) -> nnx.State[Any, Any] | tuple[nnx.State[Any, Any], list[str]]:
  """Reads saved variables into a State of the same structure.

  Args:
    directory: What `save_adapter` wrote.
    like: A State of arrays or of `jax.ShapeDtypeStruct`s; shardings are kept.
    manifest: From `make_manifest` on `like`, for the run that goes on.
    strict: Whether everything has to agree. With False the variables that both
      have, in the same shape and dtype, are restored, whatever else differs.

  Returns:
    `like` with the saved values; no leaf of `like` itself is left in it, and
    none that is abstract. With `strict=False` that, with `like`'s own values
    where nothing was restored, and a list of lines, one for each difference.

  Raises:
    FileNotFoundError: If the directory isn't an adapter's.
    ValueError: If method, rules, rank, base fingerprint, or a variable's
      presence, shape or dtype differs; the text has saved and expected values.
      With `strict=False`, if a variable of `like` that isn't in the adapter is
      abstract.
  """
  function = 'peftlib.restore_adapter'
  _checks.check_state(function, 'like', like)
  path = pathlib.Path(directory).absolute()
  saved = read_manifest(path)
  differences = _compare(saved, manifest, _FREE_FIELDS)
  if strict:
    _refuse(function, path, differences)
  with ocp.StandardCheckpointer() as checkpointer:
    stored = dict(checkpointer.metadata(path / _ARRAYS).item_metadata.items())
    found = _leaf_differences(stored, like)
    if strict:
      _refuse_leaves(function, path, found)
    abstract = _abstract_leaves(like)
    left = [name for name in abstract if name in found or name not in stored]
    wanted = {name: abstract[name] for name in abstract if name not in left}
    if not strict:
      return _restored_part(
        function, path, checkpointer, stored, like, wanted, differences
      )
    restored = checkpointer.restore(path / _ARRAYS, wanted)
  return _from_named_leaves(restored, like)


def _restored_part(
  function: str,
  path: pathlib.Path,
  checkpointer: Any,
  stored: Mapping[str, Any],
  like: nnx.State[Any, Any],
  wanted: Mapping[str, Any],
  differences: Mapping[str, str],
) -> tuple[nnx.State[Any, Any], list[str]]:
  own = _named_leaves(like)
  for name in own:
    if name not in wanted and isinstance(own[name], jax.ShapeDtypeStruct):
      raise ValueError(
        f'{function}: {path} has nothing for {name}, which is abstract; give a'
        ' State of arrays.'
      )
  # Orbax restores all of an item or none.
  everything = {
    name: jax.ShapeDtypeStruct(tuple(v.shape), v.dtype)
    for name, v in stored.items()
  }
  restored = checkpointer.restore(path / _ARRAYS, everything | dict(wanted))
  values = {**own, **{name: restored[name] for name in wanted}}
  return _from_named_leaves(values, like), list(differences.values())


def open_run(
  directory: str | os.PathLike[str], *, max_to_keep: int = 2
) -> ocp.CheckpointManager:
  """Opens the checkpoints of a training run; close it when done.

  Args:
    directory: Made if it isn't there.
    max_to_keep: How many of the newest checkpoints stay.

  Returns:
    Orbax's manager: `latest_step()`, `wait_until_finished()`, `close()`.
  """
  return ocp.CheckpointManager(
    pathlib.Path(directory).absolute(),
    options=ocp.CheckpointManagerOptions(max_to_keep=max_to_keep, create=True),
    item_names=('train_state', 'data', 'manifest'),
  )


def save_run(
  manager: ocp.CheckpointManager,
  train_state: training.TrainState,
  data_state: Mapping[str, Any],
  manifest: Manifest,
) -> None:
  """Saves a run at `train_state.step`, in the background and atomically.

  Args:
    manager: From `open_run`.
    train_state: Copied before the call returns: it may be donated next.
    data_state: Position of the input pipeline, as JSON values.
    manifest: From `make_manifest` on `train_state.trainable`.
  """
  manager.save(
    int(train_state.step),
    args=ocp.args.Composite(
      train_state=ocp.args.StandardSave(_named_leaves(train_state)),
      data=ocp.args.JsonSave(dict(data_state)),
      manifest=ocp.args.JsonSave(_to_json(manifest)),
    ),
    force=True,
  )


def restore_run(
  manager: ocp.CheckpointManager,
  like: training.TrainState,
  manifest: Manifest,
  *,
  step: int | None = None,
) -> tuple[training.TrainState, dict[str, Any]]:
  """Restores a run: every array, the step, the key and the data's position.

  Args:
    manager: From `open_run`.
    like: A train state of the same structure, of arrays or abstract values.
    manifest: From `make_manifest` on `like.trainable`.
    step: Which checkpoint; the newest one by default.

  Returns:
    The train state and the saved `data_state`.

  Raises:
    FileNotFoundError: If there is no checkpoint.
    ValueError: If config, base or any leaf differs from what was saved; the
      text has saved and expected values.
  """
  step = manager.latest_step() if step is None else step
  if step is None:
    raise FileNotFoundError(
      f'peftlib.restore_run: {manager.directory} has no checkpoint.'
    )
  path = pathlib.Path(os.fspath(manager.directory)) / str(step)
  read = manager.restore(
    step,
    args=ocp.args.Composite(
      manifest=ocp.args.JsonRestore(), data=ocp.args.JsonRestore()
    ),
  )
  saved = _from_json(read['manifest'])
  _refuse('peftlib.restore_run', path, _compare(saved, manifest, ()))
  with ocp.StandardCheckpointer() as checkpointer:
    stored = checkpointer.metadata(path / 'train_state').item_metadata
  _refuse_leaves(
    'peftlib.restore_run', path, _leaf_differences(dict(stored.items()), like)
  )
  restored = manager.restore(
    step,
    args=ocp.args.Composite(
      train_state=ocp.args.StandardRestore(_abstract_leaves(like))
    ),
  )
  return _from_named_leaves(restored['train_state'], like), dict(read['data'])


def _is_key(x: Any) -> bool:
  return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _named(tree: Any) -> dict[str, Any]:
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  named = {
    # A Variable's own level says nothing.
    jax.tree_util.keystr(path, simple=True, separator='/').removesuffix(
      '/value'
    ): leaf
    for path, leaf in flat
  }
  assert len(named) == len(flat), 'two leaves share a name'
  return named


def _named_leaves(tree: Any) -> dict[str, Any]:
  """Arrays that can be stored, by path; typed keys as their data."""
  return {name: _storable(leaf) for name, leaf in _named(tree).items()}


def _storable(leaf: Any) -> Any:
  leaf = _untyped(leaf)
  if leaf.dtype != jnp.uint4:
    return leaf
  # Tensorstore has no uint4 (the levels of nf4), but int4.
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return leaf.update(dtype=jnp.int4)
  return jax.lax.bitcast_convert_type(leaf, jnp.int4)


def _untyped(leaf: Any) -> Any:
  return _key_data(leaf) if _is_key(leaf) else leaf


def _key_data(key: Any) -> Any:
  if isinstance(key, jax.ShapeDtypeStruct):
    return jax.eval_shape(jax.random.key_data, key)
  return jax.random.key_data(key)


def _abstract_leaves(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
  return {
    name: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=getattr(leaf, 'sharding', None)
    )
    for name, leaf in _named_leaves(tree).items()
  }


def _from_named_leaves(values: Mapping[str, Any], like: Any) -> Any:
  leaves = []
  for name, leaf in _named(like).items():
    value = values[name]
    if not _is_placed(leaf):
      # Orbax pins what it restores to a device; a step that was compiled for
      # values that are free would be compiled again.
      value = jnp.asarray(np.asarray(value))
    if _is_key(leaf):
      value = jax.random.wrap_key_data(value, impl=_key_impl(leaf))
    elif leaf.dtype == jnp.uint4:
      value = jax.lax.bitcast_convert_type(value, jnp.uint4)
    leaves.append(value)
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _is_placed(x: Any) -> bool:
  """Whether a value, or an abstract one, was put on devices on purpose."""
  if isinstance(x, jax.Array):
    return x.committed
  return getattr(x, 'sharding', None) is not None


def _key_impl(key: Any) -> Any:
  impls = []
  # Traced, since the question cannot be put to an abstract value.
  jax.eval_shape(lambda k: impls.append(jax.random.key_impl(k)), key)
  return impls[0]


def _to_json(manifest: Manifest) -> dict[str, Any]:
  return {
    'config': manifest.config,
    'leaves': {k: [list(s), d] for k, (s, d) in manifest.leaves.items()},
    'base_fingerprint': manifest.base_fingerprint,
  }


def _from_json(value: Mapping[str, Any]) -> Manifest:
  return Manifest(
    value['config'],
    {k: (tuple(s), d) for k, (s, d) in value['leaves'].items()},
    value['base_fingerprint'],
  )


def _differences(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
  """One line for each name whose values differ."""
  return '\n'.join(f'  {x}' for x in _by_name(saved, expected).values())


def _by_name(
  saved: Mapping[str, Any], expected: Mapping[str, Any]
) -> dict[str, str]:
  """What differs, by name."""
  show = lambda side, name: repr(side[name]) if name in side else 'missing'
  return {
    name: (
      f'{name}: saved {show(saved, name)}, expected {show(expected, name)}'
    )
    for name in sorted({*saved, *expected})
    if saved.get(name) != expected.get(name)
    or (name in saved) != (name in expected)
  }


def _compare(
  saved: Manifest, expected: Manifest, free: Sequence[str]
) -> dict[str, str]:
  """What differs between two manifests, by name."""

  def flat(manifest: Manifest) -> dict[str, Any]:
    return {
      **_flat_config(manifest.config, free),
      'base_fingerprint': manifest.base_fingerprint,
      **manifest.leaves,
    }

  return _by_name(flat(saved), flat(expected))


def _flat_config(
  config: Mapping[str, Any] | None, free: Sequence[str]
) -> dict[str, Any]:
  """The fields of a config that have to agree, by name."""
  if config is None:
    return {'method': 'full'}
  if 'rules' not in config:
    own = {k: v for k, v in config.items() if k not in free}
    return {'method': 'lora', **own}
  found: dict[str, Any] = {}
  for i, rule in enumerate(config['rules']):
    method = rule['method'] or {'name': 'none'}
    # A single rule's fields go by their own names, as LoraConfig's do.
    prefix = f'rules[{i}].' if len(config['rules']) > 1 else ''
    found[f'{prefix}method'] = method['name']
    own = {**rule, **method}
    for name, value in own.items():
      if name not in (*free, 'method', 'name') and value not in (None, []):
        found[f'{prefix}{name}'] = value
  if config['train']:
    found['train'] = config['train']
  return found


def _refuse(
  function: str, path: pathlib.Path, differences: Mapping[str, str]
) -> None:
  if differences:
    lines = '\n'.join(f'  {x}' for x in differences.values())
    raise ValueError(f'{function}: {path} does not fit this run:\n{lines}')


def _leaf_differences(stored: Mapping[str, Any], like: Any) -> dict[str, str]:
  """Where the arrays on disk aren't exactly those of `like`."""
  return _by_name(
    {k: (tuple(v.shape), str(v.dtype)) for k, v in stored.items()},
    {k: (tuple(v.shape), str(v.dtype)) for k, v in _named_leaves(like).items()},
  )


def _refuse_leaves(
  function: str, path: pathlib.Path, differences: Mapping[str, str]
) -> None:
  if differences:
    lines = '\n'.join(f'  {x}' for x in differences.values())
    raise ValueError(
      f'{function}: the arrays in {path} are not those of this run:\n{lines}'
    )
