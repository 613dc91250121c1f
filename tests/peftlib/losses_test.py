import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import peftlib
from peftlib import losses
from peftlib import methods
from tests.peftlib.models import golden
import transforms


class _Model:
  """Gives fixed logits at the positions asked for, and notes the call."""

  def __init__(self, logits):
    self.logits = jnp.asarray(logits, jnp.float32)
    self.call = None

  def __call__(self, tokens, *, positions, segment_ids, logits_at):
    self.call = (tokens, positions, segment_ids)
    return jnp.take_along_axis(self.logits, logits_at[..., None], axis=1)


def _batch(weights):
  return {
    'tokens': jnp.array([[5, 6, 7, 0]]),
    'positions': jnp.array([[0, 1, 0, 0]]),
    'segment_ids': jnp.array([[1, 1, 2, 0]]),
    'loss_positions': jnp.array([[0, 2, 0]]),
    'targets': jnp.array([[1, 0, 0]]),
    'loss_weights': jnp.array([weights], jnp.float32),
  }


# Probabilities of two tokens at each of the four places.
_P = np.array([[[0.2, 0.8], [0.5, 0.5], [0.4, 0.6], [0.1, 0.9]]])


class CausalLmLossTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('even', [1, 1, 0], -(np.log(0.8) + np.log(0.4)) / 2, 2),
    ('weighted', [1, 0.5, 0], -(np.log(0.8) + 0.5 * np.log(0.4)) / 1.5, 1.5),
    ('padding', [0, 0, 0], 0.0, 0),
    # Less than one token in all: not blown up to a whole one.
    ('little', [0.5, 0, 0], -0.5 * np.log(0.8), 0.5),
  )
  def test_value(self, weights, loss, tokens):
    model = _Model(np.log(_P) + 3.0)
    batch = _batch(weights)
    call = lambda b: losses.causal_lm_loss(model, b, nnx.Rngs(0))
    for f in (call, jax.jit(call)):
      got, metrics = f(batch)
      self.assertAlmostEqual(float(got), loss, places=5)
      self.assertEqual(list(metrics), ['tokens'])
      self.assertEqual(float(metrics['tokens']), tokens)
      self.assertEqual((got.shape, got.dtype), ((), jnp.float32))
    abstract, _ = jax.eval_shape(call, batch)
    self.assertEqual((abstract.shape, abstract.dtype), ((), jnp.float32))

  def test_what_the_model_gets(self):
    model, batch = _Model(np.log(_P)), _batch([1, 1, 0])
    losses.causal_lm_loss(model, batch, nnx.Rngs(0))
    chex.assert_trees_all_equal(
      model.call, (batch['tokens'], batch['positions'], batch['segment_ids'])
    )

  def test_a_model_that_takes_targets(self):
    got = {}

    def model(tokens, *, loss_targets, **kwargs):
      got.update(kwargs, tokens=tokens, loss_targets=loss_targets)
      return jnp.array([[1.0, 2.0, 4.0]])

    batch = _batch([1, 0.5, 0])
    value, _ = losses.causal_lm_loss(model, batch, nnx.Rngs(0))
    self.assertAlmostEqual(float(value), 2 / 1.5, places=6)
    chex.assert_trees_all_equal(
      got,
      {
        'tokens': batch['tokens'],
        'positions': batch['positions'],
        'segment_ids': batch['segment_ids'],
        'logits_at': batch['loss_positions'],
        'loss_targets': batch['targets'],
      },
    )


def _decoder_batch(shape):
  rng = np.random.default_rng(1)
  ints = lambda high: jnp.asarray(rng.integers(1, high, shape), jnp.int32)
  return {
    'tokens': ints(37),
    'positions': jnp.broadcast_to(jnp.arange(shape[-1]), shape),
    'segment_ids': jnp.ones(shape, jnp.int32),
    'loss_positions': ints(shape[-1]),
    'targets': ints(37),
    'loss_weights': jnp.asarray(rng.random(shape), jnp.float32),
  }


def _loss_of_logits(model, batch, rngs):
  """The loss with all logits at once, by optax."""
  del rngs
  logits = model(
    batch['tokens'],
    positions=batch['positions'],
    segment_ids=batch['segment_ids'],
    logits_at=batch['loss_positions'],
  )
  each = optax.softmax_cross_entropy_with_integer_labels(
    logits, batch['targets']
  )
  weights = batch['loss_weights']
  return jnp.sum(each * weights) / jnp.sum(weights), {}


