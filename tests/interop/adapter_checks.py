"""Adapters of HF peft and ours, both ways, as checks for `run.py`.

peft trains an adapter of every case of `peft_interop.py` and saves it. We load
each, compare, write it back, train it on, and write that too; adapters that we
have made ourselves join them; peft loads all that we have written.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors import numpy as safetensors_numpy
import tokenizers
from tokenizers import models as tokenizers_models

import peftlib
from peftlib import __main__ as command_line
from peftlib import data
from peftlib import hf
from peftlib import methods
from peftlib import models
from tests.interop import expectations
from tests.interop import own_models
import transforms

Check = tuple[str, Callable[[], str]]
Theirs = Callable[..., None]

_TOLERANCE = 1e-4
_STEPS = 3
_LEARNING_RATE = 0.5
_TENSORS = 'adapter_model.safetensors'
_ALL = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj') + (
  'down_proj',
)
_ATTENTION = _ALL[:4]


def _one(module_path: Any, method: methods.Method) -> peftlib.AdapterConfig:
  return peftlib.AdapterConfig((peftlib.Rule(module_path, method),))


def _virtual(kind: str) -> peftlib.AdapterConfig:
  return peftlib.AdapterConfig(
    virtual_tokens=peftlib.VirtualTokens(kind=kind, length=5)
  )


_LORA: dict[str, Any] = {'rank': 4, 'alpha': 8.0}
# Adapters that start with us. Of every registered method there is one.
OURS: dict[str, peftlib.AdapterConfig] = {
  'lora': _one(_ALL, methods.Lora(**_LORA)),
  'lora_fa': _one(_ALL, methods.LoraFA(**_LORA)),
  'lora_orthogonal': _one(_ALL, methods.OrthogonalLora(**_LORA)),
  'rslora': _one(_ALL, methods.RsLora(**_LORA)),
  'dora': _one(_ALL, methods.Dora(**_LORA)),
  'dora, rank_stabilized': _one(
    _ALL, methods.Dora(**_LORA, rank_stabilized=True)
  ),
  'pissa': _one(_ALL, methods.Pissa(**_LORA)),
  'olora': _one(_ALL, methods.Olora(**_LORA)),
  'lora, bias': _one(_ATTENTION, methods.Lora(**_LORA, bias=True)),
  'lora, head and embeddings': _one(
    ('q_proj', 'embed_tokens', 'lm_head'), methods.Lora(**_LORA)
  ),
  'lora, several rules': peftlib.AdapterConfig(
    (
      peftlib.Rule(('q_proj',), methods.Lora(rank=2, alpha=3.0)),
      peftlib.Rule('mlp', methods.Lora(rank=3, alpha=5.0), layers=(0, 2)),
      peftlib.Rule('attention', methods.Lora(**_LORA)),
    )
  ),
  'lora, trained whole': peftlib.AdapterConfig(
    (peftlib.Rule(_ATTENTION, methods.Lora(**_LORA)),),
    train=('lm_head', 'norm'),
  ),
  'trainable_tokens': peftlib.AdapterConfig(
    (
      peftlib.Rule(
        ('embed_tokens',), methods.TrainableTokens(indices=(3, 17, 120))
      ),
      peftlib.Rule(_ATTENTION, methods.Lora(**_LORA)),
    )
  ),
  'hira': _one(_ALL, methods.Hira(rank=4)),
  'shira': _one(_ALL, methods.Shira(rank=4)),
  'miss': _one(_ALL, methods.Miss(rank=8)),
  'miss, bat': _one(_ATTENTION, methods.Miss(rank=8, form='bat')),
  'miss, mini': _one(
    _ATTENTION, methods.Miss(rank=8, form='mini', mini_rank=2)
  ),
  'gralora': _one(_ALL, methods.Gralora(rank=8, alpha=8.0, blocks=2)),
  'gralora, hybrid': _one(
    _ALL, methods.Gralora(rank=8, alpha=8.0, blocks=2, hybrid_rank=2)
  ),
  'oft': _one(_ALL, methods.Oft(block_size=8)),
  'ia3': peftlib.AdapterConfig(
    (
      peftlib.Rule(('down_proj',), methods.Ia3(feedforward=True)),
      peftlib.Rule(('k_proj', 'v_proj'), methods.Ia3()),
    )
  ),
  'loha': _one(_ALL, methods.Loha(rank=4, alpha=8.0)),
  'lokr': _one(_ALL, methods.Lokr(rank=4, alpha=8.0, decompose_factor=4)),
  'vera': _one(_ALL, methods.Vera(rank=8, projection_shape=(80, 80))),
  'norms': peftlib.AdapterConfig(train=('norm',)),
  'prefix': _virtual('prefix'),
  'prompt': _virtual('prompt'),
}
# What `peftlib merge` writes has to answer as these do.
_MERGED = (
  *('lora', 'rslora', 'dora', 'pissa', 'olora', 'hira', 'shira', 'miss'),
  *('miss, bat', 'gralora', 'oft', 'ia3', 'loha', 'lokr', 'vera'),
  *('lora, tokens', 'lora, modules_to_save', 'lora, head and embeddings'),
  *(
    'lora, tied, ensure_weight_tying',
    'lora, tied tokens',
    'lora, over biases',
  ),
)


@dataclasses.dataclass(frozen=True)
class _Base:
  """A model, its inputs, and what `hf` has to be told of it."""

  split: tuple[nnx.GraphDef[Any], nnx.State]
  inputs: jax.Array
  logits: np.ndarray
  told: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def seen(self) -> tuple[jax.Array, ...]:
    """Inputs that `load_adapter` needs for a model that it doesn't know."""
    return (self.inputs,) if self.told else ()


