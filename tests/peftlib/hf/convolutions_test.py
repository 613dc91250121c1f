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
from tests.peftlib.hf import theirs

chex.set_n_cpu_devices(8)

PREFIX = 'base_model.model.conv.'
FIELDS = {
  'peft_type': 'LORA',
  'target_modules': ['conv'],
  'r': 2,
  'lora_alpha': 6,
}
IMAGES = np.random.default_rng(0).normal(size=(2, 3, 6, 5)).astype(np.float32)


class LikeTorch(nnx.Module):
  """A convolution whose kernel is (out, in, height, width)."""

  def __init__(self, kernel):
    self.conv = nnx.Module()
    self.conv.kernel = nnx.Param(jnp.asarray(kernel))

  def __call__(self, images):
    return convolve(images, self.conv.kernel.get_value())


class Flax(nnx.Module):
  """One whose kernel is (height, width, in, out)."""

  def __init__(self, kernel):
    rngs = nnx.Rngs(0)
    self.conv = nnx.Conv(3, 4, (3, 2), padding='VALID', rngs=rngs)
    self.conv.kernel.set_value(jnp.asarray(kernel.transpose(2, 3, 1, 0)))

  def __call__(self, images):
    return self.conv(images.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def convolve(images, kernel):
  """torch's conv2d."""
  return jax.lax.conv_general_dilated(
    images, kernel, (1, 1), 'VALID', dimension_numbers=('NCHW', 'OIHW', 'NCHW')
  )


def places(transposed):
  return {'conv': hf.Place('conv', ('conv',), 'kernel', None, transposed)}


class ConvolutionsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.root = pathlib.Path(self.create_tempdir().full_path)
    self.kernel = theirs.draw(4, 3, 3, 2)

  def write(self, fields, tensors):
    return theirs.write(self.root / 'theirs', FIELDS | fields, tensors, PREFIX)

  @parameterized.product(model=(Flax, LikeTorch), dora=(False, True))
  def test_there_and_back(self, model, dora):
    a, b = theirs.draw(2, 3, 3, 2), theirs.draw(4, 2, 1, 1)
    tensors = {'lora_A.weight': a, 'lora_B.weight': b}
    # What peft computes, from its tensors as they are: 6 / 2 is the scale.
    merged = self.kernel + 3 * np.einsum('rihw,or->oihw', a, b[..., 0, 0])
    if dora:
      tensors['lora_magnitude_vector'] = theirs.draw(1, 4, 1, 1)
      norm = np.linalg.norm(merged.reshape(4, -1), axis=1)
      factor = tensors['lora_magnitude_vector'].reshape(-1) / norm
      merged = merged * factor[:, None, None, None]
    folder = self.write({'use_dora': dora}, tensors)
    told = {'places': places(model is Flax)}
    base = nnx.split(model(self.kernel))
    loaded = hf.load_adapter(folder, *base, IMAGES, **told)
    got = nnx.merge(loaded.graphdef, loaded.state)(IMAGES)
    np.testing.assert_allclose(got, convolve(IMAGES, merged), atol=1e-4)

    for fields in (loaded.fields, None):
      again = self.root / f'ours{fields is None}'
      hf.save_adapter(
        again, loaded.graphdef, loaded.state, fields=fields, **told
      )
      saved = safetensors_numpy.load_file(again / 'adapter_model.safetensors')
      chex.assert_trees_all_equal(
        saved, {PREFIX + name: value for name, value in tensors.items()}
      )
    config = json.loads((again / 'adapter_config.json').read_text())
    self.assertIsNone(config['task_type'])

  def test_trained_whole(self):
    weight = theirs.draw(4, 3, 3, 2) + 1
    folder = self.write(
      {'target_modules': [], 'modules_to_save': ['conv']}, {'weight': weight}
    )
    base = nnx.split(Flax(self.kernel))
    loaded = hf.load_adapter(folder, *base, IMAGES, places=places(True))
    got = nnx.merge(loaded.graphdef, loaded.state)(IMAGES)
    np.testing.assert_allclose(got, convolve(IMAGES, weight), atol=1e-4)
    hf.save_adapter(
      self.root / 'ours',
      loaded.graphdef,
      loaded.state,
      train=loaded.config.train,
      places=places(True),
    )
    chex.assert_trees_all_equal(
      safetensors_numpy.load_file(
        self.root / 'ours' / 'adapter_model.safetensors'
      ),
      {PREFIX + 'ln_tuning_layers.weight': weight},
    )

  def test_refused(self):
    model = Flax(self.kernel)
    config = peftlib.AdapterConfig((peftlib.Rule('.*', methods.Loha(rank=2)),))
    split = peftlib.inject(
      *nnx.split(model), config, IMAGES, key=jax.random.key(0)
    )
    folder = self.root / 'x'
    with self.assertRaisesRegex(
      ValueError, 'save_adapter: LOHA of conv, a convolution: only LORA'
    ):
      hf.save_adapter(folder, *split, places=places(True))
    self.assertFalse(folder.exists())
    factors = {'hada_w1_a': theirs.draw(4, 2), 'hada_w1_b': theirs.draw(2, 18)}
    factors |= {'hada_w2_a': theirs.draw(4, 2), 'hada_w2_b': theirs.draw(2, 18)}
    written = self.write({'peft_type': 'LOHA', 'alpha': 2, 'r': 2}, factors)
    (written / 'adapter_config.json').write_text(
      json.dumps(
        {'peft_type': 'LOHA', 'target_modules': ['conv'], 'r': 2, 'alpha': 2}
      )
    )
    with self.assertRaisesRegex(
      ValueError, 'load_adapter: LOHA of conv, a convolution: only LORA'
    ):
      hf.load_adapter(written, *nnx.split(model), IMAGES, places=places(True))

  def test_groups(self):
    class Grouped(nnx.Module):
      def __init__(self):
        self.conv = nnx.Conv(
          4, 4, (2, 2), feature_group_count=2, rngs=nnx.Rngs(0)
        )

      def __call__(self, images):
        return self.conv(images)

    config = peftlib.LoraConfig(rank=2)
    split = peftlib.inject(
      *nnx.split(Grouped()),
      config,
      theirs.draw(1, 5, 5, 4),
      key=jax.random.key(0),
    )
    with self.assertRaisesRegex(
      ValueError, 'save_adapter: conv is a convolution in groups'
    ):
      hf.save_adapter(self.root / 'x', *split, places=places(True))


if __name__ == '__main__':
  absltest.main()
