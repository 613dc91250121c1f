"""peftlib, as its users run it.

usage: python -m tests.benchmarks.ours SPEC

Fields of the spec, in JSON: `case` (one of `_CASES`), `folder` (see
material.py), and those that the functions below read. What only one case needs
is imported there: what it holds is no part of a step's memory.
"""

from collections.abc import Iterator
import dataclasses
import functools
import json
import pathlib
import shutil
import time
from typing import Any

from absl import logging
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import peftlib
from peftlib import generation
from peftlib import hf
from peftlib import losses
from peftlib import models
from peftlib.cli import compiling
from peftlib.cli import meshes
from tests.benchmarks import overhead as overhead_lib
from tests.benchmarks import products as products_lib
from tests.benchmarks import worker
import transforms

State = nnx.State[Any, Any]
Batch = dict[str, np.ndarray]
_QUANTIZE: dict[str | None, dict[str, Any]] = {
  None: {},
  'int8': {'weight_qtype': 'int8', 'tile_size': 64},
  'nf4': {'weight_qtype': 'nf4', 'tile_size': 64},
}
_INPUTS = jax.ShapeDtypeStruct((1, 8), jnp.int32)


def _config(spec: worker.Spec) -> peftlib.LoraConfig:
  return peftlib.LoraConfig(
    module_path='.*_proj',
    rank=spec.get('rank', 16),
    alpha=2.0 * spec.get('rank', 16),
    **_QUANTIZE[spec.get('quantize')],
  )


def _base(spec: worker.Spec) -> models.LoadedModel:
  dtype = spec.get('dtype', 'float32')
  return models.load(
    pathlib.Path(spec['folder'], 'model'),
    dtype=dtype,
    param_dtype=dtype,
    remat=spec.get('remat', 'dots'),
  )


def _first_layers(model: models.LoadedModel, count: int) -> models.LoadedModel:
  """A model of fewer layers."""
  config = dataclasses.replace(model.config, num_layers=count)
  graphdef, _ = nnx.split(
    nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))
  )
  layers, rest = transforms.partition(
    model.state, nnx.PathContains('layers'), ...
  )
  cut = jax.tree.map(lambda x: x[:count], layers)
  return model._replace(
    graphdef=graphdef, state=transforms.merge(cut, rest), config=config
  )


def _fresh(spec: worker.Spec) -> tuple[nnx.GraphDef[Any], State]:
  """The first `layers` of the model with a new adapter of rank `rank`."""
  model = _first_layers(_base(spec), spec['layers'])
  return peftlib.inject(
    model.graphdef,
    model.state,
    _config(spec),
    _INPUTS,
    key=jax.random.key(0),
  )


def _adapted(spec: worker.Spec) -> tuple[nnx.GraphDef[Any], State]:
  """The model with the adapter that the peers have too."""
  graphdef, state, *_ = hf.load_adapter(
    pathlib.Path(spec['folder'], 'adapter'), *_base(spec)[:2]
  )
  if spec.get('quantize'):
    graphdef, state = peftlib.quantize_base(
      graphdef, state, _config(spec), _INPUTS
    )
  return graphdef, state


def _split(state: State) -> tuple[State, State]:
  trainable, frozen = transforms.partition(
    state, peftlib.trainable_filter(_config({})), ...
  )
  return trainable, frozen


def _tokens(spec: worker.Spec) -> np.ndarray:
  return np.load(pathlib.Path(spec['folder'], 'tokens.npy'))


def _batches(spec: worker.Spec) -> Iterator[Batch]:
  """Rows with a loss on every token."""
  for rows in worker.batches(_tokens(spec), spec):
    shape = (len(rows), rows.shape[1] - 1)
    places = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    yield {
      'tokens': rows[:, :-1],
      'positions': places,
      'segment_ids': np.ones(shape, np.int32),
      'loss_positions': places,
      'targets': rows[:, 1:],
      'loss_weights': np.ones(shape, np.float32),
    }


def _num_bytes(tree: Any) -> int:
  return sum(x.on_device_size_in_bytes() for x in jax.tree.leaves(tree))


def _weight_bytes(state: State) -> int:
  """Bytes of what LoRA adapts, of quantized weights codes and scales."""
  return sum(
    _num_bytes(variable)
    for path, variable in nnx.to_flat_state(state)
    if any(str(part).endswith('_proj') for part in path)
  )


