import json
import pathlib
import shutil

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import numpy as np
from safetensors import numpy as safetensors_numpy

import peftlib
from peftlib import hf
from peftlib import models

chex.set_n_cpu_devices(8)

GOLDEN = pathlib.Path(__file__).parents[2] / 'golden' / 'hf_peft'


def _read(name):
  return safetensors_numpy.load_file(GOLDEN / name / 'golden.safetensors')


class PromptsTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    loaded = models.load(GOLDEN / 'base')
    cls.base = (loaded.graphdef, loaded.state)

  @parameterized.parameters(('prefix', 480), ('prompt', 160))
  def test_logits_and_parameters_are_those_of_peft(self, name, count):
    golden = _read(name)
    loaded = hf.load_adapter(GOLDEN / name, *self.base)
    ids = golden['input_ids'].astype(np.int32)
    logits = jax.jit(lambda s: nnx.merge(loaded.graphdef, s, copy=True)(ids))(
      loaded.state
    )
    np.testing.assert_allclose(logits, golden['logits'], atol=1e-4)
    self.assertGreater(np.abs(logits - golden['base_logits']).max(), 1e-3)
    trainable, _ = nnx.split_state(
      loaded.state, peftlib.trainable_filter(loaded.config), ...
    )
    self.assertEqual(sum(x.size for x in jax.tree.leaves(trainable)), count)

  @parameterized.parameters('prefix', 'prompt')
  def test_there_and_back(self, name):
    loaded = hf.load_adapter(GOLDEN / name, *self.base)
    root = pathlib.Path(self.create_tempdir().full_path)
    for folder, fields in (('kept', loaded.fields), ('own', None)):
      hf.save_adapter(
        root / folder, loaded.graphdef, loaded.state, fields=fields
      )
      read = safetensors_numpy.load_file(
        root / folder / 'adapter_model.safetensors'
      )
      saved = safetensors_numpy.load_file(
        GOLDEN / name / 'adapter_model.safetensors'
      )
      chex.assert_trees_all_equal(read, saved)
      config = json.loads((root / folder / 'adapter_config.json').read_text())
      before = json.loads((GOLDEN / name / 'adapter_config.json').read_text())
      if fields is None:
        before = {key: before[key] for key in config}
      self.assertEqual(config, before)

  @parameterized.parameters(
    ('prefix', {'prefix_projection': True, 'inference_mode': False},
     'prefix_projection=True: the model needs False'),
    ('prompt', {'token_dim': 64}, 'token_dim=64: the model needs 32'),
    ('prompt', {'num_virtual_tokens': 4}, r'prompt_embeddings has shape'
     r' \(5, 32\); the fields and the model make it \(4, 32\)'),
    ('prompt', {'new_field': 1}, 'new_field=1: not a field that is known'),
    ('prefix', {'task_type': 'SEQ_CLS'}, "task_type='SEQ_CLS': the model needs"
     " 'CAUSAL_LM'"),
  )  # fmt: skip
  def test_refused(self, name, changes, message):
    folder = pathlib.Path(self.create_tempdir().full_path)
    config = json.loads((GOLDEN / name / 'adapter_config.json').read_text())
    (folder / 'adapter_config.json').write_text(json.dumps(config | changes))
    tensors = safetensors_numpy.load_file(
      GOLDEN / name / 'adapter_model.safetensors'
    )
    safetensors_numpy.save_file(tensors, folder / 'adapter_model.safetensors')
    with self.assertRaisesRegex(ValueError, message):
      hf.load_adapter(folder, *self.base)

  def test_a_projection_that_is_in_the_tensor_already(self):
    root = pathlib.Path(self.create_tempdir().full_path)
    theirs = root / 'theirs'
    shutil.copytree(GOLDEN / 'prefix', theirs)
    config = json.loads((theirs / 'adapter_config.json').read_text())
    config['prefix_projection'] = True
    (theirs / 'adapter_config.json').write_text(json.dumps(config))
    loaded = hf.load_adapter(theirs, *self.base)
    plain = hf.load_adapter(GOLDEN / 'prefix', *self.base)
    chex.assert_trees_all_equal(loaded.state, plain.state)
    split = loaded.graphdef, loaded.state
    hf.save_adapter(root / 'ours', *split, fields=loaded.fields)
    self.assertEqual(
      json.loads((root / 'ours' / 'adapter_config.json').read_text()), config
    )

  def test_other_fields_than_the_adapter_s(self):
    loaded = hf.load_adapter(GOLDEN / 'prompt', *self.base)
    folder = pathlib.Path(self.create_tempdir().full_path) / 'x'
    with self.assertRaisesRegex(
      ValueError, 'fields have num_virtual_tokens=7, the adapter has 5'
    ):
      hf.save_adapter(
        folder,
        loaded.graphdef,
        loaded.state,
        fields=loaded.fields | {'num_virtual_tokens': 7},
      )
    self.assertFalse(folder.exists())


if __name__ == '__main__':
  absltest.main()
