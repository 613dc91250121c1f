import json
import pathlib
import tomllib

from absl.testing import absltest
from absl.testing import parameterized

from peftlib import config
from peftlib.cli import errors


def _caught(function):
  try:
    function()
  except Exception as e:
    return e
  raise AssertionError('nothing was raised')


def _raise(error):
  raise error


class ErrorsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('own', lambda: _raise(errors.UserError('x')), True),
    ('missing_file', lambda: open('no/such/file'), True),
    ('check_of_ours', lambda: config.LoraConfig(rank=0), True),
    ('inside_a_library', lambda: json.loads('{'), False),
    ('elsewhere', lambda: _raise(ValueError('x')), False),
    ('bug', lambda: _raise(KeyError('x')), False),
  )
  def test_is_user_error(self, function, expected):
    self.assertEqual(errors.is_user_error(_caught(function)), expected)

  @parameterized.named_parameters(
    ('one', ValueError('a'), 'a'),
    ('several', ValueError('a:\n  b\n\n  c\n'), 'a: b; c'),
    ('none', ValueError(''), 'ValueError'),
    (
      'system',
      FileNotFoundError(2, 'No such file or directory', 'x.gguf'),
      'x.gguf: No such file or directory',
    ),
    ('text_alone', FileNotFoundError('x: no such file'), 'x: no such file'),
  )
  def test_one_line(self, error, expected):
    self.assertEqual(errors.one_line(error), expected)


class MissingExtraTest(absltest.TestCase):
  def test_names_what_the_extra_has(self):
    root = pathlib.Path(__file__).resolve().parents[3]
    project = tomllib.loads((root / 'pyproject.toml').read_text())['project']
    names = {
      requirement.partition('>=')[0]
      for requirement in project['optional-dependencies']['cli']
    }
    for name in names:
      self.assertEqual(
        errors.missing_extra(ModuleNotFoundError(name=name)),
        f"{name} is not installed; run: pip install 'peftlib[cli]'",
      )
    self.assertEqual(errors._EXTRA, names)

  def test_says_nothing_of_others(self):
    for error in (
      ModuleNotFoundError(name='peftlib.no'),
      ModuleNotFoundError('rich'),
      ValueError('rich'),
    ):
      self.assertIsNone(errors.missing_extra(error))


if __name__ == '__main__':
  absltest.main()
