"""The contests of the benchmark: who takes part, and which bars they fill."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import pathlib
import statistics
import tempfile
from typing import Any

from tests.benchmarks import bars
from tests.benchmarks import contest

Results = dict[str, contest.Result]

_PEERS = 'tests/benchmarks/peers'
LEARNING_RATE = 1e-4
# The losses of all have to be this near.
_TOLERANCE = 1e-3
# As our commands set it for themselves, see peftlib/cli/malloc.py.
_HUGE_PAGES = {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}


class LossError(Exception):
  """Two competitors didn't do the same work."""


@dataclasses.dataclass(frozen=True)
class Field:
  """Who there is, and how long they run.

  Attributes:
    folder: From `material.make`.
    ours: Our Python.
    interop: A Python with torch, transformers and peft.
    tunix: A Python with Tunix; None leaves Tunix out.
    rounds: Rounds of a contest that count.
    platform: JAX's, 'cpu', 'gpu' or 'tpu'.
    bf16_units: Whether the machine has units for bf16.
    quick: Leaves out what takes long.
    log: Is told what happens.
  """

  folder: pathlib.Path
  ours: str
  interop: str
  tunix: str | None
  rounds: int
  platform: str
  bf16_units: bool
  quick: bool
  log: Callable[[str], None]

  def _spec(self, case: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    return {
      'case': case,
      'folder': str(self.folder),
      'learning_rate': LEARNING_RATE,
      **spec,
    }

  def us(self, name: str, case: str, **spec: Any) -> contest.Competitor:
    """One of our processes."""
    return our_process(name, self.ours, self.platform, self._spec(case, spec))

  def peft(self, name: str, case: str, **spec: Any) -> contest.Competitor:
    """A process of HF peft, or of transformers alone."""
    device = 'cpu' if self.platform == 'cpu' else 'cuda'
    return contest.Competitor(
      name,
      (self.interop, f'{_PEERS}/hf_peft.py'),
      self._spec(case, {'device': device, **spec}),
    )

  def nnx(self, name: str, **spec: Any) -> contest.Competitor:
    """A process of the hand-written loop."""
    return self._stepping(name, self.ours, 'nnx_loop.py', spec)

  def trainer(self, name: str, **spec: Any) -> list[contest.Competitor]:
    """A process of Tunix's trainer, where there is one."""
    if self.tunix is None:
      return []
    return [self._stepping(name, self.tunix, 'tunix_trainer.py', spec)]

  def _stepping(
    self, name: str, python: str, program: str, spec: Mapping[str, Any]
  ) -> contest.Competitor:
    """A peer's process on JAX."""
    return contest.Competitor(
      name,
      (python, f'{_PEERS}/{program}'),
      self._spec('step', spec),
      {'JAX_PLATFORMS': _jax_name(self.platform)},
    )

  def run(
    self,
    competitors: Sequence[contest.Competitor],
    *,
    rounds: int | None = None,
    skip: int = 1,
  ) -> Results:
    """Lets them take turns, `rounds` that count after `skip` that don't."""
    rounds = self.rounds if rounds is None else rounds
    return contest.run(competitors, rounds + skip, skip=skip, log=self.log)

  def fresh(
    self, competitors: Sequence[contest.Competitor], times: int | None = None
  ) -> Results:
    """Lets each work once in each of several processes, in turns."""
    times = self.rounds if times is None else times
    found = [
      contest.run(competitors, 1, skip=0, log=self.log) for _ in range(times)
    ]
    return {
      competitor.name: contest.joined([each[competitor.name] for each in found])
      for competitor in competitors
    }


def our_process(
  name: str,
  python: str,
  platform: str,
  spec: Mapping[str, Any],
  environ: Mapping[str, str] | None = None,
) -> contest.Competitor:
  """A process of ours, started as our commands start themselves."""
  return contest.Competitor(
    name,
    (python, '-m', 'tests.benchmarks.ours'),
    spec,
    {'JAX_PLATFORMS': _jax_name(platform), **_HUGE_PAGES, **(environ or {})},
  )


def _jax_name(platform: str) -> str:
  return {'gpu': 'cuda'}.get(platform, platform)


def check_losses(results: Results, names: Sequence[str]) -> None:
  """Holds first and last losses of competitors against each other.

  Raises:
    LossError: They differ by more than the tolerance.
  """
  for which in (0, -1):
    losses = {name: results[name].rounds[which]['loss'] for name in names}
    if max(losses.values()) - min(losses.values()) > _TOLERANCE:
      raise LossError(
        f'losses of round {which} differ by more than {_TOLERANCE}: {losses}'
      )


def _time(
  work: str, results: Results, peers: Sequence[str], bar: float, name: str
) -> bars.Row:
  best = min(peers, key=lambda peer: results[peer].median)
  return bars.Row(
    work,
    'time, s',
    results[name].median,
    bar,
    results[best].median,
    best,
    spread=results[name].spread,
  )


def _memory(
  work: str, results: Results, peers: Sequence[str], bar: float, name: str
) -> bars.Row:
  best = min(peers, key=lambda peer: results[peer].peak_bytes)
  return bars.Row(
    work,
    'peak memory, GB',
    results[name].peak_bytes / 1e9,
    bar,
    results[best].peak_bytes / 1e9,
    best,
  )


def main_step(field: Field) -> tuple[Results, list[bars.Row]]:
  """4x128 in float32, beside the products alone."""
  spec = {'rows': 4, 'length': 128}
  competitors = [
    field.us('ours', 'step', **spec),
    field.us('products', 'products', **spec),
    field.peft('peft', 'step', **spec),
    field.nnx('nnx + qwix', **spec),
    *field.trainer('Tunix', **spec),
  ]
  if not field.quick:
    competitors.append(
      field.peft('peft, torch.compile', 'step', compile=True, **spec)
    )
  # Loss after ten steps: the eleventh round's.
  results = field.run(competitors, rounds=3 if field.quick else 10)
  names = [n for n in results if n != 'products']
  check_losses(results, names)
  peers = [n for n in names if n != 'ours']
  work = 'step 4x128 f32'
  rows = [
    _time(work, results, peers, 0.55, 'ours'),
    _memory(work, results, peers, 0.65, 'ours'),
    bars.Row(
      'step 4x128 f32 against its GEMMs (`jnp.dot`)',
      'time, s',
      results['ours'].median,
      1.35,
      results['products'].median,
      'the GEMMs',
    ),
    bars.Row(
      'compile of the first step',
      's',
      results['ours'].rounds[0]['compile'],
      15.0,
    ),
  ]
  if not field.bf16_units:
    # What is fastest here for everybody; `dtypes` has our bf16.
    rows.append(
      _time('step 4x128, best dtype of each', results, peers, 0.7, 'ours')
    )
  return results, rows


def dtypes(field: Field) -> tuple[Results, list[bars.Row]]:
  """4x128 in bfloat16, beside our float32."""
  spec = {'rows': 4, 'length': 128}
  competitors = [
    field.us('f32', 'step', **spec),
    field.us('bf16', 'step', dtype='bfloat16', **spec),
  ]
  if field.bf16_units:
    competitors += [
      field.peft('peft, bf16', 'step', dtype='bfloat16', **spec),
      field.nnx('nnx + qwix, bf16', dtype='bfloat16', **spec),
    ]
  results = field.run(competitors)
  if field.bf16_units:
    peers = ['nnx + qwix, bf16', 'peft, bf16']
    return results, [
      _time('step 4x128, best dtype of each', results, peers, 0.7, 'bf16')
    ]
  return results, [
    _time('bf16 without bf16 units, step 4x128', results, ['f32'], 1.0, 'bf16')
  ]


def long_rows(field: Field) -> tuple[Results, list[bars.Row]]:
  """1x512 in float32."""
  spec = {'rows': 1, 'length': 512}
  results = field.run(
    [field.us('ours', 'step', **spec), field.peft('peft', 'step', **spec)]
  )
  check_losses(results, list(results))
  return results, [_time('step 1x512 f32', results, ['peft'], 0.6, 'ours')]


def rematerialized(field: Field) -> tuple[Results, list[bars.Row]]:
  """4x128 where activations are computed again."""
  spec = {'rows': 4, 'length': 128}
  peers = [
    field.peft('peft', 'step', remat=True, **spec),
    field.nnx('nnx + qwix', remat=True, **spec),
  ]
  results = field.run([field.us('ours', 'step', remat='full', **spec), *peers])
  check_losses(results, list(results))
  names = [peer.name for peer in peers]
  work = 'step 4x128 f32, gradient checkpointing'
  return results, [
    _time(work, results, names, 0.55, 'ours'),
    _memory(work, results, names, 0.5, 'ours'),
  ]


def quantized(field: Field) -> tuple[Results, list[bars.Row]]:
  """4x128 over a quantized base, beside our own over a dense one."""
  spec = {'rows': 4, 'length': 128}
  competitors = [
    field.us('f32', 'step', **spec),
    field.us('nf4', 'step', quantize='nf4', **spec),
    field.us('int8', 'step', quantize='int8', **spec),
  ]
  if not field.quick:
    competitors.append(field.nnx('nnx + qwix, nf4', quantize='nf4', **spec))
  results = field.run(competitors)
  weights = {
    name: results[name].rounds[0]['bytes']['adapted weights'] / 1e6
    for name in ('f32', 'nf4', 'int8')
  }
  rows = []
  for name, limit in (('nf4', 0.16), ('int8', 0.27)):
    work = f'QLoRA {name} 4x128'
    rows += [
      _time(work, results, ['f32'], 1.2, name),
      bars.Row(
        work,
        'bytes of the adapted weights, MB',
        weights[name],
        limit,
        weights['f32'],
        'f32',
      ),
    ]
  return results, rows


def mixed_lengths(field: Field) -> tuple[Results, list[bars.Row]]:
  """Chats of 8 to 512 tokens, 8 a step: packed against padded."""
  results = field.run(
    [
      field.us('ours', 'chats', rows=8, length=512),
      field.peft('peft', 'chats', rows=8),
    ],
    skip=0,
  )
  check_losses(results, list(results))
  rates = {
    name: found.rounds[0]['loss_tokens'] / found.median
    for name, found in results.items()
  }
  return results, [
    bars.Row(
      'rows of 8 to 512 tokens',
      'loss tokens/s',
      rates['ours'],
      2.5,
      rates['peft'],
      'peft',
      at_least=True,
      spread=results['ours'].spread,
    )
  ]


def stacked(field: Field) -> tuple[Results, list[bars.Row]]:
  """8 adapters in one step; a batch of rows with 4 different adapters."""
  one = {'rows': 1, 'length': 128}
  four = {'rows': 4, 'length': 128}
  results = field.run(
    [
      field.us('1 adapter', 'step', **one),
      field.us('8 adapters', 'adapters', adapters=8, **one),
      field.us('4 rows, 1 adapter', 'step', **four),
      field.us('4 rows, 4 adapters', 'mixed', adapters=4, **four),
    ]
  )
  loss, losses = (
    results['1 adapter'].rounds[0]['loss'],
    results['8 adapters'].rounds[0]['losses'],
  )
  if abs(loss - losses[0]) > _TOLERANCE:
    raise LossError(f'alone {loss}, among 8 {losses[0]}')
  return results, [
    bars.Row(
      '8 adapters in one step, 1x128 each',
      'time, s',
      results['8 adapters'].median,
      0.85,
      8 * results['1 adapter'].median,
      '8 single steps',
      spread=results['8 adapters'].spread,
    ),
    _time(
      'a batch with 4 adapters, 4x128',
      results,
      ['4 rows, 1 adapter'],
      1.15,
      '4 rows, 4 adapters',
    ),
  ]


def sweep(field: Field) -> tuple[Results, list[bars.Row]]:
  """8 runs of 50 steps with a learning rate each: as one, and one by one.

  Of those one by one only two run; the others would do the same work.
  """
  spec = {'rows': 1, 'length': 128, 'steps': 50}
  rates = [LEARNING_RATE * (i + 1) for i in range(8)]
  chosen = (0, len(rates) - 1)
  results = field.fresh(
    [
      field.us('as one', 'adapters', adapters=8, rates=rates, **spec),
      *[
        field.us(f'alone {i}', 'run', **spec, **{'learning_rate': rates[i]})
        for i in chosen
      ],
    ],
    1,
  )
  found = results['as one'].rounds[0]['losses']
  singles = [results[f'alone {i}'] for i in chosen]
  for i, one in zip(chosen, singles, strict=True):
    loss = one.rounds[0]['loss']
    if abs(loss - found[i]) > _TOLERANCE:
      raise LossError(f'rate {rates[i]}: alone {loss}, as one {found[i]}')

  def whole(result: contest.Result) -> float:
    return result.since_exec + sum(result.seconds)

  times = len(rates) / len(singles)
  work = 'a sweep of 8 runs of 50 steps, 1x128'
  return results, [
    bars.Row(
      work,
      'time, s',
      whole(results['as one']),
      0.7,
      times * sum(map(whole, singles)),
      '8 processes, one after another',
    ),
    bars.Row(
      work,
      'peak memory, GB',
      results['as one'].peak_bytes / 1e9,
      0.25,
      times * sum(one.peak_bytes for one in singles) / 1e9,
      '8 processes at once',
    ),
  ]


def loading(field: Field) -> tuple[Results, list[bars.Row]]:
  """The model from files, each time in a process of its own."""
  results: Results = {}
  for source in ('gguf', 'safetensors'):
    results |= field.fresh(
      [
        field.us(f'ours, {source}', 'load', source=source),
        field.peft(f'transformers, {source}', 'load', source=source),
      ],
      1 if field.quick else None,
    )
  gguf, safetensors = results['ours, gguf'], results['ours, safetensors']
  return results, [
    _time('load GGUF', results, ['transformers, gguf'], 0.8, 'ours, gguf'),
    bars.Row(
      'load safetensors',
      's',
      safetensors.median,
      1.0,
      spread=safetensors.spread,
    ),
    *[
      bars.Row(
        f'load {source}',
        'peak memory, GB, without what the imports hold',
        (found.peak_bytes - found.rounds[0]['bytes']['imports']) / 1e9,
        1.3,
        found.rounds[0]['bytes']['base'] / 1e9,
        'the f32 model',
      )
      for source, found in (('GGUF', gguf), ('safetensors', safetensors))
    ],
  ]


def starting(field: Field) -> tuple[Results, list[bars.Row]]:
  """From the start of a process to its first step, without cache and with."""
  spec = {'rows': 4, 'length': 128, 'quantize': 'nf4'}
  times = 1 if field.quick else None
  with tempfile.TemporaryDirectory() as cache:
    cached = field.us('nf4, cached', 'start', cache=cache, **spec)
    # Fills the cache.
    field.fresh([cached], 1)
    results = field.fresh(
      [field.us('nf4', 'start', cache='', **spec), cached], times
    )

  def part(name: str, *keys: str) -> float:
    return statistics.median(
      sum(found[key] for key in keys) for found in results[name].rounds
    )

  return results, [
    bars.Row('`inject` + `quantize_base`', 's', part('nf4', 'inject'), 3.0),
    bars.Row(
      'second start, persistent compilation cache',
      's to trace and compile',
      part('nf4, cached', 'compile'),
      4.0,
    ),
    bars.Row(
      'process start to first step, cached',
      's',
      results['nf4, cached'].since_exec,
      15.0,
    ),
  ]


def host(field: Field) -> tuple[Results, list[bars.Row]]:
  """What the host does in a step of 1,000 variables."""
  results = field.run([field.us('ours', 'overhead', variables=1000)])
  found = {
    key: statistics.median(r[key] for r in results['ours'].rounds) * 1e6
    for key in ('arrays', 'variables', 'nnx')
  }
  work = 'host overhead over bare `jax.jit`, 1,000 variables'
  rows = []
  for name, kind in (('arrays', '`nnx.as_pure`'), ('variables', 'Variables')):
    rows += [
      bars.Row(f'{work}, {kind}', 'us', found[name], 300.0),
      bars.Row(
        f'{work}, {kind}', 'us', found[name], 0.2, found['nnx'], '`nnx.jit`'
      ),
    ]
  return results, rows


def generation(field: Field) -> tuple[Results, list[bars.Row]]:
  """Greedy, 64 tokens after 64."""
  spec = {'rows': 1, 'prompt': 64, 'new': 64}
  results = field.run(
    [
      field.us('ours', 'generate', **spec),
      field.peft('transformers', 'generate', **spec),
    ]
  )
  ours, theirs = (found.rounds[0]['tokens'] for found in results.values())
  if ours != theirs:
    raise LossError(f'ours generated {ours}, transformers {theirs}')
  return results, [
    bars.Row(
      'generation, greedy, 64 tokens after 64',
      'tokens/s',
      spec['new'] / results['ours'].median,
      1.2,
      spec['new'] / results['transformers'].median,
      'transformers',
      at_least=True,
      spread=results['ours'].spread,
    )
  ]


def saving(field: Field) -> tuple[Results, list[bars.Row]]:
  """How long the loop waits for an asynchronous save."""
  spec = {'rows': 1, 'length': 32}
  results = field.run([field.us('ours', 'save', **spec)])
  return results, [
    bars.Row(
      'save adapter and optimizer, asynchronous',
      'ms that the loop waits',
      results['ours'].median * 1e3,
      20.0,
      spread=results['ours'].spread,
    )
  ]


Part = Callable[[Field], tuple[Results, list[bars.Row]]]
PARTS: dict[str, Part] = {
  'main': main_step,
  'dtypes': dtypes,
  'long': long_rows,
  'remat': rematerialized,
  'quantized': quantized,
  'lengths': mixed_lengths,
  'stacked': stacked,
  'sweep': sweep,
  'loading': loading,
  'starting': starting,
  'host': host,
  'generation': generation,
  'saving': saving,
}
# What `--quick` runs, in its 8 minutes.
QUICK = (
  'main',
  'long',
  'quantized',
  'loading',
  'starting',
  'generation',
  'saving',
)


def run(field: Field, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
  """Runs parts by name.

  Yields:
    For each its name with what it measured and the rows that this fills.
  """
  for name in names:
    field.log(f'== {name}')
    yield name, PARTS[name](field)
