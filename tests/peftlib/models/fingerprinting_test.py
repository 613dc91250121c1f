import os
import subprocess
import sys

from absl.testing import absltest
from flax import nnx
import jax
import jax.numpy as jnp

from peftlib import models
from tests.peftlib.models import golden

_PROGRAM = """
import sys
from peftlib import models
print(models.fingerprint(models.load(sys.argv[1]).state))
"""


class FingerprintTest(absltest.TestCase):
  def test_same_in_another_process_and_for_another_file_format(self):
    path = os.path.join(self.create_tempdir(), 'model.gguf')
    golden.write_gguf(path, 'llama_tiny')
    other = subprocess.run(
      [sys.executable, '-c', _PROGRAM, path],
      check=True,
      capture_output=True,
      text=True,
      env={
        **os.environ,
        'PYTHONHASHSEED': '7',
        'PYTHONPATH': os.pathsep.join(sys.path),
      },
    ).stdout.strip()
    here = models.fingerprint(models.load(golden.directory('llama_tiny')).state)
    self.assertEqual(other, here)
    self.assertRegex(here, '^[0-9a-f]{64}$')

  def test_tells_models_apart(self):
    _, state = golden.tiny_model()
    _, other_values = golden.tiny_model(seed=1)
    last = lambda x: x.at[(-1,) * x.ndim].add(1)
    prints = [
      models.fingerprint(s)
      for s in (
        state,
        other_values,
        jax.tree.map(last, state),
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), state),
        nnx.State({'inner': dict(state)}),
        jax.tree.map(lambda x: x.reshape(-1), state),
      )
    ]
    self.assertLen(set(prints), len(prints))

  def test_adapters_do_not_matter(self):
    _, state = golden.tiny_model()
    flat = dict(nnx.to_flat_state(state))
    flat[('norm', 'lora')] = nnx.LoRAParam(jnp.ones(3))
    self.assertEqual(
      models.fingerprint(nnx.from_flat_state(flat)), models.fingerprint(state)
    )

  def test_rejects(self):
    graphdef, state = golden.tiny_model()
    with self.assertRaisesRegex(TypeError, 'nnx.split it first'):
      models.fingerprint(nnx.merge(graphdef, state))
    with self.assertRaisesRegex(ValueError, 'no base weights'):
      models.fingerprint(nnx.State({'a': nnx.LoRAParam(jnp.ones(3))}))


if __name__ == '__main__':
  absltest.main()
