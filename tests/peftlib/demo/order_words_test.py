import dataclasses

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
  # What heads a value of its kind, so that no held-out value has one of
  # training. Endings of towns are beside the point: their stems differ.
  @parameterized.parameters(
    (('first_names',),),
    (('last_names', 'name_stems'),),
    (('name_endings',),),
    (('adjectives',),),
    (('items', 'foods', 'containers', 'vessels'),),
    (('contents', 'liquids'),),
    (('towns', 'town_stems'),),
    (('venue_names',),),
    (('venues',),),
    (('plain_events', 'topics', 'subjects'),),
    (('meetings', 'lessons'),),
  )
  def test_share_no_word(self, kinds):
    train, held_out = (
      [w.lower() for kind in kinds for w in getattr(side, kind)]
      for side in (order_words.TRAIN, order_words.HELD_OUT)
    )
    self.assertEmpty(set(train) & set(held_out))
    last = [{w.split()[-1] for w in side} for side in (train, held_out)]
    if 'towns' not in kinds:
      self.assertEmpty(last[0] & last[1])

  @parameterized.parameters('TRAIN', 'HELD_OUT')
  def test_lists_hold_clean_words_once(self, side):
    words = getattr(order_words, side)
    for field in dataclasses.fields(words):
      values = getattr(words, field.name)
      self.assertNotEmpty(values)
      self.assertLen(set(values), len(values), field.name)
      for value in values:
        self.assertEqual(value, ' '.join(value.split()))
        self.assertRegex(value, r"^[A-Za-z' -]+$")

  def test_training_has_hundreds_of_names(self):
    self.assertGreater(len(order_words.TRAIN.first_names), 150)
    self.assertGreater(
      len(order_words.TRAIN.last_names)
      + len(order_words.TRAIN.name_stems) * len(order_words.TRAIN.name_endings),
      500,
    )


if __name__ == '__main__':
  absltest.main()
