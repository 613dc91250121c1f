import gc
import os
import pathlib
import shutil
import tracemalloc

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import gguf
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors_numpy

import peftlib
from peftlib import models
from tests.peftlib.models import golden


def _logits(model, tokens):
  return nnx.merge(model.graphdef, model.state)(tokens)


class LoadTest(parameterized.TestCase):
  @parameterized.parameters(
    'llama_tiny', 'llama/tied', 'llama/wide_heads', 'llama/linear_rope',
    'llama/all_biases_tied',
  )  # fmt: skip
  def test_gguf_and_hugging_face_are_the_same_model(self, case):
    path = os.path.join(self.create_tempdir(), 'model.gguf')
    golden.write_gguf(path, case)
    from_gguf = models.load(path)
    from_hf = models.load(golden.directory(case))
    # GGUF keeps epsilon as a float32.
    self.assertEqual(from_gguf.config.num_kv_heads, from_hf.config.num_kv_heads)
    chex.assert_trees_all_equal(from_gguf.state, from_hf.state)
    expected = golden.expected(case)
    np.testing.assert_allclose(
      _logits(from_gguf, jnp.asarray(expected['input_ids'], jnp.int32)),
      expected['logits'],
      atol=1e-4,
      rtol=0,
    )

  def test_state_is_that_of_a_new_model(self):
    model = models.load(golden.directory('llama_tiny'))
    graphdef, state = nnx.split(models.Decoder(model.config, rngs=nnx.Rngs(0)))
    self.assertEqual(model.graphdef, graphdef)
    chex.assert_trees_all_equal_shapes_and_dtypes(model.state, state)
    self.assertEqual(jax.tree.structure(model.state), jax.tree.structure(state))

  # The second are copied by two threads, from two cores on.
  @parameterized.parameters((40, 70), (201, 701))
  def test_kernels_are_the_file_s_matrices_transposed(self, width, inner):
    config = golden.tiny_config(hidden_size=width, intermediate_size=inner)
    _, state = nnx.split(models.Decoder(config, rngs=nnx.Rngs(0)))
    path = self.create_tempdir().full_path
    models.save_directory(path, config, state)
    written = safetensors_numpy.load_file(
      os.path.join(path, 'model.safetensors')
    )
    # Both are kept: neither may be a buffer that the other was read into.
    first, second = models.load(path), models.load(path)
    for model in (first, second):
      mlp = model.state['layers']['mlp']
      for name in ('gate_proj', 'up_proj', 'down_proj'):
        kernel = np.asarray(mlp[name]['kernel'].get_value())
        self.assertLen(kernel, config.num_layers)
        for layer, values in enumerate(kernel):
          matrix = written[f'model.layers.{layer}.mlp.{name}.weight']
          np.testing.assert_array_equal(values, matrix.T)

  @parameterized.parameters(
    ('nf4', 8, False), ('int4', 8, True), ('int8', None, False)
  )
  def test_quantized_as_it_is_read(self, qtype, tile_size, double):
    path = os.path.join(self.create_tempdir(), 'model.gguf')
    golden.write_gguf(path, 'llama_tiny')
    config = peftlib.LoraConfig(
      module_path='all-linear',
      weight_qtype=qtype,
      tile_size=tile_size,
      double_quantize=double,
    )
    plain = models.load(path)
    graphdef, state = peftlib.quantize_base(
      plain.graphdef, plain.state, config, jnp.ones((1, 4), jnp.int32)
    )
    quantized = models.load(path, quantize=config)
    self.assertEqual(quantized.graphdef, graphdef)
    chex.assert_trees_all_equal_shapes_and_dtypes(quantized.state, state)
    chex.assert_trees_all_equal(quantized.state, state)
    self.assertEqual(quantized.fingerprint, plain.fingerprint)
    self.assertEqual(plain.fingerprint, models.fingerprint(plain.state))

  def test_dtypes_and_remat(self):
    model = models.load(
      golden.directory('llama_tiny'),
      dtype=jnp.bfloat16,
      param_dtype=jnp.float16,
      remat='full',
    )
    self.assertEqual(
      {v.dtype for _, v in nnx.to_flat_state(model.state)},
      {jnp.dtype(jnp.float16)},
    )
    self.assertEqual(model.config.dtype, jnp.dtype(jnp.bfloat16))
    self.assertEqual(model.config.remat, 'full')
    exact = models.load(golden.directory('llama_tiny'))
    chex.assert_trees_all_equal(
      model.state, jax.tree.map(lambda x: x.astype(jnp.float16), exact.state)
    )

  def test_nothing_there(self):
    with self.assertRaisesRegex(
      FileNotFoundError, 'nowhere: no such file or directory; expected a GGUF'
    ):
      models.load('nowhere')


class AccountingTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path)
    shutil.copytree(
      golden.directory('llama_tiny'), self.path, dirs_exist_ok=True
    )
    self.weights = safetensors_numpy.load_file(self.path / 'model.safetensors')

  def _load(self):
    safetensors_numpy.save_file(self.weights, self.path / 'model.safetensors')
    return models.load(self.path)

  def test_missing(self):
    del self.weights['model.layers.1.mlp.up_proj.weight']
    with self.assertRaisesRegex(
      ValueError,
      r'missing tensor model.layers.1.mlp.up_proj.weight of shape \(80, 32\)',
    ):
      self._load()

  def test_unexpected(self):
    self.weights['model.layers.1.mlp.up_prj.weight'] = np.ones(3, np.float32)
    with self.assertRaisesRegex(
      ValueError,
      r'unexpected tensor model.layers.1.mlp.up_prj.weight of shape \(3,\) '
      r'\(near: model.layers.1.mlp.up_proj.weight\)',
    ):
      self._load()

  def test_misshapen(self):
    self.weights['model.norm.weight'] = np.ones(31, np.float32)
    with self.assertRaisesRegex(
      ValueError,
      r'tensor model.norm.weight has shape \(31,\), expected \(32,\)',
    ):
      self._load()

  def test_many(self):
    for name in list(self.weights):
      if 'mlp' in name:
        del self.weights[name]
    with self.assertRaisesRegex(ValueError, r'; and 4 more\.$'):
      self._load()

  def test_gguf_tensor_without_hugging_face_name(self):
    path = os.path.join(self.path, 'model.gguf')
    writer = gguf.GGUFWriter(path, 'llama')
    golden_path = os.path.join(self.path, 'golden.gguf')
    golden.write_gguf(golden_path, 'llama_tiny')
    reader = gguf.GGUFReader(golden_path)
    for field in reader.fields.values():
      if field.name.startswith(('llama.', 'tokenizer.')):
        sub_type = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(
          field.name, field.contents(), field.types[0], sub_type=sub_type
        )
    for tensor in reader.tensors:
      writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor('rope_freqs.weight', np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with self.assertRaisesRegex(
      ValueError, r'unexpected tensor rope_freqs.weight of shape \(4,\)'
    ):
      models.load(path)


class MemoryTest(parameterized.TestCase):
  @parameterized.parameters('gguf', 'hf')
  def test_beyond_the_model_no_more_than_two_of_its_largest_tensors(self, kind):
    config = golden.tiny_config(
      vocab_size=8192,
      hidden_size=128,
      intermediate_size=512,
      num_layers=12,
      num_heads=4,
      num_kv_heads=4,
      head_dim=32,
      tie_embeddings=True,
    )
    _, state = nnx.split(models.Decoder(config, rngs=nnx.Rngs(0)))
    path = os.path.join(self.create_tempdir(), 'model')
    models.save_directory(path, config, state)
    if kind == 'gguf':
      golden.write_gguf(f'{path}.gguf', path)
      path = f'{path}.gguf'
    model_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    largest = 8192 * 128 * 4
    # The stacked kernels are larger than that: a copy would be noticed.
    self.assertGreater(model_bytes, 3 * largest)
    del state
    models.load(path)  # Imports and caches are not what is measured.
    gc.collect()
    tracemalloc.start()
    try:
      loaded = models.load(path)
      current, peak = tracemalloc.get_traced_memory()
    finally:
      tracemalloc.stop()
    # The arrays are the very buffers that were read into: were they copies, the
    # buffers would be gone by now.
    self.assertGreaterEqual(current, model_bytes)
    self.assertLess(peak, model_bytes + 2 * largest)
    del loaded


if __name__ == '__main__':
  absltest.main()
