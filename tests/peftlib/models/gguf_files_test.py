import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import gguf
import numpy as np
from safetensors import numpy as safetensors_numpy

from peftlib.models import gguf_files
from tests.peftlib.models import golden


class HeaderTest(parameterized.TestCase):
  def _write(self, **kwargs):
    path = os.path.join(self.create_tempdir(), 'model.gguf')
    golden.write_gguf(path, 'llama_tiny', **kwargs)
    return path

  def test_reads_what_the_gguf_package_reads(self):
    path = self._write(metadata={'general.name': 'Größe', 'custom.number': 7})
    header = gguf_files.read_header(path)
    reader = gguf.GGUFReader(path)
    expected = {
      key: field.contents()
      for key, field in reader.fields.items()
      if not key.startswith('GGUF.')
    }
    self.assertEqual(header.metadata, expected)
    self.assertEqual(header.metadata['general.name'], 'Größe')
    self.assertLen(header.metadata['tokenizer.ggml.tokens'], 128)
    self.assertEqual(
      [tuple(t) for t in header.tensors],
      [
        (
          t.name,
          tuple(int(n) for n in reversed(t.shape)),
          t.tensor_type,
          t.data_offset,
          t.n_bytes,
        )
        for t in reader.tensors
      ],
    )

  def test_not_gguf(self):
    path = self.create_tempfile(content='{"a": 1}').full_path
    with self.assertRaisesRegex(ValueError, f'{path}: not a GGUF file'):
      gguf_files.read_header(path)

  def test_version(self):
    path = self._write()
    data = bytearray(pathlib.Path(path).read_bytes())
    data[4] = 1
    pathlib.Path(path).write_bytes(data)
    with self.assertRaisesRegex(ValueError, 'GGUF version 1 is not supported'):
      gguf_files.read_header(path)

  @parameterized.parameters(
    (10, 'cut off within its header'),
    (100, 'cut off within its header'),
    (3000, 'cut off within its header'),
    (
      -100,
      r'output_norm.weight ends at byte \d+, the file has \d+: it is cut off',
    ),
  )
  def test_cut_off(self, size, message):
    path = self._write()
    data = pathlib.Path(path).read_bytes()
    pathlib.Path(path).write_bytes(data[:size])
    with self.assertRaisesRegex(ValueError, message):
      gguf_files.read_header(path)

  def test_unknown_tensor_type(self):
    path = self._write()
    data = pathlib.Path(path).read_bytes()
    name = b'blk.0.attn_q.weight'
    at = data.index(name) + len(name) + 4 + 2 * 8
    changed = data[:at] + (99).to_bytes(4, 'little') + data[at + 4 :]
    pathlib.Path(path).write_bytes(changed)
    with self.assertRaisesRegex(
      ValueError, 'blk.0.attn_q.weight has tensor type 99'
    ):
      gguf_files.read_header(path)


class GgufCheckpointTest(parameterized.TestCase):
  @parameterized.parameters(
    'llama_tiny', 'llama/tied', 'llama/wide_heads', 'llama/all_biases_tied'
  )
  def test_tensors_are_those_of_the_hugging_face_directory(self, case):
    path = os.path.join(self.create_tempdir(), 'model.gguf')
    golden.write_gguf(path, case)
    checkpoint = gguf_files.GgufCheckpoint(path)
    expected = safetensors_numpy.load_file(
      golden.directory(case) / 'model.safetensors'
    )
    read = dict(checkpoint.tensors())
    self.assertEqual(
      checkpoint.shapes, {name: v.shape for name, v in expected.items()}
    )
    self.assertEqual(set(read), set(expected))
    for name, values in expected.items():
      self.assertEqual(read[name].dtype, np.float32)
      np.testing.assert_array_equal(read[name], values, err_msg=name)

  @parameterized.parameters(
    'F16', 'BF16', 'Q8_0', 'Q4_0', 'Q4_1', 'Q5_0', 'Q5_1'
  )
  def test_storage_types(self, name):
    qtype = gguf.GGMLQuantizationType[name]
    path = os.path.join(self.create_tempdir(), 'model.gguf')
    golden.write_gguf(path, 'llama_tiny', qtypes={'token_embd.weight': qtype})
    original = safetensors_numpy.load_file(
      golden.directory('llama_tiny') / 'model.safetensors'
    )['model.embed_tokens.weight']
    read = dict(gguf_files.GgufCheckpoint(path).tensors())
    values = read['model.embed_tokens.weight']
    # Steps of the 4-bit types are 1/8 of a block's maximum.
    np.testing.assert_allclose(
      values, original, atol=np.abs(original).max() / 8
    )
    self.assertGreater(np.abs(values - original).max(), 0)

  def test_a_tensor_larger_than_a_chunk(self):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3000, 512)).astype(np.float32)
    path = os.path.join(self.create_tempdir(), 'model.gguf')
    writer = gguf.GGUFWriter(path, 'llama')
    writer.add_head_count(1)
    qtype = gguf.GGMLQuantizationType.Q8_0
    data = gguf.quantize(values, qtype)
    writer.add_tensor('token_embd.weight', data, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ((_, read),) = gguf_files.GgufCheckpoint(path).tensors()
    np.testing.assert_array_equal(read, gguf.dequantize(data, qtype))

  def test_config_reads_ties_and_biases_from_the_names(self):
    for case, tied, bias in (
      ('llama_tiny', False, False),
      ('llama/all_biases_tied', True, True),
    ):
      path = os.path.join(self.create_tempdir(), 'model.gguf')
      golden.write_gguf(path, case)
      config = gguf_files.GgufCheckpoint(path).config()
      self.assertEqual(config.tie_embeddings, tied)
      self.assertEqual(config.attention_bias, bias)
      self.assertEqual(config.mlp_bias, bias)

  def test_config_error_names_the_file(self):
    path = os.path.join(self.create_tempdir(), 'model.gguf')
    golden.write_gguf(path, 'llama_tiny', metadata={'llama.expert_count': 4})
    with self.assertRaisesRegex(
      ValueError, f'{path}: llama.expert_count=4 is not supported'
    ):
      gguf_files.GgufCheckpoint(path).config()


if __name__ == '__main__':
  absltest.main()
