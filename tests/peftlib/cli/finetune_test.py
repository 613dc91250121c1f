import contextlib
import io
import json
import logging
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import numpy as np
import orbax.checkpoint as ocp

from peftlib import __main__ as command_line
from peftlib import checkpoint
from peftlib import models
from peftlib.cli import runs
from tests.peftlib.cli import tiny

chex.set_n_cpu_devices(8)

_ROOT = pathlib.Path(__file__).resolve().parents[3]

# Dies in the middle of a run as a machine does: without a chance to tidy up.
_KILLED = """
import os, signal, sys
import chex
import jax
chex.set_n_cpu_devices(8)
jax.config.update('jax_disable_most_optimizations', True)
from peftlib import __main__ as command_line
from peftlib.cli import runs
append = runs.append_metrics
def append_and_die(file, record):
  append(file, record)
  if record['step'] == 5:
    file.write('{"step": 6, "lo')
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
runs.append_metrics = append_and_die
command_line.run(sys.argv)
"""


def run(argv):
  """Returns the exit status, standard output and standard error."""
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = command_line.run(argv)
  return status, out.getvalue(), err.getvalue()


def curve(output):
  records = runs.read_metrics(runs.paths(output).metrics)
  return [
    (r['step'], r['loss'], r['grad_norm'], r['learning_rate']) for r in records
  ]


def adapter(output):
  """The adapter's arrays by name, as they are on disk."""
  with ocp.StandardCheckpointer() as checkpointer:
    values = checkpointer.restore(runs.paths(output).adapter / 'arrays')
  return {name: np.asarray(value) for name, value in values.items()}


class FinetuneTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    tiny.prepare(cls)
    folder = cls.enterClassContext(tempfile.TemporaryDirectory())
    cls.folder = pathlib.Path(folder)
    cls.model = tiny.write_model(cls.folder / 'model')
    cls.rows = tiny.write_rows(cls.folder / 'rows.jsonl')
    cls.held_out = tiny.write_rows(cls.folder / 'held_out.jsonl', 5)
    # The run that the others are compared with.
    cls.whole = cls.folder / 'whole'
    cls.result = run(
      cls.flags(
        cls.whole,
        f'--eval_data={cls.held_out}',
        '--eval_rows=4',
        '--max_new_tokens=8',
        '--log_every=4',
      )
    )

  @classmethod
  def flags(cls, output, *more):
    return tiny.finetune_flags(cls.model, cls.rows, output, *more)

  def output(self):
    return pathlib.Path(self.create_tempdir().full_path) / 'run'

  def assert_same_run(self, output):
    self.assertEqual(curve(output), curve(self.whole))
    chex.assert_trees_all_equal(adapter(output), adapter(self.whole))

  # What a run leaves and shows.

  def test_status_and_shown_text(self):
    status, out, err = self.result
    self.assertEqual((status, err), (0, ''))
    # 2 layers x (32 x 2 + 2 x 32), and the weight in uint4 of 2 x 32 x 32.
    self.assertRegex(
      out, r'layers/self_attn/q_proj +2 x 32 x 32 uint4 +256 +2,048 '
    )
    # (32 + 32) x 2 for q, (32 + 16) x 2 for v, in 2 layers.
    self.assertRegex(out, r'\ball +448 +27,040 ')
    steps = re.findall(
      r'^step (\d)/6  loss \d\.\d{4}  \d+ tokens/s  0:\d\d left$', out, re.M
    )
    # The first, the last, and each fourth.
    self.assertEqual(steps, ['1', '4', '6'])
    self.assertRegex(out, r'before training: \d+\.\d% of 4 exact in ')
    self.assertRegex(out, r'after training: \d+\.\d% of 4 exact in ')
    for text in (
      'right    ada',
      'peak memory',
      'seconds of compilation',
      'bytes of the optimizer',
      'rows cut to fit',
    ):
      self.assertIn(text, out)

  def test_metrics(self):
    records = runs.read_metrics(self.whole / 'metrics.jsonl')
    self.assertEqual([r['step'] for r in records], [1, 2, 3, 4, 5, 6])
    self.assertEqual(
      list(records[0]),
      [
        'step',
        'loss',
        'grad_norm',
        'update_norm',
        'learning_rate',
        'tokens',
        'loss_tokens',
        'tokens_per_second',
        'seconds',
      ],
    )
    # Two steps of warm-up, then half a cosine over four.
    np.testing.assert_allclose(
      [r['learning_rate'] for r in records],
      [7.5e-4]
      + [1.5e-3 * (1 + np.cos(np.pi * i / 4)) / 2 for i in (0, 0, 1, 2, 3)],
      rtol=1e-5,
    )
    # Of a model that knows nothing: log(264).
    self.assertAlmostEqual(records[0]['loss'], np.log(264), delta=1.0)
    self.assertLess(records[-1]['loss'], records[0]['loss'])

  def test_run_json(self):
    run_json = json.loads((self.whole / 'run.json').read_text())
    self.assertEqual(run_json['seed'], 0)
    self.assertEqual(run_json['steps'], 6)
    self.assertEqual(run_json['flags']['rank'], 2)
    self.assertEqual(run_json['flags']['weight_qtype'], 'nf4')
    self.assertEqual(run_json['flags']['model'], self.model)
    self.assertEqual(run_json['versions']['jax'], jax.__version__)
    loaded = models.load(self.model)
    self.assertEqual(
      run_json['base_fingerprint'], models.fingerprint(loaded.state)
    )

  def test_summary_json(self):
    summary = json.loads((self.whole / 'summary.json').read_text())
    self.assertEqual(summary['rows'], 24)
    self.assertEqual(summary['truncated_rows'], 0)
    (file,) = summary['exact_match']
    self.assertEqual((file['file'], file['rows']), (self.held_out, 4))
    # 448 values in float32, two moments of each and two counters of int32,
    # two hyperparameters in float32.
    self.assertEqual(summary['trainable_bytes'], 448 * 4)
    self.assertEqual(summary['optimizer_bytes'] // (448 * 4), 2)
    self.assertBetween(summary['pad_share'], 0.0, 0.5)
    self.assertGreater(summary['compile_seconds'], 0)
    self.assertGreater(summary['peak_bytes'], 1e8)
    self.assertEqual(summary['adapter'], str(self.whole / 'adapter'))

  def test_files(self):
    self.assertTrue((self.whole / 'loss.png').read_bytes()[:4], b'\x89PNG')
    names = {p.name for p in self.whole.iterdir() if p.name != '.lock'}
    self.assertEqual(
      names,
      {
        'adapter',
        'after.json',
        'before.json',
        'checkpoints',
        'loss.png',
        'metrics.jsonl',
        'run.json',
        'summary.json',
      },
    )
    manifest = checkpoint.read_manifest(self.whole / 'adapter')
    self.assertEqual(
      {k: v for k, v in manifest.config.items() if k in ('rank', 'tile_size')},
      {'rank': 2, 'tile_size': 16},
    )
    self.assertEqual(
      {k: v.shape for k, v in adapter(self.whole).items()},
      {k: tuple(shape) for k, (shape, _) in manifest.leaves.items()},
    )
    self.assertLen(manifest.leaves, 4)

  # Going on.

  def test_killed_and_resumed_is_the_unbroken_run(self):
    output = self.output()
    killed = subprocess.run(
      [sys.executable, '-c', _KILLED, *self.flags(output)[1:]],
      cwd=_ROOT,
      capture_output=True,
      text=True,
    )
    self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
    self.assertEqual([s for s, *_ in curve(output)], [1, 2, 3, 4, 5])
    self.assertFalse((output / 'adapter').exists())
    status, out, err = run(self.flags(output, '--resume'))
    self.assertEqual((status, err), (0, ''))
    # Step 4's checkpoint may not have been complete.
    self.assertRegex(out, r'Resumed after step [24]\.')
    self.assert_same_run(output)

  def test_interrupted_run(self):
    output = self.output()
    append = runs.append_metrics

    def append_and_interrupt(file, record):
      append(file, record)
      if record['step'] == 3:
        signal.raise_signal(signal.SIGINT)

    with mock.patch.object(runs, 'append_metrics', append_and_interrupt):
      status, out, err = run(self.flags(output))
    self.assertEqual((status, err), (130, ''))
    self.assertIn(
      'Stopped after step 3, which is saved. To go on, give the same flags and'
      ' --resume.',
      ' '.join(out.split()),
    )
    self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)

    with self.subTest('is not begun again'):
      status, _, err = run(self.flags(output))
      self.assertEqual(status, 2)
      self.assertEqual(
        err,
        f'peftlib finetune: --output={output}: has an unfinished run already;'
        ' give --resume to go on with it, --overwrite to replace it, or'
        ' another folder\n',
      )
    with self.subTest('is not resumed with other flags'):
      status, _, err = run(self.flags(output, '--resume', '--rank=4'))
      self.assertEqual(status, 2)
      self.assertEqual(
        err,
        f'peftlib finetune: --resume: the run in {output} has other flags:'
        ' --rank was 2, is now 4; give its own, or start a new run in another'
        ' --output\n',
      )
    with self.subTest('is not resumed with other rows'):
      rows = tiny.write_rows(output.parent / 'other.jsonl', 23)
      status, _, err = run(self.flags(output, '--resume', f'--data={rows}'))
      self.assertEqual(status, 2)
      self.assertStartsWith(
        err,
        'peftlib finetune: --resume: --data has other contents than the run'
        ' started with (fingerprint was ',
      )
    with self.subTest('is not resumed with another model'):
      model = tiny.write_model(output.parent / 'other_model', seed=1)
      status, _, err = run(self.flags(output, '--resume', f'--model={model}'))
      self.assertEqual(status, 2)
      self.assertStartsWith(
        err,
        'peftlib finetune: --resume: --model has other contents than the run'
        ' started with (fingerprint was ',
      )
    with self.subTest('its checkpoint comes before an adapter'):
      status, out, err = run(
        self.flags(
          output, '--resume', f'--restore_adapter={self.whole / "adapter"}'
        )
      )
      self.assertEqual(status, 0)
      self.assertIn('Resumed after step 3.', out)
      self.assertEqual(
        err,
        f'peftlib finetune: warning: --restore_adapter={self.whole}/adapter is'
        f' not used: {output} has a checkpoint of step 3, which comes first\n',
      )
      self.assert_same_run(output)

  def test_finished_run_is_shown_again(self):
    before = {p: p.stat().st_mtime_ns for p in self.whole.rglob('*')}
    argv = self.flags(
      self.whole, f'--eval_data={self.held_out}', '--max_new_tokens=8'
    )
    for more in ([], ['--resume']):
      with mock.patch.object(models, 'load', side_effect=AssertionError):
        status, out, err = run([*argv, *more])
      self.assertEqual((status, err), (0, ''))
      self.assertIn('This run is finished already; nothing was done.', out)
      self.assertIn('--overwrite', out)
      self.assertIn('peak memory', out)
    after = {p: p.stat().st_mtime_ns for p in self.whole.rglob('*')}
    self.assertEqual(
      after | {self.whole / '.lock': 0}, before | {self.whole / '.lock': 0}
    )

  def test_finished_run_is_not_replaced_by_another(self):
    status, _, err = run(self.flags(self.whole, '--seed=1'))
    self.assertEqual(status, 2)
    self.assertEqual(
      err,
      f'peftlib finetune: --output={self.whole}: has a run already; give'
      ' --resume to go on with it, --overwrite to replace it, or another'
      ' folder\n',
    )

  # Starting from an adapter.

  def test_restored_adapter_is_where_training_starts(self):
    output = self.output()
    status, out, _ = run(
      self.flags(
        output,
        f'--restore_adapter={self.whole / "adapter"}',
        '--steps=1',
        '--warmup_steps=0',
        # Too small to be seen in float32.
        '--learning_rate=1e-30',
        '--resume',
      )
    )
    self.assertEqual(status, 0)
    self.assertIn(f'Nothing to resume in {output}: a new run starts.\n', out)
    self.assertIn('Started from the adapter in ', out)
    restored, whole = adapter(output), adapter(self.whole)
    chex.assert_trees_all_equal(restored, whole)
    self.assertGreater(
      np.abs(whole['layers/self_attn/q_proj/kernel_lora_b']).max(), 0
    )

    with self.subTest('overwrite replaces the run'):
      status, out, _ = run(
        self.flags(output, '--overwrite', '--steps=2', '--warmup_steps=1')
      )
      self.assertEqual(status, 0)
      self.assertNotIn('Resumed', out)
      self.assertLen(curve(output), 2)
      self.assertEqual(curve(output)[0][1], curve(self.whole)[0][1])

  def test_adapter_that_does_not_fit(self):
    output = self.output()
    source = self.whole / 'adapter'
    status, _, err = run(
      self.flags(output, f'--restore_adapter={source}', '--rank=4', '--alpha=8')
    )
    self.assertEqual(status, 2)
    self.assertStartsWith(
      err,
      f'peftlib finetune: peftlib.restore_adapter: {source} does not fit this'
      ' run: alpha: saved 32.0, expected 8.0; ',
    )
    self.assertIn('rank: saved 2, expected 4', err)
    self.assertEqual(err.count('\n'), 1)

  # The compiler.

  def test_one_compilation_a_shape(self):
    output = self.output()
    flags = self.flags(output, '--nopack', '--steps=28', '--checkpoint_every=7')
    append = runs.append_metrics

    def append_and_stop(file, record):
      append(file, record)
      # Two more than the epoch's 12.
      if record['step'] == 14:
        signal.raise_signal(signal.SIGTERM)

    with mock.patch.object(runs, 'append_metrics', append_and_stop):
      compiled, status = self.compilations(flags)
    self.assertEqual(status, 128 + signal.SIGTERM)
    # Rows of 28 to 40 tokens are padded to 32 or to 64.
    self.assertEqual(compiled, 2)
    compiled, status = self.compilations([*flags, '--resume'])
    self.assertEqual(status, 0)
    self.assertEqual(compiled, 2)
    self.assertLen(curve(output), 28)

  def compilations(self, argv):
    """How often the step was compiled, and the status."""
    with self.assertLogs('jax', logging.WARNING) as logs, jax.log_compiles():
      status, _, _ = run(argv)
    found = [
      x for x in logs.output if 'Finished XLA compilation of jit(step)' in x
    ]
    return len(found), status

  # Other ways to train.

  def test_mesh_gives_the_losses_of_one_device(self):
    one, many = self.output(), self.output()
    argv = self.flags(one, '--batch_size=8', '--steps=3')
    self.assertEqual(run(argv)[0], 0)
    argv = self.flags(
      many, '--batch_size=8', '--steps=3', '--mesh=fsdp=4,data=2'
    )
    self.assertEqual(run(argv)[0], 0)
    np.testing.assert_allclose(
      [loss for _, loss, *_ in curve(many)],
      [loss for _, loss, *_ in curve(one)],
      rtol=1e-5,
    )

  def test_mesh_with_more_devices_than_there_are(self):
    status, _, err = run(
      self.flags(self.output(), '--batch_size=16', '--mesh=fsdp=16')
    )
    self.assertEqual(status, 2)
    self.assertEqual(
      err,
      'peftlib finetune: --mesh=fsdp=16: needs 16 devices; there are 8 (cpu)\n',
    )

  def test_whole_model_in_bfloat16_with_accumulation(self):
    output = self.output()
    argv = [
      x
      for x in self.flags(
        output,
        '--method=full',
        '--compute_dtype=bfloat16',
        '--remat=full',
        '--accumulate=2',
        '--epochs=0.3',
        '--warmup_steps=1',
        '--schedule=linear',
      )
      if not x.startswith(
        ('--rank', '--tile', '--dropout', '--module', '--steps')
      )
    ]
    status, out, err = run(argv)
    self.assertEqual((status, err), (0, ''))
    records = runs.read_metrics(output / 'metrics.jsonl')
    # Weights move every second step alone.
    moved = [r['update_norm'] > 0 for r in records]
    self.assertEqual(moved, [i % 2 == 1 for i in range(len(records))])
    self.assertEqual(
      {str(x.dtype) for x in adapter(output).values()}, {'float32'}
    )
    # 264 x 32, two layers of 9,280 and two norms of 32, a last norm of 32.
    self.assertRegex(out, r'\ball +27,040 +0 ')

  def test_diverging_run_stops(self):
    output = self.output()
    status, _, err = run(
      self.flags(output, '--learning_rate=1e38', '--warmup_steps=0')
    )
    self.assertEqual(status, 2)
    self.assertRegex(
      err,
      r'^peftlib finetune: the loss is \S+ and the norm of its gradient nan at'
      r' step 2 \(no step is saved\); a lower --learning_rate, more'
      r' --warmup_steps or --compute_dtype=float32 may help\n$',
    )

  # Input that is wrong.

  @parameterized.named_parameters(
    (
      'json',
      '{"prompt": "a", "completion": "b"}\n{"prompt": \n',
      '{path}:2: not valid JSON: Expecting value at column 11; expected one'
      ' JSON object a line',
    ),
    (
      'empty',
      '\n',
      '{path}:1: the file has no rows; expected one of',
    ),
    (
      'long',
      json.dumps({'prompt': 'a', 'completion': 'b' * 80}) + '\n',
      '{path}:1: the completion alone needs ',
    ),
  )
  def test_wrong_rows(self, content, message):
    path = self.create_tempfile(content=content).full_path
    with mock.patch.object(models, 'load', side_effect=AssertionError):
      status, out, err = run(self.flags(self.output(), f'--data={path}'))
    self.assertEqual((status, out), (2, ''))
    self.assertStartsWith(err, f'peftlib finetune: {message.format(path=path)}')
    self.assertEqual(err.count('\n'), 1)

  @parameterized.named_parameters(
    (
      'module_path',
      '--module_path=.*q_prj',
      "peftlib: module_path '.*q_prj' matches no module",
    ),
    (
      'tile_size',
      '--tile_size=7',
      'peftlib.quantize_base: tile_size=7 does not divide the contracted width'
      ' of layers/self_attn/q_proj.kernel (32), ',
    ),
    (
      'warmup_steps',
      '--warmup_steps=7',
      '--warmup_steps=7: must be at most the number of steps, 6\n',
    ),
  )
  def test_flags_that_do_not_fit(self, flag, message):
    with mock.patch.object(models, 'load', side_effect=AssertionError):
      status, _, err = run(self.flags(self.output(), flag))
    self.assertEqual(status, 2)
    self.assertStartsWith(err, f'peftlib finetune: {message}')

  def test_output_in_use(self):
    output = self.output()
    with runs.locked(runs.paths(output)):
      status, _, err = run(self.flags(output))
    self.assertEqual(status, 2)
    self.assertEqual(
      err,
      f'peftlib finetune: --output={output}: another process is at work there;'
      ' wait for it, or give another folder\n',
    )


if __name__ == '__main__':
  absltest.main()
