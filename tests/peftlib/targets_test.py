import functools

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp

from peftlib import interception
from peftlib import models
from peftlib import targets
from tests.peftlib import toy_models

ATTENTION = [f'layers/self_attn/{k}_proj.kernel' for k in 'qkvo']
MLP = [f'layers/mlp/{k}_proj.kernel' for k in ('gate', 'up', 'down')]
SIZES = dict(
  vocab_size=11,
  hidden_size=8,
  intermediate_size=12,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
)


@functools.cache
def _decoder(**kwargs):
  config = models.DecoderConfig(**SIZES | kwargs)
  return interception.record(
    nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0))),
    jax.ShapeDtypeStruct((1, 3), jnp.int32),
  )


def _labels(recording, pattern, exclude=()):
  return [op.label for op in targets.matching(recording, pattern, exclude)]


def _param(*shape):
  return nnx.Param(jnp.ones(shape))


class Foreign(nnx.Module):
  """nnx's attention, a feed-forward layer, and no vocabulary."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.mix = nnx.MultiHeadAttention(
      2, 8, qkv_features=8, decode=False, rngs=rngs
    )
    self.up = nnx.Linear(8, 16, rngs=rngs)
    self.conv = nnx.Conv(16, 5, (1,), rngs=rngs)

  def __call__(self, x):
    return self.conv(self.up(self.mix(x[None])))


class RawAttention(nnx.Module):
  """Attention over raw parameters of its own."""

  def __init__(self):
    self.q, self.k = _param(8, 8), _param(8, 8)

  def __call__(self, x):
    scores = (x @ self.q[...]) @ (x @ self.k[...]).T
    return jax.nn.softmax(scores) @ x


class WeightedExperts(nnx.Module):
  """A mixture: weights of the experts times their outputs, by an einsum."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.router = nnx.Linear(8, 3, rngs=rngs)
    self.experts = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])

  def __call__(self, x):
    outputs = jnp.stack([expert(x) for expert in self.experts])
    return jnp.einsum('be,ebd->bd', jax.nn.softmax(self.router(x)), outputs)


