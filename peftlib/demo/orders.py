"""Makes the data of the demo: requests in English to one line of JSON.

A row is a chat of three turns, such as::

  system     Reply with JSON.
  user       Could you send a dozen blue mugs to Mara Berg by the 4th of March?
  assistant  {"order":"12 blue mugs for Mara Berg","date":"03-04"}

or, for a calendar::

  user       Lunch with Dr Novak at Harbour Hall on 21 June, please.
  assistant  {"event":"with Dr Novak, Harbour Hall: lunch","date":"06-21"}

Things, names and places are copied as written, except that an event has no
capital of a sentence's first word. Counts become numbers, dates `MM-DD`. The
answer follows from the request alone, so that a prediction is right if and
only if it is the reference, character by character. What is copied follows a
space in the answer as in the request: a tokenizer that joins a space to the
word after it gives the word other tokens behind a quotation mark, and a small
model is bad at spelling one it has not seen.

Three sets are written: `train.jsonl`, `heldout_values.jsonl` (patterns as in
training; no name, thing, place or event of training) and
`heldout_patterns.jsonl` (sentence patterns not in training either).

Usage::

  python -m peftlib.demo.orders --output=DIR
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import os
import pathlib
import random
import re
from typing import Any

from absl import app
from absl import flags

from peftlib.demo import order_patterns
from peftlib.demo import order_words

SYSTEM = 'Reply with JSON.'
FILES = ('train.jsonl', 'heldout_values.jsonl', 'heldout_patterns.jsonl')

# Some of them twice or more, which makes them as many times as likely.
_OPENINGS = (
  *('',) * 14,
  'Hi, ',
  'Hello, ',
  'Hey, ',
  'Hi there, ',
  'Good morning, ',
  'Good afternoon, ',
  'Hello! ',
  'Good morning. ',
  'Hi! ',
  'OK, ',
)
_CLOSINGS = (
  *('',) * 16,
  ' Thanks!',
  ' Thanks.',
  ' Thank you.',
  ' Thank you!',
  ' Cheers!',
  ' Many thanks.',
)
_TITLES = ('Mr', 'Mrs', 'Ms', 'Dr')
_ROUND_COUNTS = {
  2: ('a pair of', 'a couple of'),
  6: ('half a dozen',),
  12: ('a dozen',),
  24: ('two dozen',),
  36: ('three dozen',),
}
# `the golf`, `my next golf`: only events that take an article go here.
_DETERMINED = re.compile(r'\b(the|my|our|next)\]? \{event\}', re.IGNORECASE)
_KEEPS_CAPITAL = re.compile(r"(I|I'm|I'd|I'll)\b")


def make_rows(
  split: str, count: int, *, seed: int = 0
) -> list[dict[str, list[dict[str, str]]]]:
  """Makes rows of one of the three sets; no two have the same request.

  Example::

    rows = make_rows('train', 1000, seed=0)

  Args:
    split: `train`, `heldout_values` or `heldout_patterns`.
    count: number of rows. The first rows are the same whatever it is.
    seed: another seed gives other rows.

  Returns:
    Rows `{'messages': [system, user, assistant]}`.

  Raises:
    ValueError: there is no such set.
  """
  splits = [name.removesuffix('.jsonl') for name in FILES]
  if split not in splits:
    raise ValueError(f'split is {split!r}; expected one of {splits}')
  words = order_words.TRAIN if split == splits[0] else order_words.HELD_OUT
  patterns = (order_patterns.ORDERS, order_patterns.EVENTS)
  if split == splits[2]:
    patterns = (
      order_patterns.HELD_OUT_ORDERS,
      order_patterns.HELD_OUT_EVENTS,
    )
  rng = random.Random(f'{seed} {split}')
  rows: list[dict[str, list[dict[str, str]]]] = []
  seen: set[str] = set()
  deck = order_words.Deck(rng)
  while len(rows) < count:
    kind = len(rows) % 2
    pattern = deck.draw(patterns[kind])
    make = _make_event if kind else _make_order
    request, answer = make(rng, deck, words, pattern)
    if request in seen:
      continue
    seen.add(request)
    rows.append(
      {
        'messages': [
          {'role': 'system', 'content': SYSTEM},
          {'role': 'user', 'content': request},
          {
            'role': 'assistant',
            'content': json.dumps(
              answer, separators=(',', ':'), ensure_ascii=False
            ),
          },
        ]
      }
    )
  return rows


def write(
  directory: str | os.PathLike[str],
  *,
  rows: int = 4000,
  seed: int = 0,
) -> dict[str, pathlib.Path]:
  """Writes the three sets, each file put in place in one piece.

  Args:
    directory: made if missing.
    rows: number of training rows.
    seed: seed of all rows.

  Returns:
    The paths by name of the set.
  """
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  counts = dict(zip(FILES, (rows, 200, 100), strict=True))
  paths = {}
  for name, count in counts.items():
    split = name.removesuffix('.jsonl')
    made = make_rows(split, count, seed=seed)
    paths[split] = directory / name
    _write_lines(paths[split], made)
  return paths


def expand(pattern: str) -> list[str]:
  """All sentences that a pattern's choices allow.

  Args:
    pattern: one of `order_patterns`.

  Returns:
    The sentences, places in braces left as they are.
  """
  head, bracket, rest = pattern.partition('[')
  if not bracket:
    return [pattern]
  choices, _, tail = rest.partition(']')
  tails = expand(tail)
  return [head + c + t for c in choices.split('|') for t in tails]


def date_forms(month: int, day: int) -> tuple[str, ...]:
  """The ways in which a date is written.

  Args:
    month: 1 to 12.
    day: 1 to 31.

  Returns:
    For the fourth of March: `March 4`, `4 March`, `March 4th`, `the 4th of
    March`.
  """
  name, nth = order_words.MONTHS[month - 1], order_words.ordinal(day)
  return (
    f'{name} {day}',
    f'{day} {name}',
    f'{name} {nth}',
    f'the {nth} of {name}',
  )


def count_forms(count: int) -> tuple[str, ...]:
  """The ways in which a count is written before a thing.

  Args:
    count: 2 to 99.

  Returns:
    For 12: `12`, `twelve`, `a dozen`.
  """
  return (
    str(count),
    order_words.number_word(count),
    *_ROUND_COUNTS.get(count, ()),
  )


def _make_order(
  rng: random.Random,
  deck: order_words.Deck,
  words: order_words.Words,
  pattern: str,
) -> tuple[str, dict[str, Any]]:
  """A request to order something, and its answer."""
  thing = _thing(rng, deck, words)
  apart = '{n}' in pattern  # `mug for Mara, one of them` is no English.
  count = _count(rng, least=2 if apart else 1)
  if count == 1:
    counted = rng.choice((f'1 {thing}', f'one {thing}'))
    if rng.random() < 0.6:
      counted = order_words.with_article(thing)
  else:
    thing = order_words.plural(thing)
    counted = f'{rng.choice(count_forms(count))} {thing}'
  name = _name(rng, deck, words)
  date, when = _date(rng)
  number = rng.choice((str(count), order_words.number_word(count)))
  request = _phrase(
    rng,
    pattern,
    {'items': counted, 'item': thing, 'n': number, 'name': name, 'date': date},
  )
  return request, {'order': f'{count} {thing} for {name}', 'date': when}


def _make_event(
  rng: random.Random,
  deck: order_words.Deck,
  words: order_words.Words,
  pattern: str,
) -> tuple[str, dict[str, Any]]:
  """A request about a calendar, and its answer."""
  article = _DETERMINED.search(pattern) is not None or rng.random() < 0.7
  event = _event(rng, deck, words, article)
  place, preposition = _place(rng, deck, words)
  name = _name(rng, deck, words)
  while set(_parts(name)) & set(_parts(f'{place} {event}')):
    name = _name(rng, deck, words)
  date, when = _date(rng)
  request = _phrase(
    rng,
    pattern,
    {
      'event': event,
      'an': order_words.with_article(event) if article else event,
      'place': place,
      'at': f'{preposition} {place}',
      'name': name,
      'date': date,
    },
  )
  return request, {'event': f'with {name}, {place}: {event}', 'date': when}


def _count(rng: random.Random, least: int) -> int:
  if rng.random() < 0.3:
    return rng.choice([c for c in (1, 1, 2, 2, 6, 12, 24, 36) if c >= least])
  return rng.randint(least, rng.choice((12, 30, 60)))


def _thing(
  rng: random.Random, deck: order_words.Deck, words: order_words.Words
) -> str:
  kind = rng.random()
  if kind < 0.08:
    return f'{rng.choice(words.containers)} of {deck.draw(words.contents)}'
  if kind < 0.15:
    return f'{rng.choice(words.vessels)} of {deck.draw(words.liquids)}'
  if kind < 0.27:
    return deck.draw(words.foods)
  item = deck.draw(words.items)
  if kind < 0.45:
    return item
  adjective = deck.draw(words.adjectives)
  while set(_parts(adjective)) & set(_parts(item)):  # `garden garden chair`
    adjective = deck.draw(words.adjectives)
  return f'{adjective} {item}'


def _name(
  rng: random.Random, deck: order_words.Deck, words: order_words.Words
) -> str:
  kind = rng.random()
  first = last = ''
  if kind >= 0.1:
    first = _word(rng, deck, words, words.first_names)
  if kind < 0.1 or kind >= 0.35:
    if rng.random() < 0.35:
      last = deck.draw(words.name_stems) + rng.choice(words.name_endings)
    else:
      last = _word(rng, deck, words, words.last_names)
  if not first:
    return f'{rng.choice(_TITLES)} {last}'
  return first if last in ('', first) else f'{first} {last}'


def _place(
  rng: random.Random, deck: order_words.Deck, words: order_words.Words
) -> tuple[str, str]:
  """A place and its preposition."""
  kind = rng.random()
  if kind < 0.4:
    name = _word(rng, deck, words, words.venue_names)
    return f'{name} {deck.draw(words.venues)}', 'at'
  if kind < 0.75:
    return _word(rng, deck, words, words.towns), 'in'
  return deck.draw(words.town_stems) + rng.choice(words.town_endings), 'in'


def _word(
  rng: random.Random,
  deck: order_words.Deck,
  words: order_words.Words,
  values: tuple[str, ...],
) -> str:
  """One of a list of names, or a made-up one."""
  if rng.random() < words.invented_share:
    return order_words.invented(rng)
  return deck.draw(values)


def _event(
  rng: random.Random,
  deck: order_words.Deck,
  words: order_words.Words,
  article: bool,
) -> str:
  """An event, of the kind that takes an article or of the other."""
  if not article:
    return deck.draw(words.plain_events)
  kind = rng.random()
  if kind < 0.15:
    return deck.draw(words.outings)
  first, second = (
    (words.topics, words.meetings)
    if kind < 0.6
    else (words.subjects, words.lessons)
  )
  subject, meeting = deck.draw(first), deck.draw(second)
  while meeting in _parts(subject):  # `evening evening`
    meeting = deck.draw(second)
  return f'{subject} {meeting}'


def _parts(value: str) -> list[str]:
  """The words of a value, in small letters."""
  return re.findall(r"[\w']+", value.lower())


def _date(rng: random.Random) -> tuple[str, str]:
  """A date as written, and as `MM-DD`."""
  month = rng.randint(1, 12)
  day = rng.randint(1, order_words.DAYS_IN_MONTH[month - 1])
  return rng.choice(date_forms(month, day)), f'{month:02}-{day:02}'


def _phrase(rng: random.Random, pattern: str, values: Mapping[str, str]) -> str:
  """Fills a pattern and puts a greeting and the like around it."""
  while '[' in pattern:
    head, _, rest = pattern.partition('[')
    choices, _, tail = rest.partition(']')
    pattern = head + rng.choice(choices.split('|')) + tail
  opening, closing = rng.choice(_OPENINGS), rng.choice(_CLOSINGS)
  casual = rng.random() < 0.08
  begins_with_value = pattern.startswith('{')
  if begins_with_value and not opening.endswith(('! ', '. ')):
    opening = ''  # `Hi, Mara needs` would greet Mara.
  lower = opening.endswith(', ') or (casual and not opening)
  if lower and not begins_with_value and not _KEEPS_CAPITAL.match(pattern):
    pattern = pattern[0].lower() + pattern[1:]
  if casual and not closing and pattern.endswith('.'):
    pattern = pattern[:-1]
  if closing and pattern[-1] not in '.?!':
    closing = ''
  text = pattern
  for key, value in values.items():
    text = text.replace(f'{{{key}}}', value)
    text = text.replace(f'{{{key.capitalize()}}}', value[0].upper() + value[1:])
  return opening + text + closing


def _write_lines(path: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
  temporary = path.with_name(f'.{path.name}.{os.getpid()}')
  try:
    with open(temporary, 'w', encoding='utf-8', newline='\n') as f:
      for row in rows:
        f.write(json.dumps(row, ensure_ascii=False) + '\n')
      f.flush()
      os.fsync(f.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def _main(argv: Sequence[str]) -> None:
  """Writes the three files and says where."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected argument {argv[1]!r}; give only flags')
  values = flags.FLAGS
  if not values.output:
    raise app.UsageError('--output is empty; expected a folder')
  for path in write(values.output, rows=values.rows, seed=values.seed).values():
    print(path)


if __name__ == '__main__':
  # Defined here, not above: other programs import this module, and have flags
  # of these names.
  flags.DEFINE_string(
    'output', '', 'Folder to write the three files to; made if missing.'
  )
  flags.DEFINE_integer('seed', 0, 'Seed of the rows.', lower_bound=0)
  flags.DEFINE_integer('rows', 4000, 'Training rows.', lower_bound=1)
  app.run(_main)
