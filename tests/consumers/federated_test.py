import functools

from absl.testing import absltest
from flax import nnx
import numpy as np

import peftlib
from tests.consumers import federated
from tests.consumers import harness
import transforms


@functools.cache
def _one_round(noise, clip):
  result = federated.run(steps=1, noise=noise, clip=clip)
  before, clients, after = map(_flat, result['rounds'][0])
  return result, before, clients, after


def _flat(state):
  """All numbers of a State, or those of each of several, in a row."""
  if isinstance(state, list):
    return np.stack([_flat(s) for s in state])
  return np.concatenate(
    [np.ravel(v.get_value()) for _, v in nnx.to_flat_state(state)]
  )


class FederatedTest(harness.LeakCheckedTestCase):
  loop = federated

  def test_knows_more_than_any_client(self):
    result = self.result()
    after = float(result['after']['accuracy'])
    self.assertGreater(after, 0.7)
    self.assertGreater(after, result['before']['accuracy'] + 0.2)
    for alone in result['each_alone']:
      self.assertGreater(after, alone['accuracy'])

  def test_average_without_privacy(self):
    _, before, clients, after = _one_round(0.0, 1e6)
    self.assertGreater(np.abs(clients - before).max(axis=1).min(), 0.05)
    np.testing.assert_allclose(after, clients.mean(axis=0), atol=1e-6)

  def test_average_of_the_weights(self):
    result = _one_round(0.0, 1e6)[0]
    _, clients, after = result['rounds'][0]
    weights = [
      _flat(
        peftlib.merge_adapters(
          result['graphdef'], transforms.merge(state, result['frozen'])
        )[1]
      )
      for state in (*clients, after)
    ]
    np.testing.assert_allclose(
      weights[-1], np.mean(weights[:-1], axis=0), atol=1e-6
    )

  def test_a_client_counts_up_to_the_clip(self):
    clip = 0.25
    _, before, clients, after = _one_round(0.0, clip)
    moved = clients - before
    norms = np.linalg.norm(moved, axis=1, keepdims=True)
    self.assertGreater(norms.min(), clip)
    np.testing.assert_allclose(
      after, before + (moved * clip / norms).mean(axis=0), atol=1e-6
    )

  def test_noise(self):
    noise, clip = 0.5, 0.25
    expected = _one_round(0.0, clip)[3]
    difference = _one_round(noise, clip)[3] - expected
    self.assertAlmostEqual(
      difference.std(), noise * clip / federated.CLIENTS, delta=0.01
    )
    self.assertLess(abs(difference.mean()), 0.01)

  def test_only_what_a_client_may_send_changes(self):
    result = self.result()
    base = dict(nnx.to_flat_state(nnx.state(result['base'])))
    names = set()
    for path, variable in nnx.to_flat_state(result['frozen']):
      if path in base:
        self.assertIs(variable.get_raw_value(), base[path].get_raw_value())
      else:
        names.add(path[-1])
    self.assertEqual(names, {'kernel_lora_a'})


if __name__ == '__main__':
  absltest.main()
