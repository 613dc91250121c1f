import json
import pathlib
import tempfile

from absl.testing import absltest
import chex
from flax import nnx
import jax
import numpy as np
from safetensors import numpy as safetensors

import peftlib
from peftlib import hf
from tests.consumers import harness
from tests.consumers import population
import transforms


class PopulationTest(harness.LeakCheckedTestCase):
  loop = population

  @classmethod
  def run_loop(cls, **arguments):
    folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(folder.cleanup)
    path = pathlib.Path(folder.name, 'best')
    return {**population.run(path, **arguments), 'path': path}

  def test_each_has_its_learning_rate(self):
    history = self.result()['history']
    chex.assert_shape(history['loss'], (40, 8))
    np.testing.assert_array_equal(
      history['learning_rate'], np.tile(population.RATES, (40, 1))
    )
    # All are the base at first; then they learn at different speed.
    self.assertLen(set(history['loss'][0].tolist()), 1)
    self.assertLen(set(history['loss'][-1].tolist()), 8)
    self.assertTrue((np.diff(history['loss'][-1])[:4] < 0).all())

  def test_the_best_is_kept(self):
    result = self.result()
    self.assertEqual(result['scores'].argmin(), result['best'])
    self.assertBetween(result['best'], 1, 6)
    graphdef, state = result['tuned']
    loss = population.loss_fn(
      nnx.merge(graphdef, state), population.sequences(1), None
    )[0]
    self.assertAlmostEqual(
      float(loss), float(result['scores'].min()), delta=1e-4
    )

  def test_one_of_the_population_is_what_it_is_alone(self):
    result = self.result()
    best, (graphdef, state) = result['best'], result['tuned']
    frozen = transforms.exclude(state, nnx.LoRAParam)
    tx = population.optax.adam(float(population.RATES[best]))
    alone = peftlib.init_train_state(result['first'], tx, key=jax.random.key(0))
    step = peftlib.make_train_step(graphdef, population.loss_fn, tx)
    losses = []
    for _ in range(3):
      alone, metrics = step(alone, frozen, result['batch'])
      losses.append(float(metrics['loss']))
    np.testing.assert_allclose(
      losses, result['history']['loss'][:3, best], rtol=1e-4
    )

  def test_export_has_every_layer(self):
    path = self.result()['path']
    config = json.loads((path / 'adapter_config.json').read_text())
    self.assertEqual((config['r'], config['lora_alpha']), (4, 8))
    tensors = safetensors.load_file(path / 'adapter_model.safetensors')
    self.assertEqual(
      {k: v.shape for k, v in tensors.items() if '.1.' in k},
      {
        f'base_model.model.layers.1.{name}.lora_{factor}.weight': shape
        for name, shapes in {
          'attention.query': ((4, 16), (16, 4)),
          'up': ((4, 16), (32, 4)),
          'down': ((4, 32), (16, 4)),
        }.items()
        for factor, shape in zip('AB', shapes)
      },
    )
    self.assertLen(tensors, 12)

  def test_export_gives_the_same_model(self):
    result = self.result()
    loaded = hf.load_adapter(
      result['path'],
      *result['base'],
      result['batch'],
      places=population.places(),
    )
    chex.assert_trees_all_equal(
      nnx.merge(loaded.graphdef, loaded.state)(result['batch']),
      nnx.merge(*result['tuned'])(result['batch']),
    )


if __name__ == '__main__':
  absltest.main()
