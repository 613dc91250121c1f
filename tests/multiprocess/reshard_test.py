"""The transforms in two operating system processes of four devices each."""

import os
import pathlib
import socket
import subprocess
import sys
import time

from absl.testing import absltest
from absl.testing import parameterized

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_LIMIT_S = 120


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(('localhost', 0))
    return int(listener.getsockname()[1])


def _run(scenario: str) -> tuple[list[int], list[str]]:
  """Returns exit codes and outputs of both processes, ended in any case."""
  port = _free_port()
  # This process may have asked for its own number of devices.
  environment = {
    name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'
  }
  processes = [
    subprocess.Popen(
      [
        sys.executable,
        '-m',
        'tests.multiprocess.worker',
        scenario,
        str(number),
        str(port),
      ],
      cwd=_ROOT,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for number in range(2)
  ]
  deadline = time.monotonic() + _LIMIT_S
  outputs = []
  try:
    for process in processes:
      left = max(1.0, deadline - time.monotonic())
      try:
        output, _ = process.communicate(timeout=left)
      except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += f'\nended after {_LIMIT_S} s'
      outputs.append(output)
  finally:
    for process in processes:
      if process.poll() is None:
        process.kill()
        process.wait()
  return [process.returncode for process in processes], outputs


class MultiprocessTest(parameterized.TestCase):
  @parameterized.parameters('reshard', 'gradient', 'train', 'keys')
  def test_scenario(self, scenario):
    codes, outputs = _run(scenario)
    shown = '\n=== the other process ===\n'.join(outputs)
    self.assertEqual(codes, [0, 0], shown)
    for number, output in enumerate(outputs):
      self.assertIn(f'process {number} is done', output)

  def test_one_fails_and_the_other_ends(self):
    codes, outputs = _run('fail')
    self.assertIn('this process fails on purpose', outputs[1])
    self.assertNotEqual(codes[1], 0, outputs[1])
    self.assertNotEqual(codes[0], 0, outputs[0])
    self.assertNotIn('ended after', outputs[0])


if __name__ == '__main__':
  absltest.main()