class Mixture(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.attention = RawAttention()
    self.mixture = WeightedExperts()
    self.up = nnx.Linear(8, 16, rngs=rngs)

  def __call__(self, x):
    return self.up(self.mixture(self.attention(x)))


class Coincidences(nnx.Module):
  """Tables of as many rows as inner layers have outputs."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.tokens = nnx.Embed(11, 8, rngs=rngs)
    self.positions = nnx.Embed(8, 8, rngs=rngs)
    self.attention = RawAttention()
    self.wide = nnx.Linear(8, 11, rngs=rngs)
    self.narrow = nnx.Linear(11, 8, rngs=rngs)
    self.heads = nnx.List([nnx.Linear(8, 11, rngs=rngs) for _ in range(2)])

  def __call__(self, ids):
    x = self.tokens(ids) + self.positions(jnp.arange(ids.shape[0]))
    x = self.narrow(self.wide(self.attention(x)))
    return [head(x) for head in self.heads]


class Missed(nnx.Module):
  """A weight that no adapter can follow."""

  def __init__(self):
    self.scaled, self.plain = _param(8, 8), _param(8, 8)
    self.table = _param(5, 8)

  def __call__(self, x):
    x = x + self.table[...][jnp.array([0, 1, 2, 3]), :]
    return x @ (self.scaled[...] * 2) @ self.plain[...]


class Holder(nnx.Module):
  """Something below the root."""

  def __init__(self, inner):
    self.inner = inner

  def __call__(self, x):
    return self.inner(x)


SCALED = 'scaled: its use in dot_general could not be traced back to it'
GATHER = 'table: its use in gather could not be traced back to it'


class PatternTest(parameterized.TestCase):
  @parameterized.parameters(
    ('.*q_proj', ATTENTION[:1]),
    ('.*(q|v)_proj', [ATTENTION[0], ATTENTION[2]]),
    ('layers/mlp/.*', MLP),
    # The weight itself, too.
    ('layers/mlp/up_proj/kernel', MLP[1:2]),
    ('.*/kernel', [*ATTENTION, *MLP, 'lm_head.kernel']),
    ('.*embed.*', ['embed_tokens.embedding']),
    (('q_proj', 'v_proj'), [ATTENTION[0], ATTENTION[2]]),
    (('self_attn.q_proj', 'mlp/up_proj'), [ATTENTION[0], MLP[1]]),
    (('layers.self_attn.q_proj.kernel',), ATTENTION[:1]),
    (('lm_head',), ['lm_head.kernel']),
  )
  def test_what_is_meant(self, pattern, expected):
    self.assertEqual(_labels(_decoder(), pattern), expected)

  @parameterized.parameters(
    ('q_proj', False),
    ('layers', False),
    ('.*proj', True),
    (('proj',), False),
    (('q_proj',), True),
    (('attn/q_proj',), False),
    (('self_attn/q_proj',), True),
    (('self_attn.q_proj',), True),
    (('layers/self_attn/q_proj',), True),
    (('self_attn',), False),
    ((), False),
  )
  def test_a_path(self, pattern, expected):
    self.assertEqual(
      targets.path_matches('layers/self_attn/q_proj', pattern), expected
    )

  @parameterized.parameters(
    ('.*mlp.*', '.*(up|down)_proj', MLP[:1]),
    ('.*mlp.*', ('up_proj',), [MLP[0], MLP[2]]),
    ('all-linear', ('up_proj', 'down_proj'), [*ATTENTION, MLP[0]]),
    ('all-linear', 'mlp', ATTENTION),
    ('.*mlp.*', 'layers/mlp/up_proj/kernel', [MLP[0], MLP[2]]),
  )
  def test_exclude(self, pattern, exclude, expected):
    self.assertEqual(_labels(_decoder(), pattern, exclude), expected)

  def test_the_module_of_a_weight_at_the_root(self):
    recording = interception.record(RawAttention(), toy_models.inputs())
    self.assertEqual(_labels(recording, '.*'), ['q', 'k'])
    self.assertEqual(_labels(recording, ('k',)), ['k'])
    self.assertEqual(_labels(recording, 'q'), ['q'])

  @parameterized.parameters(
    (
      '.*(k|w)_projj',
      (),
      r"peftlib: module_path '\.\*\(k\|w\)_projj' matches no module with a"
      r' weight that takes part in a contraction\. It has to match the whole'
      r" path; nearest: \[.*'layers/self_attn/k_proj', .*\]\.",
    ),
    (
      ('up_pro',),
      (),
      r"module_path \('up_pro',\) matches no module .*; nearest:"
      r" \['layers/mlp/up_proj',",
    ),
    (
      '.*q_proj',
      ('self_attn.q_proj',),
      r"module_path '\.\*q_proj' matches no module with a weight that takes"
      r" part in a contraction that \('self_attn\.q_proj',\) leaves\.",
    ),
    ('zzz', (), r"nearest: \['embed_tokens', 'layers/self_attn/q_proj',"),
  )
  def test_nothing_is_meant(self, pattern, exclude, text):
    with self.assertRaisesRegex(ValueError, text):
      targets.matching(_decoder(), pattern, exclude)


class PresetTest(parameterized.TestCase):
  @parameterized.parameters(
    {},
    {'tie_embeddings': True},
    {'attention_bias': True, 'mlp_bias': True},
    # As many inner features as tokens, and as many tokens as features.
    {'intermediate_size': 11},
    {'intermediate_size': 11, 'tie_embeddings': True},
  )
  def test_decoder(self, **kwargs):
    recording = _decoder(**kwargs)
    self.assertEqual(_labels(recording, 'all-linear'), [*ATTENTION, *MLP])
    self.assertEqual(_labels(recording, 'attention'), ATTENTION)
    self.assertEqual(_labels(recording, 'mlp'), MLP)

  def test_any_contraction_of_two_activations_counts_as_attention(self):
    recording = interception.record(
      Mixture(), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    )
    attention = ['attention.q', 'attention.k']
    experts = [f'mixture/experts/{i}.kernel' for i in range(3)]
    self.assertCountEqual(
      _labels(recording, 'attention'),
      [*attention, 'mixture/router.kernel', *experts],
    )
    self.assertEqual(_labels(recording, 'mlp'), ['up.kernel'])
    self.assertEqual(
      _labels(recording, 'attention', exclude='mixture/.*'), attention
    )

  def test_foreign_attention(self):
    recording = interception.record(Foreign(), toy_models.inputs())
    attention = [f'mix/{k}.kernel' for k in ('query', 'key', 'value', 'out')]
    self.assertEqual(_labels(recording, 'attention'), attention)
    self.assertEqual(_labels(recording, 'mlp'), ['up.kernel'])
    self.assertEqual(
      _labels(recording, 'all-linear'), [*attention, 'up.kernel']
    )

  def test_raw_weights_and_extents_that_meet_by_chance(self):
    recording = interception.record(Coincidences(), jnp.arange(4))
    attention = ['attention.q', 'attention.k']
    inner = ['wide.kernel', 'narrow.kernel']
    self.assertEqual(_labels(recording, 'attention'), attention)
    self.assertEqual(_labels(recording, 'mlp'), inner)
    self.assertEqual(_labels(recording, 'all-linear'), [*attention, *inner])

  def test_none_of_the_kind(self):
    recording = interception.record(
      toy_models.Plain(nnx.Rngs(0)), toy_models.inputs()
    )
    with self.assertRaisesRegex(
      ValueError, "module_path 'attention' matches no module"
    ):
      targets.matching(recording, 'attention')


class MissedTest(parameterized.TestCase):
  @parameterized.parameters(
    ('.*', (), f'{SCALED}; {GATHER}'),
    ('.*', ('table',), SCALED),
    ('scaled', (), SCALED),
    (('scaled',), (), SCALED),
    ('all-linear', (), SCALED),
    ('mlp', (), SCALED),
  )
  def test_is_an_error_that_says_why(self, pattern, exclude, reasons):
    recording = interception.record(Missed(), toy_models.inputs())
    with self.assertRaisesWithLiteralMatch(
      ValueError,
      f'peftlib: module_path {pattern!r} means weights that no adapter can'
      f' follow: {reasons}. Exclude them.',
    ):
      targets.matching(recording, pattern, exclude)

  @parameterized.parameters(
    ('.*', 'scaled|table'),
    ('.*', ('scaled', 'table')),
    ('plain', ()),
    ('all-linear', ('scaled',)),
    ('mlp', 'scaled'),
  )
  def test_excluded(self, pattern, exclude):
    recording = interception.record(Missed(), toy_models.inputs())
    self.assertEqual(_labels(recording, pattern, exclude), ['plain'])

  def test_below_the_root(self):
    recording = interception.record(Holder(Missed()), toy_models.inputs())
    for pattern in ('inner', 'inner/scaled', ('inner.scaled',), ('scaled',)):
      with self.assertRaisesRegex(ValueError, r'follow: inner\.scaled: its'):
        targets.matching(recording, pattern)
    self.assertEqual(
      _labels(recording, '.*', ('inner.scaled', 'table')), ['inner.plain']
    )
    self.assertEqual(
      _labels(recording, 'all-linear', ('scaled',)), ['inner.plain']
    )


if __name__ == '__main__':
  absltest.main()
