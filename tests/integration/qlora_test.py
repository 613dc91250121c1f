import dataclasses
import itertools
import json

from absl.testing import absltest
from flax import nnx
import jax
import numpy as np
import optax

import peftlib
from peftlib import data
from peftlib import losses
from peftlib import models
from peftlib.data import reading
from peftlib.demo import assets
from peftlib.demo import orders
import transforms

STEPS = 30
KEY = jax.random.key(0)
CONFIG = peftlib.LoraConfig(module_path='all-linear', rank=8, alpha=16.0)
QUANTIZED = dataclasses.replace(CONFIG, weight_qtype='nf4', tile_size=64)


def batches():
  rows = [
    reading.parse_row(json.dumps(row)) for row in orders.make_rows('train', 150)
  ]
  tokenizer = data.Tokenizer.from_path(assets.model_path())
  pipeline = data.make_pipeline(
    rows,
    tokenizer,
    length=128,
    batch_size=1,
    loss_on='all',
    overlong='truncate',
  )
  return list(itertools.islice(iter(pipeline.dataset), STEPS))


def train(config, batches):
  quantize = config if config.weight_qtype else None
  model = models.load(assets.model_path(), quantize=quantize)
  tokens = jax.ShapeDtypeStruct((1, 8), 'int32')
  graphdef, state = peftlib.inject(
    model.graphdef, model.state, config, tokens, key=KEY
  )
  del model
  trainable, frozen = transforms.partition(
    state, peftlib.trainable_filter(config), ...
  )
  tx = optax.adamw(1e-3)
  train_state = peftlib.init_train_state(trainable, tx, key=KEY)
  step = peftlib.make_train_step(graphdef, losses.causal_lm_loss, tx)
  found = []
  for batch in batches:
    train_state, metrics = step(train_state, frozen, batch)
    found.append(float(metrics['loss']))
  return np.asarray(found), frozen


class QloraTest(absltest.TestCase):
  def test_loss_on_smollm2_is_near_that_of_lora(self):
    same = batches()
    lora, _ = train(CONFIG, same)
    qlora, frozen = train(QUANTIZED, same)
    # It learns.
    self.assertLess(lora[-10:].mean(), 0.6 * lora[:3].mean())
    np.testing.assert_allclose(qlora[-10:].mean(), lora[-10:].mean(), rtol=0.05)
    # By hand: 30 layers of q, o (576 x 576), k, v (576 x 192), gate, up, down
    # (576 x 1536); half a byte a weight, an f32 for each 64 of them.
    weights = 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)
    sizes = {'qvalue': 0, 'scale': 0}
    for path, variable in nnx.to_flat_state(frozen['layers']):
      if path[-2] == 'array':
        sizes[path[-1]] += variable.get_value().on_device_size_in_bytes()
    self.assertEqual(
      sizes, {'qvalue': weights // 2, 'scale': weights // 64 * 4}
    )


if __name__ == '__main__':
  absltest.main()
