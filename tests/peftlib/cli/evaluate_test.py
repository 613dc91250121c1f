import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest
import chex
import jax
import numpy as np

from peftlib import __main__ as command_line
from peftlib import checkpoint
from peftlib import config as config_lib
from peftlib.cli import assembly
from tests.peftlib.cli import tiny

chex.set_n_cpu_devices(8)


def run(*arguments):
  """Returns the exit status, standard output and standard error."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = command_line.run(['peftlib', 'evaluate', *arguments])
  return status, out.getvalue(), err.getvalue()


class EvaluateTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    tiny.prepare(cls)
    folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.folder = folder
    cls.model = tiny.write_model(folder / 'model')
    cls.rows = tiny.write_rows(folder / 'rows.jsonl', 5)
    cls.texts = str(folder / 'texts.jsonl')
    pathlib.Path(cls.texts).write_text('{"text": "one"}\n{"text": "two"}\n')

  def figures(self, *more):
    path = self.folder / 'figures' / f'{self.id()}.json'
    status, out, err = run(
      f'--model={self.model}',
      '--length=64',
      '--max_new_tokens=4',
      f'--json={path}',
      *more,
    )
    self.assertEqual((status, err), (0, ''))
    return json.loads(path.read_text()), out

  def test_base(self):
    figures, out = self.figures(
      f'--data={self.rows},{self.texts}', '--eval_rows=3'
    )
    self.assertEqual(figures['model'], self.model)
    self.assertIsNone(figures['adapter'])
    rows, texts = figures['files']
    self.assertEqual((rows['file'], texts['file']), (self.rows, self.texts))
    self.assertEqual((rows['rows'], texts['rows']), (3, 2))
    # ada, ben, cleo and the end; two texts of three letters, their first not
    # learnt, and the end.
    self.assertEqual((rows['loss_tokens'], texts['loss_tokens']), (13, 6))
    # The tiny model knows nothing.
    self.assertAlmostEqual(rows['loss'], np.log(264), delta=1.0)
    self.assertEqual(rows['exact_match'], 0.0)
    self.assertIsNone(texts['exact_match'])
    self.assertEqual(texts['answers'], [])
    self.assertLen(rows['answers'], 3)
    self.assertEqual(
      {k: v for k, v in rows['answers'][0].items() if k != 'given'},
      {'asked': 'Ada 0', 'right': 'ada', 'correct': False},
    )
    self.assertRegex(out, rf' 3 +13 +{rows["loss"]:.4f} +0\.0%')
    self.assertRegex(out, rf' 2 +6 +{texts["loss"]:.4f} +-')

  def test_adapter(self):
    config = config_lib.LoraConfig(
      module_path='.*_proj', rank=2, weight_qtype='int8', tile_size=16
    )
    base, fingerprint = assembly.load_base(self.model, compute_dtype='float32')
    trainable = assembly.assemble(base, config, key=jax.random.key(0)).trainable
    trainable = jax.tree.map(lambda x: x + 0.1, trainable)
    adapter = self.folder / 'adapter'
    checkpoint.save_adapter(
      adapter,
      trainable,
      checkpoint.make_manifest(trainable, config, fingerprint),
    )
    plain, _ = self.figures(f'--data={self.rows}')
    adapted, _ = self.figures(f'--data={self.rows}', f'--adapter={adapter}')
    self.assertEqual(adapted['adapter'], str(adapter))
    self.assertNotAlmostEqual(
      plain['files'][0]['loss'], adapted['files'][0]['loss'], places=2
    )

  def test_row_without_an_answer(self):
    path = self.folder / 'mixed.jsonl'
    path.write_text('{"text": "one"}\n{"prompt": "a", "completion": "b"}\n')
    status, out, err = run(
      f'--model={self.model}', f'--data={path}', '--length=64'
    )
    self.assertEqual((status, out), (2, ''))
    self.assertStartsWith(
      err, f'peftlib evaluate: {path}:1: a text row is no chat'
    )

  def test_directory_that_is_no_adapter(self):
    status, _, err = run(
      f'--model={self.model}',
      f'--data={self.rows}',
      f'--adapter={self.model}',
      '--length=64',
    )
    self.assertEqual(status, 2)
    self.assertEqual(
      err,
      'peftlib evaluate: peftlib.read_manifest: '
      f'{self.model} is not an adapter directory: it lacks manifest.json or'
      ' arrays/, which save_adapter writes.\n',
    )


if __name__ == '__main__':
  absltest.main()
