import json

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from peftlib import models
from peftlib.demo import assets
from tests.peftlib.models import golden

_RNG = np.random.default_rng(0)


def _tokens(shape, vocab_size=37):
  return jnp.asarray(_RNG.integers(1, vocab_size, shape), jnp.int32)


def _apply(graphdef, state, tokens, **kwargs):
  return jax.jit(
    lambda state, tokens, kwargs: nnx.merge(graphdef, state)(tokens, **kwargs)
  )(state, tokens, kwargs)


class GoldenTest(parameterized.TestCase):
  @parameterized.parameters(*golden.CASES)
  def test_logits_are_those_of_transformers(self, case):
    model = models.load(golden.directory(case))
    expected = golden.expected(case)
    logits = _apply(
      model.graphdef, model.state, expected['input_ids'].astype(np.int32)
    )
    chex.assert_type(logits, jnp.float32)
    # Random weights of this size give logits that spread over units.
    self.assertGreater(expected['logits'].std(), 0.3)
    np.testing.assert_allclose(logits, expected['logits'], atol=1e-4, rtol=0)


class SmolLM2Test(parameterized.TestCase):
  def test_losses_and_top_logits_are_those_of_transformers(self):
    model = models.load(assets.model_path())
    texts = json.loads((golden.GOLDEN / 'smollm2.json').read_text())['texts']
    width = max(len(text['ids']) for text in texts)
    tokens = np.zeros((len(texts), width), np.int32)
    segment_ids = np.zeros((len(texts), width), np.int32)
    for i, text in enumerate(texts):
      tokens[i, : len(text['ids'])] = text['ids']
      segment_ids[i, : len(text['ids'])] = 1
    logits = np.asarray(
      _apply(
        model.graphdef,
        model.state,
        tokens,
        segment_ids=jnp.asarray(segment_ids),
      )
    )
    for row, text in zip(logits, texts):
      length = len(text['ids'])
      top = text['top_ids']
      np.testing.assert_allclose(
        row[length - 1][top], text['top_logits'], atol=1e-3
      )
      row = row.astype(np.float64)
      logsumexp = np.logaddexp.reduce(row[:length], axis=-1)
      self.assertAlmostEqual(
        float(logsumexp[-1]), text['logsumexp_last'], delta=1e-3
      )
      if length > 1:
        picked = row[np.arange(length - 1), text['ids'][1:]]
        self.assertAlmostEqual(
          float(np.mean(logsumexp[:-1] - picked)),
          text['mean_next_token_loss'],
          delta=1e-3,
        )


