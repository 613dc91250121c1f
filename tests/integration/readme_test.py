"""Runs the loop of README.md as it is printed, in a script of its own."""

import pathlib
import re
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

_ROOT = pathlib.Path(__file__).parents[2]

_COMMON = """
import sys
import jax.numpy as jnp
from flax import nnx
import jax

inputs = jax.random.normal(jax.random.key(2), (16, 8))
targets = jnp.sin(inputs.sum(-1, keepdims=True))
batches = [(inputs, targets)] * 60

def loss_fn(model, batch, rngs):
  x, y = batch
  return jnp.mean((model(x) - y) ** 2), {'tokens': jnp.int32(x.shape[0])}
"""

_MLP = """
class Model(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(8, 32, rngs=rngs)
    self.down = nnx.Linear(32, 1, rngs=rngs)

  def __call__(self, x):
    return self.down(nnx.relu(self.up(x)))
"""

_SCANNED = """
class Block(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.RMSNorm(8, rngs=rngs)
    self.up = nnx.Linear(8, 16, rngs=rngs)
    self.down = nnx.Linear(16, 8, rngs=rngs)

  def __call__(self, x):
    return x + self.down(nnx.silu(self.up(self.norm(x))))

class Model(nnx.Module):
  def __init__(self, rngs):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
      return Block(rngs)
    self.layers = make(rngs)
    self.head = nnx.Linear(8, 1, rngs=rngs)

  def __call__(self, x):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def body(x, layer):
      return layer(x)
    return self.head(body(x, self.layers))
"""

_CHECKS = """
start = loss_fn(model, batches[0], None)[0]
end = loss_fn(tuned, batches[0], None)[0]
assert metrics['loss'] < 0.5 * start, (metrics, start)
assert end < 0.5 * start, (end, start)
from peftlib import testing as peftlib_testing
from transforms import testing
after = nnx.state(tuned)
peftlib_testing.assert_trainable(after, config, ['.*_lora_[ab]'])
testing.assert_states_share(
  transforms.exclude(after, nnx.LoRAParam), nnx.state(model)
)
print('loss', float(start), float(end))
"""


_OWN_METHOD = """
import jax
from flax import nnx
import peftlib
from peftlib import methods

assert methods.by_name('column_shift') is ColumnShift
model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(0), (2, 4))
graphdef, state = peftlib.inject(
  *nnx.split(model), config, x, key=jax.random.key(1)
)
assert (nnx.merge(graphdef, state)(x) == model(x)).all()
state['kernel_shift'] = state['kernel_shift'].replace(jnp.array([1.0, 0, 2]))
got = nnx.merge(graphdef, state)(x)
expected = model(x) + x.sum(-1, keepdims=True) * jnp.array([1.0, 0, 2])
assert jnp.allclose(got, expected, atol=1e-5), (got, expected)
_, merged = peftlib.merge_adapters(graphdef, state)
assert jnp.allclose(
  merged['kernel'][...], model.kernel[...] + jnp.array([1.0, 0, 2])
)
print('loss of nothing')
"""


def _printed() -> list[str]:
  text = (_ROOT / 'README.md').read_text('utf-8')
  return re.findall(r'```python\n(.*?)```', text, re.DOTALL)


def _printed_loop() -> str:
  return _printed()[0]


class ReadmeTest(parameterized.TestCase):
  def test_is_twelve_lines_after_the_imports(self):
    _, _, loop = _printed_loop().partition('\n\n')
    self.assertLen(loop.splitlines(), 12)

  def test_a_method_of_your_own_is_thirty_lines_and_works(self):
    loop, method = _printed()
    del loop
    self.assertLessEqual(len(method.splitlines()), 30)
    self._run(f'{method}\n{_OWN_METHOD}')

  @parameterized.named_parameters(('mlp', _MLP), ('nnx_scan', _SCANNED))
  def test_loop_runs_as_printed(self, model):
    self._run(
      f'{_COMMON}\n{model}\nmodel = Model(nnx.Rngs(0))\n'
      f'{_printed_loop()}\n{_CHECKS}'
    )

  def _run(self, text):
    script = pathlib.Path(self.create_tempdir().full_path) / 'loop.py'
    script.write_text(text, 'utf-8')
    result = subprocess.run(
      [sys.executable, str(script)],
      cwd=_ROOT,
      env={'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'},
      capture_output=True,
      text=True,
      check=False,
      timeout=240,
    )
    self.assertEqual(result.returncode, 0, msg=result.stderr)
    self.assertStartsWith(result.stdout, 'loss ')


if __name__ == '__main__':
  absltest.main()
