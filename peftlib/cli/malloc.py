"""How glibc handles the memory of a command's process.

XLA:CPU asks for the temporary memory of a step anew at each step and gives it
back; in pages of 4 KB the kernel spends a third of the step's time on clearing
them. glibc can ask for huge pages instead, but looks at its environment only
when a process starts. What was freed between blocks in use, as by a
compilation, it keeps until it is told not to.
"""

from collections.abc import Mapping
import ctypes
import os
import platform
import sys

_VARIABLE = 'GLIBC_TUNABLES'
_SETTING = 'glibc.malloc.hugetlb=1'
# The first glibc that knows the setting.
_SINCE = (2, 35)


def wanted(environ: Mapping[str, str]) -> bool:
  """Whether the process should be started anew with huge pages.

  Args:
    environ: Its environment. Who has set GLIBC_TUNABLES, to whatever value, is
      left alone.
  """
  if _VARIABLE in environ or (version := _glibc()) is None:
    return False
  parts = version.split('.')[:2]
  return (
    all(part.isdecimal() for part in parts) and tuple(map(int, parts)) >= _SINCE
  )


def restart() -> None:
  """Replaces this process by one of the same arguments, with huge pages."""
  sys.stdout.flush()
  sys.stderr.flush()
  os.execve(
    sys.executable,
    [sys.executable, *sys.orig_argv[1:]],
    {**os.environ, _VARIABLE: _SETTING},
  )


def trim() -> None:
  """Gives freed memory back to the system; does nothing without glibc."""
  if _glibc() is not None:
    ctypes.CDLL(None).malloc_trim(0)


def _glibc() -> str | None:
  """Its version; None where the process has another C library."""
  if sys.platform != 'linux':
    return None
  name, version = platform.libc_ver()
  return version if name == 'glibc' else None
