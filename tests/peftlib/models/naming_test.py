import json

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
from safetensors import numpy as safetensors_numpy

from peftlib.models import config as config_lib
from peftlib.models import decoder
from peftlib.models import naming
from tests.peftlib.models import golden


class TargetsTest(parameterized.TestCase):
  @parameterized.parameters(*golden.CASES)
  def test_names_and_shapes_are_those_transformers_saves(self, case):
    directory = golden.directory(case)
    config = config_lib.DecoderConfig.from_hf(
      json.loads((directory / 'config.json').read_text())
    )
    weights = safetensors_numpy.load_file(directory / 'model.safetensors')
    targets = naming.targets(config)
    self.assertEqual(
      {name: target.shape for name, target in targets.items()},
      {name: values.shape for name, values in weights.items()},
    )
    _, state = nnx.split(
      nnx.eval_shape(lambda: decoder.Decoder(config, rngs=nnx.Rngs(0)))
    )
    self.assertEqual(
      {target.path for target in targets.values()},
      {path for path, _ in nnx.to_flat_state(state)},
    )

  def test_a_kernel_and_a_norm(self):
    targets = naming.targets(golden.tiny_config())
    self.assertEqual(
      targets['model.layers.2.mlp.down_proj.weight'],
      naming.Target(
        ('layers', 'mlp', 'down_proj', 'kernel'), 2, (16, 24), True
      ),
    )
    self.assertEqual(
      targets['model.norm.weight'],
      naming.Target(('norm', 'scale'), None, (16,), False),
    )


if __name__ == '__main__':
  absltest.main()