def checks(
  folder: pathlib.Path, theirs: Theirs, only: re.Pattern[str]
) -> Iterator[Check]:
  """Runs peft and yields the checks; each builds on those before it.

  Args:
    folder: Where everything is written.
    theirs: Runs a script of this folder in the environment that has peft.
    only: What the names of the cases have to match.
  """
  theirs('peft_interop.py', 'train', folder, only.pattern)
  bases = {
    path.stem: _base(path)
    for path in sorted((folder / 'bases').glob('*.safetensors'))
  }
  for kind, base in bases.items():
    yield f'base: {kind}', functools.partial(_check_base, base)
  missing = sorted(
    methods.registry().keys()
    - {rule.method.name for c in OURS.values() for rule in c.rules}
  )
  yield 'every method is tried', functools.partial(_check_none, missing)

  written: dict[str, np.ndarray] = {}
  for directory in sorted((folder / 'cases').iterdir()):
    yield from _case_checks(directory, bases, folder / 'ours', written)
  for name, config in OURS.items():
    if not only.search(name):
      continue
    yield (
      f'{name}: made by peftlib',
      functools.partial(
        _check_ours, name, config, bases['plain'], folder / 'ours', written
      ),
    )
  merged: dict[str, np.ndarray] = {}
  for name in filter(only.search, _MERGED):
    yield (
      f'{name}: `peftlib merge`',
      functools.partial(_check_merge, name, folder, merged),
    )
  yield (
    'peft and transformers run on what peftlib has written',
    functools.partial(_check_read, theirs, folder),
  )
  for root, they, logits in (
    ('ours', 'peft', written),
    ('merged', 'transformers', merged),
  ):
    for name, expected in logits.items():
      yield (
        f'{name} -> {they}',
        functools.partial(_check_written, folder / root / name, expected),
      )


def _base(path: pathlib.Path) -> _Base:
  tensors = safetensors_numpy.load_file(path)
  inputs = tensors['inputs']
  if path.stem in own_models.KINDS:
    model = own_models.load(
      path.stem, path.with_suffix('') / 'model.safetensors'
    )
    told = {'places': model.places}
    return _Base(nnx.split(model), jnp.asarray(inputs), tensors['logits'], told)
  loaded = models.load(path.with_suffix(''))
  ids = jnp.asarray(inputs, jnp.int32)
  split = loaded.graphdef, loaded.state
  told = {}
  if path.stem == 'fused':
    told = {'projections': hf.fused_projections(*split)}
  return _Base(split, ids, tensors['logits'], told)


