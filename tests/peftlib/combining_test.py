from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlib
from tests.peftlib import toy_models
import transforms

chex.set_n_cpu_devices(8)

KEY = jax.random.key(0)
WEIGHTS = [0.7, -0.4, 0.2]


def _adapter(seed, rank=2):
  _, state = peftlib.inject(
    *nnx.split(toy_models.LaxScan(nnx.Rngs(0))),
    peftlib.LoraConfig(module_path='.*up', rank=rank, alpha=rank),
    toy_models.inputs(),
    key=KEY,
  )
  state = transforms.select(state, nnx.LoRAParam)
  keys = iter(jax.random.split(jax.random.key(seed), 2))
  return jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), state)


def _factors(state):
  up = state['layers']['up']
  return (
    np.asarray(up['kernel_lora_a'][...], np.float64),
    np.asarray(up['kernel_lora_b'][...], np.float64),
  )


def _update(state):
  a, b = _factors(state)
  return a @ b


def _cut(delta, rank):
  u, s, vt = np.linalg.svd(delta, full_matrices=False)
  return (u[..., :rank] * s[..., None, :rank]) @ vt[..., :rank, :]


def _elect(deltas):
  """Yadav et al., 2023, with weights as in peft.utils.merge_utils.ties."""
  out = np.zeros(deltas[0].shape)
  for index in np.ndindex(*out.shape):
    entries = [delta[index] for delta in deltas]
    positive = sum(entries) >= 0
    chosen = [
      e * w for e, w in zip(entries, WEIGHTS) if e and (e > 0) == positive
    ]
    out[index] = np.mean(chosen) if chosen else 0.0
  return out


def _resized(state):
  """The same with one more input."""
  flat = [
    (p, v.replace(jnp.ones((3, 9, 2))) if str(p[-1])[-1] == 'a' else v)
    for p, v in nnx.to_flat_state(state)
  ]
  return nnx.from_flat_state(flat)


def _last(state):
  """The same with the layers on the last axis."""
  return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), state)


class CombiningTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.states = [_adapter(i) for i in range(3)]
    self.deltas = np.stack([_update(state) for state in self.states])
    self.weighted = self.deltas * np.reshape(WEIGHTS, (3, 1, 1, 1))

  def test_concatenated_is_the_sum_exactly(self):
    states = [_adapter(0, 2), _adapter(1, 3)]
    got = peftlib.combine_adapters(states, [0.5, -2.0])
    self.assertEqual(_factors(got)[0].shape, (3, 8, 5))
    expected = 0.5 * _update(states[0]) - 2.0 * _update(states[1])
    np.testing.assert_allclose(_update(got), expected, atol=1e-5)

  def test_negation_and_interpolation(self):
    one, two, _ = self.states
    np.testing.assert_allclose(
      _update(peftlib.combine_adapters([one], [-1.0])), -_update(one), atol=1e-6
    )
    got = peftlib.combine_adapters([one, two], [0.75, 0.25])
    np.testing.assert_allclose(
      _update(got), 0.75 * _update(one) + 0.25 * _update(two), atol=1e-5
    )

  @parameterized.parameters(None, 3)
  def test_svd_is_the_best_of_its_rank(self, rank):
    got = peftlib.combine_adapters(self.states, WEIGHTS, how='svd', rank=rank)
    expected = _cut(self.weighted.sum(0), rank or 2)
    np.testing.assert_allclose(_update(got), expected, atol=1e-4)

  def test_ties(self):
    trimmed = []
    for delta in self.deltas:
      layers = []
      for layer in delta:
        kept = np.argsort(-np.abs(layer).ravel())[: layer.size // 2]
        mask = np.zeros(layer.size, bool)
        mask[kept] = True
        layers.append(np.where(mask.reshape(layer.shape), layer, 0))
      trimmed.append(layers)
    got = peftlib.combine_adapters(
      self.states, WEIGHTS, how='ties_svd', density=0.5, rank=8
    )
    np.testing.assert_allclose(
      _update(got), _elect(np.array(trimmed)), atol=1e-4
    )

  def test_dare_that_drops_nothing(self):
    got = peftlib.combine_adapters(
      self.states, WEIGHTS, how='dare_linear_svd', density=1.0, rank=8, key=KEY
    )
    np.testing.assert_allclose(_update(got), self.weighted.sum(0), atol=1e-4)
    got = peftlib.combine_adapters(
      self.states, WEIGHTS, how='dare_ties_svd', density=1.0, rank=8, key=KEY
    )
    np.testing.assert_allclose(_update(got), _elect(self.deltas), atol=1e-4)

  def test_dare_drops_and_scales_up(self):
    got = peftlib.combine_adapters(
      self.states[:1],
      [1.0],
      how='dare_linear_svd',
      density=0.5,
      rank=8,
      key=KEY,
    )
    ratio = _update(got) / self.deltas[0]
    kept = np.isclose(ratio, 2.0, atol=1e-2)
    dropped = np.isclose(ratio, 0.0, atol=1e-2)
    self.assertTrue((kept | dropped).all())
    self.assertBetween(kept.mean(), 0.4, 0.6)

  def test_linear_is_that_of_peft(self):
    got = peftlib.combine_adapters(self.states, WEIGHTS, how='linear')
    a = sum(
      np.sign(w) * np.sqrt(abs(w)) * _factors(s)[0]
      for w, s in zip(WEIGHTS, self.states)
    )
    b = sum(
      np.sqrt(abs(w)) * _factors(s)[1] for w, s in zip(WEIGHTS, self.states)
    )
    np.testing.assert_allclose(_factors(got)[0], a, atol=1e-5)
    np.testing.assert_allclose(_factors(got)[1], b, atol=1e-5)

  def test_extracted(self):
    _, base = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    kernel = base['layers']['up']['kernel']
    tuned = jax.tree.map(lambda x: x, base)
    tuned['layers']['up']['kernel'] = kernel.replace(
      kernel[...] + jnp.asarray(2.0 * _update(self.states[0]), jnp.float32)
    )
    got = peftlib.extract_adapter(base, tuned, self.states[1], scale=2.0)
    np.testing.assert_allclose(_update(got), _update(self.states[0]), atol=1e-4)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, self.states[1])

  def test_extracted_of_more_than_fits(self):
    _, base = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    noise = jax.random.normal(KEY, (3, 8, 16))
    kernel = base['layers']['up']['kernel']
    tuned = jax.tree.map(lambda x: x, base)
    tuned['layers']['up']['kernel'] = kernel.replace(kernel[...] + noise)
    got = peftlib.extract_adapter(base, tuned, self.states[0], scale=0.5)
    expected = _cut(np.asarray(noise, np.float64) / 0.5, 2)
    np.testing.assert_allclose(_update(got), expected, atol=1e-4)

  def test_extract_errors(self):
    _, base = nnx.split(toy_models.LaxScan(nnx.Rngs(0)))
    _, other = nnx.split(toy_models.Plain(nnx.Rngs(0)))
    like = self.states[0]
    for arguments, scale, message in (
      ((base, base, like), 0.0, r'scale=0\.0: must be a number > 0'),
      ((base, other, like), 1.0, 'layers/up/kernel is not in both models'),
      (
        (base, base, _resized(like)),
        1.0,
        r'layers/up/kernel has shapes \(3, 8, 16\) and \(3, 8, 16\); the'
        r' adapter is for \(3, 9, 16\)',
      ),
    ):
      with self.subTest(message):
        with self.assertRaisesRegex(ValueError, message):
          peftlib.extract_adapter(*arguments, scale=scale)
    with self.assertRaisesRegex(TypeError, 'tuned is a LaxScan, an nnx.Module'):
      peftlib.extract_adapter(
        base, toy_models.LaxScan(nnx.Rngs(0)), like, scale=1.0
      )

  def test_dtype_and_metadata_stay(self):
    states = [
      jax.tree.map(lambda x: x.astype(jnp.bfloat16), s) for s in self.states
    ]
    for how in ('concatenate', 'svd', 'linear'):
      got = peftlib.combine_adapters(states, WEIGHTS, how=how)
      for path, variable in nnx.to_flat_state(got):
        before = dict(nnx.to_flat_state(states[0]))[path]
        self.assertEqual(variable.get_value().dtype, jnp.bfloat16)
        self.assertEqual(variable.get_metadata(), before.get_metadata())

  def test_errors(self):
    one, two, _ = self.states
    cases = [
      (([one, two], [1.0]), {}, '2 states and 1 weights'),
      (([one], [np.inf]), {}, r'weights=\[inf\]: must be finite'),
      (([one], [1.0]), {'how': 'mean'}, "how='mean': one of"),
      (([one], [1.0]), {'density': 0.0}, r'density=0.0: must be in \(0, 1\]'),
      (([one], [1.0]), {'how': 'dare_ties_svd'}, 'draws numbers; give a key'),
      (([one], [1.0]), {'rank': 2}, "rank=2: how='concatenate' does not cut"),
      (([one], [1.0]), {'how': 'svd', 'rank': 0}, 'rank=0: must be at least 1'),
      (
        ([one, _resized(one)], [1.0, 1.0]),
        {},
        r'adapters of layers/up/kernel are for weights of shapes'
        r' \[\(3, 8, 16\), \(3, 9, 16\)\]',
      ),
      (
        ([_last(one)], [1.0]),
        {},
        r'kernel_lora_a has shape \(8, 2, 3\), its other factor'
        r' \(2, 16, 3\); only adapters of plain linear layers',
      ),
      (
        ([one, nnx.State({'layers': {}})], [1.0, 1.0]),
        {},
        r'states\[0\] and states\[1\] have not the same variables: layers/up/',
      ),
      (
        ([one, _adapter(0, 3)], [1.0, 1.0]),
        {'how': 'linear'},
        r"how='linear' adds factors; their ranks are \[2, 3\]",
      ),
      (
        ([nnx.State({'w': nnx.Param(jnp.ones(2))})], [1.0]),
        {},
        'w is no part of an adapter; only LoRA adapters',
      ),
    ]
    for arguments, more, message in cases:
      with self.subTest(message):
        with self.assertRaisesRegex(ValueError, message):
          peftlib.combine_adapters(*arguments, **more)


if __name__ == '__main__':
  absltest.main()