class ForwardTest(parameterized.TestCase):
  def test_variables_have_the_documented_paths_and_shapes(self):
    config = golden.tiny_config(attention_bias=True, mlp_bias=True)
    _, state = golden.tiny_model(config)
    shapes = {
      '.'.join(path): v.shape
      for path, v in nnx.to_flat_state(state)
      if 'v_proj' in path or 'down_proj' in path or 'layers' not in path
    }
    self.assertEqual(
      shapes,
      {
        'embed_tokens.embedding': (37, 16),
        'layers.mlp.down_proj.bias': (3, 16),
        'layers.mlp.down_proj.kernel': (3, 24, 16),
        'layers.self_attn.v_proj.bias': (3, 12),
        'layers.self_attn.v_proj.kernel': (3, 16, 12),
        'lm_head.kernel': (16, 37),
        'norm.scale': (16,),
      },
    )

  def test_layers_start_differently(self):
    _, state = nnx.split(models.Decoder(golden.tiny_config(), rngs=nnx.Rngs(0)))
    kernel = state['layers']['mlp']['up_proj']['kernel'].get_value()
    self.assertGreater(float(jnp.abs(kernel[0] - kernel[1]).max()), 1e-3)

  def test_abstract_model_has_the_same_graphdef_and_shapes(self):
    config = golden.tiny_config()
    make = lambda: models.Decoder(config, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(make())
    abstract_graphdef, abstract = nnx.split(nnx.eval_shape(make))
    self.assertEqual(graphdef, abstract_graphdef)
    self.assertEqual(hash(graphdef), hash(abstract_graphdef))
    chex.assert_trees_all_equal_shapes_and_dtypes(state, abstract)
    out = jax.eval_shape(
      lambda s, t: nnx.merge(abstract_graphdef, s)(t),
      abstract,
      jax.ShapeDtypeStruct((2, 5), jnp.int32),
    )
    self.assertEqual((out.shape, out.dtype), ((2, 5, 37), jnp.float32))

  def test_same_eagerly_and_under_jit(self):
    graphdef, state = golden.tiny_model()
    tokens = _tokens((2, 7))
    chex.assert_trees_all_close(
      nnx.merge(graphdef, state)(tokens),
      _apply(graphdef, state, tokens),
      atol=1e-5,
    )

  def test_tokens_see_only_the_past(self):
    graphdef, state = golden.tiny_model()
    tokens = _tokens((1, 9))
    changed = tokens.at[0, 5].set(tokens[0, 5] % 36 + 1)
    difference = jnp.abs(
      _apply(graphdef, state, tokens) - _apply(graphdef, state, changed)
    ).max(-1)[0]
    chex.assert_trees_all_equal(difference[:5], jnp.zeros(5))
    self.assertGreater(float(difference[5:].min()), 1e-4)

  def test_logits_at_is_a_selection_of_all_logits(self):
    graphdef, state = golden.tiny_model()
    tokens = _tokens((2, 8))
    at = jnp.asarray([[7, 0, 3], [2, 2, 5]], jnp.int32)
    everything = np.asarray(_apply(graphdef, state, tokens))
    selected = _apply(graphdef, state, tokens, logits_at=at)
    self.assertEqual(selected.shape, (2, 3, 37))
    for row in range(2):
      np.testing.assert_allclose(
        selected[row], everything[row, np.asarray(at[row])], atol=1e-5
      )

  def test_losses_are_those_of_the_logits(self):
    graphdef, state = golden.tiny_model()
    tokens, targets = _tokens((2, 8)), _tokens((2, 8))
    at = jnp.asarray([[7, 0, 3], [2, 2, 5]], jnp.int32)
    logits = np.asarray(_apply(graphdef, state, tokens), np.float64)
    picked = np.take_along_axis(logits, np.asarray(targets)[..., None], -1)
    expected = np.log(np.exp(logits).sum(-1)) - picked[..., 0]
    losses = _apply(graphdef, state, tokens, loss_targets=targets)
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    losses = _apply(
      graphdef,
      state,
      tokens,
      logits_at=at,
      loss_targets=jnp.take_along_axis(targets, at, axis=1),
    )
    np.testing.assert_allclose(
      losses, np.take_along_axis(expected, np.asarray(at), 1), atol=1e-5
    )
    losses, cache = _apply(
      graphdef,
      state,
      tokens,
      cache=models.init_cache(golden.tiny_config(), 2, 8),
      loss_targets=targets,
    )
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    self.assertEqual(int(cache.next_slot), 8)

  def test_packed_rows_are_those_of_separate_rows(self):
    graphdef, state = golden.tiny_model()
    first, second = _tokens((1, 5)), _tokens((1, 4))
    packed = jnp.concatenate([first, second, jnp.zeros((1, 3), jnp.int32)], 1)
    segment_ids = jnp.asarray([[1] * 5 + [2] * 4 + [0] * 3], jnp.int32)
    positions = jnp.asarray([[*range(5), *range(4), *range(3)]], jnp.int32)
    for extra in ({}, {'positions': positions}):
      logits = _apply(graphdef, state, packed, segment_ids=segment_ids, **extra)
      chex.assert_tree_all_finite(logits)
      np.testing.assert_allclose(
        logits[:, :5], _apply(graphdef, state, first), atol=1e-4
      )
      np.testing.assert_allclose(
        logits[:, 5:9], _apply(graphdef, state, second), atol=1e-4
      )

  def test_positions_matter_by_their_differences(self):
    graphdef, state = golden.tiny_model()
    tokens = _tokens((1, 6))
    base = _apply(graphdef, state, tokens)
    moved = _apply(graphdef, state, tokens, positions=jnp.arange(20, 26)[None])
    spread = _apply(graphdef, state, tokens, positions=2 * jnp.arange(6)[None])
    np.testing.assert_allclose(moved, base, atol=1e-4)
    self.assertGreater(float(jnp.abs(spread - base).max()), 1e-2)

  @parameterized.product(remat=['dots', 'full'], dtype=['float32', 'bfloat16'])
  def test_remat_gives_the_same_gradients(self, remat, dtype):
    tokens = _tokens((2, 6))
    grads = []
    for kind in ('none', remat):
      config = golden.tiny_config(remat=kind, dtype=dtype)
      graphdef, state = golden.tiny_model(config)

      def loss(state, graphdef=graphdef):
        logits = nnx.merge(graphdef, state)(tokens)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

      grads.append(jax.jit(jax.grad(loss))(state))
      remat_in_jaxpr = 'remat' in str(jax.make_jaxpr(jax.grad(loss))(state))
      self.assertEqual(remat_in_jaxpr, kind != 'none')
    chex.assert_trees_all_close(
      *grads, atol=1e-6 if dtype == 'float32' else 1e-2
    )
    kernel = grads[0]['layers']['self_attn']['q_proj']['kernel'].get_value()
    self.assertEqual(kernel.dtype, jnp.float32)
    self.assertGreater(float(jnp.abs(kernel).max()), 1e-4)

  def test_what_remat_computes_again(self):
    tokens = _tokens((2, 6))
    forward, products = [], {}
    for remat in ('none', 'dots', 'full'):
      graphdef, state = golden.tiny_model(golden.tiny_config(remat=remat))

      def total(state, graphdef=graphdef):
        return nnx.merge(graphdef, state)(tokens).sum()

      program = jax.jit(total).lower(state).compile()
      forward.append(
        (
          program.cost_analysis()['flops'],
          program.memory_analysis().temp_size_in_bytes,
        )
      )
      lowered = jax.jit(jax.grad(total)).lower(state)
      products[remat] = lowered.as_text().count('stablehlo.dot_general')
    # A layer has seven projections and two products of attention, each with two
    # gradients; those of the sum of logits need the head's, not the logits.
    none = 3 * (7 + 2) + 2
    # The last projection's result is needed by the next layer alone.
    self.assertEqual(
      products, {'none': none, 'dots': none + 2, 'full': none + 2 + 6}
    )
    self.assertLen(set(forward), 1)

  def test_gradients_are_those_of_finite_differences(self):
    graphdef, state = golden.tiny_model()
    tokens = _tokens((1, 5))

    def loss(state):
      logits = nnx.merge(graphdef, state)(tokens)
      return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 3])

    grads = jax.jit(jax.grad(loss))(state)
    direction = jax.tree.map(
      lambda x: jnp.asarray(_RNG.normal(size=x.shape), x.dtype), state
    )
    slope = sum(
      float(jnp.sum(g * d))
      for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction))
    )
    eps = 1e-3
    move = lambda sign: jax.tree.map(
      lambda x, d: x + sign * eps * d, state, direction
    )
    numeric = (loss(move(1)) - loss(move(-1))) / (2 * eps)
    self.assertAlmostEqual(slope, float(numeric), delta=2e-2 * abs(slope))

  def test_grad_of_a_model_merged_outside(self):
    # The variables belong to the trace outside of `grad`.
    graphdef, state = golden.tiny_model()
    tokens = _tokens((1, 4))
    model = nnx.merge(graphdef, state)

    def loss(scale):
      return jnp.sum(model(tokens) * scale)

    expected = float(jnp.sum(model(tokens)))
    self.assertAlmostEqual(
      float(jax.grad(loss)(1.0)), expected, delta=1e-3 * abs(expected)
    )

  @parameterized.parameters(False, True)
  def test_bfloat16(self, tied):
    config = golden.tiny_config(
      dtype='bfloat16', param_dtype='bfloat16', tie_embeddings=tied
    )
    graphdef, state = golden.tiny_model(config)
    self.assertEqual(
      {v.dtype for _, v in nnx.to_flat_state(state)}, {jnp.dtype(jnp.bfloat16)}
    )
    exact_graphdef, _ = golden.tiny_model(
      golden.tiny_config(tie_embeddings=tied)
    )
    exact_state = jax.tree.map(lambda x: x.astype(jnp.float32), state)
    tokens = _tokens((2, 8))
    logits = _apply(graphdef, state, tokens)
    self.assertEqual(logits.dtype, jnp.float32)
    exact = _apply(exact_graphdef, exact_state, tokens)
    difference = float(jnp.abs(logits - exact).max() / jnp.abs(exact).max())
    self.assertBetween(difference, 1e-6, 5e-2)

  def test_variables_put_into_layers_take_part(self):
    # What adapters do: other variables beside a kernel, sliced by the scan.
    graphdef, state = golden.tiny_model()
    model = nnx.merge(graphdef, state)
    model.layers.mlp.up_proj.extra = nnx.LoRAParam(jnp.arange(3.0))
    seen = []
    call = nnx.Linear.__call__

    class Watching(nnx.Linear):
      def __call__(self, x):
        if hasattr(self, 'extra'):
          seen.append(self.extra.get_value().shape)
        seen.append(x.ndim)
        return call(self, x)

    for module in (model.layers.mlp, model.layers.self_attn):
      for name in list(vars(module)):
        child = getattr(module, name)
        if isinstance(child, nnx.Linear):
          child.__class__ = Watching
    graphdef, state = nnx.split(model)
    nnx.merge(graphdef, state)(_tokens((2, 5)))
    self.assertIn((), seen)
    self.assertEqual({s for s in seen if s != ()}, {2})

  @parameterized.parameters(
    (
      {'tokens': jnp.zeros((3,), jnp.int32)},
      r'tokens: expected integers of shape \(batch, length\), got int32\[3\]',
    ),
    (
      {'tokens': jnp.zeros((1, 3))},
      r'tokens: expected integers of shape \(batch, length\), got '
      r'float32\[1, 3\]',
    ),
    (
      {'positions': jnp.zeros((3,), jnp.int32)},
      r'positions: expected the shape of tokens \(2, 3\), got \(3,\)',
    ),
    (
      {'segment_ids': jnp.zeros((2, 4), jnp.int32)},
      r'segment_ids: expected the shape of tokens \(2, 3\), got \(2, 4\)',
    ),
    (
      {'logits_at': jnp.zeros((3,), jnp.int32)},
      r'logits_at: expected shape \(2, K\), got \(3,\)',
    ),
    (
      {'loss_targets': jnp.zeros((2, 4), jnp.int32)},
      r'loss_targets: expected integers of shape \(2, 3\), got int32\[2, 4\]',
    ),
    (
      {
        'logits_at': jnp.zeros((2, 1), jnp.int32),
        'loss_targets': jnp.zeros((2, 1)),
      },
      r'loss_targets: expected integers of shape \(2, 1\), got '
      r'float32\[2, 1\]',
    ),
    (
      {'cache': models.init_cache(golden.tiny_config(), 2, 2)},
      r'cache: made for 2 rows of 2 slots; tokens have shape \(2, 3\)',
    ),
  )
  def test_rejects_inputs_that_do_not_fit(self, kwargs, message):
    graphdef, state = golden.tiny_model()
    kwargs = {'tokens': jnp.ones((2, 3), jnp.int32), **kwargs}
    with self.assertRaisesRegex(ValueError, message):
      nnx.merge(graphdef, state)(**kwargs)


