import dataclasses
import random
import re

from absl.testing import absltest
from absl.testing import parameterized

from peftlib.demo import order_words


class WordsTest(parameterized.TestCase):
  @parameterized.parameters(
    (0, 'zero'),
    (1, 'one'),
    (10, 'ten'),
    (12, 'twelve'),
    (13, 'thirteen'),
    (15, 'fifteen'),
    (18, 'eighteen'),
    (20, 'twenty'),
    (21, 'twenty-one'),
    (40, 'forty'),
    (48, 'forty-eight'),
    (59, 'fifty-nine'),
    (80, 'eighty'),
    (99, 'ninety-nine'),
  )
  def test_number_word(self, number, expected):
    self.assertEqual(order_words.number_word(number), expected)

  def test_number_words_differ(self):
    words = {order_words.number_word(n) for n in range(100)}
    self.assertLen(words, 100)

  @parameterized.parameters(-1, 100)
  def test_number_out_of_range(self, number):
    with self.assertRaisesRegex(
      ValueError, f'number is {number}; expected 0 to 99'
    ):
      order_words.number_word(number)

  @parameterized.parameters(
    (1, '1st'),
    (2, '2nd'),
    (3, '3rd'),
    (4, '4th'),
    (11, '11th'),
    (12, '12th'),
    (13, '13th'),
    (20, '20th'),
    (21, '21st'),
    (22, '22nd'),
    (23, '23rd'),
    (30, '30th'),
    (31, '31st'),
  )
  def test_ordinal(self, number, expected):
    self.assertEqual(order_words.ordinal(number), expected)

  @parameterized.parameters(
    ('mug', 'mugs'),
    ('blue brush', 'blue brushes'),
    ('torch', 'torches'),
    ('box of tea', 'boxes of tea'),
    ('knife', 'knives'),
    ('red scarf', 'red scarves'),
    ('bookshelf', 'bookshelves'),
    ('battery', 'batteries'),
    ('key', 'keys'),
    ('toy car', 'toy cars'),
    ('loaf of bread', 'loaves of bread'),
    ('compass', 'compasses'),
    ('sweet potato', 'sweet potatoes'),
    ('gingerbread man', 'gingerbread men'),
    ('piano', 'pianos'),
  )
  def test_plural(self, noun, expected):
    self.assertEqual(order_words.plural(noun), expected)

  @parameterized.parameters(
    ('mug', 'a mug'),
    ('umbrella', 'an umbrella'),
    ('orange chair', 'an orange chair'),
    ('budget review', 'a budget review'),
    ('annual call', 'an annual call'),
  )
  def test_with_article(self, noun, expected):
    self.assertEqual(order_words.with_article(noun), expected)

  def test_months(self):
    self.assertEqual(order_words.MONTHS[2], 'March')
    self.assertEqual(
      order_words.DAYS_IN_MONTH,
      (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31),
    )


class SidesTest(parameterized.TestCase):
  def test_share_no_word(self):
    """No held-out word is a word of training, of whatever kind."""
    words = {}
    for side in ('TRAIN', 'HELD_OUT'):
      values = dataclasses.asdict(getattr(order_words, side))
      # Beginnings and endings are parts of words: see below.
      words[side] = {
        re.sub(r'(?<=[^s])s$', '', word)
        for kind, texts in values.items()
        if not kind.endswith(('stems', 'endings', 'share'))
        for text in texts
        for word in re.findall(r"[a-z']+", text.lower())
      }
    self.assertEmpty(words['TRAIN'] & words['HELD_OUT'])

  @parameterized.parameters('name_stems', 'name_endings', 'town_stems')
  def test_share_no_part_of_a_word(self, kind):
    train = set(getattr(order_words.TRAIN, kind))
    self.assertEmpty(train & set(getattr(order_words.HELD_OUT, kind)))

  @parameterized.parameters('TRAIN', 'HELD_OUT')
  def test_lists_hold_clean_words_once(self, side):
    words = getattr(order_words, side)
    for field in dataclasses.fields(words):
      values = getattr(words, field.name)
      if field.name == 'invented_share':
        continue
      self.assertNotEmpty(values)
      self.assertLen(set(values), len(values), field.name)
      for value in values:
        self.assertEqual(value, ' '.join(value.split()))
        self.assertRegex(value, r"^[A-Za-z' -]+$")

  @parameterized.parameters(
    ('first_names', 950, 150),
    ('last_names', 950, 150),
    ('adjectives', 500, 70),
    ('items', 1150, 150),
    ('foods', 170, 30),
    ('contents', 130, 20),
    ('towns', 480, 150),
    ('venue_names', 280, 60),
    ('venues', 50, 10),
    ('topics', 200, 30),
    ('subjects', 150, 30),
    ('outings', 130, 12),
  )
  def test_are_long(self, kind, train, held_out):
    self.assertGreaterEqual(len(getattr(order_words.TRAIN, kind)), train)
    self.assertGreaterEqual(len(getattr(order_words.HELD_OUT, kind)), held_out)


class DrawingTest(absltest.TestCase):
  def test_deck_takes_all_before_any_twice(self):
    deck = order_words.Deck(random.Random(0))
    letters, digits = tuple('abcdefgh'), tuple('12345')
    drawn = [(deck.draw(letters), deck.draw(digits)) for _ in range(40)]
    for values, taken in zip((letters, digits), zip(*drawn)):
      rounds = [taken[i : i + len(values)] for i in range(0, 40, len(values))]
      for one_round in rounds:
        self.assertCountEqual(one_round, values)
      self.assertGreater(len(set(rounds)), 1)

  def test_invented(self):
    rng = random.Random(0)
    names = [order_words.invented(rng) for _ in range(1000)]
    self.assertGreater(len(set(names)), 950)
    for name in names:
      self.assertRegex(name, '^[A-Z][a-z]{2,}$')
      self.assertNoCommonElements(
        {name}, {*order_words.TRAIN.first_names, *order_words.HELD_OUT.towns}
      )


if __name__ == '__main__':
  absltest.main()