def difference(ours: Any, theirs: Any, tolerance: float = _TOLERANCE) -> float:
  """The largest difference of logits; AssertionError if it is too large."""
  ours, theirs = np.asarray(ours), np.asarray(theirs)
  if ours.shape != theirs.shape:
    raise AssertionError(f'shapes {ours.shape} and {theirs.shape}')
  difference = float(np.abs(ours - theirs).max())
  if not difference <= tolerance:
    raise AssertionError(
      f'logits differ by {difference:.2e}, more than {tolerance:.0e}'
    )
  return difference


def _check_base(base: _Base) -> str:
  graphdef, state = base.split
  logits = _trained(graphdef, state, ..., base.inputs, 0)[0]
  return f'logits differ by {difference(logits, base.logits):.1e}'


def _check_none(missing: list[str]) -> str:
  if missing:
    raise AssertionError(f'no adapter of ours is of {missing}')
  return f'{len(methods.registry())} of them'


@functools.partial(jax.jit, static_argnums=0)
def _run(
  graphdef: nnx.GraphDef[Any],
  own: nnx.State,
  frozen: nnx.State,
  inputs: jax.Array,
  rates: jax.Array,
) -> tuple[nnx.State, jax.Array]:
  def loss(own: nnx.State) -> tuple[jax.Array, jax.Array]:
    logits = nnx.merge(graphdef, own, frozen, copy=True)(inputs)
    if logits.ndim == 3:
      labels, guesses = inputs[:, 1:], logits[:, :-1]
    else:
      labels, guesses = jnp.arange(len(logits)), logits
    losses = optax.softmax_cross_entropy_with_integer_labels(guesses, labels)
    return losses.mean(), logits

  def step(own: nnx.State, rate: jax.Array) -> tuple[nnx.State, jax.Array]:
    slopes, logits = jax.grad(loss, has_aux=True)(own)
    moved = jax.tree.map(
      lambda x, d: (x - rate * d).astype(x.dtype), own, slopes
    )
    return moved, logits

  return jax.lax.scan(step, own, rates)


def _trained(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State,
  trainable: Any,
  inputs: jax.Array,
  steps: int = _STEPS,
) -> tuple[np.ndarray, nnx.State, np.ndarray]:
  """Logits; the whole State after some steps of SGD; logits then."""
  own, frozen = transforms.partition(state, trainable, ...)
  # The last one is for its logits alone.
  rates = jnp.array([_LEARNING_RATE] * steps + [0.0])
  own, logits = _run(graphdef, own, frozen, inputs, rates)
  logits = np.asarray(logits)
  return logits[0], transforms.merge(own, frozen), logits[-1]


class _Case:
  """An adapter that peft trained, in our model; loaded at the first use."""

  def __init__(self, directory: pathlib.Path, bases: dict[str, _Base]):
    self.directory = directory
    self.info = json.loads((directory / 'golden.json').read_text())
    self.base = bases[self.info['base']]

  @functools.cached_property
  def loaded(self) -> hf.Loaded:
    return hf.load_adapter(
      self.directory, *self.base.split, *self.base.seen, **self.base.told
    )

  @functools.cached_property
  def trained(self) -> tuple[np.ndarray, nnx.State, np.ndarray]:
    return _trained(
      self.loaded.graphdef,
      self.loaded.state,
      peftlib.trainable_filter(self.loaded.config),
      self.base.inputs,
    )


def _case_checks(
  directory: pathlib.Path,
  bases: dict[str, _Base],
  ours: pathlib.Path,
  written: dict[str, np.ndarray],
) -> Iterator[Check]:
  name = directory.name
  if (directory / 'error.txt').exists() or name in expectations.PEFT_FAILS:
    yield f'{name}: peft', functools.partial(_check_failure, directory)
    return
  case = _Case(directory, bases)
  if name in expectations.REFUSED:
    yield f'{name} -> peftlib', functools.partial(_check_refused, case)
    return
  yield f'{name} -> peftlib', functools.partial(_check_loaded, case)
  yield (
    f'{name}: there and back',
    functools.partial(_check_back, case, ours, written),
  )
  yield (
    f'{name}: trained on by peftlib',
    functools.partial(_check_trained_on, case, ours, written),
  )


