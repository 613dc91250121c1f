"""A run as a user has it: a process of its own, stopped by Ctrl-C, resumed."""

import os
import pathlib
import signal
import subprocess
import sys
import time

from absl.testing import absltest

from peftlib.cli import runs
from tests.peftlib.cli import tiny

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_STEPS = 400
_PATIENCE = 120.0


class InterruptTest(absltest.TestCase):
  def start(self, argv):
    environment = {**os.environ, 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
    return subprocess.Popen(
      [sys.executable, '-m', *argv],
      cwd=_ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  def test_interrupted_and_resumed(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    output = folder / 'run'
    argv = tiny.finetune_flags(
      tiny.write_model(folder / 'model'),
      tiny.write_rows(folder / 'rows.jsonl'),
      output,
      f'--steps={_STEPS}',
      '--checkpoint_every=100',
    )
    metrics = runs.paths(str(output)).metrics

    process = self.start(argv)
    end = time.monotonic() + _PATIENCE
    while len(runs.read_metrics(metrics)) < 3 and time.monotonic() < end:
      self.assertIsNone(process.poll())
      time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=_PATIENCE)
    self.assertEqual((process.returncode, err), (130, ''))
    done = len(runs.read_metrics(metrics))
    self.assertBetween(done, 3, _STEPS - 1)
    self.assertIn(f'Stopped after step {done}, which is saved.', out)
    # Not a terminal, so neither a bar nor colours.
    self.assertNotIn('\x1b', out)

    process = self.start([*argv, '--resume'])
    out, err = process.communicate(timeout=_PATIENCE)
    self.assertEqual((process.returncode, err), (0, ''))
    self.assertIn(f'Resumed after step {done}.', out)
    self.assertEqual(
      [r['step'] for r in runs.read_metrics(metrics)],
      list(range(1, _STEPS + 1)),
    )
    self.assertEqual(
      [p.name for p in sorted((output / 'checkpoints').iterdir())][-2:],
      [str(_STEPS - 100), str(_STEPS)],
    )


if __name__ == '__main__':
  absltest.main()
