import difflib
import re

from absl.testing import absltest
from absl.testing import parameterized

from peftlib.demo import order_patterns
from peftlib.demo import orders

_TRAIN = {
  'order': order_patterns.ORDERS,
  'event': order_patterns.EVENTS,
}
_HELD_OUT = {
  'order': order_patterns.HELD_OUT_ORDERS,
  'event': order_patterns.HELD_OUT_EVENTS,
}
# Each of these, and nothing else, is in a pattern of its kind exactly once.
_PLACES = {
  'order': (('items', 'item n'), ('name',), ('date',)),
  'event': (('event', 'an'), ('at', 'place'), ('name',), ('date',)),
}


class PatternsTest(parameterized.TestCase):
  @parameterized.product(kind=['order', 'event'], held_out=[False, True])
  def test_hold_every_field_once(self, kind, held_out):
    for pattern in (_HELD_OUT if held_out else _TRAIN)[kind]:
      for sentence in orders.expand(pattern):
        places = sorted(p.lower() for p in re.findall(r'\{(\w+)\}', sentence))
        for choices in _PLACES[kind]:
          taken = [c for c in choices if all(p in places for p in c.split())]
          self.assertLen(taken, 1, sentence)
          for place in taken[0].split():
            places.remove(place)
        self.assertEmpty(places, sentence)

  @parameterized.parameters('order', 'event')
  def test_are_many(self, kind):
    self.assertGreaterEqual(len(_TRAIN[kind]), 60)
    self.assertGreaterEqual(len(_HELD_OUT[kind]), 20)
    sentences = [s for p in _TRAIN[kind] for s in orders.expand(p)]
    self.assertGreaterEqual(len(sentences), 440)
    self.assertLen(set(sentences), len(sentences))

  @parameterized.parameters('order', 'event')
  def test_held_out_ones_are_others(self, kind):
    train = [s.lower() for p in _TRAIN[kind] for s in orders.expand(p)]
    words = [re.findall(r"[\w{}']+", s) for s in train]
    for pattern in _HELD_OUT[kind]:
      for sentence in orders.expand(pattern):
        own = re.findall(r"[\w{}']+", sentence.lower())
        nearest = max(
          words, key=lambda w: difflib.SequenceMatcher(None, w, own).ratio()
        )
        ratio = difflib.SequenceMatcher(None, nearest, own).ratio()
        # Not a training sentence with one word replaced.
        self.assertLess(ratio, 0.85, f'{sentence} / {nearest}')


if __name__ == '__main__':
  absltest.main()
