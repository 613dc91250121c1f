import json
import pathlib
import re

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
from tests.peftlib.hf import loading_test
from tests.peftlib.hf import theirs

chex.set_n_cpu_devices(8)

PREFIX = 'base_model.model.'
TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]], jnp.int32)
# Of the tiny Llama that the golden adapters were trained on.
PARTS = {
  'qkv_proj': {'q_proj': 32, 'k_proj': 16, 'v_proj': 16},
  'gate_up_proj': {'gate_proj': 80, 'up_proj': 80},
}
LAYERS = 3
MODULES = {'qkv_proj': 'self_attn', 'gate_up_proj': 'mlp'}
LORA = {
  'peft_type': 'LORA',
  'task_type': 'CAUSAL_LM',
  'target_modules': ['gate_up_proj', 'qkv_proj'],
  'r': 2,
  'lora_alpha': 6,
}


def _norm(weight):
  return np.linalg.norm(weight, axis=1)


def _lora(weight, t, scale):
  return weight + scale * t['lora_B.weight'] @ t['lora_A.weight']


def _dora(weight, t, scale):
  moved = _lora(weight, t, scale)
  return moved * (t['lora_magnitude_vector'] / _norm(moved))[:, None]


def _low_rank(rows, columns, up='lora_B.weight', down='lora_A.weight'):
  return {
    down: theirs.draw(2, columns) / 4,
    up: theirs.draw(rows, 2) / 4,
  }


# Fields, tensors of a weight, and what they make of it, as HF peft documents.
CASES = {
  'lora': (LORA, _low_rank, lambda w, t: _lora(w, t, 3.0)),
  'rslora': (
    {**LORA, 'use_rslora': True},
    _low_rank,
    lambda w, t: _lora(w, t, 6 / 2**0.5),
  ),
  'dora': (
    {**LORA, 'use_dora': True},
    lambda rows, columns: {
      **_low_rank(rows, columns),
      'lora_magnitude_vector': np.abs(theirs.draw(rows)) + 1,
    },
    lambda w, t: _dora(w, t, 3.0),
  ),
  'hira': (
    {
      'peft_type': 'HIRA',
      'task_type': 'CAUSAL_LM',
      'target_modules': ['gate_up_proj', 'qkv_proj'],
      'r': 2,
    },
    lambda rows, columns: _low_rank(rows, columns, 'hira_B', 'hira_A'),
    lambda w, t: w + w * (t['hira_B'] @ t['hira_A']),
  ),
  'ia3': (
    {
      'peft_type': 'IA3',
      'task_type': 'CAUSAL_LM',
      'target_modules': ['gate_up_proj', 'qkv_proj'],
      'feedforward_modules': [],
    },
    lambda rows, columns: {'ia3_l': theirs.draw(rows, 1)},
    lambda w, t: w * t['ia3_l'],
  ),
  'ia3, of inputs': (
    {
      'peft_type': 'IA3',
      'task_type': 'CAUSAL_LM',
      'target_modules': ['gate_up_proj', 'qkv_proj'],
      'feedforward_modules': ['gate_up_proj', 'qkv_proj'],
    },
    lambda rows, columns: {'ia3_l': theirs.draw(1, columns)},
    lambda w, t: w * t['ia3_l'],
  ),
}


def _fused_name(layer, fused):
  return f'model.layers.{layer}.{MODULES[fused]}.{fused}.'


def _fused_tensors(make):
  return {
    _fused_name(layer, fused) + suffix: tensor * (1 + layer)
    for layer in range(LAYERS)
    for fused, parts in PARTS.items()
    for suffix, tensor in make(sum(parts.values()), 32).items()
  }


def _moved(state, tensors, merge):
  """The Llama whose weights, put together and moved, are cut again."""
  flat = dict(nnx.to_flat_state(state))
  for fused, parts in PARTS.items():
    paths = [('layers', MODULES[fused], part, 'kernel') for part in parts]
    kernels = [np.array(flat[path].get_value()) for path in paths]
    for layer in range(LAYERS):
      own = {
        name.removeprefix(_fused_name(layer, fused)): tensor
        for name, tensor in tensors.items()
        if name.startswith(_fused_name(layer, fused))
      }
      whole = np.concatenate([k[layer].T for k in kernels])
      cuts = np.cumsum(list(parts.values()))[:-1]
      for kernel, part in zip(
        kernels, np.split(merge(whole, own), cuts), strict=True
      ):
        kernel[layer] = part.T
    for path, kernel in zip(paths, kernels, strict=True):
      flat[path] = flat[path].replace(jnp.asarray(kernel))
  return nnx.from_flat_state(list(flat.items()))


