"""Words that the demo's requests are made of.

Each kind of value has words for training and words that only held-out rows
use. A compound value (`oak stool`, `Mara Thornbury`) is made of words of one
side alone, so that a held-out value shares no word with training.

The lists of training are long enough for a thousand rows to use most words once
or twice: a model must learn to copy words, as it can't learn them by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import random
import re
from typing import TypeVar

from peftlib.demo import _occasions
from peftlib.demo import _people
from peftlib.demo import _places
from peftlib.demo import _things

_T = TypeVar('_T')

MONTHS = (
  'January',
  'February',
  'March',
  'April',
  'May',
  'June',
  'July',
  'August',
  'September',
  'October',
  'November',
  'December',
)
DAYS_IN_MONTH = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

_ONES = (
  'zero one two three four five six seven eight nine ten eleven twelve'
  ' thirteen fourteen fifteen sixteen seventeen eighteen nineteen'
).split()
_TENS = 'twenty thirty forty fifty sixty seventy eighty ninety'.split()

# Nouns whose plural isn't spelled by rule.
_PLURALS = {
  'bookshelf': 'bookshelves',
  'domino': 'dominoes',
  'knife': 'knives',
  'loaf': 'loaves',
  'man': 'men',
  'mouse': 'mice',
  'penknife': 'penknives',
  'potato': 'potatoes',
  'scarf': 'scarves',
  'shelf': 'shelves',
  'tomato': 'tomatoes',
}
_ONSETS = (
  'b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh'
  ' sk sl sm sn sp st sw t th tr v w y z'
).split()
_VOWELS = 'a a a e e e i i o o u ai au ea ee ei ia ie oa oo ou'.split()
_CODAS = (
  *('',) * 4,
  *'d k l ll m n nd ng nt r rd rk rn rt s sk ss st t th x'.split(),
)


@dataclasses.dataclass(frozen=True)
class Words:
  """The words of one side, training or held-out.

  Attributes:
    first_names: given names.
    last_names: family names.
    name_stems: beginnings of further family names.
    name_endings: their endings.
    adjectives: what may stand before an item.
    items: things to order that adjectives go with, in the singular.
    foods: things to order that stand alone, in the singular.
    containers: what dry goods come in, in the singular.
    contents: dry goods.
    vessels: what liquids come in, in the singular.
    liquids: liquids.
    towns: places that one is in.
    town_stems: beginnings of further towns.
    town_endings: their endings.
    venue_names: first words of places that one is at.
    venues: their last words.
    plain_events: events that take no article.
    topics: what work meetings are about.
    meetings: kinds of work meetings.
    subjects: what is learnt.
    lessons: how it is learnt.
    outings: further events that take an article.
    invented_share: share of names and places made up of syllables.
  """

  first_names: tuple[str, ...]
  last_names: tuple[str, ...]
  name_stems: tuple[str, ...]
  name_endings: tuple[str, ...]
  adjectives: tuple[str, ...]
  items: tuple[str, ...]
  foods: tuple[str, ...]
  containers: tuple[str, ...]
  contents: tuple[str, ...]
  vessels: tuple[str, ...]
  liquids: tuple[str, ...]
  towns: tuple[str, ...]
  town_stems: tuple[str, ...]
  town_endings: tuple[str, ...]
  venue_names: tuple[str, ...]
  venues: tuple[str, ...]
  plain_events: tuple[str, ...]
  topics: tuple[str, ...]
  meetings: tuple[str, ...]
  subjects: tuple[str, ...]
  lessons: tuple[str, ...]
  outings: tuple[str, ...]
  invented_share: float


class Deck:
  """Draws from lists without putting back, each list in an order of its own.

  A list that is used up is shuffled anew.
  """

  def __init__(self, rng: random.Random):
    """Starts with all lists full.

    Args:
      rng: what shuffles.
    """
    self._rng = rng
    self._left: dict[int, tuple[Sequence[object], list[object]]] = {}

  def draw(self, values: Sequence[_T]) -> _T:
    """Takes the next value of a list.

    Args:
      values: the list, the same object each time.

    Returns:
      One of its values.
    """
    # The list is kept beside what is left of it, so that its id stays its own.
    _, left = self._left.setdefault(id(values), (values, []))
    if not left:
      left.extend(self._rng.sample(values, len(values)))
    return left.pop()  # type: ignore[return-value]


def number_word(number: int) -> str:
  """A number from 0 to 99 in words, such as `twenty-three`.

  Args:
    number: the number.

  Returns:
    Its words.

  Raises:
    ValueError: it is out of that range.
  """
  if not 0 <= number <= 99:
    raise ValueError(f'number is {number}; expected 0 to 99')
  if number < 20:
    return _ONES[number]
  tens, ones = divmod(number, 10)
  return _TENS[tens - 2] + (f'-{_ONES[ones]}' if ones else '')


def ordinal(number: int) -> str:
  """A day of the month with its ending, such as `22nd`.

  Args:
    number: the number.

  Returns:
    Its digits and ending.
  """
  if number % 100 in (11, 12, 13):
    return f'{number}th'
  return f'{number}{ {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") }'


def plural(noun: str) -> str:
  """The plural of a noun of these lists, such as `boxes of tea`.

  Args:
    noun: a noun in the singular, adjectives before it and `of` after it
      allowed.

  Returns:
    The plural.
  """
  head, of, rest = noun.partition(' of ')
  before, space, last = head.rpartition(' ')
  if last in _PLURALS:
    last = _PLURALS[last]
  elif last.endswith(('s', 'x', 'ch', 'sh')):
    last += 'es'
  elif last.endswith('y') and last[-2] not in 'aeiou':
    last = last[:-1] + 'ies'
  else:
    last += 's'
  return before + space + last + of + rest


def with_article(noun: str) -> str:
  """A noun of these lists with `a` or `an` before it.

  Args:
    noun: a noun in the singular.

  Returns:
    Article and noun.
  """
  return f'{"an" if noun[0] in "aeiou" else "a"} {noun}'


def invented(rng: random.Random) -> str:
  """A name that nobody has, made of two or three syllables.

  Args:
    rng: what chooses.

  Returns:
    A word such as `Trovand`, never one of the lists.
  """
  while True:
    syllables = [
      rng.choice(_ONSETS) + rng.choice(_VOWELS)
      for _ in range(rng.choice((1, 2, 2)))
    ]
    end = rng.choice(_ONSETS) + rng.choice(_VOWELS)[0] + rng.choice(_CODAS)
    word = (''.join(syllables) + end).capitalize()
    if word.lower() not in _KNOWN:
      return word


def _words(prefix: str, invented_share: float) -> Words:
  """The words of one side."""
  lists = {}
  for module in (
    _occasions,
    _people,
    _places,
    _things,
  ):
    for field in dataclasses.fields(Words):
      text = getattr(module, prefix + field.name.upper(), None)
      if text is not None:
        lists[field.name] = tuple(' '.join(w.split()) for w in text.split(','))
  return Words(**lists, invented_share=invented_share)


TRAIN = _words('', 0.15)
HELD_OUT = _words('HELD_OUT_', 0.0)
_KNOWN = frozenset(
  word.lower()
  for side in (TRAIN, HELD_OUT)
  for values in dataclasses.astuple(side)
  if isinstance(values, tuple)
  for value in values
  for word in re.findall(r'\w+', value)
)
