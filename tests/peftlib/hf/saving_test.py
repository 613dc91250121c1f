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
from peftlib import methods
from tests.peftlib import scanned_model
from tests.peftlib.hf import loading_test
import transforms

chex.set_n_cpu_devices(8)

GOLDEN = loading_test.GOLDEN


def _tensors(folder):
  return safetensors_numpy.load_file(folder / 'adapter_model.safetensors')


def _config(folder):
  return json.loads((folder / 'adapter_config.json').read_text())


class SavingTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    name = 'jax_disable_most_optimizations'
    cls.addClassCleanup(jax.config.update, name, jax.config.values[name])
    jax.config.update(name, True)
    cls.base = loading_test.base()

  def folder(self):
    return pathlib.Path(self.create_tempdir().full_path) / 'adapter'

  @parameterized.parameters(*loading_test.NAMES)
  def test_there_and_back(self, name):
    loaded = hf.load_adapter(GOLDEN / name, *self.base)
    train = loaded.config.train
    split = loaded.graphdef, loaded.state
    kept, own = self.folder(), self.folder()
    hf.save_adapter(kept, *split, train=train, fields=loaded.fields)
    hf.save_adapter(own, *split, train=train)
    before = _tensors(GOLDEN / name)
    for folder in (kept, own):
      after = _tensors(folder)
      self.assertEqual(after.keys(), before.keys())
      for key, value in before.items():
        self.assertEqual(after[key].dtype, value.dtype, key)
        self.assertEqual(after[key].shape, value.shape, key)
        self.assertEqual(after[key].tobytes(), value.tobytes(), key)
    self.assertEqual(_config(kept), _config(GOLDEN / name))

  @parameterized.product(
    axis=(0, 1, 2),
    method=(
      methods.Dora(rank=2, alpha=4.0),
      methods.Ia3(),
    ),
  )
  def test_stack_along_any_axis(self, axis, method):
    base, base_state = nnx.split(
      scanned_model.Stack(rngs=nnx.Rngs(0), axis=axis)
    )
    tokens = jnp.ones((1, 4), jnp.int32)
    config = peftlib.AdapterConfig((peftlib.Rule('layers/up_proj', method),))
    graphdef, state = peftlib.inject(
      base, base_state, config, tokens, key=jax.random.key(0)
    )
    # Each layer has its own, and no start.
    drawn = iter(jax.random.split(jax.random.key(2), 8))
    state = transforms.map_variables(
      lambda v: v.replace(
        v.get_value() + jax.random.uniform(next(drawn), v.shape)
      ),
      state,
      nnx.LoRAParam,
    )
    places = {
      (name := f'layers.{i}.up_proj'): hf.Place(
        name, ('layers', 'up_proj'), 'kernel', i, True
      )
      for i in range(scanned_model.LAYERS)
    }
    folder = self.folder()
    hf.save_adapter(folder, graphdef, state, places=places)
    loaded = hf.load_adapter(folder, base, base_state, tokens, places=places)
    self.assertEqual(loaded.graphdef, graphdef)
    self.assertEmpty(transforms.diff(loaded.state, state))

  def test_config_of_our_own(self):
    config = peftlib.AdapterConfig(
      (
        peftlib.Rule(('q_proj',), methods.Lora(rank=4, alpha=8.0)),
        peftlib.Rule(('v_proj',), methods.Lora(rank=2, alpha=8.0), layers=(1,)),
      )
    )
    tokens = jnp.ones((1, 4), jnp.int32)
    split = peftlib.inject(*self.base, config, tokens, key=jax.random.key(0))
    folder = self.folder()
    hf.save_adapter(folder, *split)
    saved = _config(folder)
    self.assertEqual(
      {
        key: saved[key]
        for key in (
          'peft_type',
          'r',
          'lora_alpha',
          'rank_pattern',
          'target_modules',
          'use_dora',
        )
      },
      {
        'peft_type': 'LORA',
        'r': 4,
        'lora_alpha': 8.0,
        'rank_pattern': {r'model\.layers\.1\.self_attn\.v_proj': 2},
        'target_modules': ['q_proj', 'model.layers.1.self_attn.v_proj'],
        'use_dora': False,
      },
    )
    loaded = hf.load_adapter(folder, *self.base)
    ids = np.arange(8).reshape(2, 4)
    np.testing.assert_allclose(
      loading_test.logits(loaded.graphdef, loaded.state, ids),
      loading_test.logits(*split, ids),
      atol=1e-6,
    )

  def _injected(self, *rules):
    return peftlib.inject(
      *self.base,
      peftlib.AdapterConfig(rules),
      jnp.ones((1, 4), jnp.int32),
      key=jax.random.key(0),
    )

  def test_refused(self):
    folder = self.folder()
    lora = self._injected(peftlib.Rule(('q_proj',), methods.Lora(rank=2)))
    cases = [
      (
        self._injected(
          peftlib.Rule(('q_proj',), methods.Lora(rank=2)),
          peftlib.Rule(('v_proj',), methods.Hira(rank=2)),
        ),
        {},
        r"peft has no one configuration for the methods \['hira', 'lora'\]",
      ),
      (
        self._injected(
          peftlib.Rule(('q_proj',), methods.Lora(rank=2, dropout=0.1)),
          peftlib.Rule(('v_proj',), methods.Lora(rank=2)),
        ),
        {},
        'lora_dropout differs from module to module',
      ),
      (lora, {'adapter': 'x'}, "the model has no adapter 'x'; it has"),
      (
        lora,
        {'fields': {'peft_type': 'HIRA'}},
        'fields are of a HIRA, the adapter is a LORA',
      ),
      (
        lora,
        {'fields': {'peft_type': 'LORA', 'r': 3, 'lora_alpha': 32.0}},
        r'fields have r=3 for model.layers.0.self_attn.q_proj, the adapter'
        ' has 2',
      ),
      (lora, {'train': ('nothing',)}, "train='nothing' is no weight with"),
    ]
    for split, arguments, message in cases:
      with self.subTest(message):
        with self.assertRaisesRegex(ValueError, message):
          hf.save_adapter(folder, *split, **arguments)
        self.assertFalse(folder.exists())

  def test_an_existing_directory(self):
    split = self._injected(peftlib.Rule(('q_proj',), methods.Lora(rank=2)))
    folder = self.folder()
    folder.mkdir()
    (folder / 'precious').write_text('x')
    with self.assertRaisesRegex(FileExistsError, 'exists; give another'):
      hf.save_adapter(folder, *split)
    self.assertTrue((folder / 'precious').exists())
    hf.save_adapter(folder, *split, overwrite=True)
    self.assertEqual(
      sorted(p.name for p in folder.iterdir()),
      ['adapter_config.json', 'adapter_model.safetensors'],
    )
    self.assertEqual([p.name for p in folder.parent.iterdir()], ['adapter'])

  def test_projections_that_are_not_parts_of_one(self):
    split = self._injected(
      peftlib.Rule(('q_proj', 'down_proj'), methods.Vera(rank=2))
    )
    with self.assertRaisesRegex(ValueError, 'Give Vera a projection_shape'):
      hf.save_adapter(self.folder(), *split)
    shared = self._injected(
      peftlib.Rule(
        ('q_proj', 'down_proj'),
        methods.Vera(rank=2, projection_shape=(80, 32)),
      )
    )
    folder = self.folder()
    hf.save_adapter(folder, *shared)
    self.assertEqual(_tensors(folder)['base_model.vera_A'].shape, (2, 80))


if __name__ == '__main__':
  absltest.main()
