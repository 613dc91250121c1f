import dataclasses

from absl.testing import absltest
from absl.testing import parameterized

from peftlib.cli import errors
from peftlib.cli import flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class _General:
  """General flags."""

  debug: bool = flags.boolean(False, 'Say more.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options(_General):
  """Cooking."""

  dish: str | None = flags.text(None, 'What to cook.')
  guests: tuple[str, ...] = flags.texts(('Ada',), 'Who comes.')
  people: int = flags.integer(2, 'How many eat.', low=1, high=12)
  salt: float = flags.number(0.5, 'Grams of salt.', low=0, below=9)
  heat: str = flags.choice('low', 'Of the stove.', of=('low', 'high'))


class FlagsTest(parameterized.TestCase):
  def test_defaults(self):
    options, given = flags.parse(_Options, [])
    self.assertEqual(options, _Options())
    self.assertEqual(given, frozenset())

  def test_values(self):
    options, given = flags.parse(
      _Options,
      [
        '--dish=pie',
        '--guests=Ada, Ben,',
        '--people=3',
        '--salt=1e-1',
        '--heat=high',
        '--debug',
      ],
    )
    self.assertEqual(
      options,
      _Options(
        dish='pie',
        guests=('Ada', 'Ben'),
        people=3,
        salt=0.1,
        heat='high',
        debug=True,
      ),
    )
    self.assertEqual(
      given, {'dish', 'guests', 'people', 'salt', 'heat', 'debug'}
    )

  @parameterized.parameters(
    ('--guests=', 'guests', ()),
    ('--nodebug', 'debug', False),
    ('--debug=true', 'debug', True),
    ('--debug=False', 'debug', False),
    ('--people=12', 'people', 12),
    ('--salt=0', 'salt', 0.0),
  )
  def test_value(self, argument, name, expected):
    options, given = flags.parse(_Options, [argument])
    self.assertEqual(getattr(options, name), expected)
    self.assertEqual(given, {name})

  def test_commands_do_not_share_values(self):
    flags.parse(_Options, ['--people=3'])
    options, given = flags.parse(_Options, [])
    self.assertEqual(options.people, 2)
    self.assertEmpty(given)

  @parameterized.parameters(
    ('--people=0', '--people=0: must be an integer from 1 to 12'),
    ('--people=2.5', '--people=2.5: must be an integer from 1 to 12'),
    ('--salt=9', '--salt=9: must be a number >= 0 and < 9'),
    ('--salt=nan', '--salt=nan: must be a number >= 0 and < 9'),
    ('--salt=inf', '--salt=inf: must be a number >= 0 and < 9'),
    (
      '--heat=hihg',
      '--heat=hihg: must be one of low, high; did you mean high?',
    ),
    ('--heat=x', '--heat=x: must be one of low, high'),
    ('--dish=', '--dish=: must be text'),
    ('--debug=maybe', '--debug=maybe: must be true or false'),
    ('--peple=3', '--peple: there is no such flag; did you mean --people?'),
    ('--zzz', '--zzz: there is no such flag; see --help'),
    (
      'pie',
      "unexpected argument 'pie'; expected flags, as --name=value",
    ),
    ('--dish', 'Missing value for flag --dish'),
  )
  def test_error(self, argument, message):
    with self.assertRaises(errors.UserError) as caught:
      flags.parse(_Options, [argument])
    self.assertEqual(str(caught.exception), message)

  def test_usage(self):
    self.assertEqual(
      flags.usage(_Options),
      '\n'.join(
        [
          'General flags:',
          '  --[no]debug  (default: false)',
          '      Say more.',
          '',
          'Cooking:',
          '  --dish=...  (text; no default)',
          '      What to cook.',
          '  --guests=...  (texts separated by commas; default: Ada)',
          '      Who comes.',
          '  --people=...  (an integer from 1 to 12; default: 2)',
          '      How many eat.',
          '  --salt=...  (a number >= 0 and < 9; default: 0.5)',
          '      Grams of salt.',
          '  --heat=...  (low, high; default: low)',
          '      Of the stove.',
        ]
      ),
    )


if __name__ == '__main__':
  absltest.main()
