import collections
import json
import os
import pathlib
import re
import subprocess
import sys

from absl.testing import absltest
from absl.testing import parameterized

from peftlib.data import chat
from peftlib.data import reading
from peftlib.data import tokenizer as tokenizer_lib
from peftlib.demo import assets
from peftlib.demo import orders

_SPLITS = ('train', 'heldout_values', 'heldout_patterns')
_MONTHS = (
  'january february march april may june july august september october'
  ' november december'
).split()
# Written out here, apart from the code that is tested.
_COUNTS = {
  'a': 1,
  'an': 1,
  'a pair of': 2,
  'a couple of': 2,
  'half a dozen': 6,
  'a dozen': 12,
  'two dozen': 24,
  'three dozen': 36,
}
_SMALL = (
  'one two three four five six seven eight nine ten eleven twelve thirteen'
  ' fourteen fifteen sixteen seventeen eighteen nineteen'
).split()
for _i, _word in enumerate(_SMALL, start=1):
  _COUNTS[_word] = _i
for _tens, _word in enumerate('twenty thirty forty fifty sixty'.split(), 2):
  _COUNTS[_word] = 10 * _tens
  for _i, _ones in enumerate(_SMALL[:9], start=1):
    _COUNTS[f'{_word}-{_ones}'] = 10 * _tens + _i


def _row(row) -> tuple[str, dict]:
  system, user, assistant = row['messages']
  assert system == {'role': 'system', 'content': 'Reply with JSON.'}
  assert user['role'] == 'user'
  assert assistant['role'] == 'assistant'
  answer = json.loads(assistant['content'])
  assert assistant['content'] == json.dumps(answer, separators=(',', ':'))
  if 'order' in answer:
    found = re.fullmatch(r'(\d+) (.+) for (.+)', answer['order'])
    fields = {'order': found[2], 'count': int(found[1]), 'for': found[3]}
  else:
    found = re.fullmatch(r'with (.+), (.+): (.+)', answer['event'])
    fields = {'event': found[3], 'with': found[1], 'place': found[2]}
  return user['content'], {**fields, 'date': answer['date']}


def _dates(text: str) -> list[str]:
  """All dates in a text, as MM-DD."""
  found = []
  month = '|'.join(_MONTHS)
  for m in re.finditer(
    rf'\b({month}) (\d+)(?:st|nd|rd|th)?\b'
    rf'|\b(\d+)(?:st|nd|rd|th)?(?: of)? ({month})\b',
    text.lower(),
  ):
    name, day = (m[1], m[2]) if m[1] else (m[4], m[3])
    found.append(f'{_MONTHS.index(name) + 1:02}-{int(day):02}')
  return found


def _values(rows) -> dict[str, set[str]]:
  found = {}
  for row in rows:
    for key, value in _row(row)[1].items():
      if key not in ('count', 'date'):
        key = 'name' if key in ('for', 'with') else key
        found.setdefault(key, set()).add(value)
  return found


class MakeRowsTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    counts = (3000, 200, 100)
    cls.rows = {
      split: orders.make_rows(split, count)
      for split, count in zip(_SPLITS, counts)
    }

  def test_known_rows(self):
    rows = [_row(r) for r in orders.make_rows('train', 2, seed=1)]
    self.assertEqual(list(rows[0][1]), ['order', 'count', 'for', 'date'])
    self.assertEqual(list(rows[1][1]), ['event', 'with', 'place', 'date'])

  @parameterized.parameters(*_SPLITS)
  def test_same_seed_same_rows(self, split):
    rows = self.rows[split]
    again = orders.make_rows(split, 50)
    self.assertEqual(again, rows[:50])
    self.assertNotEqual(orders.make_rows(split, 50, seed=1), rows[:50])

  @parameterized.parameters(*_SPLITS)
  def test_requests_differ(self, split):
    requests = [_row(r)[0] for r in self.rows[split]]
    self.assertLen(set(requests), len(requests))

  @parameterized.parameters(*_SPLITS)
  def test_answer_follows_from_the_request(self, split):
    for row in self.rows[split]:
      request, answer = _row(row)
      self.assertEqual(_dates(request), [answer['date']], request)
      name = answer.get('for') or answer['with']
      self.assertLen(re.findall(rf'\b{name}\b', request), 1, request)
      if 'order' in answer:
        thing = answer['order']
        self.assertIn(thing, request)
        forms = {str(answer['count'])} | {
          f for f, n in _COUNTS.items() if n == answer['count']
        }
        pattern = '|'.join(sorted(forms, key=len, reverse=True))
        rest = request.lower()
        for value in (name, *_MONTHS):
          rest = rest.replace(value.lower(), '')
        self.assertRegex(rest, rf'\b({pattern})\b')
      else:
        self.assertIn(answer['event'], request.lower())
        self.assertEqual(answer['event'], answer['event'].lower())
        self.assertEqual(request.count(answer['place']), 1, request)

  @parameterized.parameters(*_SPLITS)
  def test_is_tidy_english(self, split):
    for row in self.rows[split]:
      request, _ = _row(row)
      self.assertNotRegex(request, r'[{}\[\]|]|  |^ | $|,,|\.\.|[.?!],')
      self.assertNotRegex(request.lower(), r'\ba [aeiou]|\ban [^aeiou]')
      self.assertNotRegex(request, r'\bi\b')

  def test_held_out_values_are_not_in_training(self):
    train = _values(self.rows['train'])
    for split in _SPLITS[1:]:
      for kind, values in _values(self.rows[split]).items():
        self.assertEmpty(values & train[kind], kind)

  def test_training_values_hardly_repeat(self):
    """Within a thousand rows: 500 orders and 500 events."""
    for start in (0, 1000, 2000):
      values = _values(self.rows['train'][start : start + 1000])
      self.assertGreaterEqual(len(values['name']), 990)
      self.assertGreaterEqual(len(values['order']), 490)
      self.assertGreaterEqual(len(values['place']), 490)
      self.assertGreaterEqual(len(values['event']), 450)

  def test_training_words_hardly_repeat(self):
    rows = [_row(r)[1] for r in self.rows['train'][:1000]]
    firsts = collections.Counter(
      (row.get('for') or row['with']).split()[0] for row in rows
    )
    for title in ('Mr', 'Mrs', 'Ms', 'Dr'):
      del firsts[title]
    self.assertGreaterEqual(len(firsts), 850)
    self.assertLessEqual(max(firsts.values()), 3)

  def test_both_kinds_are_equally_many(self):
    kinds = [next(iter(_row(r)[1])) for r in self.rows['train']]
    self.assertEqual(kinds.count('order'), kinds.count('event'))

  def test_rows_are_short(self):
    tokenizer = tokenizer_lib.Tokenizer.from_gguf(assets.model_path())
    for split, limit in zip(_SPLITS, (70, 75, 75)):
      lengths = []
      for row in self.rows[split][:200]:
        encoded = chat.encode_row(
          reading.Row(messages=tuple(row['messages'])), tokenizer
        )
        lengths.append(len(encoded))
      self.assertLess(sum(lengths) / len(lengths), limit)
      self.assertLess(max(lengths), 100)

  def test_unknown_split(self):
    with self.assertRaisesRegex(
      ValueError,
      r"split is 'test'; expected one of \['train', 'heldout_values',",
    ):
      orders.make_rows('test', 1)


class FormsTest(parameterized.TestCase):
  def test_date_forms(self):
    self.assertEqual(
      orders.date_forms(3, 4),
      ('March 4', '4 March', 'March 4th', 'the 4th of March'),
    )

  @parameterized.parameters(
    (2, ('2', 'two', 'a pair of', 'a couple of')),
    (12, ('12', 'twelve', 'a dozen')),
    (36, ('36', 'thirty-six', 'three dozen')),
    (41, ('41', 'forty-one')),
  )
  def test_count_forms(self, count, expected):
    self.assertEqual(orders.count_forms(count), expected)

  def test_expand(self):
    self.assertEqual(
      orders.expand('[A|B] c[|, d].'), ['A c.', 'A c, d.', 'B c.', 'B c, d.']
    )


class WriteTest(absltest.TestCase):
  def test_writes_files_that_can_be_read(self):
    directory = pathlib.Path(self.create_tempdir().full_path) / 'new'
    paths = orders.write(directory, rows=30, seed=5)
    self.assertEqual(list(paths), list(_SPLITS))
    self.assertCountEqual(os.listdir(directory), orders.FILES)
    for (split, path), count in zip(paths.items(), (30, 200, 100)):
      rows = reading.read_jsonl(path)
      expected = orders.make_rows(split, count, seed=5)
      self.assertEqual(
        [list(r.messages) for r in rows], [r['messages'] for r in expected]
      )

  def test_command(self):
    directory = self.create_tempdir().full_path
    command = [sys.executable, '-m', 'peftlib.demo.orders']
    done = subprocess.run(
      [*command, f'--output={directory}', '--rows=3'],
      capture_output=True,
      text=True,
      check=False,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    )
    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertEqual(
      done.stdout.split(), [os.path.join(directory, f) for f in orders.FILES]
    )
    lines = pathlib.Path(directory, 'train.jsonl').read_text().splitlines()
    self.assertLen(lines, 3)


if __name__ == '__main__':
  absltest.main()
