import sys

from absl.testing import absltest
import numpy as np

from tests.benchmarks import contest
from tests.benchmarks import worker

_SCRIPT = """
import time
from tests.benchmarks import worker

def turns(spec):
  print('a library says something')
  def work():
    return {'seconds': spec['seconds'].pop(0), 'at': time.monotonic()}
  return work

worker.serve({'turns': turns})
"""


def _competitor(name, seconds):
  return contest.Competitor(
    name,
    (sys.executable, '-c', _SCRIPT),
    {'case': 'turns', 'seconds': seconds},
  )


class ContestTest(absltest.TestCase):
  """Processes take turns and are compared."""

  def test_competitors_take_turns(self):
    results = contest.run(
      [_competitor('a', [9, 1, 2, 3]), _competitor('b', [9, 4, 4, 4])], 4
    )
    self.assertEqual(list(results), ['a', 'b'])
    when = [[r['at'] for r in results[name].rounds] for name in ('a', 'b')]
    in_turns = [at for both in zip(*when, strict=True) for at in both]
    self.assertEqual(in_turns, sorted(in_turns))

  def test_first_round_does_not_count(self):
    result = contest.run([_competitor('a', [9, 1, 2, 6])], 4)['a']
    self.assertEqual(result.seconds, [1, 2, 6])
    self.assertEqual(result.median, 2)
    self.assertEqual(result.spread, 1.25)
    self.assertGreater(result.since_exec, result.ready)
    self.assertBetween(result.peak_bytes, 5e6, 1e9)

  def test_processes_of_one_name_are_joined(self):
    found = [
      contest.run([_competitor('a', seconds)], 2)['a']
      for seconds in ([9, 1], [9, 3], [9, 4])
    ]
    whole = contest.joined(found)
    self.assertEqual(whole.seconds, [1, 3, 4])
    self.assertEqual(whole.peak_bytes, max(one.peak_bytes for one in found))
    self.assertEqual(
      whole.since_exec, sorted(one.since_exec for one in found)[1]
    )

  def test_says_what_a_failed_process_printed(self):
    with self.assertRaisesRegex(
      contest.ProcessError,
      r'^a: ended with exit code 1:\n(?s:.*)pop from empty',
    ):
      contest.run([_competitor('a', [1])], 2)


class BatchesTest(absltest.TestCase):
  """What every competitor's steps see."""

  def test_cuts_tokens_in_order(self):
    batches = list(worker.batches(np.arange(14), {'rows': 2, 'length': 2}))
    np.testing.assert_array_equal(
      batches, [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]
    )


if __name__ == '__main__':
  absltest.main()
