"""The flags of each command, and what must hold between them.

Nothing here needs jax, so that `--help` and a wrong flag are answered at once.
The defaults are the demo; no other file of the command line knows it.
"""

from collections.abc import Collection, Sequence
import dataclasses
import os
import re
from typing import Any

from peftlib.cli import errors
from peftlib.cli import flags
from peftlib.demo import assets

WEIGHT_QTYPES = ('none', 'nf4', 'int8', 'int4', 'fp8')
REMATS = ('none', 'dots', 'full')

_DEMO_DATA = 'runs/demo-data'
_DEMO_EVAL = (
  f'{_DEMO_DATA}/heldout_values.jsonl',
  f'{_DEMO_DATA}/heldout_patterns.jsonl',
)
# The generator of random numbers that shuffles takes no more.
_MAX_SEED = 2**32 - 1

# Flags that say how or where to run, not what is computed; a resumed run may
# change them. Model and data are compared by their contents instead.
FREE_ON_RESUME = frozenset(
  {
    'model',
    'data',
    'eval_data',
    'eval_rows',
    'eval_batch_size',
    'max_new_tokens',
    'output',
    'resume',
    'overwrite',
    'restore_adapter',
    'checkpoint_every',
    'log_every',
    'compilation_cache',
    'debug',
  }
)
# What each method takes of --rank, --alpha and --dropout, and what it is where
# the flag isn't given; None where there is no such thing.
_Usual = dict[str, float | None]
_LORA_LIKE: _Usual = {'rank': 16, 'alpha': 32.0, 'dropout': 0.0}
METHODS: dict[str, _Usual] = {
  'lora': _LORA_LIKE,
  'rslora': {**_LORA_LIKE, 'alpha': 8.0},
  'dora': _LORA_LIKE,
  'lora_fa': _LORA_LIKE,
  'lora_orthogonal': _LORA_LIKE,
  'pissa': _LORA_LIKE,
  'olora': _LORA_LIKE,
  'hira': {'rank': 32, 'alpha': None, 'dropout': 0.0},
  'shira': {'rank': 16, 'alpha': None, 'dropout': None},
  'miss': {'rank': 64, 'alpha': None, 'dropout': 0.0},
  'gralora': {'rank': 32, 'alpha': 64.0, 'dropout': 0.0},
  'loha': {'rank': 8, 'alpha': 8.0, 'dropout': None},
  'lokr': {'rank': 8, 'alpha': 8.0, 'dropout': None},
  'oft': {'rank': None, 'alpha': None, 'dropout': None},
  'ia3': {'rank': None, 'alpha': None, 'dropout': None},
  'vera': {'rank': 256, 'alpha': None, 'dropout': 0.0},
}
_ADAPTERS_ONLY = ('rank', 'alpha', 'dropout', 'module_path', 'tile_size')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
  """General flags."""

  compilation_cache: str | None = flags.text(
    None,
    'Folder in which compiled programs are kept, so that the next run need'
    ' not compile them.',
    right='a folder',
  )
  debug: bool = flags.boolean(
    False, 'Show the traceback of every error, of wrong input too.'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """The model."""

  model: str | None = flags.text(
    None,
    'A GGUF file, or a Hugging Face directory (config.json,'
    ' model*.safetensors, tokenizer.json), of the Llama architecture.',
    right='a path',
    shown='SmolLM2-135M-Instruct, as `make assets` gets it',
  )
  compute_dtype: str = flags.choice(
    'float32',
    'Type of activations. Adapters and the state of the optimizer are float32'
    ' always.',
    of=('float32', 'bfloat16'),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
  """What is trained."""

  method: str = flags.choice(
    'lora',
    'Which adapters are trained, or full: the whole model.',
    of=(*METHODS, 'full'),
  )
  rank: int = flags.integer(
    16,
    'Rank of the adapters. Without the flag what is usual for the method.',
    low=1,
  )
  alpha: float = flags.number(
    32.0,
    'An adapter is scaled by alpha / rank (rslora: by alpha / sqrt(rank)).'
    ' Without the flag what is usual for the method.',
    above=0,
  )
  dropout: float = flags.number(
    0.0, "Dropout of the adapters' input, in training.", low=0, below=1
  )
  module_path: str = flags.text(
    '.*_proj',
    'Which modules get adapters and quantized weights: a regular expression'
    ' that has to match the whole path, e.g. layers/self_attn/q_proj.',
    right='a regular expression',
  )
  weight_qtype: str | None = flags.choice(
    None,
    'What the frozen weights of these modules are quantized to.',
    of=WEIGHT_QTYPES,
    shown='nf4; none with --method=full',
  )
  tile_size: int | None = flags.integer(
    None,
    'Number of quantized weights that share a scale; 0 for one scale a channel.'
    ' Without the flag 64, where weights are quantized.',
    low=0,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
  """How rows become tokens."""

  template: str = flags.choice(
    'auto',
    "Whether prompt/completion rows are rendered with the model's chat"
    ' template; auto does if it has one.',
    of=('auto', 'chat', 'none'),
  )
  loss_on: str = flags.choice(
    'assistant',
    "What is learnt: the assistant's turns, or every token.",
    of=('assistant', 'all'),
  )
  length: int = flags.integer(
    512,
    'Tokens of a sequence. A row that is longer is cut from the left of its'
    ' prompt.',
    low=2,
  )
  overlong: str = flags.choice(
    'error',
    'What to do with a completion that is longer than --length by itself.',
    of=('error', 'truncate'),
  )
  batch_size: int = flags.integer(1, 'Sequences of a batch.', low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judging:
  """How answers are judged."""

  eval_rows: int | None = flags.integer(
    None, 'Judge at most so many rows of each file.', low=1
  )
  eval_batch_size: int = flags.integer(
    64, 'Answers that are generated at once.', low=1
  )
  max_new_tokens: int = flags.integer(64, 'Tokens of an answer.', low=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finetune(Common, Judging, Rows, Method, Model):
  """Training."""

  data: str = flags.text(
    f'{_DEMO_DATA}/train.jsonl',
    'JSON lines to learn: {"messages": [{"role", "content"}, ...]},'
    ' {"prompt", "completion"} or {"text"} a line.',
    right='a path',
  )
  eval_data: tuple[str, ...] = flags.texts(
    _DEMO_EVAL,
    'Files like --data, separated by commas, whose last answers are compared'
    ' with greedy generation before and after training; empty for none.',
  )
  output: str = flags.text(
    'runs/demo', 'Folder of the run; made if missing.', right='a path'
  )
  resume: bool = flags.boolean(
    False, 'Go on with the run in --output from its last checkpoint.'
  )
  overwrite: bool = flags.boolean(False, 'Replace the run that is in --output.')
  restore_adapter: str | None = flags.text(
    None,
    'Start a new run from the adapter in this folder. A checkpoint in --output'
    ' comes first.',
    right='a path',
  )
  pack: bool = flags.boolean(
    True,
    'Let several rows share a sequence; otherwise batches are of rows of about'
    ' one length.',
  )
  steps: int | None = flags.integer(100, 'Batches to train on.', low=1)
  epochs: float | None = flags.number(
    None, 'Train so many times on all rows, instead of --steps.', above=0
  )
  learning_rate: float = flags.number(
    1.5e-3, 'The highest learning rate.', above=0
  )
  warmup_steps: int = flags.integer(
    10, 'Steps in which the learning rate rises to it.', low=0
  )
  schedule: str = flags.choice(
    'cosine',
    'How the learning rate falls after that; cosine and linear reach 0.',
    of=('cosine', 'linear', 'constant'),
  )
  weight_decay: float = flags.number(0.0, "AdamW's weight decay.", low=0)
  clip_norm: float = flags.number(
    1.0, 'The largest norm of a gradient; 0 for no limit.', low=0
  )
  accumulate: int = flags.integer(
    1, 'Batches whose gradients are averaged into one update.', low=1
  )
  remat: str = flags.choice(
    'dots',
    'What of a layer the backward pass computes again: all but the products'
    ' with weights, whose results are kept (dots), everything (full: the least'
    ' memory, a fifth slower), or nothing (none: the most memory).',
    of=REMATS,
  )
  seed: int = flags.integer(
    0,
    'Seed of adapters, order of rows and dropout.',
    low=0,
    high=_MAX_SEED,
  )
  checkpoint_every: int = flags.integer(
    50, 'Save the whole run every so many steps.', low=1
  )
  log_every: int = flags.integer(
    10, 'Print a line every so many steps, if not on a terminal.', low=1
  )
  mesh: str | None = flags.text(
    None,
    "Devices by axis, e.g. 'fsdp=4,data=2': weights are split over fsdp,"
    ' batches over both. One device without.',
    right="axes and sizes, e.g. 'fsdp=4,data=2'",
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
  """The adapter."""

  adapter: str | None = flags.text(
    None, 'Folder of an adapter, e.g. OUTPUT/adapter.', right='a path'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(Common, Judging, Rows, Adapter, Model):
  """Evaluation."""

  data: tuple[str, ...] = flags.texts(
    _DEMO_EVAL,
    'Files of JSON lines, separated by commas, as for finetune --data.',
  )
  json: str | None = flags.text(
    None, 'File to write the figures and all answers to.', right='a path'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(Common, Adapter, Model):
  """Generation."""

  prompt: str | None = flags.text(
    None, 'What to answer or continue.', shown='standard input'
  )
  chat: bool | None = flags.boolean(
    None,
    "Whether the prompt is a user's turn in a chat (--chat) or raw text to"
    ' continue (--nochat).',
    shown='chat if the model has a template',
  )
  system: str | None = flags.text(None, 'System message of the chat.')
  temperature: float = flags.number(
    0.0, 'Randomness; 0 takes the most likely token.', low=0
  )
  top_p: float = flags.number(
    1.0,
    'Sample from the most likely tokens that have this probability together.',
    above=0,
    high=1,
  )
  max_new_tokens: int = flags.integer(256, 'Tokens to generate.', low=1)
  seed: int = flags.integer(0, 'Seed of sampling.', low=0, high=_MAX_SEED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
  """What is written."""

  output: str | None = flags.text(
    None, 'Folder to write; nothing may be there.', right='a path'
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Merge(Common, Output, Adapter, Model):
  """Merging."""

  dtype: str = flags.choice(
    'float32', 'Type of the weights.', of=('float32', 'bfloat16', 'float16')
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export(Common, Output, Adapter, Model):
  """Export."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect(Common, Adapter, Method, Model):
  """Inspection."""


def check_finetune(options: Finetune, given: Collection[str]) -> Finetune:
  """Checks what must hold between flags, and resolves those left open.

  Args:
    options: As parsed.
    given: Names of the flags that were on the command line.

  Returns:
    Options in which `model`, `weight_qtype`, `tile_size` and, unless there are
    epochs, `steps` are set.

  Raises:
    errors.UserError: Naming flag, value, and what would be right.
  """
  _check_method(options, given)
  if options.epochs is not None and 'steps' in given:
    raise errors.UserError(
      f'--steps={options.steps}: cannot be together with'
      f' --epochs={options.epochs}; give one of them'
    )
  if options.resume and options.overwrite:
    raise errors.UserError(
      '--overwrite: cannot be together with --resume; give one of them'
    )
  if options.restore_adapter is not None:
    _check_exists(
      '--restore_adapter', options.restore_adapter, 'a folder of an adapter'
    )
  mesh = {} if options.mesh is None else parse_mesh(options.mesh)
  shards = 1
  for size in mesh.values():
    shards *= size
  if options.batch_size % shards:
    raise errors.UserError(
      f'--batch_size={options.batch_size}: must be a multiple of {shards}, the'
      f' devices of --mesh={options.mesh}'
    )
  if os.path.exists(options.output) and not os.path.isdir(options.output):
    raise errors.UserError(
      f'--output={options.output}: is a file; expected a folder'
    )
  _check_files('--data', [options.data])
  _check_files('--eval_data', options.eval_data)
  steps = options.steps if options.epochs is None else None
  if steps is not None:
    check_steps(options, steps)
  return dataclasses.replace(
    options,
    model=_model(options.model),
    steps=steps,
    **_resolved_method(options, given),
  )


def check_steps(options: Finetune, steps: int) -> None:
  """Checks the flags that depend on the number of steps.

  Args:
    options: The flags.
    steps: Number of steps, from the flag or from the epochs.

  Raises:
    errors.UserError: Warm-up or accumulation don't fit it.
  """
  if options.warmup_steps > steps:
    raise errors.UserError(
      f'--warmup_steps={options.warmup_steps}: must be at most the number of'
      f' steps, {steps}'
    )
  if options.accumulate > steps:
    raise errors.UserError(
      f'--accumulate={options.accumulate}: must be at most the number of'
      f' steps, {steps}'
    )


def check_evaluate(options: Evaluate, given: Collection[str]) -> Evaluate:
  """Does for `evaluate` what `check_finetune` does."""
  del given
  _check_adapter(options)
  if not options.data:
    raise errors.UserError('--data=: must be at least one file')
  _check_files('--data', options.data)
  return dataclasses.replace(options, model=_model(options.model))


def check_generate(options: Generate, given: Collection[str]) -> Generate:
  """Does for `generate` what `check_finetune` does."""
  _check_adapter(options)
  if options.system is not None and options.chat is False:
    raise errors.UserError(
      f'--system={options.system}: needs a chat; leave out --nochat'
    )
  if options.temperature == 0 and 'top_p' in given and options.top_p < 1:
    raise errors.UserError(
      f'--top_p={options.top_p}: needs a --temperature above 0'
    )
  return dataclasses.replace(options, model=_model(options.model))


def check_merge(options: Merge, given: Collection[str]) -> Merge:
  """As `check_finetune`, for `peftlib merge`."""
  del given
  _check_output(options.adapter, options.output)
  return dataclasses.replace(options, model=_model(options.model))


def check_export(options: Export, given: Collection[str]) -> Export:
  """As `check_finetune`, for `peftlib export`."""
  del given
  _check_output(options.adapter, options.output)
  return dataclasses.replace(options, model=_model(options.model))


def _check_output(adapter: str | None, output: str | None) -> None:
  if adapter is None:
    raise errors.UserError('--adapter: give the folder of an adapter')
  _check_exists('--adapter', adapter, 'a folder of an adapter')
  if output is None:
    raise errors.UserError('--output: give a folder to write')
  if os.path.lexists(output):
    raise errors.UserError(
      f'--output={output}: is there already; give another folder'
    )


def check_inspect(options: Inspect, given: Collection[str]) -> Inspect:
  """Does for `inspect` what `check_finetune` does."""
  _check_adapter(options)
  if options.adapter is not None:
    own = {f.name for f in dataclasses.fields(Method)} & set(given)
    if own:
      name = sorted(own)[0]
      raise errors.UserError(
        f'--{name}={getattr(options, name)}: cannot be together with'
        ' --adapter, which says it itself'
      )
  _check_method(options, given)
  return dataclasses.replace(
    options, model=_model(options.model), **_resolved_method(options, given)
  )


def parse_mesh(text: str) -> dict[str, int]:
  """Reads `--mesh`.

  Args:
    text: E.g. 'fsdp=4,data=2'.

  Returns:
    Sizes by axis, in order.

  Raises:
    errors.UserError: The text is malformed, or an axis isn't one of ours.
  """
  axes: dict[str, int] = {}
  for part in text.split(','):
    name, _, size = (x.strip() for x in part.partition('='))
    if (
      name not in ('fsdp', 'data')
      or name in axes
      or not size.isdecimal()
      or int(size) < 1
    ):
      raise errors.UserError(
        f'--mesh={text}: {part.strip()!r} is no axis; must be fsdp=N, data=N or'
        " both, e.g. 'fsdp=4,data=2'"
      )
    axes[name] = int(size)
  return axes


def adapter_fields(options: Method) -> dict[str, Any] | None:
  """What the adapters are, or None where the whole model is trained.

  Args:
    options: Resolved by one of the checks.

  Returns:
    'method', the fields of `peftlib.Rule`, and 'fields', those of the method.
  """
  if options.method == 'full':
    return None
  quantized = options.weight_qtype != 'none'
  return {
    'method': options.method,
    'fields': {
      name: getattr(options, name)
      for name, usual in METHODS[options.method].items()
      if usual is not None
    },
    'module_path': options.module_path,
    'weight_qtype': options.weight_qtype if quantized else None,
    'tile_size': options.tile_size or None,
  }


def _check_method(options: Method, given: Collection[str]) -> None:
  try:
    re.compile(options.module_path)
  except re.error as e:
    raise errors.UserError(
      f'--module_path={options.module_path}: must be a regular expression: {e}'
    ) from e
  if options.method == 'full':
    for name in _ADAPTERS_ONLY:
      if name in given:
        raise errors.UserError(
          f'--{name}={getattr(options, name)}: --method=full has no adapters;'
          ' leave it out, or use --method=lora'
        )
    if options.weight_qtype not in (None, 'none'):
      raise errors.UserError(
        f'--weight_qtype={options.weight_qtype}: quantized weights cannot be'
        ' trained; must be none with --method=full'
      )
    return
  for name, usual in METHODS[options.method].items():
    if usual is None and name in given:
      raise errors.UserError(
        f'--{name}={getattr(options, name)}: --method={options.method} has no'
        f' {name}; leave it out'
      )
  if options.weight_qtype == 'none' and options.tile_size is not None:
    raise errors.UserError(
      f'--tile_size={options.tile_size}: there is nothing to tile with'
      ' --weight_qtype=none; leave it out'
    )


def _resolved_method(options: Method, given: Collection[str]) -> dict[str, Any]:
  qtype = options.weight_qtype
  if qtype is None:
    qtype = 'none' if options.method == 'full' else 'nf4'
  tile = options.tile_size
  if tile is None:
    tile = 0 if qtype == 'none' else 64
  usual = METHODS.get(options.method, {})
  return {
    'weight_qtype': qtype,
    'tile_size': tile,
    **{
      name: value
      for name, value in usual.items()
      if value is not None and name not in given
    },
  }


def _model(path: str | None) -> str:
  if path is None:
    try:
      return assets.model_path()
    except FileNotFoundError as e:
      raise errors.UserError(
        f'--model: {e.strerror or e} (looked for {e.filename}); or give the'
        ' path of another model'
      ) from e
  _check_exists('--model', path, 'a GGUF file or a Hugging Face directory')
  return path


def _check_adapter(options: Adapter) -> None:
  if options.adapter is not None:
    _check_exists('--adapter', options.adapter, 'a folder of an adapter')


def _check_exists(flag: str, path: str, right: str) -> None:
  if not os.path.exists(path):
    raise errors.UserError(
      f'{flag}={path}: no such file or directory; expected {right}'
    )


def _check_files(flag: str, paths: Sequence[str]) -> None:
  for path in paths:
    if os.path.isfile(path):
      continue
    what = 'is a folder' if os.path.isdir(path) else 'no such file'
    hint = ''
    if path.startswith(_DEMO_DATA):
      hint = (
        "; the demo's files are made by: python -m peftlib.demo.orders"
        f' --output={_DEMO_DATA}'
      )
    raise errors.UserError(
      f'{flag}={path}: {what}; expected a file of JSON lines{hint}'
    )
