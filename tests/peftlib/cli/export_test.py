import contextlib
import io
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

from peftlib import __main__ as command_line
from peftlib.cli import assembly
from peftlib.cli import runs
from tests.peftlib.cli import tiny

chex.set_n_cpu_devices(8)


def run(*arguments):
  """Returns the exit status, standard output and standard error."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = command_line.run(['peftlib', *arguments])
  return status, out.getvalue(), err.getvalue()


class ExportTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    tiny.prepare(cls)
    cls.folder = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    cls.model = tiny.write_model(cls.folder / 'model')
    rows = tiny.write_rows(cls.folder / 'rows.jsonl')
    flags = tiny.finetune_flags(cls.model, rows, cls.folder / 'run')
    flags.remove('--tile_size=16')
    status, _, err = run(*flags[1:], '--weight_qtype=none')
    assert (status, err) == (0, ''), err
    cls.adapter = str(runs.paths(cls.folder / 'run').adapter)

  def logits(self, adapter):
    adapted = assembly.load_adapted(
      self.model, adapter, compute_dtype='float32'
    )
    tokens = jnp.arange(12).reshape(2, 6)
    return jax.jit(lambda s: nnx.merge(adapted.graphdef, s, copy=True)(tokens))(
      adapted.state
    )

  def test_hf_directory_gives_the_same_logits(self):
    output = self.folder / 'exported'
    status, out, err = run(
      'export',
      f'--model={self.model}',
      f'--adapter={self.adapter}',
      f'--output={output}',
    )
    self.assertEqual((status, err), (0, ''))
    self.assertEqual(out.strip(), f'Wrote {output}.')
    config = json.loads((output / 'adapter_config.json').read_text())
    self.assertEqual(
      {k: config[k] for k in ('peft_type', 'r', 'lora_alpha', 'bias')},
      {'peft_type': 'LORA', 'r': 2, 'lora_alpha': 32.0, 'bias': 'none'},
    )
    self.assertEqual(sorted(config['target_modules']), ['q_proj', 'v_proj'])
    # The exported directory is an adapter of the commands too.
    np.testing.assert_allclose(
      self.logits(str(output)), self.logits(self.adapter), atol=1e-6
    )
    again = run(
      'export',
      f'--model={self.model}',
      f'--adapter={self.adapter}',
      f'--output={output}',
    )
    self.assertEqual(
      again,
      (
        2,
        '',
        f'peftlib export: --output={output}: is there already; give another'
        ' folder\n',
      ),
    )


if __name__ == '__main__':
  absltest.main()
