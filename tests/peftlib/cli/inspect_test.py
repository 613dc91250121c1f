import contextlib
import io
import pathlib
import re
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax

from peftlib import __main__ as command_line
from peftlib import checkpoint
from peftlib import config as config_lib
from peftlib import models
from peftlib.cli import assembly
from peftlib.models import hf_files
from tests.peftlib.cli import tiny

chex.set_n_cpu_devices(8)


def run(*arguments):
  """Returns the exit status, standard output and standard error."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = command_line.run(['peftlib', 'inspect', *arguments])
  return status, out.getvalue(), err.getvalue()


class InspectTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    tiny.prepare(cls)
    cls.folder = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    cls.model = tiny.write_model(cls.folder / 'model')

  def table(self, *arguments):
    """Rows of the table by module."""
    status, out, err = run(f'--model={self.model}', *arguments)
    self.assertEqual((status, err), (0, ''))
    rows = [re.split(r' {2,}', line.strip()) for line in out.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) > 2}

  def test_no_weight_is_read(self):
    with mock.patch.object(
      hf_files.HfCheckpoint, 'tensors', side_effect=AssertionError
    ):
      table = self.table('--module_path=.*(q|v)_proj', '--tile_size=16')
    self.assertEqual(
      set(table),
      {
        'module',
        'layers/self_attn/q_proj',
        'layers/self_attn/v_proj',
        '(the rest)',
        'all',
      },
    )
    # Rank 16: (32 + 16) x 16 in 2 layers; 2 x 32 x 16 half bytes, 4 tiles of
    # 16 scales in float32 together.
    self.assertEqual(
      table['layers/self_attn/v_proj'],
      ['2 x 32 x 16 uint4', '1,536', '1,024', '6.9 kB'],
    )

  def test_unquantized(self):
    table = self.table(
      '--weight_qtype=none', '--rank=1', '--module_path=.*up_proj'
    )
    self.assertEqual(
      table['layers/mlp/up_proj'],
      ['2 x 32 x 64 float32', '192', '4,096', '17.2 kB'],
    )

  def test_whole_model(self):
    table = self.table('--method=full')
    self.assertEqual(table['all'], ['27,040', '0', '108.2 kB'])

  def test_adapter(self):
    config = config_lib.LoraConfig(module_path='.*k_proj', rank=3)
    base, fingerprint = assembly.load_base(self.model, compute_dtype='float32')
    trainable = assembly.assemble(base, config, key=jax.random.key(0)).trainable
    adapter = self.folder / 'adapter'
    checkpoint.save_adapter(
      adapter,
      trainable,
      checkpoint.make_manifest(trainable, config, fingerprint),
    )
    with mock.patch.object(models, 'load', side_effect=AssertionError):
      table = self.table(f'--adapter={adapter}')
    # (32 + 16) x 3 in 2 layers.
    self.assertEqual(
      table['layers/self_attn/k_proj'][:2], ['2 x 32 x 16 float32', '288']
    )

  def test_nothing_matches(self):
    status, out, err = run(f'--model={self.model}', '--module_path=.*q_prj')
    self.assertEqual((status, out), (2, ''))
    self.assertStartsWith(
      err,
      "peftlib inspect: peftlib: module_path '.*q_prj' matches no module with"
      ' a weight that takes part in a contraction. It has to match the whole'
      " path; nearest: ['layers/self_attn/q_proj', ",
    )

  def test_tile_size_does_not_fit(self):
    status, _, err = run(f'--model={self.model}', '--module_path=.*q_proj')
    self.assertEqual(status, 2)
    self.assertEqual(
      err,
      'peftlib inspect: peftlib.quantize_base: tile_size=64 does not divide'
      ' the contracted width of layers/self_attn/q_proj.kernel (32).\n',
    )


if __name__ == '__main__':
  absltest.main()
