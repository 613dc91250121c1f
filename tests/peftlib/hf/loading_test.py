import functools
import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors_numpy

import peftlib
from peftlib import hf
from peftlib import models

chex.set_n_cpu_devices(8)

GOLDEN = pathlib.Path(__file__).parents[2] / 'golden' / 'hf_peft'
# Made by HF peft 0.21.2, see make_hf_peft.py there.
NAMES = (
  'dora',
  'gralora',
  'hira',
  'ia3',
  'ln_tuning',
  'loha',
  'lokr',
  'lora',
  'lora_all_linear',
  'lora_bias',
  'lora_head_embed',
  'lora_layers',
  'lora_modules_to_save',
  'lora_patterns',
  'lora_regex',
  'lora_tokens',
  'miss',
  'miss_bat',
  'oft',
  'olora',
  'pissa',
  'rslora',
  'shira',
  'vera',
)


def base():
  loaded = models.load(GOLDEN / 'base')
  return loaded.graphdef, loaded.state


def golden(name):
  return safetensors_numpy.load_file(GOLDEN / name / 'golden.safetensors')


# Equal graphdefs, those of all merged models, compile once.
@functools.partial(jax.jit, static_argnums=0)
def _answer(graphdef, state, ids):
  return nnx.merge(graphdef, state, copy=True)(ids)


def logits(graphdef, state, ids):
  return _answer(graphdef, state, np.asarray(ids, np.int32))


def changed(test, name, fields=None, tensors=None):
  """A copy of a golden directory with other fields or tensors."""
  folder = pathlib.Path(test.create_tempdir().full_path)
  config = json.loads((GOLDEN / name / 'adapter_config.json').read_text())
  (folder / 'adapter_config.json').write_text(
    json.dumps(config | (fields or {}))
  )
  own = safetensors_numpy.load_file(GOLDEN / name / 'adapter_model.safetensors')
  own = tensors(own) if tensors else own
  safetensors_numpy.save_file(own, folder / 'adapter_model.safetensors')
  return folder


class LoadingTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    name = 'jax_disable_most_optimizations'
    cls.addClassCleanup(jax.config.update, name, jax.config.values[name])
    jax.config.update(name, True)
    cls.base = base()

  @parameterized.parameters(*NAMES)
  def test_logits_and_parameters_are_those_of_peft(self, name):
    expected = golden(name)
    info = json.loads((GOLDEN / name / 'golden.json').read_text())
    loaded = hf.load_adapter(GOLDEN / name, *self.base)
    got = logits(loaded.graphdef, loaded.state, expected['input_ids'])
    np.testing.assert_allclose(got, expected['logits'], atol=1e-4)
    self.assertGreater(np.abs(got - expected['base_logits']).max(), 1e-2)
    trainable, _ = nnx.split_state(
      loaded.state, peftlib.trainable_filter(loaded.config), ...
    )
    count = sum(x.size for x in jax.tree.leaves(trainable))
    self.assertEqual(count, info['trainable'])
    if name not in ('lora_bias', 'ln_tuning'):
      merged = peftlib.merge_adapters(loaded.graphdef, loaded.state)
      self.assertEqual(merged[0], self.base[0])
      np.testing.assert_allclose(
        logits(*merged, expected['input_ids']), expected['logits'], atol=1e-4
      )

  def test_base_is_what_peft_had(self):
    expected = golden('lora')
    np.testing.assert_allclose(
      logits(*self.base, expected['input_ids']),
      expected['base_logits'],
      atol=1e-4,
    )

  @parameterized.parameters(
    (
      'vera_not_saved',
      r"VERA with save_projection=False: its projections are torch's random"
      r' numbers, which are not in the file',
    ),
    (
      'moe_parameters',
      r'LORA with target_parameters=\[.*\]: the model has no parameter'
      " 'mlp.experts.down_proj', as experts have",
    ),
  )
  def test_refused_with_the_reason(self, name, message):
    with self.assertRaisesRegex(ValueError, message):
      hf.load_adapter(GOLDEN / name, *self.base)

  def test_names_and_other_variables(self):
    before = dict(nnx.to_flat_state(self.base[1]))
    loaded = hf.load_adapter(GOLDEN / 'lora', *self.base, adapter='other')
    after = dict(nnx.to_flat_state(loaded.state))
    for path, variable in before.items():
      self.assertIs(after[path], variable)
    self.assertEqual(
      peftlib.adapter_names(loaded.graphdef, loaded.state), ('other',)
    )
    again = hf.load_adapter(
      GOLDEN / 'rslora', loaded.graphdef, loaded.state, adapter='second'
    )
    expected = golden('rslora')
    only = peftlib.set_active(again.graphdef, again.state, ['second'])
    np.testing.assert_allclose(
      logits(*only, expected['input_ids']), expected['logits'], atol=1e-4
    )

  def test_onto_a_quantized_base(self):
    config = peftlib.LoraConfig(module_path='.*_proj', weight_qtype='int8')
    tokens = jnp.ones((1, 8), jnp.int32)
    quantized = peftlib.quantize_base(*self.base, config, tokens)
    loaded = hf.load_adapter(GOLDEN / 'lora', *quantized)
    expected = golden('lora')
    np.testing.assert_allclose(
      logits(loaded.graphdef, loaded.state, expected['input_ids']),
      expected['logits'],
      atol=0.15,
    )

  def test_layers_of_a_stack_alone_have_parameters(self):
    loaded = hf.load_adapter(GOLDEN / 'lora_layers', *self.base)
    q_proj = loaded.state['layers']['self_attn']['q_proj']
    self.assertEqual(q_proj['kernel_lora_a'].shape, (2, 32, 4))
    self.assertEqual({rule.layers for rule in loaded.config.rules}, {(1, 2)})

  def test_tensors_that_do_not_fit(self):
    first = 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    without = lambda t: {k: v for k, v in t.items() if k != first}
    cases = {
      'has no tensor lora_A.weight': changed(self, 'lora', None, without),
      r'lora_A.weight has shape \(3, 32\)': changed(
        self, 'lora', None, lambda t: t | {first: t[first][:3]}
      ),
      # As many numbers, in another order.
      r'lora_A.weight has shape \(32, 4\), which is \(4, 32\) here': changed(
        self, 'lora', None, lambda t: t | {first: t[first].T.copy()}
      ),
      'tensors of modules that the model has not: other.weight': changed(
        self, 'lora', None, lambda t: t | {'other.weight': t[first]}
      ),
      'without tensors: none; with tensors though not meant: .*down_proj': (
        changed(self, 'lora', {'target_modules': ['q_proj']})
      ),
      'without tensors: model.layers.1.mlp.up_proj': changed(
        self, 'lora_layers', {'target_modules': ['up_proj']}
      ),
      'tensors for which the fields have no use: .*lora_magnitude': changed(
        self, 'dora', {'use_dora': False}
      ),
    }
    for message, folder in cases.items():
      with self.subTest(message):
        with self.assertRaisesRegex(ValueError, message):
          hf.load_adapter(folder, *self.base)

  def test_a_model_whose_names_are_not_known(self):
    with self.assertRaisesRegex(
      TypeError, 'only for peftlib.models.Decoder are the names of HF known'
    ):
      hf.load_adapter(
        GOLDEN / 'lora', *nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
      )
    with self.assertRaisesRegex(TypeError, 'nnx.split it first'):
      hf.load_adapter(GOLDEN / 'lora', nnx.merge(*self.base), self.base[1])


if __name__ == '__main__':
  absltest.main()
