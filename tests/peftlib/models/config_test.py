import dataclasses
import json

from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp

from peftlib.models import config as config_lib
from tests.peftlib.models import golden

_HF = {
  'model_type': 'llama',
  'vocab_size': 100,
  'hidden_size': 32,
  'intermediate_size': 64,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
}
_GGUF = {
  'general.architecture': 'llama',
  'llama.block_count': 2,
  'llama.context_length': 64,
  'llama.embedding_length': 32,
  'llama.feed_forward_length': 64,
  'llama.attention.head_count': 4,
  'llama.attention.layer_norm_rms_epsilon': 1e-5,
  'llama.vocab_size': 100,
}
_LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 8192,
}


class DecoderConfigTest(parameterized.TestCase):
  def test_equal_whatever_the_spelling_of_the_dtype(self):
    one = golden.tiny_config(dtype=jnp.bfloat16)
    two = golden.tiny_config(dtype='bfloat16')
    self.assertEqual(one, two)
    self.assertEqual(hash(one), hash(two))
    self.assertNotEqual(one, golden.tiny_config())

  @parameterized.parameters(
    ({'num_layers': 0}, 'num_layers=0: expected a positive int'),
    ({'vocab_size': 3.0}, 'vocab_size=3.0: expected a positive int'),
    ({'hidden_size': True}, 'hidden_size=True: expected a positive int'),
    ({'num_kv_heads': 3}, 'num_kv_heads=3 does not divide num_heads=4'),
    ({'head_dim': 5}, 'head_dim=5: rotary embeddings need an even width'),
    ({'rope_theta': 0.0}, 'rope_theta=0.0: expected a positive number'),
    ({'rms_norm_eps': float('nan')}, 'rms_norm_eps=nan: expected a positive'),
    ({'dtype': 'int8'}, "dtype='int8': expected a float dtype"),
    (
      {'remat': True},
      r"remat=True is not supported; expected one of 'none', 'dots', 'full'\.$",
    ),
  )
  def test_rejects(self, overrides, message):
    with self.assertRaisesRegex(ValueError, message):
      golden.tiny_config(**overrides)

  @parameterized.parameters(
    ({'rope_type': 'yarn'}, "rope_type='yarn' is not supported; expected one"),
    ({'factor': 0.5}, 'factor=0.5: expected at least 1'),
    (
      {'rope_type': 'llama3', 'low_freq_factor': 4.0},
      'low_freq_factor=4.0, high_freq_factor=4.0: expected 0 < low < high',
    ),
  )
  def test_rejects_scaling(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      config_lib.RopeScaling(**fields)


class FromHfTest(parameterized.TestCase):
  def test_defaults_of_an_old_file(self):
    config = config_lib.DecoderConfig.from_hf(_HF, remat='full')
    self.assertEqual(config.num_kv_heads, 4)
    self.assertEqual(config.head_dim, 8)
    self.assertEqual(config.rope_theta, 10000.0)
    self.assertFalse(config.tie_embeddings)
    self.assertEqual(config.remat, 'full')

  @parameterized.parameters(
    (
      {'rope_theta': 500000.0, 'rope_scaling': _LLAMA3},
      500000.0,
      config_lib.RopeScaling(**_LLAMA3),
    ),
    (
      {'rope_parameters': {**_LLAMA3, 'rope_theta': 500000.0}},
      500000.0,
      config_lib.RopeScaling(**_LLAMA3),
    ),
    (
      {'rope_scaling': {'type': 'linear', 'factor': 2.0}},
      10000.0,
      config_lib.RopeScaling(rope_type='linear', factor=2.0),
    ),
    ({'rope_scaling': None}, 10000.0, config_lib.RopeScaling()),
  )
  def test_rope(self, extra, theta, scaling):
    config = config_lib.DecoderConfig.from_hf({**_HF, **extra})
    self.assertEqual(config.rope_theta, theta)
    self.assertEqual(config.rope_scaling, scaling)

  @parameterized.parameters(
    ({'model_type': 'mistral'}, "model_type='mistral' is not supported"),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported; expected"),
    ({'sliding_window': 128}, 'sliding_window=128 is not supported'),
    ({'num_local_experts': 8}, 'num_local_experts=8 is not supported'),
    (
      {'quantization_config': {'bits': 4}},
      r"quantization_config=\{'bits': 4\} is not supported",
    ),
    (
      {'rope_scaling': {'rope_type': 'yarn', 'factor': 2.0}},
      "rope_scaling: rope_type='yarn' is not supported",
    ),
    (
      {'rope_scaling': {'rope_type': 'linear', 'factor': 2.0, 'beta': 1}},
      "rope_scaling: beta=1 is not supported with rope_type='linear'",
    ),
    (
      {'rope_scaling': {'rope_type': 'llama3', 'factor': 2.0}},
      "rope_scaling of type 'llama3' lacks 'low_freq_factor'",
    ),
    ({'hidden_size': None}, "The configuration lacks 'hidden_size'"),
    ({'num_attention_heads': 5}, 'num_attention_heads=5 does not divide'),
  )
  def test_rejects(self, extra, message):
    with self.assertRaisesRegex(ValueError, message):
      config_lib.DecoderConfig.from_hf({**_HF, **extra})

  @parameterized.parameters(*golden.CASES)
  def test_round_trip(self, case):
    raw = json.loads((golden.directory(case) / 'config.json').read_text())
    config = config_lib.DecoderConfig.from_hf(raw)
    written = json.loads(json.dumps(config.to_hf()))
    self.assertEqual(config_lib.DecoderConfig.from_hf(written), config)


class FromGgufTest(parameterized.TestCase):
  def test_reads(self):
    config = config_lib.DecoderConfig.from_gguf(
      {
        **_GGUF,
        'llama.attention.head_count_kv': 2,
        'llama.rope.freq_base': 1e5,
      },
      tie_embeddings=True,
      dtype='bfloat16',
    )
    self.assertEqual(
      config,
      config_lib.DecoderConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
        tie_embeddings=True,
        max_position_embeddings=64,
        dtype='bfloat16',
      ),
    )

  def test_vocabulary_size_from_the_tokens(self):
    metadata = {**_GGUF, 'tokenizer.ggml.tokens': ['a', 'b', 'c']}
    del metadata['llama.vocab_size']
    config = config_lib.DecoderConfig.from_gguf(metadata, tie_embeddings=False)
    self.assertEqual(config.vocab_size, 3)
    self.assertFalse(config.tie_embeddings)

  def test_linear_scaling(self):
    config = config_lib.DecoderConfig.from_gguf(
      {
        **_GGUF,
        'llama.rope.scaling.type': 'linear',
        'llama.rope.scaling.factor': 4.0,
      },
      tie_embeddings=True,
    )
    self.assertEqual(dataclasses.asdict(config.rope_scaling)['factor'], 4.0)

  @parameterized.parameters(
    ({'general.architecture': 'qwen2'}, "general.architecture='qwen2' is not"),
    ({'llama.expert_count': 8}, 'llama.expert_count=8 is not supported'),
    (
      {'llama.rope.dimension_count': 4},
      'llama.rope.dimension_count=4 is not supported; expected 8',
    ),
    (
      {'llama.attention.head_count_kv': [2, 1]},
      r'llama.attention.head_count_kv=\[2, 1\] is not supported',
    ),
    (
      {'llama.rope.scaling.type': 'yarn'},
      "llama.rope.scaling.type='yarn' is not supported",
    ),
    (
      {'llama.block_count': None},
      "The GGUF metadata lacks 'llama.block_count'",
    ),
  )
  def test_rejects(self, extra, message):
    with self.assertRaisesRegex(ValueError, message):
      config_lib.DecoderConfig.from_gguf(
        {**_GGUF, **extra}, tie_embeddings=True
      )


if __name__ == '__main__':
  absltest.main()
