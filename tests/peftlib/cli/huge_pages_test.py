import os
import platform
import subprocess
import sys
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from peftlib.cli import huge_pages


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
      self.assertEqual(huge_pages.wanted(environ), expected)


class RestartTest(absltest.TestCase):
  def test_same_process_and_arguments(self):
    script = (
      'import os, sys\n'
      'from peftlib.cli import huge_pages\n'
      'print(os.getpid(), sys.argv[1:], os.environ.get("GLIBC_TUNABLES"))\n'
      'if "GLIBC_TUNABLES" not in os.environ:\n'
      '  huge_pages.restart()\n'
    )
    environ = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'}
    result = subprocess.run(
      [sys.executable, '-c', script, 'a b', '--c'],
      env=environ,
      capture_output=True,
      text=True,
      check=True,
      timeout=120,
    )
    before, after = result.stdout.splitlines()
    self.assertEndsWith(before, "['a b', '--c'] None")
    self.assertEndsWith(after, "['a b', '--c'] glibc.malloc.hugetlb=1")
    self.assertEqual(before.split()[0], after.split()[0])


if __name__ == '__main__':
  absltest.main()
