import json
import os
import pathlib
import shutil
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from peftlib.models import hf_files
from tests.peftlib.models import golden


class HfCheckpointTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path)
    shutil.copytree(
      golden.directory('llama_tiny'), self.path, dirs_exist_ok=True
    )
    self.weights = safetensors_numpy.load_file(self.path / 'model.safetensors')

  def _shard(self, weight_map_extra=(), first_extra=()):
    names = sorted(self.weights)
    parts = {'a.safetensors': names[::2], 'b.safetensors': names[1::2]}
    for file_name, part in parts.items():
      tensors = {name: self.weights[name] for name in part}
      if file_name == 'a.safetensors':
        tensors.update(dict(first_extra))
      safetensors_numpy.save_file(tensors, self.path / file_name)
    weight_map = {n: f for f, part in parts.items() for n in part}
    weight_map.update(dict(weight_map_extra))
    (self.path / 'model.safetensors').unlink()
    (self.path / 'model.safetensors.index.json').write_text(
      json.dumps({'weight_map': weight_map})
    )

  def _check_tensors(self):
    checkpoint = hf_files.HfCheckpoint(str(self.path))
    read = dict(checkpoint.tensors())
    self.assertEqual(set(read), set(self.weights))
    for name, values in self.weights.items():
      self.assertEqual(read[name].dtype, values.dtype)
      np.testing.assert_array_equal(read[name], values)
      self.assertEqual(checkpoint.shapes[name], values.shape)

  def test_single_file(self):
    self._check_tensors()

  def test_shards(self):
    self._shard()
    self._check_tensors()

  def test_a_file_is_closed_before_much_of_it_is_mapped(self):
    self._shard()
    checkpoint = hf_files.HfCheckpoint(str(self.path))
    limit = sorted(v.nbytes for v in self.weights.values())[-1]
    read, since = {}, 0
    real = safetensors.safe_open

    def counted(*args):
      nonlocal since
      since = 0
      return real(*args)

    with (
      mock.patch.object(hf_files, '_MAPPED_BYTES', limit),
      mock.patch.object(safetensors, 'safe_open', counted),
    ):
      for name, values in checkpoint.tensors():
        since += values.nbytes
        self.assertLess(since, 2 * limit)
        read[name] = values
    # All at once they would have been more.
    self.assertGreater(sum(v.nbytes for v in read.values()), 4 * limit)
    self.assertEqual(set(read), set(self.weights))
    for name, values in self.weights.items():
      np.testing.assert_array_equal(read[name], values)

  @parameterized.parameters(np.float16, ml_dtypes.bfloat16, np.float64)
  def test_dtypes(self, dtype):
    self.weights = {n: v.astype(dtype) for n, v in self.weights.items()}
    safetensors_numpy.save_file(self.weights, self.path / 'model.safetensors')
    self._check_tensors()

  def test_inverse_frequencies_of_old_files_are_left_out(self):
    safetensors_numpy.save_file(
      {
        **self.weights,
        'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4, np.float32),
      },
      self.path / 'model.safetensors',
    )
    self._check_tensors()

  def test_integers(self):
    name = 'model.norm.weight'
    self.weights[name] = self.weights[name].astype(np.int32)
    safetensors_numpy.save_file(self.weights, self.path / 'model.safetensors')
    with self.assertRaisesRegex(
      ValueError, f'{name} has dtype I32; expected one of F64, F32, F16, BF16'
    ):
      hf_files.HfCheckpoint(str(self.path))

  def test_tensor_in_two_shards(self):
    name = sorted(self.weights)[1]
    self._shard(first_extra=[(name, self.weights[name])])
    with self.assertRaisesRegex(ValueError, f'{name} is in two shards'):
      hf_files.HfCheckpoint(str(self.path))

  def test_index_names_more_than_there_is(self):
    self._shard(weight_map_extra=[('model.more', 'a.safetensors')])
    with self.assertRaisesRegex(
      ValueError, 'model.more is in the index, not in the shards'
    ):
      hf_files.HfCheckpoint(str(self.path))

  def test_index_names_less_than_there_is(self):
    self._shard(first_extra=[('model.more', np.ones(2, np.float32))])
    with self.assertRaisesRegex(
      ValueError, 'model.more is in the shards, not in the index'
    ):
      hf_files.HfCheckpoint(str(self.path))

  def test_shard_missing(self):
    self._shard()
    (self.path / 'b.safetensors').unlink()
    with self.assertRaisesRegex(FileNotFoundError, 'no b.safetensors, which'):
      hf_files.HfCheckpoint(str(self.path))

  def test_files_missing(self):
    (self.path / 'model.safetensors').unlink()
    with self.assertRaisesRegex(
      FileNotFoundError, 'neither model.safetensors nor .*index.json is there'
    ):
      hf_files.HfCheckpoint(str(self.path))
    (self.path / 'config.json').unlink()
    with self.assertRaisesRegex(FileNotFoundError, 'no config.json'):
      hf_files.HfCheckpoint(str(self.path))

  @parameterized.parameters(
    ('config.json', '{', 'config.json: not valid JSON'),
    ('config.json', '[]', 'config.json: expected a JSON object'),
    ('model.safetensors', 'x' * 20, 'model.safetensors: not a safetensors'),
    ('model.safetensors.index.json', '{}', "index.json: lacks 'weight_map'"),
  )
  def test_broken_files(self, name, text, message):
    (self.path / name).write_text(text)
    with self.assertRaisesRegex(ValueError, message):
      hf_files.HfCheckpoint(str(self.path))

  def test_config_error_names_the_file(self):
    config = json.loads((self.path / 'config.json').read_text())
    (self.path / 'config.json').write_text(
      json.dumps({**config, 'hidden_act': 'gelu'})
    )
    with self.assertRaisesRegex(
      ValueError,
      f"{os.path.join(self.path, 'config.json')}: hidden_act='gelu' is not",
    ):
      hf_files.HfCheckpoint(str(self.path)).config()


if __name__ == '__main__':
  absltest.main()
