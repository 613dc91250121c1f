from absl.testing import absltest
from absl.testing import parameterized
import hypothesis
from hypothesis import strategies as st
import numpy as np

from peftlib.data import chat
from peftlib.data import packing


def _row(tokens, loss, completion_start=0, source='f:1') -> chat.Encoded:
  return chat.Encoded(
    np.asarray(tokens, np.int32),
    np.asarray(loss, bool),
    completion_start,
    source,
  )


class BuildSequenceTest(absltest.TestCase):
  def test_arrays(self):
    rows = [_row([5, 6, 7], [0, 1, 1]), _row([8, 9], [0, 1])]
    got = packing.build_sequence(rows, length=7, loss_length=4, pad_id=1)
    expected = {
      'tokens': [5, 6, 7, 8, 9, 1, 1],
      'positions': [0, 1, 2, 0, 1, 0, 0],
      'segment_ids': [1, 1, 1, 2, 2, 0, 0],
      'loss_positions': [0, 1, 3, 0],
      'targets': [6, 7, 9, 0],
      'loss_weights': [1.0, 1.0, 1.0, 0.0],
    }
    self.assertCountEqual(got, expected)
    for key, value in expected.items():
      self.assertEqual(got[key].tolist(), value, key)
      self.assertEqual(
        got[key].dtype, np.float32 if key == 'loss_weights' else np.int32
      )

  def test_nothing_but_padding(self):
    got = packing.build_sequence([], length=3, loss_length=2, pad_id=9)
    self.assertEqual(got['tokens'].tolist(), [9, 9, 9])
    self.assertEqual(got['segment_ids'].tolist(), [0, 0, 0])
    self.assertEqual(got['loss_weights'].tolist(), [0.0, 0.0])

  def test_too_much(self):
    rows = [_row([5, 6, 7], [0, 1, 1])]
    with self.assertRaisesRegex(
      ValueError, 'rows of 3 tokens and 2 targets in a sequence for 2 and 16'
    ):
      packing.build_sequence(rows, length=2, loss_length=16, pad_id=0)

  def test_stack(self):
    one = packing.build_sequence([], length=3, loss_length=2, pad_id=9)
    two = packing.build_sequence(
      [_row([4, 5], [0, 1])], length=3, loss_length=2, pad_id=9
    )
    batch = packing.stack([one, two])
    self.assertEqual(batch['tokens'].tolist(), [[9, 9, 9], [4, 5, 9]])
    self.assertEqual(batch['loss_weights'].shape, (2, 2))


class FitTest(parameterized.TestCase):
  def test_short_row_stays(self):
    row = _row([1, 2, 3], [0, 0, 1], 2)
    self.assertEqual(packing.fit(row, 3), (row, False))

  def test_prompt_is_cut_from_the_left(self):
    row = _row(range(8), [0, 0, 0, 1, 0, 0, 1, 1], 6)
    got, cut = packing.fit(row, 5)
    self.assertTrue(cut)
    self.assertEqual(got.tokens.tolist(), [3, 4, 5, 6, 7])
    # The target at 3 is first now: nothing is left to predict it from.
    self.assertEqual(got.loss_mask.tolist(), [False, False, False, True, True])
    self.assertEqual(got.completion_start, 3)

  def test_one_token_of_the_prompt_stays(self):
    row = _row(range(8), [0] * 6 + [1, 1], 6)
    self.assertEqual(packing.fit(row, 3)[0].tokens.tolist(), [5, 6, 7])
    with self.assertRaises(ValueError) as caught:
      packing.fit(row, 2)
    self.assertEqual(
      str(caught.exception),
      'f:1: the completion alone needs 3 tokens, more than the length of 2;'
      " shorten it, use a length of at least 3, or overlong='truncate'",
    )

  def test_truncate(self):
    row = _row(range(8), [0] * 4 + [1] * 4, 4)
    got, cut = packing.fit(row, 3, overlong='truncate')
    self.assertTrue(cut)
    self.assertEqual(got.tokens.tolist(), [3, 4, 5])
    self.assertEqual(got.loss_mask.tolist(), [False, True, True])
    self.assertEqual(got.completion_start, 1)

  def test_text(self):
    row = _row(range(5), [0, 1, 1, 1, 1])
    with self.assertRaisesRegex(ValueError, 'the text alone needs 5 tokens'):
      packing.fit(row, 4)
    got, _ = packing.fit(row, 4, overlong='truncate')
    self.assertEqual(got.tokens.tolist(), [0, 1, 2, 3])


class FirstFitTest(parameterized.TestCase):
  def test_longest_first(self):
    packs = packing.first_fit(
      [2, 5, 3, 4], [1, 1, 1, 1], length=7, loss_length=4
    )
    self.assertEqual(packs, [[1, 0], [3, 2]])

  def test_targets_are_a_capacity_too(self):
    packs = packing.first_fit([2, 2, 2], [2, 2, 1], length=9, loss_length=3)
    self.assertEqual(packs, [[0, 2], [1]])

  def test_window(self):
    packs = packing.first_fit(
      [3, 3, 1], [1, 1, 1], length=4, loss_length=9, window=1
    )
    self.assertEqual(packs, [[0], [1, 2]])

  def test_row_that_fits_nowhere(self):
    with self.assertRaisesRegex(
      ValueError, 'row 1 has 9 tokens and 1 targets; a sequence has room for 8'
    ):
      packing.first_fit([1, 9], [1, 1], length=8, loss_length=4)

  @hypothesis.settings(max_examples=50, deadline=None)
  @hypothesis.given(
    st.lists(
      st.integers(1, 20).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(1, min(n, 8)))
      ),
      min_size=1,
      max_size=60,
    ),
    st.integers(1, 10),
  )
  def test_holds_every_row_once_within_both_capacities(self, rows, window):
    lengths, losses = zip(*rows)
    packs = packing.first_fit(
      lengths, losses, length=20, loss_length=8, window=window
    )
    self.assertCountEqual([i for p in packs for i in p], range(len(rows)))
    for pack in packs:
      self.assertNotEmpty(pack)
      self.assertLessEqual(sum(lengths[i] for i in pack), 20)
      self.assertLessEqual(sum(losses[i] for i in pack), 8)


class ChooseLossLengthTest(parameterized.TestCase):
  def test_holds_the_largest_row(self):
    got = packing.choose_loss_length([10, 60], [2, 50], length=64)
    self.assertEqual(got, 64)

  def test_is_as_small_as_packing_allows(self):
    # Eight rows of 8 tokens fill a sequence: 8 times 2 targets, not more.
    got = packing.choose_loss_length([8] * 80, [2] * 80, length=64)
    self.assertEqual(got, 16)
    packs = packing.first_fit([8] * 80, [2] * 80, length=64, loss_length=got)
    self.assertLen(packs, 10)

  @parameterized.parameters((0, 16), (1, 16), (16, 16), (17, 32), (32, 32))
  def test_round_up(self, count, expected):
    self.assertEqual(packing.round_up(count), expected)


class PackingStatsTest(absltest.TestCase):
  def test_shares(self):
    stats = packing.PackingStats(
      rows=3, sequences=2, tokens=15, slots=20, loss_tokens=6, truncated_rows=0
    )
    self.assertAlmostEqual(stats.pad_share, 0.25)
    self.assertAlmostEqual(stats.loss_share, 0.4)


if __name__ == '__main__':
  absltest.main()
