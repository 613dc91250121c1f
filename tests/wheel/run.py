"""Installs the wheel where nothing of the checkout is, and uses it there.

usage: python tests/wheel/run.py dist/peftlib-0.1.0-py3-none-any.whl
         [--commands] [--constraints=FILE]

A new virtual environment in a temporary folder first gets the wheel alone, then
its extras `cli` and `hf`, and a type checker. With --commands, the demo model
(PEFTLIB_CACHE) is trained for two steps.
"""

import argparse
import email.parser
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import zipfile

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_HELP_S = 1.5
# Pyright with its engine in the wheel; pyright's own downloads one.
_TYPE_CHECKER = 'basedpyright==1.40.2'
_STRICT = {'typeCheckingMode': 'strict', 'include': ['typed.py']}

_PRELUDE = """
import jax, jax.numpy as jnp
from flax import nnx
model = nnx.Sequential(
  nnx.Linear(8, 32, rngs=nnx.Rngs(0)), nnx.relu,
  nnx.Linear(32, 1, rngs=nnx.Rngs(1)),
)
inputs = jax.random.normal(jax.random.key(2), (16, 8))
batches = [(inputs, jnp.sin(inputs.sum(-1, keepdims=True)))] * 60

def loss_fn(model, batch, rngs):
  x, y = batch
  return jnp.mean((model(x) - y) ** 2), {}
"""
_CHECK_LOOP = """
assert loss_fn(tuned, batch, None)[0] < loss_fn(model, batch, None)[0] / 2
"""
# Every module by both of its names, in either order, is one object.
_IDENTITY = """
import importlib, pkgutil, sys
first, second = sys.argv[1:]
importlib.import_module(first + '.scan_axis')
import peftlib.transforms, transforms
assert transforms is peftlib.transforms
names = [m.name for m in pkgutil.iter_modules(transforms.__path__)]
assert 'scan_axis' in names and '_leaves' in names, names
for name in names:
  one = importlib.import_module(f'{first}.{name}')
  assert one is importlib.import_module(f'{second}.{name}'), name
assert transforms.filtering.PathMatches is peftlib.transforms.PathMatches
import pickle
filters = transforms.PathMatches('a')
assert pickle.loads(pickle.dumps(filters)) == filters
"""
_FOREIGN = """
import transforms
assert transforms.MINE
import jax, peftlib
from flax import nnx
from peftlib import checkpoint, testing, transforms as ours
config = peftlib.LoraConfig(rank=2)
graphdef, state = peftlib.inject(
  *nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), config,
  jax.numpy.ones((1, 2)), key=jax.random.key(0),
)
testing.assert_trainable(state, config, ['kernel_lora_.*'])
lora, base = ours.partition(state, nnx.LoRAParam, ...)
assert sorted(lora) == ['kernel_lora_a', 'kernel_lora_b'], lora
assert transforms.MINE and 'runs' not in ours.__file__
"""


def check(condition: object, text: object) -> None:
  """Ends the run with a text unless a condition holds."""
  if not condition:
    raise SystemExit(f'wheel-test: {text}')


def check_contents(wheel: pathlib.Path) -> None:
  """Looks at what is in the wheel, and at its metadata."""
  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    (metadata,) = [n for n in names if n.endswith('.dist-info/METADATA')]
    message = email.parser.Parser().parsestr(archive.read(metadata).decode())
  tops = {name.partition('/')[0] for name in names}
  info = metadata.partition('/')[0]
  check(tops == {'peftlib', 'transforms', info}, f'top level: {tops}')
  for name in ('peftlib', 'peftlib/transforms', 'transforms'):
    check(f'{name}/py.typed' in names, f'no py.typed in {name}')
  wrong = [n for n in names if re.search(r'test(s/|_|\b(?!ing))|BUILD', n)]
  check(not wrong, f'not for users: {wrong}')
  check('peftlib/transforms.py' not in names, 'the alias of the checkout')
  ours = {
    path.relative_to(_ROOT).as_posix()
    for path in (_ROOT / 'peftlib').rglob('*.py')
  } - {'peftlib/transforms.py'}
  check(ours <= set(names), f'left out: {ours - set(names)}')
  required = message.get_all('Requires-Dist') or []
  bare = {r for r in required if 'extra ==' not in r}
  print('\n'.join(['requires:', *required]))
  check(
    {re.split('[<>=]', r)[0] for r in bare}
    == {
      *('absl-py', 'chex', 'flax', 'jax', 'numpy'),
      *('optax', 'orbax-checkpoint', 'qwix'),
    },
    f'requires {bare}',
  )
  check(all('>=' in r for r in required if 'peftlib[' not in r), 'no bounds')
  extras = set(message.get_all('Provides-Extra') or [])
  check(extras == {'cli', 'hf', 'dev'}, f'extras {extras}')


