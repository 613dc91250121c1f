"""Compares with torch, transformers and HF peft, live.

    python tests/interop/run.py --interop_python=PATH [--only=REGEX]

Runs in the project's own environment. Whatever needs torch is run by
`--interop_python`, whose environment has torch, transformers and peft (and
gguf, for --model). Prints a line for each check: what was compared, which way,
and the largest error. Ends with a line `N passed, N failed`, and the exit code
1 if any failed.
"""

from collections.abc import Callable, Iterator
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors_numpy

# The checkout; this file is run by its path.
sys.path.insert(0, os.fspath(pathlib.Path(__file__).parents[2]))

from peftlib import models
from peftlib.demo import assets
from tests.interop import adapter_checks

_INTEROP_PYTHON = flags.DEFINE_string(
  'interop_python', None, 'Python with torch and transformers.', required=True
)
_MODEL = flags.DEFINE_string(
  'model', None, 'GGUF file to compare; the demo model by default.'
)
_PARTS = flags.DEFINE_list(
  'parts', ['models', 'adapters'], 'What is compared: models, adapters.'
)
_ONLY = flags.DEFINE_string(
  'only', '', 'Cases of adapters that are tried: those that this matches.'
)

_HERE = pathlib.Path(__file__).parent
_TOLERANCE = 1e-4
# SmolLM2's logits go up to 40, its hidden states to hundreds.
_MODEL_TOLERANCE = 1e-3

_OWN_CONFIGS = {
  'own_untied': {'num_kv_heads': 2},
  'own_biases': {'attention_bias': True, 'mlp_bias': True},
  'own_tied': {'tie_embeddings': True, 'num_kv_heads': 1},
  'own_linear': {
    'rope_scaling': models.RopeScaling(rope_type='linear', factor=4.0)
  },
  'own_llama3': {
    'rope_theta': 1000.0,
    'rope_scaling': models.RopeScaling(
      rope_type='llama3',
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=16,
    ),
  },
  'own_bfloat16': {'param_dtype': 'bfloat16'},
}


def _theirs(script: str, *arguments: str | os.PathLike[str]) -> None:
  """Runs one of the scripts beside this file with the other Python."""
  process = subprocess.run(
    [_INTEROP_PYTHON.value, _HERE / script, *arguments],
    capture_output=True,
    text=True,
    check=False,
    # Nothing is to be asked from a hub; threads would wait for one another on
    # models as small as these.
    env={**os.environ, 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1'},
  )
  if process.returncode:
    raise RuntimeError(f'{script} failed:\n{process.stderr[-4000:]}')


def _our_logits(path: str | os.PathLike[str], tokens: np.ndarray) -> np.ndarray:
  model = models.load(path)
  forward = jax.jit(lambda s, t: nnx.merge(model.graphdef, s)(t))
  return np.asarray(forward(model.state, tokens.astype(np.int32)))


def _compare(
  ours: np.ndarray, theirs: np.ndarray, tolerance: float = _TOLERANCE
) -> str:
  """What the check says; AssertionError if they differ."""
  difference = adapter_checks.difference(ours, theirs, tolerance)
  return f'logits differ by {difference:.1e}'


def _check_case(directory: pathlib.Path) -> str:
  """A model that transformers made."""
  golden = safetensors_numpy.load_file(directory / 'golden.safetensors')
  return _compare(_our_logits(directory, golden['input_ids']), golden['logits'])


def _check_source(
  source: pathlib.Path, tokens: np.ndarray, out: pathlib.Path, tolerance: float
) -> str:
  """A model that both read."""
  tokens_path = out.with_suffix('.tokens')
  safetensors_numpy.save_file(
    {'input_ids': tokens.astype(np.int64)}, tokens_path
  )
  _theirs('llama_interop.py', source, tokens_path, out)
  return _compare(
    _our_logits(source, tokens),
    safetensors_numpy.load_file(out)['logits'],
    tolerance,
  )


def _save_own(directory: pathlib.Path, fields: dict[str, object]) -> None:
  """A random model of ours."""
  config = models.DecoderConfig(
    **{
      'vocab_size': 61,
      'hidden_size': 24,
      'intermediate_size': 40,
      'num_layers': 2,
      'num_heads': 4,
      'num_kv_heads': 4,
      'head_dim': 16,
      **fields,
    }
  )
  _, state = nnx.split(models.Decoder(config, rngs=nnx.Rngs(0)))
  rng = np.random.default_rng(0)
  state = jax.tree.map(
    lambda x: x + jnp.asarray(rng.normal(0, 0.2, x.shape), x.dtype), state
  )
  models.save_directory(directory, config, state)


def _check_own(
  directory: pathlib.Path, fields: dict[str, object], tokens: np.ndarray
) -> str:
  """A model that we saved."""
  _save_own(directory, fields)
  out = directory.with_suffix('.out')
  return _check_source(directory, tokens, out, _TOLERANCE)


def _check_model_saved(
  gguf_path: pathlib.Path, folder: pathlib.Path, tokens: np.ndarray
) -> str:
  """The GGUF model, saved by us, read by transformers."""
  model = models.load(gguf_path)
  directory = folder / 'saved'
  models.save_directory(directory, model.config, model.state)
  return _check_source(
    directory, tokens, folder / 'saved.out', _MODEL_TOLERANCE
  )


def _model_checks(folder: pathlib.Path) -> dict[str, Callable[[], str]]:
  _theirs('make_llama_golden.py', folder / 'theirs')
  rng = np.random.default_rng(0)
  checks: dict[str, Callable[[], str]] = {}
  for directory in sorted((folder / 'theirs').iterdir()):
    checks[f'made by transformers: {directory.name}'] = functools.partial(
      _check_case, directory
    )
  for name, fields in _OWN_CONFIGS.items():
    checks[f'saved by peftlib: {name}'] = functools.partial(
      _check_own, folder / name, fields, rng.integers(0, 61, (2, 40))
    )
  model = pathlib.Path(_MODEL.value or assets.model_path())
  tokens = rng.integers(0, 49152, (2, 30))
  checks[f'read by both: {model.name}'] = functools.partial(
    _check_source, model, tokens, folder / 'gguf.out', _MODEL_TOLERANCE
  )
  checks[f'saved by peftlib: {model.name}'] = functools.partial(
    _check_model_saved, model, folder, tokens
  )
  return checks


def _checks(folder: pathlib.Path) -> Iterator[tuple[str, Callable[[], str]]]:
  if 'models' in _PARTS.value:
    yield from _model_checks(folder).items()
  if 'adapters' in _PARTS.value:
    # Compiling these tiny models takes longer than running them.
    jax.config.update('jax_disable_most_optimizations', True)
    yield from adapter_checks.checks(
      folder / 'adapters', _theirs, re.compile(_ONLY.value)
    )


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unexpected argument {argv[1]!r}.')
  start = time.monotonic()
  passed, failures = 0, []
  with tempfile.TemporaryDirectory() as folder:
    for name, check in _checks(pathlib.Path(folder)):
      try:
        print(f'ok    {name}: {check()}', flush=True)
        passed += 1
      except Exception as error:  # Whatever it is, it is one failure.
        failures.append(f'FAIL  {name}: {type(error).__name__}: {error}')
        print(failures[-1], flush=True)
  if failures:
    print('', *failures, sep='\n')
  print(f'{time.monotonic() - start:.0f} s')
  print(f'{passed} passed, {len(failures)} failed')
  if failures:
    sys.exit(1)


if __name__ == '__main__':
  app.run(main)
