import collections
import json

from absl.testing import absltest
from absl.testing import parameterized
import chex
import numpy as np
import tokenizers
from tokenizers import models
from tokenizers import pre_tokenizers

from peftlib.data import pipeline as pipeline_lib
from peftlib.data import reading
from peftlib.data import tokenizer as tokenizer_lib

_LENGTHS = np.random.default_rng(0).integers(2, 30, 50)


def _tokenizer() -> tokenizer_lib.Tokenizer:
  """One token a byte, and 0 for the end."""
  tokens = ['</s>', *sorted(pre_tokenizers.ByteLevel.alphabet())]
  backend = tokenizers.Tokenizer(
    models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[])
  )
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  return tokenizer_lib.Tokenizer(backend, None, None, (0,), 7)


def _rows() -> list[reading.Row]:
  """Rows of different letters and lengths; a fifth of a row is completion."""
  rows = []
  for i, n in enumerate(_LENGTHS):
    text = ''.join(chr(ord('a') + (i + j * (i + 1)) % 26) for j in range(n))
    cut = max(1, n - 1 - n // 5)
    rows.append(
      reading.Row(prompt=text[:cut], completion=text[cut:], source=f'f:{i + 1}')
    )
  return rows


def _make(**options) -> pipeline_lib.Pipeline:
  options = {'length': 64, 'batch_size': 2, 'num_epochs': 1, **options}
  rows = options.pop('rows', _rows())
  return pipeline_lib.make_pipeline(rows, _tokenizer(), **options)


def _contents(batches) -> collections.Counter:
  """Each row found in the batches, as its tokens and its target places."""
  found = collections.Counter()
  for batch in batches:
    for b, segments in enumerate(batch['segment_ids']):
      for segment in range(1, segments.max() + 1):
        (at,) = np.nonzero(segments == segment)
        np.testing.assert_array_equal(at, np.arange(at[0], at[-1] + 1))
        np.testing.assert_array_equal(
          batch['positions'][b, at], np.arange(len(at))
        )
        targets = []
        for k, place in enumerate(batch['loss_positions'][b]):
          if batch['loss_weights'][b, k] and place in at:
            assert batch['tokens'][b, place + 1] == batch['targets'][b, k]
            targets.append(int(place - at[0] + 1))
        found[(tuple(batch['tokens'][b, at].tolist()), tuple(targets))] += 1
  return found


def _expected(rows) -> collections.Counter:
  tokenizer = _tokenizer()
  expected = collections.Counter()
  for row in rows:
    prompt = tokenizer.encode(row.prompt)
    ids = [*prompt, *tokenizer.encode(row.completion), 0]
    expected[(tuple(ids), tuple(range(len(prompt), len(ids))))] += 1
  return expected


class MakePipelineTest(parameterized.TestCase):
  @parameterized.product(
    pack=[True, False], shuffle=[True, False], batch_size=[1, 3]
  )
  def test_every_row_is_there_once(self, **options):
    pipeline = _make(**options)
    batches = list(pipeline.dataset)
    self.assertEqual(_contents(batches), _expected(_rows()))
    size = options['batch_size']
    for batch in batches:
      self.assertEqual(batch['tokens'].shape[0], size)
      self.assertIn(
        (batch['tokens'].shape[1], batch['targets'].shape[1]), pipeline.shapes
      )
      pads = batch['segment_ids'] == 0
      np.testing.assert_array_equal(batch['tokens'][pads], 7)
      np.testing.assert_array_equal(batch['positions'][pads], 0)
      for key, value in batch.items():
        self.assertEqual(
          value.dtype, np.float32 if key == 'loss_weights' else np.int32
        )
    self.assertLen(batches, int(np.ceil(pipeline.steps_per_epoch)))

  def test_packed_is_of_one_shape_and_little_padding(self):
    pipeline = _make()
    self.assertEqual(pipeline.shapes, ((64, 32),))
    self.assertEqual((pipeline.length, pipeline.loss_length), (64, 32))
    tokens = int(_LENGTHS.sum()) + 50
    stats = pipeline.stats
    self.assertEqual(stats.rows, 50)
    self.assertEqual(stats.tokens, tokens)
    self.assertEqual(stats.slots, 64 * stats.sequences)
    self.assertEqual(stats.truncated_rows, 0)
    self.assertLess(stats.pad_share, 0.15)
    self.assertEqual(
      stats.loss_tokens, sum(len(r.completion) + 1 for r in _rows())
    )

  def test_unpacked_is_of_few_shapes(self):
    pipeline = _make(pack=False, length=20, overlong='truncate')
    self.assertEqual(pipeline.shapes, ((20, 16),))
    pipeline = _make(pack=False, length=100)
    self.assertEqual(pipeline.shapes, ((32, 16),))
    long = reading.Row(prompt='x' * 90, completion='y')
    pipeline = _make(pack=False, length=100, rows=[*_rows(), long])
    self.assertEqual(pipeline.shapes, ((32, 16), (100, 16)))

  def test_unshuffled_keeps_the_order(self):
    pipeline = _make(pack=False, shuffle=False, batch_size=4)
    batches = list(pipeline.dataset)
    tokenizer = _tokenizer()
    rows = [t for batch in batches for t in batch['tokens']]
    for row, tokens in zip(_rows(), rows, strict=False):
      prompt = tokenizer.encode(row.prompt)
      self.assertEqual(tokens[: len(prompt)].tolist(), prompt)

  def test_same_seed_same_batches(self):
    one, two, other = _make(seed=3), _make(seed=3), _make(seed=4)
    chex.assert_trees_all_equal(list(one.dataset), list(two.dataset))
    self.assertEqual(one.fingerprint, two.fingerprint)
    self.assertEqual(one.fingerprint, _make(seed=3, num_epochs=9).fingerprint)
    self.assertNotEqual(one.fingerprint, other.fingerprint)
    rows = _rows()
    rows[7] = reading.Row(prompt='?', completion='!')
    changed = _make(seed=3, rows=rows)
    self.assertNotEqual(one.fingerprint, changed.fingerprint)
    first = (
      next(iter(one.dataset))['tokens'],
      next(iter(other.dataset))['tokens'],
    )
    self.assertFalse(np.array_equal(*first))

  def test_epochs_hold_the_same_rows_in_another_order(self):
    pipeline = _make(num_epochs=2, batch_size=1)
    batches = list(pipeline.dataset)
    half = len(batches) // 2
    self.assertEqual(half, pipeline.steps_per_epoch)
    self.assertEqual(_contents(batches[:half]), _expected(_rows()))
    self.assertEqual(_contents(batches[half:]), _expected(_rows()))
    order = [
      [b['tokens'].tobytes() for b in x]
      for x in (batches[:half], batches[half:])
    ]
    self.assertNotEqual(*order)

  def test_epochs_without_end_lose_nothing(self):
    pipeline = _make(num_epochs=None, batch_size=3)
    batches = iter(pipeline.dataset)
    sequences = pipeline.stats.sequences
    some = [next(batches) for _ in range(sequences)]  # Three epochs.
    three = collections.Counter(
      {k: 3 * n for k, n in _expected(_rows()).items()}
    )
    self.assertEqual(_contents(some), three)

  @parameterized.product(pack=[True, False], taken=[0, 1, 7])
  def test_resumes_at_a_saved_position(self, pack, taken):
    options = {'pack': pack, 'num_epochs': 3, 'batch_size': 2}
    batches = iter(_make(**options).dataset)
    for _ in range(taken):
      next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    again = iter(_make(**options).dataset)
    again.set_state(state)
    rest = list(batches)
    self.assertNotEmpty(rest)
    chex.assert_trees_all_equal(list(again), rest)

  def test_counts_rows_that_were_cut(self):
    rows = [
      reading.Row(prompt='p' * n, completion='c', source=f'f:{n}')
      for n in (5, 9, 30)
    ]
    pipeline = _make(rows=rows, length=8)
    self.assertEqual(pipeline.stats.truncated_rows, 2)
    self.assertEqual(pipeline.stats.tokens, 7 + 8 + 8)
    rows.append(reading.Row(prompt='p', completion='c' * 20, source='f:9'))
    with self.assertRaisesRegex(
      ValueError, '^f:9: the completion alone needs 22 tokens'
    ):
      _make(rows=rows, length=8)
    pipeline = _make(rows=rows, length=8, overlong='truncate')
    self.assertEqual(pipeline.stats.truncated_rows, 3)

  @parameterized.parameters(
    ({'rows': []}, 'no rows; expected at least one'),
    ({'length': 1}, 'length is 1; expected at least 2'),
    ({'batch_size': 0}, 'batch_size is 0; expected at least 1'),
    ({'seed': -1}, 'seed is -1; expected 0 to 4294967295'),
    ({'seed': 2**32}, 'seed is 4294967296; expected 0 to 4294967295'),
    ({'num_epochs': 0}, 'num_epochs is 0; expected at least 1, or None'),
    ({'overlong': 'drop'}, "overlong is 'drop'; expected one of"),
    ({'loss_on': 'user'}, "loss_on is 'user'; expected one of"),
  )
  def test_bad_argument(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      _make(**options)


if __name__ == '__main__':
  absltest.main()
