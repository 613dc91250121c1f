"""`peftlib finetune`: from a model and rows to an adapter."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import math
import resource
import signal
import statistics
import sys
import threading
import time
from typing import Any, NamedTuple

from flax import nnx
import jax
import numpy as np
from rich import console as rich_console

import peftlib
from peftlib import checkpoint
from peftlib import config as config_lib
from peftlib import data
from peftlib import losses
from peftlib.cli import assembly
from peftlib.cli import compiling
from peftlib.cli import display
from peftlib.cli import errors
from peftlib.cli import evaluation
from peftlib.cli import meshes
from peftlib.cli import optimizers
from peftlib.cli import options as options_lib
from peftlib.cli import runs
import transforms

_EXAMPLES = 3


class _Inputs(NamedTuple):
  """What has been read and checked before any weight is."""

  tokenizer: data.Tokenizer
  pipeline: data.Pipeline
  questions: list[evaluation.Questions]
  steps: int
  mesh: jax.sharding.Mesh | None
  config: config_lib.Config | None
  modules: list[display.ModuleRow]


class _Setup(NamedTuple):
  """A model that is ready to be trained."""

  graphdef: nnx.GraphDef[Any]
  frozen: nnx.State[Any, Any]
  train_state: peftlib.TrainState
  step: Callable[..., Any]
  manifest: checkpoint.Manifest


class _Trained(NamedTuple):
  """What the loop ends with."""

  train_state: peftlib.TrainState
  compile_seconds: float
  signal: int | None


def run(options: options_lib.Finetune) -> int:
  """Runs the command.

  Args:
    options: Checked by `options.check_finetune`.

  Returns:
    The exit status: 0, or 128 and the signal's number if one stopped it.
  """
  console = display.make_console()
  run_paths = runs.paths(options.output)
  if options.compilation_cache is not None:
    jax.config.update('jax_compilation_cache_dir', options.compilation_cache)
  with runs.locked(run_paths):
    status = runs.check_output(run_paths, options)
    if status == 'finished':
      _show_summary(console, run_paths)
      display.say(
        console,
        f'This run is finished already; nothing was done. To start anew:'
        f' --overwrite, or another --output than {options.output}.',
      )
      return 0
    if options.resume and status == 'new':
      display.say(
        console, f'Nothing to resume in {options.output}: a new run starts.'
      )
    try:
      return _run(options, console, run_paths, status)
    except KeyboardInterrupt:
      if run_paths.run.exists():
        display.say(console, 'To go on, give the same flags and --resume.')
      raise


def _run(
  options: options_lib.Finetune,
  console: rich_console.Console,
  run_paths: runs.Paths,
  status: runs.Status,
) -> int:
  inputs = _read_inputs(options)
  console.print(display.module_table(inputs.modules))
  setup = _set_up(options, inputs)
  fingerprints = {
    'base_fingerprint': setup.manifest.base_fingerprint,
    'data_fingerprint': inputs.pipeline.fingerprint,
  }
  if status == 'new':
    runs.clear(run_paths)
    runs.write_json(
      run_paths.run,
      runs.describe(options, steps=inputs.steps, **fingerprints),
    )
  else:
    runs.check_contents(run_paths, **fingerprints)
  batches = iter(inputs.pipeline.dataset)
  with contextlib.closing(checkpoint.open_run(run_paths.checkpoints)) as saved:
    train_state = _start(options, console, setup, saved, batches)
    setup = setup._replace(train_state=train_state)
    before = _before(options, console, run_paths, inputs, setup)
    trained = _train(options, console, run_paths, inputs, setup, saved, batches)
    if trained.signal is not None:
      display.say(
        console,
        f'Stopped after step {int(trained.train_state.step)}, which is saved.'
        f' To go on, give the same flags and --resume.',
      )
      return 128 + trained.signal
  adapter = transforms.merge(
    trained.train_state.trainable, _constants(setup.frozen)
  )
  checkpoint.save_adapter(
    run_paths.adapter,
    adapter,
    setup.manifest._replace(leaves=checkpoint.leaves_of(adapter)),
    overwrite=True,
  )
  after = _ask_all(
    options, console, inputs, setup, trained.train_state.trainable, 'after'
  )
  runs.write_json(run_paths.after, _results_to_json(after))
  runs.write_json(
    run_paths.summary,
    _summarize(run_paths, inputs, setup, trained, before, after),
  )
  _show_summary(console, run_paths)
  return 0


def _read_inputs(options: options_lib.Finetune) -> _Inputs:
  """Reads and checks everything but the weights."""
  mesh = meshes.make_mesh(options.mesh)
  template = evaluation.template_option(options.template)
  tokenizer = assembly.load_tokenizer(str(options.model))
  pipeline = data.make_pipeline(
    data.read_jsonl(options.data),
    tokenizer,
    length=options.length,
    batch_size=options.batch_size,
    seed=options.seed,
    pack=options.pack,
    loss_on=options.loss_on,  # type: ignore[arg-type]
    template=template,
    overlong=options.overlong,  # type: ignore[arg-type]
  )
  if options.epochs is not None:
    steps = max(1, math.ceil(options.epochs * pipeline.steps_per_epoch))
    options_lib.check_steps(options, steps)
  else:
    assert options.steps is not None
    steps = options.steps
  questions = [
    evaluation.read_questions(
      path, tokenizer, limit=options.eval_rows, template=template
    )
    for path in options.eval_data
  ]
  config = assembly.make_config(options)
  # What doesn't fit the model is found without its weights.
  abstract = assembly.assemble(
    assembly.abstract_base(
      str(options.model), compute_dtype=options.compute_dtype
    ),
    config,
    key=jax.random.key(options.seed),
  )
  modules = display.module_rows(abstract.trainable, abstract.frozen)
  return _Inputs(tokenizer, pipeline, questions, steps, mesh, config, modules)


def _set_up(options: options_lib.Finetune, inputs: _Inputs) -> _Setup:
  """Loads the model, adds what is trained, and makes the step."""
  adapter_key, run_key = jax.random.split(jax.random.key(options.seed))
  base, fingerprint = assembly.load_base(
    str(options.model),
    compute_dtype=options.compute_dtype,
    remat=options.remat,
    config=inputs.config,
  )
  graphdef, trainable, frozen = assembly.assemble(
    base, inputs.config, key=adapter_key
  )
  # Else weights that were replaced stay in memory to the end.
  del base
  frozen = meshes.shard_state(frozen, inputs.mesh)
  trainable = meshes.shard_state(trainable, inputs.mesh)
  tx = optimizers.make_optimizer(options, inputs.steps)
  train_state = meshes.replicate_rest(
    peftlib.init_train_state(trainable, tx, key=run_key), inputs.mesh
  )
  return _Setup(
    graphdef,
    frozen,
    train_state,
    peftlib.make_train_step(graphdef, losses.causal_lm_loss, tx),
    checkpoint.make_manifest(trainable, inputs.config, fingerprint),
  )


def _start(
  options: options_lib.Finetune,
  console: rich_console.Console,
  setup: _Setup,
  saved: Any,
  batches: Any,
) -> peftlib.TrainState:
  """The state to start from: a checkpoint's, an adapter's, or the fresh one."""
  latest = saved.latest_step()
  if latest is not None:
    if options.restore_adapter is not None:
      print(
        f'peftlib finetune: warning: --restore_adapter='
        f'{options.restore_adapter} is not used: {options.output} has a'
        f' checkpoint of step {latest}, which comes first',
        file=sys.stderr,
      )
    train_state, position = checkpoint.restore_run(
      saved, setup.train_state, setup.manifest
    )
    batches.set_state(position['iterator'])
    display.say(console, f'Resumed after step {latest}.')
    return train_state
  if options.restore_adapter is None:
    return setup.train_state
  trainable = setup.train_state.trainable
  like = transforms.merge(trainable, _constants(setup.frozen))
  adapter = checkpoint.restore_adapter(
    options.restore_adapter,
    like,
    setup.manifest._replace(leaves=checkpoint.leaves_of(like)),
  )
  # Equal to those of this run: they are drawn by the same rule.
  constants, trainable = transforms.partition(
    adapter, peftlib.AdapterConstant, ...
  )
  _check_constants(options, constants, _constants(setup.frozen))
  display.say(
    console, f'Started from the adapter in {options.restore_adapter}.'
  )
  return setup.train_state._replace(trainable=trainable)


def _constants(frozen: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
  return transforms.select(frozen, peftlib.AdapterConstant)


def _check_constants(
  options: options_lib.Finetune,
  saved: nnx.State[Any, Any],
  own: nnx.State[Any, Any],
) -> None:
  for a, b in zip(jax.tree.leaves(saved), jax.tree.leaves(own), strict=True):
    if not np.array_equal(a, b):
      raise errors.UserError(
        f'--restore_adapter={options.restore_adapter}: its frozen variables'
        f' were drawn from another seed than --seed={options.seed}; give that'
      )


def _before(
  options: options_lib.Finetune,
  console: rich_console.Console,
  run_paths: runs.Paths,
  inputs: _Inputs,
  setup: _Setup,
) -> list[evaluation.Result] | None:
  """Answers before training; read back where the run has given them."""
  if run_paths.before.exists():
    return _results_from_json(runs.read_json(run_paths.before))
  if int(setup.train_state.step):
    return None
  results = _ask_all(
    options, console, inputs, setup, setup.train_state.trainable, 'before'
  )
  runs.write_json(run_paths.before, _results_to_json(results))
  return results


def _ask_all(
  options: options_lib.Finetune,
  console: rich_console.Console,
  inputs: _Inputs,
  setup: _Setup,
  trainable: nnx.State[Any, Any],
  when: str,
) -> list[evaluation.Result]:
  results = []
  for questions in inputs.questions:
    start = time.perf_counter()
    result = evaluation.ask(
      setup.graphdef,
      transforms.merge(trainable, setup.frozen),
      questions,
      inputs.tokenizer,
      max_new_tokens=options.max_new_tokens,
      batch_size=options.eval_batch_size,
    )
    display.say(
      console,
      f'{when} training: {result.exact_match:.1%} of {len(result.answers)}'
      f' exact in {questions.path}'
      f' ({time.perf_counter() - start:.0f} s)',
    )
    results.append(result)
  return results


def _train(
  options: options_lib.Finetune,
  console: rich_console.Console,
  run_paths: runs.Paths,
  inputs: _Inputs,
  setup: _Setup,
  saved: Any,
  batches: Any,
) -> _Trained:
  """The loop; ends at the last step, or after the one that a signal met."""
  state = setup.train_state
  start = int(state.step)
  step = compiling.Step(setup.step)
  with (
    _caught_signals() as signals,
    contextlib.closing(runs.open_metrics(run_paths.metrics, start)) as file,
    display.training_progress(
      console, start=start, steps=inputs.steps, every=options.log_every
    ) as report,
  ):
    for number in range(start + 1, inputs.steps + 1):
      began, compiled = time.perf_counter(), step.seconds
      batch = next(batches)
      state, metrics = step(
        state, setup.frozen, meshes.shard_batch(batch, inputs.mesh)
      )
      metrics = jax.device_get(metrics)
      seconds = time.perf_counter() - began - (step.seconds - compiled)
      record = _record(number, metrics, batch, seconds)
      _check_finite(record, saved.latest_step())
      runs.append_metrics(file, record)
      report(record)
      last = number == inputs.steps or bool(signals)
      if last or number % options.checkpoint_every == 0:
        checkpoint.save_run(
          saved, state, {'iterator': batches.get_state()}, setup.manifest
        )
      if signals:
        break
  saved.wait_until_finished()
  runs.write_loss_plot(run_paths.loss, runs.read_metrics(run_paths.metrics))
  return _Trained(state, step.seconds, signals[0] if signals else None)


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
  """Collects SIGINT and SIGTERM, so that a step is finished and saved.

  A second one interrupts at once.

  Yields:
    The signals received so far.
  """
  received: list[int] = []

  def receive(number: int, frame: Any) -> None:
    del frame
    if received:
      raise KeyboardInterrupt
    received.append(number)

  # Python lets no other thread do this.
  if threading.current_thread() is not threading.main_thread():
    yield received
    return
  old = {n: signal.signal(n, receive) for n in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield received
  finally:
    for number, handler in old.items():
      signal.signal(number, handler)


def _record(
  number: int,
  metrics: Mapping[str, Any],
  batch: Mapping[str, np.ndarray],
  seconds: float,
) -> dict[str, Any]:
  """A step's line in `metrics.jsonl`.

  `tokens` are all but padding, `loss_tokens` those that are learnt.
  """
  tokens = int((batch['segment_ids'] > 0).sum())
  return {
    'step': number,
    'loss': float(metrics['loss']),
    'grad_norm': float(metrics['grad_norm']),
    'update_norm': float(metrics['update_norm']),
    'learning_rate': float(metrics['learning_rate']),
    'tokens': tokens,
    'loss_tokens': int(metrics['tokens']),
    'tokens_per_second': tokens / seconds,
    'seconds': seconds,
  }


def _check_finite(record: Mapping[str, Any], last_saved: int | None) -> None:
  if math.isfinite(record['loss']) and math.isfinite(record['grad_norm']):
    return
  kept = 'no step is saved'
  if last_saved is not None:
    kept = f'step {last_saved} is saved'
  raise errors.UserError(
    f'the loss is {record["loss"]} and the norm of its gradient'
    f' {record["grad_norm"]} at step {record["step"]} ({kept}); a lower'
    ' --learning_rate, more --warmup_steps or --compute_dtype=float32 may help'
  )


def _summarize(
  run_paths: runs.Paths,
  inputs: _Inputs,
  setup: _Setup,
  trained: _Trained,
  before: list[evaluation.Result] | None,
  after: list[evaluation.Result],
) -> dict[str, Any]:
  """What `summary.json` says."""
  records = runs.read_metrics(run_paths.metrics)
  seconds = sum(r['seconds'] for r in records)
  stats = inputs.pipeline.stats
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  last = [r['loss'] for r in records[-10:]]
  return {
    'exact_match': [
      {
        'file': new.path,
        'rows': len(new.answers),
        'before': None if before is None else before[i].exact_match,
        'after': new.exact_match,
      }
      for i, new in enumerate(after)
    ],
    'steps': inputs.steps,
    'final_loss': sum(last) / len(last),
    'tokens_per_second': sum(r['tokens'] for r in records) / seconds,
    'loss_tokens_per_second': sum(r['loss_tokens'] for r in records) / seconds,
    'seconds_per_step': statistics.median(r['seconds'] for r in records),
    'training_seconds': seconds,
    'compile_seconds': trained.compile_seconds,
    # Linux counts in kilobytes, macOS in bytes.
    'peak_bytes': peak if sys.platform == 'darwin' else peak * 1024,
    'base_bytes': display.tree_bytes(setup.frozen),
    'trainable_bytes': display.tree_bytes(trained.train_state.trainable),
    'optimizer_bytes': display.tree_bytes(trained.train_state.opt_state),
    'pad_share': stats.pad_share,
    'rows': stats.rows,
    'truncated_rows': stats.truncated_rows,
    'adapter': str(run_paths.adapter),
  }


def _show_summary(console: rich_console.Console, run_paths: runs.Paths) -> None:
  summary = runs.read_json(run_paths.summary)
  after = _results_from_json(runs.read_json(run_paths.after))
  before = None
  if run_paths.before.exists():
    before = _results_from_json(runs.read_json(run_paths.before))
  if after:
    console.print(display.examples_table(before, after, _EXAMPLES))
    console.print(display.match_table(before, after))
  figures = {
    'steps': f'{summary["steps"]}',
    'loss, mean of the last 10 steps': f'{summary["final_loss"]:.4f}',
    'tokens/s': f'{summary["tokens_per_second"]:.0f}',
    'learnt tokens/s': f'{summary["loss_tokens_per_second"]:.0f}',
    'seconds per step (median)': f'{summary["seconds_per_step"]:.2f}',
    'seconds of training': f'{summary["training_seconds"]:.0f}',
    'seconds of compilation': f'{summary["compile_seconds"]:.1f}',
    'peak memory': display.size(summary['peak_bytes']),
    'bytes of the frozen base': display.size(summary['base_bytes']),
    'bytes of what is trained': display.size(summary['trainable_bytes']),
    'bytes of the optimizer': display.size(summary['optimizer_bytes']),
    'padding': f'{summary["pad_share"]:.1%}',
    'rows cut to fit': f'{summary["truncated_rows"]} of {summary["rows"]}',
    'adapter': summary['adapter'],
  }
  console.print(display.figures_table('Summary', figures))


def _results_to_json(results: list[evaluation.Result]) -> list[dict[str, Any]]:
  return [dataclasses.asdict(r) for r in results]


def _results_from_json(values: Any) -> list[evaluation.Result]:
  return [evaluation.Result(**v) for v in values]