class _Run:
  """A training run: the state, the compiled steps, what they cost."""

  def __init__(
    self,
    graphdef: nnx.GraphDef[Any],
    state: State,
    learning_rate: float,
    mesh: jax.sharding.Mesh | None = None,
  ):
    tx = optax.adamw(learning_rate)
    trainable, frozen = _split(state)
    train_state = peftlib.init_train_state(trainable, tx, key=jax.random.key(1))
    self.mesh = mesh
    self.frozen = meshes.shard_state(frozen, mesh)
    self.state = meshes.replicate_rest(train_state, mesh)
    self._step = compiling.Step(
      peftlib.make_train_step(graphdef, losses.causal_lm_loss, tx)
    )
    self.bytes = {
      'base': _num_bytes(self.frozen),
      'adapted weights': _weight_bytes(self.frozen),
      'adapter': _num_bytes(self.state.trainable),
      'optimizer': _num_bytes(self.state.opt_state),
    }

  @property
  def compile_seconds(self) -> float:
    return self._step.seconds

  def compile(self, batch: Batch) -> None:
    batch = meshes.shard_batch(batch, self.mesh)
    self._step.compile(self.state, self.frozen, batch)

  def step(self, batch: Batch) -> dict[str, jax.Array]:
    self.state, metrics = self._step(
      self.state, self.frozen, meshes.shard_batch(batch, self.mesh)
    )
    return metrics


def _stepping(run: _Run, spec: worker.Spec) -> worker.Work:
  batches = _batches(spec)
  run.compile(next(_batches(spec)))

  def work() -> dict[str, Any]:
    batch = next(batches)
    start = time.perf_counter()
    loss = run.step(batch)['loss'].item()
    return {
      'seconds': time.perf_counter() - start,
      'loss': loss,
      'bytes': run.bytes,
      'compile': run.compile_seconds,
    }

  return work


def step(spec: worker.Spec) -> worker.Work:
  """Training steps on `rows` rows of `length` tokens, loss on all."""
  return _stepping(_Run(*_adapted(spec), spec['learning_rate']), spec)


def growth(spec: worker.Spec) -> worker.Work:
  """Training steps of `layers`, `rank`, over `devices` that share the base."""
  mesh = meshes.make_mesh(f'fsdp={spec["devices"]}')
  return _stepping(_Run(*_fresh(spec), spec['learning_rate'], mesh), spec)


def start(spec: worker.Spec) -> worker.Work:
  """The first step of a process, its parts timed; `cache` is a folder or ''."""
  if spec['cache']:
    jax.config.update('jax_compilation_cache_dir', spec['cache'])
  parts, began = {}, time.perf_counter()

  def lap(name: str, *values: Any) -> None:
    nonlocal began
    jax.block_until_ready(values)
    parts[name] = time.perf_counter() - began
    began = time.perf_counter()

  model = _base(spec)
  lap('load', model.state)
  config = _config(spec)
  graphdef, state = peftlib.inject(
    model.graphdef, model.state, config, _INPUTS, key=jax.random.key(0)
  )
  if spec.get('quantize'):
    graphdef, state = peftlib.quantize_base(graphdef, state, config, _INPUTS)
  lap('inject', state)
  run = _Run(graphdef, state, spec['learning_rate'])
  batch = next(_batches(spec))
  lap('train state', run.state)
  run.compile(batch)
  lap('compile')
  run.step(batch)['loss'].item()
  lap('first step')
  return lambda: {'seconds': sum(parts.values()), **parts}


def chats(spec: worker.Spec) -> worker.Work:
  """One pass over chats, `rows` of them packed into the sequences of a step."""
  from peftlib import data

  rows = json.loads(pathlib.Path(spec['folder'], 'chats.json').read_text())
  encoded = [
    data.Encoded(
      np.asarray(row['ids'], np.int32), np.asarray(row['has_loss'], bool), 0
    )
    for row in rows
  ]
  groups = [
    encoded[at : at + spec['rows']]
    for at in range(0, len(encoded), spec['rows'])
  ]
  batches = [_pack(group, spec['length']) for group in groups]
  run = _Run(*_adapted(spec), spec['learning_rate'])
  for batch in batches:
    run.compile(batch)

  def work() -> dict[str, Any]:
    begin, total, count = time.perf_counter(), 0.0, 0.0
    for batch in batches:
      metrics = jax.device_get(run.step(batch))
      total += float(metrics['loss'] * metrics['tokens'])
      count += float(metrics['tokens'])
    return {
      'seconds': time.perf_counter() - begin,
      'loss': total / count,
      'loss_tokens': count,
    }

  return work


def _pack(rows: list[Any], length: int) -> Batch:
  from peftlib.data import packing

  counts = [int(row.loss_mask.sum()) for row in rows]
  # Room for all targets anywhere: only tokens decide what goes together.
  sequences = packing.first_fit(
    [len(row) for row in rows], counts, length=length, loss_length=length
  )
  most = max(sum(counts[i] for i in sequence) for sequence in sequences)
  return packing.stack(
    [
      packing.build_sequence(
        [rows[i] for i in sequence],
        length=length,
        loss_length=packing.round_up(most),
        pad_id=0,
      )
      for sequence in sequences
    ]
  )


