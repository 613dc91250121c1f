"""Makes a virtual environment; used by the Makefile.

Written so that a Python far too old still parses it and can say so: standard
library only, no f-strings, no annotations. Each expected failure (Python too
old, disk full, index not reachable, a package that differs from its lock) is
one line on stderr and exit status 2; pip's own words go to a log.
"""

from __future__ import print_function

import argparse
import errno
import hashlib
import os
import shutil
import subprocess
import sys

_MIN_PYTHON = (3, 12)
# .venv itself is 1.1 GB; pip's cache and temporary files come on top.
_SPACE = 2000000000
_LOCK_HEADER = """\
# Made by `make lock` from pyproject.toml: what runs, tests and checks the code.
# Every file of every package is pinned by its hash; jaxlib is the CPU one.
"""

# What pip and venv print, each with what it means. The order counts: a full
# disk or a wrong hash is certain, an index that gave nothing is not.
_NO_SPACE = ('No space left on device', 'Errno 28')
_BAD_HASH = ('DO NOT MATCH THE HASHES',)
_NO_INDEX = (
  'NewConnectionError',
  'ConnectTimeout',
  'ReadTimeout',
  'ConnectionError',
  'ConnectionReset',
  'Connection refused',
  'Could not fetch URL',
  'ProxyError',
  'SSLError',
  'Name or service not known',
  'Temporary failure in name resolution',
  'Failed to establish a new connection',
)
_NOT_THERE = ('No matching distribution found', 'Could not find a version')
_NO_VENV = (
  'ensurepip is not',
  'No module named ensurepip',
  'No module named venv',
)


class Failure(Exception):
  """An expected failure; its text is the one line that is printed."""


def version_problem(version):
  """Returns what is wrong with a Python version (a tuple), or None."""
  if tuple(version[:2]) >= _MIN_PYTHON:
    return None
  return (
    'Python %d.%d or newer is needed, this is %s: install it, or name one: '
    'make PYTHON=/path/to/python%d.%d'
    % (_MIN_PYTHON + ('.'.join(str(v) for v in version[:3]),) + _MIN_PYTHON)
  )


def space_problem(path, needed):
  """Returns what is wrong with the free space where `path` will be, or None."""
  path = os.path.abspath(path)
  while not os.path.exists(path):
    path = os.path.dirname(path)
  free = shutil.disk_usage(path).free
  if free >= needed:
    return None
  return (
    'Not enough disk space: %.1f GB are needed in %s, %.1f GB are free; '
    'make room there and run this again.' % (needed / 1e9, path, free / 1e9)
  )


def own_python_problem(venv, python):
  """Returns what is wrong with making `venv` anew by `python`, or None."""
  venv = os.path.realpath(venv)
  # Not the real path of the interpreter: a venv's is a link out of it.
  folder = os.path.dirname(os.path.dirname(os.path.abspath(python)))
  if venv not in (os.path.realpath(sys.prefix), os.path.realpath(folder)):
    return None
  return (
    'Cannot make %s anew with its own Python (%s): name one outside of it: '
    'make PYTHON=/path/to/python%d.%d' % ((venv, python) + _MIN_PYTHON)
  )


def diagnose(output, what, log):
  """Returns one line that says why a subprocess with this output failed."""

  def said(marks):
    return any(mark in output for mark in marks)

  if said(_NO_SPACE):
    return (
      'The disk is full: about %.1f GB are needed for the environment and '
      "for pip's temporary files (TMPDIR); make room and run this again."
      % (_SPACE / 1e9)
    )
  if said(_BAD_HASH):
    return (
      'A downloaded package differs from the one in the lock: try again with '
      "an empty pip cache ('pip cache purge'), or see %s." % log
    )
  if said(_NO_INDEX):
    return (
      'The package index cannot be reached: check the network, or name a '
      'mirror in PIP_INDEX_URL, and run this again; details in %s.' % log
    )
  if said(_NO_VENV):
    return (
      'This Python cannot make virtual environments: install its venv module '
      "(on Debian and Ubuntu 'apt-get install python3.12-venv')."
    )
  errors = [
    line.strip()
    for line in output.splitlines()
    if line.strip().lower().startswith('error')
  ]
  if said(_NOT_THERE):
    return (
      'The package index does not have a package of the lock for this Python '
      'and platform: %s (index and mirror: PIP_INDEX_URL; details in %s).'
      % (errors[-1] if errors else what, log)
    )
  return '%s failed: %s (details in %s).' % (
    what,
    errors[-1] if errors else 'no reason given',
    log,
  )


def _run(command, what, log):
  """Runs a command with its output in `log`; raises Failure if it fails."""
  env = dict(os.environ)
  # pip's own progress and hints are noise between our lines, and a Python
  # path of the caller would leak into the new environment.
  env.update(PIP_NO_INPUT='1', PIP_DISABLE_PIP_VERSION_CHECK='1')
  env.pop('PYTHONPATH', None)
  env.pop('PYTHONHOME', None)
  try:
    process = subprocess.Popen(
      command,
      env=env,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )
  except OSError as e:
    raise Failure('Cannot run %s: %s.' % (command[0], e.strerror))
  output = process.communicate()[0].decode('utf-8', 'replace')
  try:
    with open(log, 'a') as f:
      f.write('$ %s\n%s\n' % (' '.join(command), output))
  except OSError as e:
    if e.errno == errno.ENOSPC:
      output += 'No space left on device'
  if process.returncode:
    raise Failure(diagnose(output, what, log))


