import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from peftlib.hf import directories


class DirectoriesTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.create_tempdir().full_path)
    self.folder = self.root / 'adapter'

  def test_there_and_back(self):
    config = {'r': 4, 'target_modules': ['q_proj']}
    tensors = {'a': np.arange(6, dtype=np.float32).reshape(2, 3).T}
    directories.write(self.folder, config, tensors, overwrite=False)
    got, read = directories.read(self.folder)
    self.assertEqual(got, config)
    np.testing.assert_array_equal(read['a'], tensors['a'])

  def test_a_file_that_is_not_there(self):
    with self.assertRaisesRegex(
      FileNotFoundError, 'adapter_config.json is not there; an adapter'
    ):
      directories.read(self.folder)
    self.folder.mkdir()
    (self.folder / 'adapter_config.json').write_text('{}')
    with self.assertRaisesRegex(
      FileNotFoundError, 'adapter_model.safetensors is not there'
    ):
      directories.read(self.folder)

  @parameterized.parameters('adapter_model.bin', 'adapter_model.pt')
  def test_pickled(self, name):
    self.folder.mkdir()
    (self.folder / 'adapter_config.json').write_text('{}')
    (self.folder / name).write_bytes(b'\x80')
    with self.assertRaisesRegex(
      ValueError, f'{name} is pickled, and unpickling can run any program'
    ):
      directories.read(self.folder)

  @parameterized.parameters(
    ('{', b'', 'adapter_config.json: not valid JSON'),
    ('[]', b'', 'adapter_config.json: not a JSON object'),
    ('{}', b'abc', 'adapter_model.safetensors: not a safetensors file'),
  )
  def test_malformed(self, config, tensors, message):
    self.folder.mkdir()
    (self.folder / 'adapter_config.json').write_text(config)
    (self.folder / 'adapter_model.safetensors').write_bytes(tensors)
    with self.assertRaisesRegex(ValueError, message):
      directories.read(self.folder)

  def test_never_half_written(self):
    directories.write(self.folder, {'r': 1}, {}, overwrite=False)
    with mock.patch.object(
      directories.os, 'fsync', side_effect=OSError('full')
    ):
      with self.assertRaisesRegex(OSError, 'full'):
        directories.write(self.folder, {'r': 2}, {}, overwrite=True)
    self.assertEqual(directories.read(self.folder)[0], {'r': 1})
    directories.write(self.folder, {'r': 3}, {}, overwrite=True)
    self.assertEqual(directories.read(self.folder)[0], {'r': 3})
    self.assertEqual([p.name for p in self.root.iterdir()], ['adapter'])


if __name__ == '__main__':
  absltest.main()