def adapters(spec: worker.Spec) -> worker.Work:
  """Steps of `adapters` adapters at once, each on `rows` rows of its own.

  All start as the peers' adapter; with `rates` each has its learning rate and
  sees the same batches, and one work is `steps` steps.
  """
  count = spec['adapters']
  graphdef, state = _adapted(spec)
  trainable, frozen = _split(state)
  tx = optax.inject_hyperparams(optax.adamw)(spec['learning_rate'])
  population = peftlib.init_stacked_train_state(
    peftlib.stack_adapters([trainable] * count),
    tx,
    keys=jax.random.split(jax.random.key(1), count),
  )
  shared = 'rates' in spec
  if shared:
    rates = jnp.asarray(spec['rates'], jnp.float32)
    population = optax.tree.set(population, learning_rate=rates)
  train_step = compiling.Step(
    peftlib.make_stacked_train_step(
      graphdef,
      losses.causal_lm_loss,
      tx,
      batch_axis=None if shared else 0,
    )
  )
  rows = spec['rows'] * (1 if shared else count)
  batches = _batches({**spec, 'rows': rows})

  def work() -> dict[str, Any]:
    nonlocal population
    begin = time.perf_counter()
    for _ in range(spec.get('steps', 1)):
      batch = next(batches)
      if not shared:
        batch = {
          k: v.reshape(count, spec['rows'], *v.shape[1:])
          for k, v in batch.items()
        }
      population, metrics = train_step(population, frozen, batch)
    found = np.asarray(metrics['loss']).tolist()
    return {'seconds': time.perf_counter() - begin, 'losses': found}

  return work


def run(spec: worker.Spec) -> worker.Work:
  """A whole run of `steps` steps, as one process of a sweep."""
  one = step(spec)

  def work() -> dict[str, Any]:
    begin = time.perf_counter()
    last = [one() for _ in range(spec['steps'])][-1]
    return {**last, 'seconds': time.perf_counter() - begin}

  return work


def mixed(spec: worker.Spec) -> worker.Work:
  """Steps of a batch whose rows have different adapters, `adapters` of them."""
  graphdef, state = _base(spec)[:2]
  names = [f'adapter{i}' for i in range(spec['adapters'])]
  for i, name in enumerate(names):
    graphdef, state = peftlib.inject(
      graphdef,
      state,
      _config(spec),
      _INPUTS,
      key=jax.random.key(i),
      adapter=name,
    )
  graphdef, state = peftlib.assign_rows(
    graphdef, state, names, np.arange(spec['rows']) % len(names)
  )
  return _stepping(_Run(graphdef, state, spec['learning_rate']), spec)


def load(spec: worker.Spec) -> worker.Work:
  """Reads the model, from `source`: 'gguf' or 'safetensors'."""
  name = {'gguf': 'model.gguf', 'safetensors': 'model'}[spec['source']]
  imported = worker.peak_bytes()

  def work() -> dict[str, Any]:
    begin = time.perf_counter()
    model = models.load(pathlib.Path(spec['folder'], name))
    jax.block_until_ready(model.state)
    return {
      'seconds': time.perf_counter() - begin,
      'bytes': {'base': _num_bytes(model.state), 'imports': imported},
    }

  return work


def generate(spec: worker.Spec) -> worker.Work:
  """Generates greedily with a cache: `new` tokens after `prompt`."""
  graphdef, state = _adapted(spec)
  shape = (spec['rows'], spec['prompt'])
  prompts = _tokens(spec)[: shape[0] * shape[1]].reshape(shape).tolist()

  def work() -> dict[str, Any]:
    begin = time.perf_counter()
    tokens = generation.generate(
      graphdef, state, prompts, max_new_tokens=spec['new'], eos_ids=()
    )
    return {'seconds': time.perf_counter() - begin, 'tokens': tokens}

  return work


def save(spec: worker.Spec) -> worker.Work:
  """Saves a run in the background; counted is what the loop waits for."""
  from peftlib import checkpoint

  folder = pathlib.Path(spec['folder']).parent / 'saved'
  shutil.rmtree(folder, ignore_errors=True)
  training = _Run(*_adapted(spec), spec['learning_rate'])
  manifest = checkpoint.make_manifest(
    training.state.trainable, _config({}), 'benchmark'
  )
  manager = checkpoint.open_run(folder)
  batches = _batches(spec)

  def work() -> dict[str, Any]:
    # What is left of the last one doesn't count against this one.
    manager.wait_until_finished()
    jax.block_until_ready(training.step(next(batches)))
    begin = time.perf_counter()
    checkpoint.save_run(manager, training.state, {}, manifest)
    return {'seconds': time.perf_counter() - begin}

  return work


def products(spec: worker.Spec) -> worker.Work:
  """The products of a step with the base's weights, and nothing else."""
  return functools.partial(
    products_lib.measure, _base(spec).config, spec['rows'] * spec['length']
  )


def overhead(spec: worker.Spec) -> worker.Work:
  """What a step of many variables costs beside its computation."""
  return overhead_lib.prepare(spec['variables'])


_CASES = {
  'adapters': adapters,
  'chats': chats,
  'generate': generate,
  'growth': growth,
  'load': load,
  'mixed': mixed,
  'overhead': overhead,
  'products': products,
  'run': run,
  'save': save,
  'start': start,
  'step': step,
}

if __name__ == '__main__':
  # Orbax tells of every file that it writes.
  logging.set_verbosity(logging.WARNING)
  worker.serve(_CASES, lambda: worker.jax_peak(jax.devices()[0]))