def _check_failure(directory: pathlib.Path) -> str:
  """A case that peft itself can't do, or not read back."""
  expected = expectations.PEFT_FAILS.get(directory.name)
  path = directory / 'error.txt'
  error = path.read_text() if path.exists() else 'no error'
  if expected is None or not re.search(expected, error):
    raise AssertionError(f'{error}; expected: {expected or "no error"}')
  return f'peft fails by itself, as expected: {_line(error)}'


def _check_refused(case: _Case) -> str:
  expected = expectations.REFUSED[case.directory.name]
  try:
    case.loaded  # noqa: B018
  except ValueError as error:
    if re.search(expected, str(error)):
      return f'refused, as expected: {_line(error)}'
    raise
  raise AssertionError(f'not refused; expected: {expected}')


def _line(error: Any) -> str:
  return ' '.join(str(error).split())[:200]


def _check_loaded(case: _Case) -> str:
  golden = safetensors_numpy.load_file(case.directory / 'golden.safetensors')
  moved = np.abs(golden['logits'] - golden['base_logits']).max()
  if not moved > 1e-3:
    raise AssertionError(f'the adapter moves logits by {moved:.1e} alone')
  error = difference(case.trained[0], golden['logits'])
  own, _ = transforms.partition(
    case.loaded.state, peftlib.trainable_filter(case.loaded.config), ...
  )
  count = transforms.param_count(own)
  more = expectations.MORE_IN_PEFT.get(case.directory.name, 0)
  if count != case.info['trainable'] - more:
    raise AssertionError(
      f'{count} trainable parameters, peft has {case.info["trainable"]}'
    )
  return f'logits differ by {error:.1e}; {count} trainable parameters'


def _check_back(
  case: _Case, ours: pathlib.Path, written: dict[str, np.ndarray]
) -> str:
  """Through us and back: with the fields kept, and with fields of our own."""
  loaded = case.loaded
  own = ours / f'{case.directory.name}: there and back'
  kept = ours.parent / 'kept' / case.directory.name
  more = {'train': loaded.config.train, **case.base.told}
  hf.save_adapter(
    kept, loaded.graphdef, loaded.state, fields=loaded.fields, **more
  )
  _same_tensors(case.directory, kept)
  _same_config(case.directory, kept)
  hf.save_adapter(own, loaded.graphdef, loaded.state, **more)
  _same_tensors(case.directory, own, more_of='.base_layer.weight')
  _note(own, case.info['base'])
  written[own.name] = case.trained[0]
  count = len(_tensors(case.directory))
  return f'{count} tensors byte-equal, every field of the configuration equal'


def _check_trained_on(
  case: _Case, ours: pathlib.Path, written: dict[str, np.ndarray]
) -> str:
  before, state, after = case.trained
  folder = ours / f'{case.directory.name}: trained on'
  hf.save_adapter(
    folder,
    case.loaded.graphdef,
    state,
    train=case.loaded.config.train,
    **case.base.told,
  )
  _note(folder, case.info['base'])
  written[folder.name] = after
  return _moved(before, after)


def _check_ours(
  name: str,
  config: peftlib.AdapterConfig,
  base: _Base,
  ours: pathlib.Path,
  written: dict[str, np.ndarray],
) -> str:
  graphdef, state = peftlib.inject(
    *base.split, config, base.inputs, key=jax.random.key(1)
  )
  _, state, after = _trained(
    graphdef, state, peftlib.trainable_filter(config), base.inputs
  )
  folder = ours / f'{name}: made by peftlib'
  hf.save_adapter(folder, graphdef, state, train=config.train)
  _note(folder, 'plain')
  written[folder.name] = after
  return _moved(base.logits, after)


def _moved(before: np.ndarray, after: np.ndarray) -> str:
  moved = float(np.abs(before - after).max())
  if not moved > 1e-3:
    raise AssertionError(
      f'{_STEPS} steps moved the logits by {moved:.1e} alone'
    )
  return f'{_STEPS} steps moved the logits by {moved:.2f}; saved'


