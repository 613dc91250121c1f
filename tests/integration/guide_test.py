"""Runs the blocks of each page of the guide, in a script of its own."""

import pathlib
import re
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

import peftlib
from peftlib import checkpoint
from peftlib import hf
from peftlib import methods
from peftlib import testing
import transforms

# What the pages import, so that it is there in a sandbox too.
_MODULES = (checkpoint, hf, methods, peftlib, testing, transforms)
_ROOT = pathlib.Path(__file__).parents[2]
_GUIDE = _ROOT / 'peftlib' / 'guide'
# Tables of names alone.
_WITHOUT_CODE = {'coming_from'}


def _script(page: pathlib.Path) -> str:
  blocks = re.findall(
    r'^```python\n(.*?)^```$', page.read_text('utf-8'), re.DOTALL | re.MULTILINE
  )
  return '\n'.join(blocks)


def _run(script: pathlib.Path) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, str(script)],
    cwd=_ROOT,
    env={'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    check=False,
    timeout=240,
  )


class GuideTest(parameterized.TestCase):
  @parameterized.parameters(
    'coming_from',
    'many_devices',
    'your_own_loop',
    'your_own_method',
    'your_own_model',
  )
  def test_page_runs(self, name):
    text = _script(_GUIDE / f'{name}.md')
    self.assertEqual(not text, name in _WITHOUT_CODE)
    script = pathlib.Path(self.create_tempdir().full_path) / f'{name}.py'
    script.write_text(text, 'utf-8')
    result = _run(script)
    self.assertEqual(result.returncode, 0, msg=result.stderr)

  def test_pages_import_what_is_there(self):
    text = '\n'.join(_script(page) for page in _GUIDE.glob('*.md'))
    found = {
      '.'.join(filter(None, names))
      for names in re.findall(
        r'^(?:from (peftlib) )?import (peftlib|transforms|\w+)$',
        text,
        re.MULTILINE,
      )
    }
    known = {module.__name__ for module in _MODULES}
    ours = {
      n for n in found if n.partition('.')[0] in ('peftlib', 'transforms')
    }
    self.assertEqual(ours, known)

  def test_readme_names_every_page(self):
    named = re.findall(
      r'\]\(peftlib/guide/(\w+)\.md\)', (_ROOT / 'README.md').read_text('utf-8')
    )
    self.assertCountEqual(named, [page.stem for page in _GUIDE.glob('*.md')])
    self.assertLen(named, 5)

  def test_block_that_fails_is_seen(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    page = folder / 'page.md'
    page.write_text(
      '```python\nx = 1\n```\n\nThen:\n\n```python\nassert x == 2\n```\n'
    )
    script = folder / 'page.py'
    script.write_text(_script(page))
    self.assertIn('AssertionError', _run(script).stderr)


if __name__ == '__main__':
  absltest.main()