class OwnAttention(nnx.Module):
  """Has its three projections in one."""

  def __init__(self, kernel):
    self.qkv = nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(0))
    self.qkv.kernel.set_value(jnp.asarray(kernel))

  def __call__(self, x):
    return self.qkv(x)


KERNEL = theirs.draw(4, 8)
OWN = {
  'projections': {'qkv': {'q': 4, 'k': 2, 'v': 2}},
  'places': {
    'block.qkv': hf.Place('block.qkv', ('qkv',), 'kernel', None, True)
  },
}
X = jnp.asarray(theirs.draw(3, 4))


def _files(folder):
  return (
    json.loads((folder / 'adapter_config.json').read_text()),
    safetensors_numpy.load_file(folder / 'adapter_model.safetensors'),
  )


class ProjectionsTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.base = loading_test.base()

  def folder(self, name='adapter'):
    return pathlib.Path(self.create_tempdir().full_path) / name

  def theirs(self, fields, tensors):
    return theirs.write(self.folder(), fields, tensors, PREFIX)

  def assert_bytes(self, given, expected):
    self.assertEqual(given.keys(), expected.keys())
    for name, value in expected.items():
      self.assertEqual(given[name].dtype, value.dtype, name)
      np.testing.assert_array_equal(given[name], value, name)

  @parameterized.parameters(*CASES)
  def test_fused_adapter_in_a_split_model_and_back(self, case):
    fields, make, merge = CASES[case]
    tensors = _fused_tensors(make)
    graphdef, state = self.base
    loaded = hf.load_adapter(self.theirs(fields, tensors), graphdef, state)
    expected = nnx.merge(graphdef, _moved(state, tensors, merge))(TOKENS)
    tuned = nnx.merge(loaded.graphdef, loaded.state)(TOKENS)
    chex.assert_trees_all_close(tuned, expected, atol=1e-4, rtol=1e-4)
    self.assertGreater(
      float(jnp.abs(tuned - nnx.merge(graphdef, state)(TOKENS)).max()), 0.01
    )
    self.assertEqual(loaded.fields, fields)

    kept, own = self.folder(), self.folder()
    split = loaded.graphdef, loaded.state
    projections = hf.fused_projections(*split)
    self.assertEqual(projections, PARTS)
    hf.save_adapter(kept, *split, fields=fields, projections=projections)
    hf.save_adapter(own, *split, projections=projections)
    before = {PREFIX + name: tensor for name, tensor in tensors.items()}
    for folder in (kept, own):
      self.assert_bytes(_files(folder)[1], before)
    self.assertEqual(_files(kept)[0], fields)
    written = _files(own)[0]
    self.assertCountEqual(written['target_modules'], fields['target_modules'])
    for field in ('r', 'lora_alpha'):
      self.assertEqual(written.get(field), fields.get(field))

  def test_oft_is_the_same_for_all_parts(self):
    fields = {
      'peft_type': 'OFT',
      'task_type': 'CAUSAL_LM',
      'target_modules': ['qkv_proj'],
      'r': 0,
      'oft_block_size': 8,
    }
    rotation = theirs.draw(4, 28) / 8
    fused = {
      f'{_fused_name(layer, "qkv_proj")}oft_R.weight': rotation
      for layer in range(LAYERS)
    }
    parts = {
      f'model.layers.{layer}.self_attn.{part}.oft_R.weight': rotation
      for layer in range(LAYERS)
      for part in PARTS['qkv_proj']
    }
    split = {**fields, 'target_modules': list(PARTS['qkv_proj'])}
    models = [
      hf.load_adapter(self.theirs(f, t), *self.base)
      for f, t in ((fields, fused), (split, parts))
    ]
    chex.assert_trees_all_equal(models[0].state, models[1].state)
    folder = self.folder()
    hf.save_adapter(
      folder,
      models[1].graphdef,
      models[1].state,
      fields=fields,
      projections=PARTS,
    )
    self.assert_bytes(
      _files(folder)[1], {PREFIX + name: t for name, t in fused.items()}
    )

  def test_layers_and_patterns_mean_fused_modules(self):
    fields = {
      **LORA,
      'layers_to_transform': [1],
      'rank_pattern': {'gate_up_proj': 3},
      'exclude_modules': [],
    }
    tensors = {
      name: tensor[:2] if 'qkv_proj.lora_A' in name else tensor
      for name, tensor in _fused_tensors(_low_rank).items()
      if '.1.' in name
    }
    wide = {
      'lora_A.weight': theirs.draw(3, 32),
      'lora_B.weight': theirs.draw(160, 3),
    }
    for suffix, tensor in wide.items():
      tensors[_fused_name(1, 'gate_up_proj') + suffix] = tensor
    loaded = hf.load_adapter(self.theirs(fields, tensors), *self.base)
    ranks = {
      '/'.join(path[1:]): variable.get_value().shape
      for path, variable in nnx.to_flat_state(loaded.state)
      if 'lora_a' in path[-1]
    }
    self.assertLen(ranks, 5)
    for path, shape in ranks.items():
      rank = 3 if 'mlp' in path else 2
      self.assertEqual(shape, (1, 32, rank), path)
    folder = self.folder()
    split = loaded.graphdef, loaded.state
    hf.save_adapter(folder, *split, fields=fields, projections=PARTS)
    config, saved = _files(folder)
    self.assertEqual(config, fields)
    self.assert_bytes(saved, {PREFIX + n: t for n, t in tensors.items()})

  def test_ranks_of_unequal_parts_add_up(self):
    config = peftlib.AdapterConfig(
      (
        peftlib.Rule(
          ('q_proj', 'k_proj'),
          methods.Lora(
            rank=2, alpha=6.0, b_initializer=nnx.initializers.normal(0.1)
          ),
        ),
        peftlib.Rule(
          ('v_proj',),
          methods.Lora(
            rank=3, alpha=3.0, b_initializer=nnx.initializers.normal(0.1)
          ),
        ),
      )
    )
    split = peftlib.inject(*self.base, config, TOKENS, key=jax.random.key(0))
    folder = self.folder()
    hf.save_adapter(folder, *split, projections=PARTS)
    config, tensors = _files(folder)
    self.assertEqual(
      (config['r'], config['lora_alpha'], config['target_modules']),
      (7, 21.0, ['qkv_proj']),
    )
    name = PREFIX + _fused_name(0, 'qkv_proj')
    chex.assert_shape(tensors[name + 'lora_A.weight'], (7, 32))
    up = tensors[name + 'lora_B.weight']
    chex.assert_shape(up, (64, 7))
    np.testing.assert_array_equal(up[:32, 2:], np.zeros((32, 5)))
    np.testing.assert_array_equal(up[48:, :4], np.zeros((16, 4)))
    again = hf.load_adapter(folder, *self.base)
    chex.assert_trees_all_close(
      nnx.merge(again.graphdef, again.state)(TOKENS),
      nnx.merge(*split)(TOKENS),
      atol=1e-5,
    )

  @parameterized.parameters(
    (['q', 'v'], {}, 4, 12.0),
    (['q', 'k', 'v'], {'v': 3}, 6, 18.0),
    (['v'], {}, 2, 6.0),
  )
  def test_split_adapter_in_a_fused_model_and_back(
    self, targets, alphas, rank, alpha
  ):
    fields = {
      'peft_type': 'LORA',
      'target_modules': targets,
      'r': 2,
      'lora_alpha': 6,
      **({'alpha_pattern': alphas} if alphas else {}),
    }
    random = np.random.default_rng(5)
    tensors, expected = {}, np.array(KERNEL)
    start = 0
    for part, width in OWN['projections']['qkv'].items():
      if part in targets:
        a, b = random.normal(size=(2, 4)), random.normal(size=(width, 2))
        a, b = a.astype(np.float32), b.astype(np.float32)
        tensors[f'block.{part}.lora_A.weight'] = a
        tensors[f'block.{part}.lora_B.weight'] = b
        moved = alphas.get(part, 6) / 2 * (b @ a).T
        expected[:, start : start + width] += moved
      start += width
    graphdef, state = nnx.split(OwnAttention(KERNEL))
    directory = self.theirs(fields, tensors)
    loaded = hf.load_adapter(directory, graphdef, state, X, **OWN)
    method = loaded.config.rules[0].method
    self.assertEqual((method.rank, method.alpha), (rank, alpha))
    split = loaded.graphdef, loaded.state
    chex.assert_trees_all_close(
      nnx.merge(*split)(X), X @ expected, atol=1e-5, rtol=1e-5
    )
    kept, own = self.folder(), self.folder()
    hf.save_adapter(kept, *split, fields=fields, **OWN)
    config, saved = _files(kept)
    self.assertEqual(config, fields)
    self.assert_bytes(saved, {PREFIX + n: t for n, t in tensors.items()})
    hf.save_adapter(own, *split, **OWN)
    config, saved = _files(own)
    self.assertEqual(config['r'], rank)
    self.assertCountEqual(config['target_modules'], ['q', 'k', 'v'])
    rows = [
      saved[f'{PREFIX}block.{part}.lora_B.weight']
      @ saved[f'{PREFIX}block.{part}.lora_A.weight']
      for part in ('q', 'k', 'v')
    ]
    chex.assert_trees_all_close(
      KERNEL + alpha / rank * np.concatenate(rows).T, expected, atol=1e-5
    )

  @parameterized.parameters((['q', 'v'], ['q']), (['q'], ['q', 'v']))
  def test_parts_that_are_meant_have_tensors(self, meant, have):
    fields = {
      'peft_type': 'LORA',
      'target_modules': meant,
      'r': 2,
      'lora_alpha': 6,
    }
    tensors = {
      f'block.{part}.{suffix}': tensor
      for part in have
      for suffix, tensor in _low_rank(
        OWN['projections']['qkv'][part], 4
      ).items()
    }
    graphdef, state = nnx.split(OwnAttention(KERNEL))
    message = re.escape(
      f'the fields mean {[f"block.{m}" for m in meant]} of block.q, block.k,'
      f' block.v; those with tensors are {[f"block.{h}" for h in have]}.'
    )
    with self.assertRaisesRegex(ValueError, message):
      hf.load_adapter(self.theirs(fields, tensors), graphdef, state, X, **OWN)

  def test_refused(self):
    graphdef, state = self.base
    vera = {
      'peft_type': 'VERA',
      'target_modules': ['qkv_proj'],
      'r': 2,
      'save_projection': True,
    }
    name = _fused_name(0, 'qkv_proj')
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      'peftlib.hf.load_adapter:'
      ' model.layers.0.self_attn.qkv_proj.vera_lambda_b is of a projection'
      ' that is model.layers.0.self_attn.q_proj,'
      ' model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj'
      ' together; only LoRA, HiRA, OFT and IA3 can be cut and joined.',
    ):
      hf.load_adapter(
        self.theirs(vera, {f'{name}vera_lambda_b': theirs.draw(64)}),
        graphdef,
        state,
      )
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      'peftlib.hf.load_adapter:'
      ' model.layers.0.self_attn.qkv_proj.lora_B.weight has 60 rows; its parts'
      " {'model.layers.0.self_attn.q_proj': 32,"
      " 'model.layers.0.self_attn.k_proj': 16,"
      " 'model.layers.0.self_attn.v_proj': 16} have 64.",
    ):
      hf.load_adapter(
        self.theirs(
          LORA, {f'{name}{n}': t for n, t in _low_rank(60, 32).items()}
        ),
        graphdef,
        state,
      )
    with self.assertRaisesRegex(
      TypeError,
      re.escape(
        'peftlib.hf.fused_projections: only of peftlib.models.Decoder are the'
        ' widths known; this is a OwnAttention.'
      ),
    ):
      hf.fused_projections(*nnx.split(OwnAttention(KERNEL)))

  def test_magnitudes_of_all_parts_are_needed(self):
    config = peftlib.LoraConfig(module_path='layers/self_attn/q_proj')
    config = peftlib.AdapterConfig(
      (peftlib.Rule(('q_proj',), methods.Dora(rank=2)),)
    )
    split = peftlib.inject(*self.base, config, TOKENS, key=jax.random.key(0))
    with self.assertRaisesRegex(
      ValueError,
      'model.layers.0.self_attn.v_proj have no lora_magnitude_vector, and'
      ' model.layers.0.self_attn.q_proj have; they are one module,'
      ' model.layers.0.self_attn.qkv_proj, on the other side.',
    ):
      hf.save_adapter(self.folder(), *split, projections=PARTS)

  def test_rank_of_a_fused_adapter_that_mixes_its_parts(self):
    graphdef, state = nnx.split(OwnAttention(KERNEL))
    lora = methods.Lora(rank=2, b_initializer=nnx.initializers.ones)
    split = peftlib.inject(
      graphdef,
      state,
      peftlib.AdapterConfig((peftlib.Rule('qkv', lora),)),
      X,
      key=jax.random.key(0),
    )
    fields = {
      'peft_type': 'LORA',
      'target_modules': ['q', 'v'],
      'r': 1,
      'lora_alpha': 16,
    }
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      'peftlib.hf.save_adapter: fields have r=1 for block.q; of the fused'
      ' adapter it needs rank 2. Leave fields out.',
    ):
      hf.save_adapter(self.folder(), *split, fields=fields, **OWN)


if __name__ == '__main__':
  absltest.main()
