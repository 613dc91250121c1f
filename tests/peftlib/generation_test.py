import functools
import json

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlib
from peftlib import generation
from peftlib import methods
from peftlib import models
from peftlib.demo import assets
from tests.peftlib.models import golden

_NO_END = (-1,)


@functools.cache
def _model():
  return golden.tiny_model(golden.tiny_config(num_layers=2))


def _prompts(lengths, shared=0, seed=0):
  rng = np.random.default_rng(seed)
  start = rng.integers(1, 37, shared).tolist()
  return [start + rng.integers(1, 37, n - shared).tolist() for n in lengths]


@functools.cache
def _forward(graphdef):
  return jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))


def _without_cache(prompt, count, model=None):
  """Greedy continuation, the whole text computed for every token."""
  graphdef, state = model or _model()
  tokens = list(prompt)
  for _ in range(count):
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = _forward(graphdef)(state, padded)
    tokens.append(int(logits[0, len(tokens) - 1].argmax()))
  return tokens[len(prompt) :]


def _with_adapter(model, name, seed):
  lora = methods.Lora(
    rank=4, alpha=16.0, b_initializer=nnx.initializers.normal(0.3)
  )
  return peftlib.inject(
    *model,
    peftlib.AdapterConfig((peftlib.Rule('all-linear', lora),)),
    jnp.ones((1, 4), jnp.int32),
    key=jax.random.key(seed),
    adapter=name,
  )


