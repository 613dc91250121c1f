import json
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlib
from peftlib import checkpoint
from peftlib import models
from peftlib.cli import assembly
from peftlib.cli import errors
from tests.peftlib.cli import tiny
from transforms import testing

chex.set_n_cpu_devices(8)

_CONFIG = peftlib.LoraConfig(
  module_path='.*q_proj', rank=2, weight_qtype='int8', tile_size=16
)


def _trained(directory, model, config):
  """Saves an adapter whose values aren't those of the start."""
  base, fingerprint = assembly.load_base(model, compute_dtype='float32')
  assembled = assembly.assemble(base, config, key=jax.random.key(3))
  trainable = jax.tree.map(lambda x: x + 0.125, assembled.trainable)
  checkpoint.save_adapter(
    directory,
    trainable,
    checkpoint.make_manifest(trainable, config, fingerprint),
  )
  return trainable


class AssemblyTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.folder = pathlib.Path(folder)
    cls.model = tiny.write_model(cls.folder / 'model')

  def output(self, adapted):
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    return nnx.merge(adapted.graphdef, adapted.state)(tokens)

  def test_abstract_is_the_shape_of_the_loaded(self):
    base, _ = assembly.load_base(self.model, compute_dtype='bfloat16')
    abstract = assembly.abstract_base(self.model, compute_dtype='bfloat16')
    testing.assert_same_graph(
      (abstract.graphdef, abstract.state), (base.graphdef, base.state)
    )
    testing.assert_no_abstract_leaves(base.state)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract.state, base.state)
    leaves = jax.tree.leaves(abstract.state)
    self.assertEqual({type(x) for x in leaves}, {jax.ShapeDtypeStruct})
    self.assertEqual({x.dtype for x in leaves}, {jnp.dtype('float32')})

  def test_assembled(self):
    base, _ = assembly.load_base(self.model, compute_dtype='float32')
    out = assembly.assemble(base, _CONFIG, key=jax.random.key(0))
    self.assertEqual(
      [path for path, _ in nnx.to_flat_state(out.trainable)],
      [
        ('layers', 'self_attn', 'q_proj', 'kernel_lora_a'),
        ('layers', 'self_attn', 'q_proj', 'kernel_lora_b'),
      ],
    )
    self.assertIn(
      'array', out.frozen['layers']['self_attn']['q_proj']['kernel']
    )

  def test_assembled_whole(self):
    base, _ = assembly.load_base(self.model, compute_dtype='float32')
    out = assembly.assemble(base, None, key=jax.random.key(0))
    self.assertEmpty(jax.tree.leaves(out.frozen))
    chex.assert_trees_all_equal(out.trainable, base.state)

  @parameterized.named_parameters(('lora', _CONFIG), ('full', None))
  def test_adapter(self, config):
    directory = pathlib.Path(self.create_tempdir().full_path) / 'adapter'
    trained = _trained(directory, self.model, config)
    adapted = assembly.load_adapted(
      self.model, str(directory), compute_dtype='float32'
    )
    self.assertEqual(adapted.config, config)
    flat = dict(nnx.to_flat_state(adapted.state))
    for path, variable in nnx.to_flat_state(trained):
      np.testing.assert_array_equal(
        flat[path].get_raw_value(), variable.get_raw_value()
      )
    base = assembly.load_adapted(self.model, None, compute_dtype='float32')
    self.assertIsNone(base.config)
    self.assertGreater(
      float(jnp.abs(self.output(adapted) - self.output(base)).max()), 1e-3
    )

  def test_adapter_of_another_model(self):
    directory = pathlib.Path(self.create_tempdir().full_path) / 'adapter'
    other = tiny.write_model(directory.parent / 'other', seed=1)
    _trained(directory, other, _CONFIG)
    prints = [
      models.fingerprint(models.load(path).state)
      for path in (other, self.model)
    ]
    self.assertNotEqual(*prints)
    with self.assertRaisesRegex(
      ValueError,
      f'base_fingerprint: saved {prints[0]!r}, expected {prints[1]!r}',
    ):
      assembly.load_adapted(self.model, str(directory), compute_dtype='float32')

  def test_no_adapter(self):
    with self.assertRaisesRegex(FileNotFoundError, 'not an adapter directory'):
      assembly.load_adapted(self.model, self.model, compute_dtype='float32')

  def test_tokenizer_of_another_model(self):
    directory = pathlib.Path(self.create_tempdir().full_path) / 'model'
    model = tiny.write_model(directory)
    self.assertEqual(assembly.load_tokenizer(model).vocab_size, 258)
    config = directory / 'config.json'
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, 'vocab_size': 200}))
    with self.assertRaises(errors.UserError) as caught:
      assembly.load_tokenizer(model)
    self.assertEqual(
      str(caught.exception),
      f'--model={model}: its tokenizer has 258 tokens, more than the model,'
      ' 200; expected files of one model',
    )


if __name__ == '__main__':
  absltest.main()
