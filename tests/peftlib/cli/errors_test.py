import json

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


if __name__ == '__main__':
  absltest.main()