def _note(folder: pathlib.Path, base: str) -> None:
  """Tells `peft_interop.py` which base an adapter is for."""
  (folder / 'golden.json').write_text(json.dumps({'base': base}))


def _tensors(folder: pathlib.Path) -> dict[str, tuple[str, list[int], bytes]]:
  """Dtype, shape and bytes of each tensor, bfloat16 too."""
  content = (folder / _TENSORS).read_bytes()
  size = int.from_bytes(content[:8], 'little')
  header = json.loads(content[8 : 8 + size])
  header.pop('__metadata__', None)
  found = {}
  for name, entry in header.items():
    start, end = entry['data_offsets']
    values = content[8 + size + start : 8 + size + end]
    found[name] = (entry['dtype'], entry['shape'], values)
  return found


def _same_tensors(
  theirs: pathlib.Path, ours: pathlib.Path, more_of: str | None = None
) -> None:
  """Raises AssertionError unless all are equal, byte by byte.

  Args:
    theirs: One directory.
    ours: The other.
    more_of: What a surplus tensor of ours may end with.
  """
  before, after = _tensors(theirs), _tensors(ours)
  if more_of:
    # Whether peft copies a table depends on how its fields name it.
    after = {
      name: tensor
      for name, tensor in after.items()
      if name in before or not name.endswith(more_of)
    }
  if before.keys() != after.keys():
    missing = sorted(before.keys() - after.keys())
    surplus = sorted(after.keys() - before.keys())
    raise AssertionError(f'tensors missing {missing}, surplus {surplus}')
  other = [
    f'{name} {before[name][:2]} and {after[name][:2]}'
    for name in before
    if before[name] != after[name]
  ]
  if other:
    raise AssertionError(
      f'{len(other)} of {len(before)} tensors differ: {other[:3]}'
    )


def _same_config(theirs: pathlib.Path, ours: pathlib.Path) -> None:
  before, after = (
    json.loads((folder / hf.CONFIG).read_text()) for folder in (theirs, ours)
  )
  if before != after:
    fields = before.keys() | after.keys()
    other = sorted(f for f in fields if before.get(f) != after.get(f))
    raise AssertionError(f'fields differ: {other}')


def _check_read(theirs: Theirs, folder: pathlib.Path) -> str:
  theirs('peft_interop.py', 'load', folder)
  return f'{len(list((folder / "ours").iterdir()))} directories'


def _check_written(folder: pathlib.Path, expected: np.ndarray) -> str:
  error = folder / 'error.txt'
  if error.exists():
    raise AssertionError(_line(error.read_text()))
  logits = safetensors_numpy.load_file(folder / 'logits.safetensors')['logits']
  return f'logits differ by {difference(expected, logits):.1e}'


def _check_merge(
  name: str, folder: pathlib.Path, merged: dict[str, np.ndarray]
) -> str:
  """The command writes a model directory."""
  case = folder / 'cases' / name
  kind = json.loads((case / 'golden.json').read_text())['base']
  model = folder / 'bases' / kind
  if not (model / 'tokenizer.json').exists():
    _write_tokenizer(model)
  output = folder / 'merged' / name
  arguments = [f'--model={model}', f'--adapter={case}', f'--output={output}']
  said = io.StringIO()
  with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
    status = command_line.run(['peftlib', 'merge', *arguments])
  if status:
    raise AssertionError(f'exit status {status}: {_line(said.getvalue())}')
  golden = safetensors_numpy.load_file(case / 'golden.safetensors')
  merged[name] = golden['logits']
  return 'written'


def _write_tokenizer(directory: pathlib.Path) -> None:
  """One that the command can copy; no text is ever read with it."""
  size = json.loads((directory / 'config.json').read_text())['vocab_size']
  backend = tokenizers.Tokenizer(
    tokenizers_models.WordLevel({f't{i}': i for i in range(size)}, 't0')
  )
  data.Tokenizer(backend, None, None, (0,), 0).save(directory)
