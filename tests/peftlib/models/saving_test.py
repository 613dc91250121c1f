import json
import os
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors_numpy

from peftlib import models
from tests.peftlib.models import golden


class _Tokenizer:
  def save(self, directory):
    pathlib.Path(directory, 'tokenizer.json').write_text('{}')


class SaveDirectoryTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.parent = pathlib.Path(self.create_tempdir().full_path)
    self.path = self.parent / 'model'

  @parameterized.parameters(*golden.CASES)
  def test_weights_are_those_transformers_saved(self, case):
    model = models.load(golden.directory(case))
    models.save_directory(self.path, model.config, model.state)
    written = safetensors_numpy.load_file(self.path / 'model.safetensors')
    original = safetensors_numpy.load_file(
      golden.directory(case) / 'model.safetensors'
    )
    self.assertEqual(set(written), set(original))
    for name, values in original.items():
      np.testing.assert_array_equal(written[name], values, err_msg=name)
    self.assertEqual(models.open_checkpoint(self.path).config(), model.config)
    self.assertEqual(
      sorted(os.listdir(self.path)), ['config.json', 'model.safetensors']
    )
    self.assertEqual(os.listdir(self.parent), ['model'])

  @parameterized.parameters('float32', 'bfloat16', 'float16')
  def test_dtype_is_kept(self, dtype):
    config = golden.tiny_config(param_dtype=dtype)
    graphdef, state = golden.tiny_model(config)
    models.save_directory(self.path, config, state)
    loaded = models.load(self.path, param_dtype=dtype)
    self.assertEqual(loaded.graphdef, graphdef)
    chex.assert_trees_all_equal(loaded.state, state)
    written = json.loads((self.path / 'config.json').read_text())
    self.assertEqual(written['torch_dtype'], dtype)

  def test_shards(self):
    config = golden.tiny_config()
    _, state = golden.tiny_model(config)
    models.save_directory(self.path, config, state, max_shard_bytes=6000)
    index = json.loads((self.path / 'model.safetensors.index.json').read_text())
    files = sorted(set(index['weight_map'].values()))
    self.assertGreater(len(files), 2)
    self.assertEqual(
      files,
      [
        f'model-{i + 1:05}-of-{len(files):05}.safetensors'
        for i in range(len(files))
      ],
    )
    self.assertEqual(
      index['metadata']['total_size'],
      sum(x.nbytes for x in jax.tree.leaves(state)),
    )
    for name in files:
      weights = safetensors_numpy.load_file(self.path / name)
      self.assertLessEqual(sum(v.nbytes for v in weights.values()), 6000)
    chex.assert_trees_all_equal(models.load(self.path).state, state)

  def test_tokenizer_is_saved_too(self):
    config = golden.tiny_config()
    _, state = golden.tiny_model(config)
    models.save_directory(self.path, config, state, tokenizer=_Tokenizer())
    self.assertEqual((self.path / 'tokenizer.json').read_text(), '{}')

  def test_empty_directory_may_be_there(self):
    config = golden.tiny_config()
    _, state = golden.tiny_model(config)
    self.path.mkdir()
    models.save_directory(self.path, config, state)
    self.assertTrue((self.path / 'config.json').is_file())

  def test_refuses_what_is_there(self):
    config = golden.tiny_config()
    _, state = golden.tiny_model(config)
    self.path.mkdir()
    (self.path / 'notes.txt').write_text('mine')
    with self.assertRaisesRegex(
      FileExistsError, 'model exists and is not an empty directory'
    ):
      models.save_directory(self.path, config, state)
    self.assertEqual(os.listdir(self.path), ['notes.txt'])

  def test_nothing_is_left_when_writing_fails(self):
    config = golden.tiny_config()
    _, state = golden.tiny_model(config)
    with mock.patch.object(
      safetensors_numpy, 'save_file', side_effect=OSError('disk full')
    ):
      with self.assertRaisesRegex(OSError, 'disk full'):
        models.save_directory(self.path, config, state)
    self.assertEqual(os.listdir(self.parent), [])

  def test_rejects_other_states(self):
    config = golden.tiny_config()
    graphdef, state = golden.tiny_model(config)
    with self.assertRaisesRegex(TypeError, 'nnx.split it first'):
      models.save_directory(self.path, config, nnx.merge(graphdef, state))
    flat = dict(nnx.to_flat_state(state))
    kernel = ('layers', 'mlp', 'up_proj', 'kernel')
    adapter = (*kernel[:-1], 'kernel_lora_a')
    for changed, message in (
      (
        flat | {adapter: nnx.LoRAParam(jnp.ones((3, 16, 2)))},
        r'Unexpected variable layers.mlp.up_proj.kernel_lora_a \(LoRAParam\): '
        'only base weights can be saved; merge adapters',
      ),
      (
        flat | {kernel: nnx.Param(jnp.ones((3, 16, 25)))},
        r'Variable layers.mlp.up_proj.kernel has shape \(3, 16, 25\), '
        r'expected \(3, 16, 24\)',
      ),
      (
        {path: v for path, v in flat.items() if path != kernel},
        r'Variable layers.mlp.up_proj.kernel of shape \(3, 16, 24\) is missing',
      ),
    ):
      with self.assertRaisesRegex(ValueError, message):
        models.save_directory(self.path, config, nnx.from_flat_state(changed))
    self.assertEqual(os.listdir(self.parent), [])


if __name__ == '__main__':
  absltest.main()
