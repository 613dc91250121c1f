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
from peftlib.hf import parameters
from tests.peftlib.hf import theirs

chex.set_n_cpu_devices(8)

PREFIX = 'base_model.model.experts.'
FIELDS = {
  'peft_type': 'LORA',
  'target_modules': [],
  'target_parameters': ['experts.up', 'experts.down'],
  'r': 2,
  'lora_alpha': 6,
}
ROWS = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
PLACES = {
  f'experts.{name}': hf.Place(
    f'experts.{name}', ('experts',), name, None, True, parameter=True
  )
  for name in ('up', 'down')
}


class Experts(nnx.Module):
  def __init__(self, up, down):
    self.experts = nnx.Module()
    self.experts.up = nnx.Param(jnp.asarray(up))
    self.experts.down = nnx.Param(jnp.asarray(down))

  def __call__(self, x):
    inner = jnp.einsum('ebi,eio->ebo', x, self.experts.up.get_value())
    return jnp.einsum('ebi,eio->ebo', inner, self.experts.down.get_value())


# (experts, inputs, outputs)
UP, DOWN = theirs.draw(3, 4, 6), theirs.draw(3, 6, 4)
# As peft has them: the first parameter is wrapped innermost.
TENSORS = {
  'base_layer.lora_A.weight': theirs.draw(6, 4),
  'base_layer.lora_B.weight': theirs.draw(6, 6),
  'lora_A.weight': theirs.draw(3, 6),
  'lora_B.weight': theirs.draw(4, 3),
}


def merged(weight, a, b, scale):
  """peft's get_delta_weight, added."""
  a = a.reshape(3, -1, a.shape[-1])
  b = b.reshape(b.shape[0], -1, 3)
  return weight + scale * np.einsum('ore,eri->eio', b, a)


def base():
  return nnx.split(Experts(UP, DOWN))


class ParametersTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.create_tempdir().full_path)

  def write(self, fields, tensors):
    return theirs.write(self.root / 'theirs', FIELDS | fields, tensors, PREFIX)

  def test_there_and_back(self):
    folder = self.write({'rank_pattern': {'down': 1}}, TENSORS)
    loaded = hf.load_adapter(folder, *base(), ROWS, places=PLACES)
    got = nnx.merge(loaded.graphdef, loaded.state)(ROWS)
    a1, b1, a2, b2 = TENSORS.values()
    inner = np.einsum('ebi,eio->ebo', ROWS, merged(UP, a1, b1, 3.0))
    expected = np.einsum('ebi,eio->ebo', inner, merged(DOWN, a2, b2, 6.0))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)
    for fields in (loaded.fields, None):
      again = self.root / f'ours{fields is None}'
      hf.save_adapter(
        again, loaded.graphdef, loaded.state, fields=fields, places=PLACES
      )
      saved = safetensors_numpy.load_file(again / 'adapter_model.safetensors')
      chex.assert_trees_all_equal(
        saved, {PREFIX + name: value for name, value in TENSORS.items()}
      )
    config = json.loads((again / 'adapter_config.json').read_text())
    self.assertEqual(config['target_parameters'], ['up', 'down'])
    self.assertEqual(config['target_modules'], [])
    self.assertEqual(config['r'], 2)
    self.assertEqual(config['rank_pattern'], {r'experts\.down': 1})

  def test_one_of_two_is_not_nested(self):
    tensors = {
      'lora_A.weight': TENSORS['base_layer.lora_A.weight'],
      'lora_B.weight': TENSORS['base_layer.lora_B.weight'],
    }
    folder = self.write({'target_parameters': ['up']}, tensors)
    loaded = hf.load_adapter(folder, *base(), ROWS, places=PLACES)
    experts = loaded.state['experts']
    self.assertEqual(experts['up_lora_a'].shape, (3, 4, 2))
    self.assertNotIn('down_lora_a', experts)

  @parameterized.parameters(
    (
      {'target_parameters': ['experts.up', 'experts.side']},
      r"LORA with target_parameters=\['experts.side', 'experts.up'\]: the model"
      " has no parameter 'experts.side'",
    ),
    (
      {'use_dora': True},
      'load_adapter: dora of experts.up, a parameter: peft adapts those by lora'
      ' and rslora alone',
    ),
    ({'lora_dropout': 0.1}, 'lora of experts.up, a parameter.*without dropout'),
    ({'r': 3}, r'experts.up.lora_A.weight has shape \(6, 4\)'),
  )
  def test_refused_on_the_way_in(self, fields, message):
    folder = self.write(fields, TENSORS)
    with self.assertRaisesRegex(ValueError, message):
      hf.load_adapter(folder, *base(), ROWS, places=PLACES)

  def test_refused_on_the_way_out(self):
    folder = self.root / 'x'
    inject = lambda method, **more: peftlib.inject(
      *base(),
      peftlib.AdapterConfig((peftlib.Rule(('up',), method),), **more),
      ROWS,
      key=jax.random.key(0),
    )
    lora = methods.Lora(rank=1)
    modules = {
      name: hf.Place(name, ('experts',), place.weight, None, True)
      for name, place in PLACES.items()
    }
    for split, told, message in (
      (inject(methods.Hira(rank=1)), {}, 'hira of experts.up, a parameter'),
      (
        inject(lora, train=('experts/down',)),
        {'train': ('experts/down',)},
        'is experts.down, a parameter; peft has modules to save only',
      ),
      (
        inject(lora),
        {'places': modules},
        r'experts.up is of experts, one matrix each.*Place\(parameter=True\)',
      ),
    ):
      with self.subTest(message):
        with self.assertRaisesRegex(ValueError, f'save_adapter: .*{message}'):
          hf.save_adapter(folder, *split, **{'places': PLACES, **told})
        self.assertFalse(folder.exists())

  def test_nested(self):
    self.assertEqual(
      parameters.nested(['a.up', 'a.gate', 'b.up', 'a.down']),
      {
        'a.up': 'a.base_layer.base_layer',
        'a.gate': 'a.base_layer',
        'b.up': 'b',
        'a.down': 'a',
      },
    )


if __name__ == '__main__':
  absltest.main()