def _adapted(config, **sizes):
  """A decoder with adapters that do something."""
  graphdef, state = golden.tiny_model(
    golden.tiny_config(hidden_size=32, **sizes)
  )
  tokens = jnp.zeros((1, 4), jnp.int32)
  if config is None:
    return graphdef, state, nnx.State({})
  graphdef, state = peftlib.inject(
    graphdef, state, config, tokens, key=jax.random.key(0)
  )
  if isinstance(config, peftlib.LoraConfig) and config.weight_qtype:
    graphdef, state = peftlib.quantize_base(graphdef, state, config, tokens)
  trainable, frozen = transforms.partition(
    state, peftlib.trainable_filter(config), ...
  )
  rng = np.random.default_rng(2)
  trainable = jax.tree.map(
    lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype), trainable
  )
  return graphdef, trainable, frozen


_LORA = functools.partial(peftlib.LoraConfig, rank=2, alpha=4.0)
_CASES = {
  'lora': (_LORA(module_path='.*_proj'), {}),
  'lora, tied': (_LORA(module_path='.*_proj'), {'tie_embeddings': True}),
  'lora, bfloat16': (_LORA(module_path='.*_proj'), {'dtype': 'bfloat16'}),
  'lora of the head': (_LORA(module_path='.*_proj|lm_head'), {}),
  'lora of the head alone': (_LORA(module_path='lm_head'), {}),
  'lora of the table, tied': (
    _LORA(module_path='embed_tokens'),
    {'tie_embeddings': True},
  ),
  'dora of the head': (
    peftlib.AdapterConfig(
      (peftlib.Rule('lm_head', methods.Dora(rank=2, alpha=4.0)),)
    ),
    {},
  ),
  'tokens of a tied table': (
    peftlib.AdapterConfig(
      (peftlib.Rule('embed_tokens', methods.TrainableTokens(indices=(1, 5))),)
    ),
    {'tie_embeddings': True},
  ),
  'quantized head': (
    _LORA(module_path='.*_proj|lm_head', weight_qtype='nf4', tile_size=8),
    {},
  ),
  'the head trained': (
    peftlib.AdapterConfig(
      (peftlib.Rule('.*_proj', methods.Lora(rank=2, alpha=4.0)),),
      train=('lm_head',),
    ),
    {},
  ),
  'the model': (None, {}),
  'the model, tied': (None, {'tie_embeddings': True}),
}


class DecoderTest(parameterized.TestCase):
  """The losses of `peftlib.models.Decoder`, in chunks of 24 places a row."""

  @parameterized.parameters(*_CASES)
  def test_values_and_gradients_are_those_of_all_logits(self, name):
    config, sizes = _CASES[name]
    graphdef, trainable, frozen = _adapted(config, **sizes)
    batch = _decoder_batch((4, 71))

    def loss(trainable, fn):
      model = nnx.merge(graphdef, trainable, frozen, copy=True)
      return fn(model, batch, nnx.Rngs(0))[0]

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected, expected_grads = run(trainable, _loss_of_logits)
    value, grads = run(trainable, losses.causal_lm_loss)
    self.assertAlmostEqual(float(value), float(expected), places=5)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(grads))
    self.assertGreater(largest, 1e-3)
    tolerance = 2e-2 if 'bfloat16' in name else 1e-5
    chex.assert_trees_all_close(
      grads, expected_grads, atol=tolerance * largest, rtol=tolerance
    )

  @parameterized.parameters('lora', 'the model')
  def test_logits_are_stored_for_a_trained_head_alone(self, name):
    graphdef, trainable, frozen = _adapted(_CASES[name][0])
    batch = _decoder_batch((4, 192))

    def loss(trainable, frozen):
      model = nnx.merge(graphdef, trainable, frozen, copy=True)
      return losses.causal_lm_loss(model, batch, nnx.Rngs(0))[0]

    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(trainable, frozen))
    self.assertEqual('f32[768,37]' in jaxpr, name == 'the model')
    self.assertEqual('f32[128,37]' in jaxpr, name == 'lora')

  def test_a_stacked_step(self):
    graphdef, trainable, frozen = _adapted(_CASES['lora'][0])
    batch = _decoder_batch((2, 2, 71))
    tx = optax.sgd(0.1)
    after = []
    for fn in (losses.causal_lm_loss, _loss_of_logits):
      train_state = peftlib.init_stacked_train_state(
        peftlib.stack_adapters([trainable] * 2),
        tx,
        keys=jax.random.split(jax.random.key(1), 2),
      )
      step = peftlib.make_stacked_train_step(graphdef, fn, tx)
      train_state, metrics = step(train_state, frozen, batch)
      after.append((train_state.trainable, metrics['loss']))
    chex.assert_trees_all_close(*after, atol=1e-5)

  def test_an_eval_step(self):
    graphdef, trainable, frozen = _adapted(_CASES['lora of the head'][0])
    batch = _decoder_batch((4, 71))
    got, expected = (
      peftlib.make_eval_step(graphdef, fn)(trainable, frozen, batch)['loss']
      for fn in (losses.causal_lm_loss, _loss_of_logits)
    )
    self.assertAlmostEqual(float(got), float(expected), places=5)


if __name__ == '__main__':
  absltest.main()