class GenerateByRowTest(parameterized.TestCase):
  """Rows of one call with different adapters, each as if it were alone."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # Of the base, or with one adapter alone.
    cls.alone = {
      -1: _model(),
      0: _with_adapter(_model(), 'a', 1),
      1: _with_adapter(_model(), 'b', 2),
    }
    cls.both = _with_adapter(cls.alone[0], 'b', 2)

  @parameterized.named_parameters(
    ('unequal_prompts', (3, 9, 1, 20, 7), 0, 64),
    ('several_batches', (3, 9, 1, 20, 7), 0, 2),
    ('more_than_eight', (4, 2, 3, 5, 4, 2, 6, 7, 3, 2, 5), 0, 64),
    ('shared_beginning', (14, 11, 12, 15, 13, 11, 12, 14, 11, 12), 10, 64),
  )
  def test_same_as_each_row_alone(self, lengths, shared, batch_size):
    prompts = _prompts(lengths, shared)
    rows = [i % 3 - 1 for i in range(len(prompts))]
    given = generation.generate(
      *peftlib.assign_rows(*self.both, ['a', 'b'], jnp.asarray(rows)),
      prompts,
      max_new_tokens=6,
      eos_ids=_NO_END,
      batch_size=batch_size,
    )
    expected = [
      _without_cache(prompt, 6, self.alone[row])
      for prompt, row in zip(prompts, rows, strict=True)
    ]
    self.assertEqual(given, expected)
    of_base = [_without_cache(prompt, 6) for prompt in prompts]
    changed = [
      row
      for row, own, base in zip(rows, expected, of_base, strict=True)
      if own != base
    ]
    # Or the adapters would show nothing.
    self.assertCountEqual(set(changed), [0, 1])

  @parameterized.named_parameters(
    ('unequal_prompts', (3, 9, 1, 20, 7), 0),
    ('more_than_eight', (4, 2, 3, 5, 4, 2, 6, 7, 3, 2, 5), 0),
    ('shared_beginning', (14, 11, 12, 15, 13, 11, 12, 14, 11, 12), 10),
  )
  def test_logits_are_those_of_each_row_alone(self, lengths, shared):
    prompts = _prompts(lengths, shared)
    rows = [i % 3 - 1 for i in range(len(prompts))]
    padded = np.zeros((len(prompts), max(lengths)), np.int32)
    for own, prompt in zip(padded, prompts, strict=True):
      own[: len(prompt)] = prompt
    graphdef, state = peftlib.assign_rows(
      *self.both, ['a', 'b'], jnp.asarray(rows)
    )
    given = _forward(graphdef)(state, padded)
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
      alone_graphdef, alone_state = self.alone[row]
      alone = _forward(alone_graphdef)(alone_state, padded[i : i + 1])
      np.testing.assert_allclose(
        given[i, : len(prompt)], alone[0, : len(prompt)], atol=1e-4
      )


class GenerateTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('one', (5,), 0, 64),
    ('different_lengths', (3, 9, 1, 20, 7), 0, 64),
    ('several_batches', (3, 9, 1, 20, 7), 0, 2),
    ('several_groups', (4, 2, 3, 5, 4, 2, 6, 7, 3, 2, 5), 0, 64),
    ('shared_beginning', (14, 11, 12), 10, 64),
    ('one_contains_the_other', (12, 10, 10), 10, 64),
  )
  def test_same_as_without_cache(self, lengths, shared, batch_size):
    prompts = _prompts(lengths, shared)
    outputs = generation.generate(
      *_model(),
      prompts,
      max_new_tokens=6,
      eos_ids=_NO_END,
      batch_size=batch_size,
    )
    self.assertEqual(outputs, [_without_cache(p, 6) for p in prompts])

  def test_stops_at_an_end_token(self):
    prompts = _prompts((4, 6, 5))
    expected = [_without_cache(p, 8) for p in prompts]
    ends = (expected[0][2], expected[1][4])

    def cut(row):
      at = [i for i, token in enumerate(row) if token in ends]
      return row[: at[0]] if at else row

    outputs = generation.generate(
      *_model(), prompts, max_new_tokens=8, eos_ids=ends
    )
    self.assertEqual(outputs, [cut(row) for row in expected])
    self.assertLessEqual(len(outputs[0]), 2)

  def test_first_token_may_be_the_end(self):
    (prompt,) = _prompts((4,))
    end = _without_cache(prompt, 1)
    self.assertEqual(
      generation.generate(*_model(), [prompt], max_new_tokens=3, eos_ids=end),
      [[]],
    )

  def test_no_prompts(self):
    self.assertEqual(
      generation.generate(*_model(), [], max_new_tokens=3, eos_ids=_NO_END), []
    )

  def test_pad_id_is_never_seen(self):
    prompts = _prompts((4, 9))
    outputs = [
      generation.generate(
        *_model(), prompts, max_new_tokens=4, eos_ids=_NO_END, pad_id=pad_id
      )
      for pad_id in (0, 30)
    ]
    self.assertEqual(*outputs)

  def test_few_compilations(self):
    # Four batches of two widths: 16 and 32.
    prompts = _prompts((3, 4, 5, 12, 13, 16, 17, 30))
    before = generation._generate_batch._cache_size()
    for _ in range(2):
      generation.generate(
        *_model(), prompts, max_new_tokens=5, eos_ids=_NO_END, batch_size=2
      )
    self.assertEqual(generation._generate_batch._cache_size() - before, 2)

  def test_sampling_depends_on_key_and_index_alone(self):
    prompts = _prompts((5, 5, 8, 3))
    sample = functools.partial(
      generation.generate,
      *_model(),
      max_new_tokens=8,
      eos_ids=_NO_END,
      temperature=1.5,
    )
    outputs = sample(prompts, key=jax.random.key(1))
    self.assertEqual(outputs, sample(prompts, key=jax.random.key(1)))
    self.assertEqual(
      outputs, sample(prompts, key=jax.random.key(1), batch_size=2)
    )
    self.assertNotEqual(outputs, sample(prompts, key=jax.random.key(2)))
    same_prompt = sample([prompts[0]] * 3, key=jax.random.key(1))
    self.assertLen({tuple(row) for row in same_prompt}, 3)

  def test_sampled_frequencies_are_the_models(self):
    graphdef, state = _model()
    (prompt,) = _prompts((4,))
    samples = generation.generate(
      graphdef,
      state,
      [prompt] * 2000,
      max_new_tokens=1,
      eos_ids=_NO_END,
      temperature=0.7,
      key=jax.random.key(0),
      batch_size=2000,
    )
    counts = np.bincount([row[0] for row in samples], minlength=37)
    logits = np.asarray(
      nnx.merge(graphdef, state)(jnp.asarray([prompt], jnp.int32))[0, -1],
      np.float64,
    )
    probabilities = np.exp(logits / 0.7)
    probabilities /= probabilities.sum()
    # Five standard deviations of a multinomial's counts.
    bound = 5 * np.sqrt(2000 * probabilities * (1 - probabilities)) + 1
    np.testing.assert_array_less(np.abs(counts - 2000 * probabilities), bound)

  def test_top_p_leaves_out_the_tail(self):
    graphdef, state = _model()
    (prompt,) = _prompts((4,))
    samples = generation.generate(
      graphdef,
      state,
      [prompt] * 500,
      max_new_tokens=1,
      eos_ids=_NO_END,
      temperature=1.0,
      top_p=0.5,
      key=jax.random.key(0),
      batch_size=500,
    )
    logits = np.asarray(
      nnx.merge(graphdef, state)(jnp.asarray([prompt], jnp.int32))[0, -1],
      np.float64,
    )
    probabilities = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-probabilities)
    size = int(np.searchsorted(np.cumsum(probabilities[order]), 0.5)) + 1
    self.assertEqual({row[0] for row in samples}, set(order[:size].tolist()))

  def test_bfloat16_cache(self):
    outputs = generation.generate(
      *_model(),
      _prompts((4,)),
      max_new_tokens=3,
      eos_ids=_NO_END,
      cache_dtype='bfloat16',
    )
    self.assertLen(outputs[0], 3)

  @parameterized.parameters(
    ({'max_new_tokens': 0}, 'max_new_tokens=0: expected at least 1'),
    ({'temperature': -1.0}, 'temperature=-1.0: expected 0 or more'),
    ({'temperature': 1.0}, 'temperature=1.0: sampling needs a key'),
    ({'top_p': 0.0}, r'top_p=0.0: expected a number in \(0, 1\]'),
    ({'batch_size': 0}, 'batch_size=0: expected at least 1'),
    ({'prompts': [[1], []]}, r'prompts\[1\] is empty'),
    ({'prompts': [[1, -2]]}, r'prompts\[0\]: token id -2 is negative'),
  )
  def test_rejects(self, kwargs, message):
    kwargs = {
      'prompts': [[1]],
      'max_new_tokens': 1,
      'eos_ids': _NO_END,
      **kwargs,
    }
    with self.assertRaisesRegex(ValueError, message):
      generation.generate(*_model(), **kwargs)

  def test_rejects_a_module(self):
    graphdef, state = _model()
    with self.assertRaisesRegex(TypeError, 'nnx.split it first'):
      generation.generate(
        nnx.merge(graphdef, state),
        state,
        [[1]],
        max_new_tokens=1,
        eos_ids=_NO_END,
      )


class StreamTest(parameterized.TestCase):
  def test_same_as_without_cache(self):
    (prompt,) = _prompts((7,))
    self.assertEqual(
      list(
        generation.stream(*_model(), prompt, max_new_tokens=6, eos_ids=_NO_END)
      ),
      _without_cache(prompt, 6),
    )

  def test_stops_before_the_end_token(self):
    (prompt,) = _prompts((7,))
    expected = _without_cache(prompt, 6)
    end = expected[3]
    self.assertEqual(
      list(
        generation.stream(*_model(), prompt, max_new_tokens=6, eos_ids=[end])
      ),
      expected[: expected.index(end)],
    )

  def test_samples_are_those_of_generate(self):
    (prompt,) = _prompts((7,))
    kwargs = {
      'max_new_tokens': 6,
      'eos_ids': _NO_END,
      'temperature': 1.2,
      'top_p': 0.9,
      'key': jax.random.key(3),
    }
    self.assertEqual(
      list(generation.stream(*_model(), prompt, **kwargs)),
      generation.generate(*_model(), [prompt], **kwargs)[0],
    )

  def test_gives_tokens_one_by_one(self):
    (prompt,) = _prompts((7,))
    tokens = generation.stream(
      *_model(), prompt, max_new_tokens=10_000, eos_ids=_NO_END
    )
    self.assertEqual([next(tokens), next(tokens)], _without_cache(prompt, 2))

  def test_rejects_before_the_first_token(self):
    with self.assertRaisesRegex(ValueError, 'prompt is empty'):
      generation.stream(*_model(), [], max_new_tokens=1, eos_ids=_NO_END)
    graphdef, state = _model()
    with self.assertRaisesRegex(TypeError, 'nnx.split it first'):
      generation.stream(
        graphdef,
        nnx.merge(graphdef, state),
        [1],
        max_new_tokens=1,
        eos_ids=_NO_END,
      )


class NucleusTest(parameterized.TestCase):
  @parameterized.parameters((0.4, 1), (0.5, 1), (0.6, 2), (0.85, 3), (1.0, 4))
  def test_keeps_the_likeliest(self, top_p, kept):
    probabilities = np.array([0.2, 0.5, 0.05, 0.25])
    masked = generation.nucleus(jnp.log(probabilities), top_p)
    order = np.argsort(-probabilities)
    np.testing.assert_array_equal(
      np.flatnonzero(np.isfinite(masked)), np.sort(order[:kept])
    )
    np.testing.assert_allclose(
      masked[order[:kept]], np.log(probabilities)[order[:kept]], rtol=1e-6
    )


class SmolLM2Test(parameterized.TestCase):
  def test_greedy_tokens_are_those_of_transformers(self):
    model = models.load(assets.model_path())
    texts = [
      text
      for text in json.loads((golden.GOLDEN / 'smollm2.json').read_text())[
        'texts'
      ]
      if 'greedy_24' in text
    ]
    self.assertLen(texts, 3)
    outputs = generation.generate(
      model.graphdef,
      model.state,
      [text['ids'] for text in texts],
      max_new_tokens=24,
      eos_ids=[2],
    )
    self.assertEqual(outputs, [text['greedy_24'] for text in texts])
    self.assertEqual(
      list(
        generation.stream(
          model.graphdef,
          model.state,
          texts[0]['ids'],
          max_new_tokens=24,
          eos_ids=[2],
        )
      ),
      texts[0]['greedy_24'],
    )


if __name__ == '__main__':
  absltest.main()