class CacheTest(parameterized.TestCase):
  @parameterized.parameters(((9,),), ((4, 5),), ((1,) * 9,), ((3, 1, 5),))
  def test_pieces_give_the_logits_of_the_whole(self, lengths):
    graphdef, state = golden.tiny_model()
    tokens = _tokens((2, 9))
    expected = _apply(graphdef, state, tokens)
    cache = nnx.merge(graphdef, state).init_cache(2, 12)
    start = 0
    for length in lengths:
      piece = tokens[:, start : start + length]
      logits, cache = _apply(graphdef, state, piece, cache=cache)
      np.testing.assert_allclose(
        logits, expected[:, start : start + length], atol=1e-4
      )
      start += length
    self.assertEqual(int(cache.next_slot), 9)
    self.assertEqual(cache.segment_ids.tolist(), [[1] * 9 + [-1] * 3] * 2)

  @parameterized.parameters('left', 'right')
  def test_padded_prompts_of_different_lengths(self, side):
    graphdef, state = golden.tiny_model()
    rows = [_tokens((1, n)) for n in (3, 6, 1)]
    continuation = _tokens((3, 4))
    tokens = np.zeros((3, 6), np.int32)
    segment_ids = np.zeros((3, 6), np.int32)
    last = []
    for i, row in enumerate(rows):
      n = row.shape[1]
      where = slice(6 - n, 6) if side == 'left' else slice(0, n)
      tokens[i, where] = row[0]
      segment_ids[i, where] = 1
      last.append(where.stop - 1)
    cache = nnx.merge(graphdef, state).init_cache(3, 10)
    first, cache = _apply(
      graphdef,
      state,
      jnp.asarray(tokens),
      segment_ids=jnp.asarray(segment_ids),
      cache=cache,
      logits_at=jnp.asarray(last)[:, None],
    )
    positions = jnp.asarray(last)[:, None] + 1 + jnp.arange(4)
    following, _ = _apply(
      graphdef, state, continuation, positions=positions, cache=cache
    )
    for i, row in enumerate(rows):
      n = row.shape[1]
      whole = jnp.concatenate([row, continuation[i : i + 1]], axis=1)
      expected = _apply(graphdef, state, whole)[0]
      np.testing.assert_allclose(first[i, 0], expected[n - 1], atol=1e-4)
      np.testing.assert_allclose(following[i], expected[n:], atol=1e-4)

  def test_bfloat16_cache(self):
    graphdef, state = golden.tiny_model()
    tokens = _tokens((1, 6))
    cache = nnx.merge(graphdef, state).init_cache(1, 6, jnp.bfloat16)
    logits, cache = _apply(graphdef, state, tokens, cache=cache)
    self.assertEqual(cache.keys.dtype, jnp.bfloat16)
    np.testing.assert_allclose(
      logits, _apply(graphdef, state, tokens), atol=0.3
    )


if __name__ == '__main__':
  absltest.main()
