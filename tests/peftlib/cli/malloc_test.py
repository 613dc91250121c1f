import os
import platform
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from peftlib.cli import malloc


def _output(script, *args):
  """What a process of its own prints that has no settings of malloc."""
  environ = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'}
  return subprocess.run(
    [sys.executable, '-c', script, *args],
    env=environ,
    capture_output=True,
    text=True,
    check=True,
    timeout=120,
  ).stdout


class WantedTest(parameterized.TestCase):
  @parameterized.parameters(
    ('linux', ('glibc', '2.36'), {}, True),
    ('linux', ('glibc', '2.35'), {}, True),
    ('linux', ('glibc', '2.34'), {}, False),
    ('linux', ('', ''), {}, False),
    ('darwin', ('', ''), {}, False),
    ('linux', ('glibc', '2.36'), {'GLIBC_TUNABLES': ''}, False),
    ('linux', ('glibc', '2.36'), {'GLIBC_TUNABLES': 'a=1'}, False),
  )
  def test_where(self, system, libc, environ, expected):
    with (
      mock.patch.object(sys, 'platform', system),
      mock.patch.object(platform, 'libc_ver', return_value=libc),
    ):
      self.assertEqual(malloc.wanted(environ), expected)


class RestartTest(absltest.TestCase):
  def test_same_process_and_arguments(self):
    script = (
      'import os, sys\n'
      'from peftlib.cli import malloc\n'
      'print(os.getpid(), sys.argv[1:], os.environ.get("GLIBC_TUNABLES"))\n'
      'if "GLIBC_TUNABLES" not in os.environ:\n'
      '  malloc.restart()\n'
    )
    before, after = _output(script, 'a b', '--c').splitlines()
    self.assertEndsWith(before, "['a b', '--c'] None")
    self.assertEndsWith(after, "['a b', '--c'] glibc.malloc.hugetlb=1")
    self.assertEqual(before.split()[0], after.split()[0])


class TrimTest(absltest.TestCase):
  def test_gives_back_what_was_freed_between_blocks_in_use(self):
    # 256 MB in blocks that malloc doesn't map one by one, each second one
    # freed: the end of the heap stays in use.
    script = (
      'import ctypes\n'
      'from peftlib.cli import malloc\n'
      'c = ctypes.CDLL(None)\n'
      'c.malloc.restype = ctypes.c_void_p\n'
      'c.free.argtypes = [ctypes.c_void_p]\n'
      'blocks = [c.malloc(1 << 16) for _ in range(4096)]\n'
      'for block in blocks: ctypes.memset(block, 1, 1 << 16)\n'
      'for block in blocks[::2]: c.free(block)\n'
      'def resident():\n'
      '  with open("/proc/self/statm") as f:\n'
      '    return int(f.read().split()[1]) * 4096\n'
      'before = resident()\n'
      'malloc.trim()\n'
      'print(before - resident())\n'
    )
    # Half of what was freed at least: pages that a block shares stay.
    self.assertGreater(int(_output(script)), 64e6)

  def test_nothing_to_do_without_glibc(self):
    with (
      mock.patch.object(platform, 'libc_ver', return_value=('', '')),
      mock.patch.object(malloc.ctypes, 'CDLL') as load,
    ):
      malloc.trim()
    load.assert_not_called()


if __name__ == '__main__':
  absltest.main()
