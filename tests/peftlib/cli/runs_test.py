import dataclasses
import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from peftlib.cli import errors
from peftlib.cli import options as options_lib
from peftlib.cli import runs


class RunsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.paths = runs.paths(str(self.folder))
    self.options = options_lib.Finetune(output=str(self.folder))

  def begin(self, options=None):
    runs.write_json(
      self.paths.run,
      runs.describe(
        options or self.options,
        base_fingerprint='base',
        data_fingerprint='data',
        steps=7,
      ),
    )

  def refusal(self, options):
    with self.assertRaises(errors.UserError) as caught:
      runs.check_output(self.paths, options)
    return str(caught.exception)

  def test_folder_of_other_things_is_new(self):
    (self.folder / 'notes.txt').touch()
    self.assertEqual(runs.status(self.paths), 'new')
    self.assertEqual(runs.check_output(self.paths, self.options), 'new')

  def test_status(self):
    self.begin()
    self.assertEqual(runs.status(self.paths), 'unfinished')
    runs.write_json(self.paths.summary, {})
    self.assertEqual(runs.status(self.paths), 'finished')

  def test_unfinished(self):
    self.begin()
    self.assertIn('give --resume to go on', self.refusal(self.options))
    resume = dataclasses.replace(self.options, resume=True)
    self.assertEqual(runs.check_output(self.paths, resume), 'unfinished')
    overwrite = dataclasses.replace(self.options, overwrite=True, rank=3)
    self.assertEqual(runs.check_output(self.paths, overwrite), 'new')

  def test_parts_without_run_json(self):
    self.paths.adapter.mkdir()
    self.assertEqual(
      self.refusal(dataclasses.replace(self.options, resume=True)),
      f'--output={self.folder}: has parts of a run but no run.json; give'
      ' --overwrite to replace them, or another folder',
    )

  def test_every_difference_is_named(self):
    self.begin()
    other = dataclasses.replace(
      self.options, resume=True, rank=3, mesh='fsdp=2'
    )
    message = self.refusal(other)
    self.assertIn('--rank was 16, is now 3; ', message)
    self.assertIn('--mesh was not given, is now fsdp=2; ', message)

  def test_flags_that_may_differ(self):
    self.begin()
    other = dataclasses.replace(
      self.options,
      resume=True,
      eval_rows=3,
      max_new_tokens=9,
      checkpoint_every=1,
      eval_data=('x',),
    )
    self.assertEqual(runs.check_output(self.paths, other), 'unfinished')

  @parameterized.parameters(
    ('--model', {'base_fingerprint': 'other'}, 'base'),
    ('--data', {'data_fingerprint': 'other'}, 'data'),
  )
  def test_other_contents(self, flag, change, saved):
    self.begin()
    prints = {'base_fingerprint': 'base', 'data_fingerprint': 'data'}
    runs.check_contents(self.paths, **prints)
    with self.assertRaises(errors.UserError) as caught:
      runs.check_contents(self.paths, **{**prints, **change})
    self.assertEqual(
      str(caught.exception),
      f'--resume: {flag} has other contents than the run started with'
      f' (fingerprint was {saved}, is now other)',
    )

  def test_clear_leaves_other_files(self):
    self.begin()
    self.paths.checkpoints.mkdir()
    (self.paths.checkpoints / '1').touch()
    (self.folder / 'notes.txt').touch()
    runs.clear(self.paths)
    self.assertEqual([p.name for p in self.folder.iterdir()], ['notes.txt'])

  def test_lock(self):
    with runs.locked(self.paths):
      with self.assertRaisesRegex(errors.UserError, 'another process is at'):
        with runs.locked(self.paths):
          pass
    with runs.locked(self.paths):
      pass

  def test_run_json(self):
    self.begin()
    saved = json.loads(self.paths.run.read_text())
    self.assertEqual(
      list(saved),
      [
        'flags',
        'seed',
        'steps',
        'base_fingerprint',
        'data_fingerprint',
        'versions',
      ],
    )
    self.assertEqual(saved['steps'], 7)
    self.assertEqual(runs.different_flags(saved['flags'], self.options), [])

  def test_broken_json(self):
    self.paths.run.write_text('{')
    with self.assertRaisesRegex(errors.UserError, 'run.json: not valid JSON'):
      runs.read_json(self.paths.run)

  def test_failed_write_leaves_the_old_file(self):
    runs.write_json(self.paths.run, {'a': 1})
    with self.assertRaises(TypeError):
      runs.write_json(self.paths.run, {'a': object()})
    with self.assertRaises(TypeError):
      runs.write_bytes(self.paths.run, 'no bytes')
    self.assertEqual(runs.read_json(self.paths.run), {'a': 1})
    self.assertEqual([p.name for p in self.folder.iterdir()], ['run.json'])

  def test_metrics_after_a_kill(self):
    lines = [json.dumps({'step': i, 'loss': 1.0}) + '\n' for i in (1, 2, 3)]
    self.paths.metrics.write_text(''.join(lines) + '{"step": 4, "lo')
    self.assertLen(runs.read_metrics(self.paths.metrics), 3)
    with runs.open_metrics(self.paths.metrics, 2) as file:
      runs.append_metrics(file, {'step': 3, 'loss': 2.0})
      # Others can read it while the file is open.
      self.assertEqual(
        runs.read_metrics(self.paths.metrics),
        [
          {'step': 1, 'loss': 1.0},
          {'step': 2, 'loss': 1.0},
          {'step': 3, 'loss': 2.0},
        ],
      )

  def test_no_metrics(self):
    self.assertEqual(runs.read_metrics(self.paths.metrics), [])

  def test_loss_plot(self):
    runs.write_loss_plot(
      self.paths.loss, [{'step': i, 'loss': 1 / i} for i in (1, 2, 3)]
    )
    content = self.paths.loss.read_bytes()
    self.assertEqual(content[:8], b'\x89PNG\r\n\x1a\n')
    # Width and height are big-endian from byte 16 on: 7 x 4 inches, 120 dpi.
    self.assertEqual(int.from_bytes(content[16:20]), 840)
    self.assertEqual(int.from_bytes(content[20:24]), 480)


if __name__ == '__main__':
  absltest.main()