class Environment:
  """A virtual environment, and a folder that commands are run in."""

  def __init__(self, folder: pathlib.Path, constraints: str | None):
    self.folder = folder / 'work'
    self.folder.mkdir()
    self.bin = folder / 'venv' / 'bin'
    self.env = {
      name: value
      for name, value in os.environ.items()
      if name not in ('PYTHONPATH', 'PYTHONHOME', 'VIRTUAL_ENV')
    }
    self.env['JAX_PLATFORMS'] = 'cpu'
    self._more = ['-c', constraints] if constraints else []
    subprocess.run([sys.executable, '-m', 'venv', folder / 'venv'], check=True)

  def pip(self, *arguments: str) -> None:
    print('pip', *arguments, flush=True)
    self.run('python', '-m', 'pip', '-q', *arguments)

  def install(self, what: str) -> None:
    self.pip('install', *self._more, what)

  def run(
    self, program: str, *arguments: str, status: int = 0
  ) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
      [self.bin / program, *arguments],
      cwd=self.folder,
      env=self.env,
      capture_output=True,
      text=True,
    )
    check(
      result.returncode == status,
      f'{program} {" ".join(arguments)}: status {result.returncode}\n'
      f'{result.stdout}\n{result.stderr}',
    )
    return result

  def script(self, text: str, *arguments: str) -> None:
    self.run('python', '-c', text, *arguments)


def check_library(venv: Environment) -> None:
  """Uses the library as it is without any extra."""
  found = venv.run('python', '-c', 'import peftlib; print(peftlib.__file__)')
  check(str(venv.bin.parent) in found.stdout, found.stdout)
  readme = (_ROOT / 'README.md').read_text('utf-8')
  loop = re.findall(r'```python\n(.*?)```', readme, re.DOTALL)[0]
  venv.script(f'{_PRELUDE}\n{loop}\n{_CHECK_LOOP}')
  print("ran README's loop")
  venv.script(_IDENTITY, 'transforms', 'peftlib.transforms')
  venv.script(_IDENTITY, 'peftlib.transforms', 'transforms')
  foreign = venv.folder / 'transforms'
  foreign.mkdir()
  (foreign / '__init__.py').write_text('MINE = True\n')
  venv.script(_FOREIGN)
  (foreign / '__init__.py').unlink()
  foreign.rmdir()
  print('transforms: one module object per module, also beside a foreign one')

  seconds = []
  for _ in range(3):
    start = time.perf_counter()
    out = venv.run('peftlib', '--help').stdout
    seconds.append(time.perf_counter() - start)
    check('finetune' in out, out)
  print(f'peftlib --help: {min(seconds):.2f} s, best of 3')
  check(min(seconds) < _HELP_S, f'more than {_HELP_S} s')
  error = venv.run(
    'peftlib', 'generate', '--prompt=x', f'--model={__file__}', status=2
  ).stderr
  check(
    re.fullmatch(
      r"peftlib generate: \w+ is not installed; run: pip install '"
      r"peftlib\[cli\]'\n",
      error,
    ),
    error,
  )
  print(error, end='')


def check_transforms_alone(venv: Environment) -> None:
  """Uses transforms where qwix isn't."""
  venv.pip('uninstall', '-y', 'qwix')
  venv.script('import transforms; assert transforms.partition')
  result = venv.run('python', '-c', 'import qwix', status=1)
  check("No module named 'qwix'" in result.stderr, result.stderr)
  print('import transforms: without qwix')


def check_commands(venv: Environment) -> None:
  """Trains the demo model for two steps."""
  venv.run('python', '-m', 'peftlib.demo.orders', '--output=demo')
  out = venv.run(
    *('peftlib', 'finetune', '--data=demo/train.jsonl', '--output=run'),
    *('--steps=2', '--warmup_steps=0', '--batch_size=1', '--length=256'),
    '--eval_data=',
  ).stdout
  check('step 2/2' in out, out)
  check((venv.folder / 'run' / 'adapter').is_dir(), 'no adapter')
  print(re.search('step 2/2.*', out).group())


def check_types(venv: Environment) -> None:
  """Lets pyright look at every public name, in strict mode."""
  venv.pip('install', _TYPE_CHECKER)
  consumer = (_ROOT / 'tests' / 'wheel' / 'typed.py').read_text('utf-8')
  (venv.folder / 'typed.py').write_text(consumer, 'utf-8')
  venv.script('import typed; assert len(typed.NAMES) > 100')
  (venv.folder / 'pyrightconfig.json').write_text(json.dumps(_STRICT))
  python = str(venv.bin / 'python')
  out = venv.run('basedpyright', '--pythonpath', python).stdout
  check(out.startswith('0 errors, 0 warnings'), out)
  print(f'pyright, strict: {out}', end='')


def main() -> None:
  """Parses the command line and runs all checks."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('wheel', type=pathlib.Path)
  parser.add_argument('--constraints', help='versions for pip')
  parser.add_argument('--commands', action='store_true')
  args = parser.parse_args()
  wheel = args.wheel.resolve()
  check_contents(wheel)
  constraints = args.constraints and str(
    pathlib.Path(args.constraints).resolve()
  )
  with tempfile.TemporaryDirectory(prefix='wheel-test-') as name:
    venv = Environment(pathlib.Path(name), constraints)
    venv.install(str(wheel))
    check_library(venv)
    check_transforms_alone(venv)
    venv.install(f'{wheel}[cli]')
    if args.commands:
      check_commands(venv)
    venv.install(f'{wheel}[hf]')
    check_types(venv)
  print('wheel-test: passed')


if __name__ == '__main__':
  main()
