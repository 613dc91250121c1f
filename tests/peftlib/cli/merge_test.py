import contextlib
import io
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
from peftlib import models
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


def logits(graphdef, state, tokens):
  return jax.jit(lambda s: nnx.merge(graphdef, s, copy=True)(tokens))(state)


class MergeTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    tiny.prepare(cls)
    cls.folder = pathlib.Path(
      cls.enterClassContext(tempfile.TemporaryDirectory())
    )
    cls.model = tiny.write_model(cls.folder / 'model')
    cls.rows = tiny.write_rows(cls.folder / 'rows.jsonl')
    cls.tokens = jnp.arange(12).reshape(2, 6)

  def trained(self, method, *flags):
    """The adapter of a short run; what it answers; what the base does."""
    output = pathlib.Path(self.create_tempdir().full_path) / 'run'
    given = [
      flag
      for flag in tiny.finetune_flags(
        self.model, self.rows, output, f'--method={method}', *flags
      )
      if not flag.startswith(('--rank', '--dropout')) or flag in flags
    ]
    status, _, err = run(*given[1:])
    self.assertEqual((status, err), (0, ''))
    adapter = str(runs.paths(output).adapter)
    adapted = assembly.load_adapted(
      self.model, adapter, compute_dtype='float32'
    )
    base, _ = assembly.load_base(self.model, compute_dtype='float32')
    return (
      adapter,
      logits(adapted.graphdef, adapted.state, self.tokens),
      logits(base.graphdef, base.state, self.tokens),
    )

  # Constants (the projections of VeRA), a weight that is read (DoRA) and one
  # that is replaced (PiSSA), over a quantized base.
  @parameterized.parameters(
    ('dora', '--rank=2'),
    ('vera', '--rank=4'),
    ('pissa', '--rank=2'),
  )
  def test_answers_as_base_and_adapter_do(self, method, *flags):
    adapter, expected, base = self.trained(method, *flags)
    self.assertGreater(float(jnp.abs(expected - base).max()), 1e-4)
    output = pathlib.Path(self.create_tempdir().full_path) / 'merged'
    status, out, err = run(
      'merge',
      f'--model={self.model}',
      f'--adapter={adapter}',
      f'--output={output}',
    )
    self.assertEqual((status, err), (0, ''))
    self.assertEqual(out.strip(), f'Wrote {output}.')
    merged = models.load(output)
    np.testing.assert_allclose(
      logits(merged.graphdef, merged.state, self.tokens), expected, atol=1e-4
    )

  @parameterized.parameters(
    ([], 'peftlib merge: --adapter: give the folder of an adapter\n'),
    (
      ['--adapter=nowhere'],
      'peftlib merge: --adapter=nowhere: no such file or directory; expected a'
      ' folder of an adapter\n',
    ),
    (
      ['--adapter=/', '--output=/'],
      'peftlib merge: --output=/: is there already; give another folder\n',
    ),
    (['--adapter=/'], 'peftlib merge: --output: give a folder to write\n'),
  )
  def test_wrong_flags(self, flags, message):
    status, out, err = run('merge', f'--model={self.model}', *flags)
    self.assertEqual((status, out, err), (2, '', message))


if __name__ == '__main__':
  absltest.main()
