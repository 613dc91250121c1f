import json
import pathlib

from absl.testing import absltest
import chex
from flax import nnx
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors_numpy

import peftlib
from peftlib import hf
from tests.peftlib.hf import loading_test
from tests.peftlib.hf import moe
import transforms

chex.set_n_cpu_devices(8)

CASE = loading_test.GOLDEN / 'moe_parameters'


class MixtureOfExpertsTest(absltest.TestCase):
  """LoRA of experts that HF peft trained (target_parameters)."""

  def test_same_logits_and_back(self):
    golden = loading_test.golden('moe_parameters')
    (graphdef, state), places = moe.load(loading_test.GOLDEN / 'moe')
    ids = jnp.asarray(golden['input_ids'], jnp.int32)
    chex.assert_trees_all_close(
      nnx.merge(graphdef, state, copy=True)(ids),
      golden['base_logits'],
      atol=1e-4,
    )
    loaded = hf.load_adapter(CASE, graphdef, state, ids, places=places)
    split = loaded.graphdef, loaded.state
    chex.assert_trees_all_close(
      nnx.merge(*split, copy=True)(ids), golden['logits'], atol=1e-4
    )
    moved = np.abs(golden['logits'] - golden['base_logits']).max()
    self.assertGreater(moved, 0.01)
    trained = transforms.select(
      loaded.state, peftlib.trainable_filter(loaded.config)
    )
    self.assertEqual(
      transforms.param_count(trained),
      json.loads((CASE / 'golden.json').read_text())['trainable'],
    )

    folder = pathlib.Path(self.create_tempdir().full_path) / 'adapter'
    hf.save_adapter(folder, *split, fields=loaded.fields, places=places)
    name = 'adapter_model.safetensors'
    before = safetensors_numpy.load_file(CASE / name)
    after = safetensors_numpy.load_file(folder / name)
    self.assertEqual(after.keys(), before.keys())
    for key, value in before.items():
      np.testing.assert_array_equal(after[key], value, key)
    self.assertEqual(
      json.loads((folder / 'adapter_config.json').read_text()),
      json.loads((CASE / 'adapter_config.json').read_text()),
    )


if __name__ == '__main__':
  absltest.main()