def _digest(*parts):
  digest = hashlib.sha256()
  for part in parts:
    digest.update(part if isinstance(part, bytes) else part.encode())
    digest.update(b'\0')
  return digest.hexdigest()


def _read(path):
  with open(path, 'rb') as f:
    return f.read()


def _stamped(stamp, value):
  try:
    return _read(stamp).decode() == value
  except (OSError, UnicodeDecodeError):
    return False


def _write_atomically(path, text):
  temporary = path + '.tmp'
  with open(temporary, 'w') as f:
    f.write(text)
    f.flush()
    os.fsync(f.fileno())
  os.replace(temporary, path)


def link_problem(venv):
  """Why an environment can't be made anew at this path, or None."""
  if not os.path.islink(venv):
    return None
  # What it points to may be another checkout's.
  return (
    '%s is a symbolic link, to %s, which is left alone: remove the link.'
    % (
      venv,
      os.readlink(venv),
    )
  )


def make_venv(args):
  """Makes `args.venv`, or leaves it alone when its stamps say it is right."""
  venv = os.path.abspath(args.venv)
  python = os.path.join(venv, 'bin', 'python')
  log = os.path.join(venv, 'bootstrap.log')
  if args.lock:
    pip_args = ['--require-hashes', '--no-deps', '--only-binary=:all:']
    pip_args += ['-r', args.lock]
    content = _read(args.lock)
  elif args.requirements:
    pip_args, content = ['-r', args.requirements], _read(args.requirements)
  else:
    pip_args, content = args.packages, ' '.join(args.packages)

  # Stamps are written last: whatever was cut short is made anew.
  stamp = os.path.join(venv, '.stamp-packages')
  value = _digest(content, args.python, sys.version, venv)
  if not (_stamped(stamp, value) and os.path.exists(python)):
    problem = (
      link_problem(venv)
      or own_python_problem(venv, args.python)
      or space_problem(venv, args.space)
    )
    if problem:
      raise Failure(problem)
    print(
      'Installing %s into %s; this takes a minute or two.'
      % (args.lock or args.requirements or content, args.venv)
    )
    sys.stdout.flush()
    if os.path.isdir(venv):
      shutil.rmtree(venv)
    os.makedirs(venv)
    _run([args.python, '-m', 'venv', venv], 'python -m venv', log)
    _run(
      [python, '-m', 'pip', 'install', '--progress-bar=off', '--retries=2']
      + pip_args,
      'pip install',
      log,
    )
    _write_atomically(stamp, value)

  if args.project:
    stamp = os.path.join(venv, '.stamp-project')
    root = os.path.abspath(args.project)
    value = _digest(value, _read(os.path.join(root, 'pyproject.toml')), root)
    if not _stamped(stamp, value):
      # Nothing from the index: setuptools, which builds it, is in the lock.
      _run(
        [python, '-m', 'pip', 'install', '--no-index', '--no-deps']
        + ['--no-build-isolation', '--editable', root],
        'pip install --editable',
        log,
      )
      _write_atomically(stamp, value)


def write_lock(args):
  """Resolves pyproject.toml into a lock with hashes and without host names."""
  result = subprocess.run(
    [args.uv, 'pip', 'compile', 'pyproject.toml', '--extra=dev']
    + ['--universal', '--python-version=%d.%d' % _MIN_PYTHON]
    + ['--generate-hashes', '--no-header', '--quiet', '--upgrade']
    + ['--no-emit-index-url', '--no-emit-find-links'],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  if result.returncode:
    reason = result.stderr.decode('utf-8', 'replace').strip()
    raise Failure('uv pip compile failed: ' + ' '.join(reason.split()))
  _write_atomically(args.write_lock, _LOCK_HEADER + result.stdout.decode())


def main(argv):
  """Parses the command line; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--venv', help='the environment to make')
  parser.add_argument(
    '--python',
    default=sys.executable,
    help='the interpreter it gets; not checked for its age',
  )
  parser.add_argument('--lock', help='requirements with hashes')
  parser.add_argument('--requirements', help='requirements without hashes')
  parser.add_argument('--packages', nargs='+', help='or just these')
  parser.add_argument('--project', help='also install this, editable')
  parser.add_argument(
    '--space', type=int, default=_SPACE, help='bytes that have to be free'
  )
  parser.add_argument('--write_lock', help='write a lock instead')
  parser.add_argument('--uv', help='the uv that resolves it')
  args = parser.parse_args(argv)
  try:
    problem = version_problem(sys.version_info)
    if problem:
      raise Failure(problem)
    if args.write_lock:
      write_lock(args)
    else:
      make_venv(args)
  except Failure as e:
    print(e, file=sys.stderr)
    return 2
  except OSError as e:
    if e.errno == errno.ENOSPC:
      print(diagnose('No space left on device', '', ''), file=sys.stderr)
    else:
      print('%s: %s' % (e.filename, e.strerror), file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print('Interrupted; run it again to go on.', file=sys.stderr)
    return 130
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
