import dataclasses

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import peftlib
from peftlib import generation
from peftlib import models
from tests.peftlib import toy_models
import transforms
from transforms import testing as transforms_testing

chex.set_n_cpu_devices(8)

KEY = jax.random.key(0)
CONFIG = models.DecoderConfig(
  vocab_size=24,
  hidden_size=16,
  intermediate_size=32,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  tie_embeddings=False,
)
LENGTH = 3


def _base():
  graphdef, state = nnx.split(models.Decoder(CONFIG, rngs=nnx.Rngs(0)))
  # As large as trained weights, so that attention sees differences.
  return graphdef, jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, state)


def _config(kind, stddev=1.0):
  tokens = peftlib.VirtualTokens(kind=kind, length=LENGTH, stddev=stddev)
  return peftlib.AdapterConfig(virtual_tokens=tokens)


def _logits(graphdef, state, tokens, **kwargs):
  return jax.jit(lambda s: nnx.merge(graphdef, s, copy=True)(tokens, **kwargs))(
    state
  )


class VirtualTokensTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.base = _base()
    self.tokens = jnp.arange(10).reshape(2, 5) + 1

  def test_shapes(self):
    _, state = peftlib.inject(*self.base, _config('prompt'), key=KEY)
    self.assertEqual(state['prompt'].shape, (LENGTH, 16))
    _, state = peftlib.inject(*self.base, _config('prefix'), key=KEY)
    attention = state['layers']['self_attn']
    self.assertEqual(attention['prefix_key'].shape, (2, LENGTH, 1, 8))
    self.assertEqual(attention['prefix_value'].shape, (2, LENGTH, 1, 8))
    trainable, frozen = transforms.partition(
      state, peftlib.trainable_filter(_config('prefix')), ...
    )
    self.assertLen(jax.tree.leaves(trainable), 2)
    chex.assert_trees_all_equal(
      toy_models.values(frozen), toy_models.values(self.base[1])
    )
    deviation = np.std(attention['prefix_key'].get_value())
    self.assertBetween(deviation, 0.5, 1.5)

  @parameterized.parameters('prompt', 'prefix')
  def test_named_as_other_adapters(self, kind):
    base, base_state = self.base
    graphdef, state = peftlib.inject(
      *self.base, _config(kind), key=KEY, adapter='tokens'
    )
    lora = peftlib.LoraConfig(module_path=('q_proj',), rank=2)
    both = peftlib.inject(
      graphdef, state, lora, self.tokens, key=KEY, adapter='lora'
    )
    self.assertEqual(peftlib.adapter_names(graphdef, state), ('tokens',))
    self.assertEqual(peftlib.adapter_names(*both), ('lora', 'tokens'))
    own = transforms.select(both[1], peftlib.adapter_filter('tokens'))
    self.assertLen(jax.tree.leaves(own), {'prompt': 1, 'prefix': 2}[kind])

    renamed = peftlib.rename_adapter(*both, 'tokens', 'style')
    self.assertEqual(peftlib.adapter_names(*renamed), ('lora', 'style'))
    other = peftlib.inject(*self.base, _config(kind), key=KEY, adapter='style')
    again = peftlib.rename_adapter(*other, 'style', 'tokens')
    self.assertEqual(again[0], graphdef)
    self.assertEmpty(transforms.diff(again[1], state))

    for name, rest in (('tokens', ('lora',)), ('lora', ('tokens',))):
      left = peftlib.remove_adapter(*both, name)
      self.assertEqual(peftlib.adapter_names(*left), rest)
    plain, plain_state = peftlib.remove_adapter(graphdef, state, 'tokens')
    self.assertEqual(plain, base)
    transforms_testing.assert_states_share(plain_state, base_state)

  @parameterized.parameters(
    ('prompt', 'prompt'), ('prefix', 'prefix_(key|value)')
  )
  def test_tokens_are_never_off(self, kind, variable):
    both = peftlib.inject(*self.base, _config(kind), key=KEY, adapter='tokens')
    lora = peftlib.LoraConfig(module_path=('q_proj',), rank=2)
    both = peftlib.inject(*both, lora, self.tokens, key=KEY, adapter='lora')
    on = peftlib.set_active(*both, ['tokens', 'lora'])
    chex.assert_trees_all_equal(
      _logits(*on, self.tokens), _logits(*both, self.tokens)
    )
    message = (
      rf"adapter 'tokens' has virtual tokens \({variable}\), which are read"
      ' by every row as long as the model has them; peftlib.remove_adapter'
      ' takes them out.'
    )
    with self.assertRaisesRegex(ValueError, f'peftlib.set_active: {message}'):
      peftlib.set_active(*both, ['lora'])
    with self.assertRaisesRegex(ValueError, f'peftlib.assign_rows: {message}'):
      peftlib.assign_rows(*both, ['lora', 'tokens'], jnp.array([0, 1]))

  def test_a_name_is_given_once(self):
    both = peftlib.inject(*self.base, _config('prompt'), key=KEY)
    with self.assertRaisesRegex(ValueError, 'default'):
      lora = peftlib.LoraConfig(module_path=('q_proj',))
      peftlib.inject(*both, lora, self.tokens, key=KEY)

  def test_abstract(self):
    graphdef, state = self.base
    abstract = jax.eval_shape(lambda: state)
    _, got = peftlib.inject(graphdef, abstract, _config('prompt'), key=KEY)
    self.assertIsInstance(got['prompt'].get_raw_value(), jax.ShapeDtypeStruct)

  def test_prompt_is_tokens_of_a_longer_vocabulary(self):
    graphdef, state = peftlib.inject(*self.base, _config('prompt'), key=KEY)
    got = _logits(graphdef, state, self.tokens)
    # The reference: a model whose table has the prompt as rows 24, 25 and 26.
    longer = models.Decoder(
      dataclasses.replace(CONFIG, vocab_size=27), rngs=nnx.Rngs(0)
    )
    longer_graphdef, own = nnx.split(longer)
    values = dict(nnx.to_flat_state(self.base[1]))
    table = values[('embed_tokens', 'embedding')].get_value()
    head = values[('lm_head', 'kernel')].get_value()
    flat = []
    for path, variable in nnx.to_flat_state(own):
      value = values[path].get_value()
      if path == ('embed_tokens', 'embedding'):
        value = jnp.concatenate([table, state['prompt'].get_value()])
      if path == ('lm_head', 'kernel'):
        value = jnp.concatenate([head, jnp.zeros((16, 3))], axis=1)
      flat.append((path, variable.replace(value)))
    before = jnp.broadcast_to(jnp.arange(24, 27), (2, 3))
    expected = _logits(
      longer_graphdef,
      nnx.from_flat_state(flat),
      jnp.concatenate([before, self.tokens], axis=1),
    )[:, LENGTH:, :24]
    np.testing.assert_allclose(got, expected, atol=1e-5)
    self.assertGreater(
      float(jnp.abs(got - _logits(*self.base, self.tokens)).max()), 0.1
    )

  @parameterized.parameters('prefix', 'prompt')
  def test_packed_rows_see_the_tokens_as_single_ones_do(self, kind):
    graphdef, state = peftlib.inject(*self.base, _config(kind), key=KEY)
    single = _logits(graphdef, state, self.tokens)
    packed = _logits(
      graphdef,
      state,
      self.tokens.reshape(1, 10),
      positions=jnp.tile(jnp.arange(5), 2)[None],
      segment_ids=jnp.repeat(jnp.array([1, 2]), 5)[None],
    )
    np.testing.assert_allclose(packed.reshape(2, 5, -1), single, atol=1e-5)

  @parameterized.parameters('prefix', 'prompt')
  def test_generates_what_the_whole_pass_finds_likeliest(self, kind):
    graphdef, state = peftlib.inject(*self.base, _config(kind), key=KEY)
    ids = [1, 2, 3]
    got = list(
      generation.stream(graphdef, state, ids, max_new_tokens=4, eos_ids=())
    )
    expected = list(ids)
    for _ in range(4):
      logits = _logits(graphdef, state, jnp.array([expected]))
      expected.append(int(logits[0, -1].argmax()))
    self.assertEqual(got, expected[3:])

  @parameterized.parameters('prefix', 'prompt')
  def test_learns_with_a_frozen_base(self, kind):
    config = _config(kind, 0.02)
    graphdef, state = peftlib.inject(*self.base, config, key=KEY)
    trainable, frozen = transforms.partition(
      state, peftlib.trainable_filter(config), ...
    )
    tx = optax.adam(0.05)
    train_state = peftlib.init_train_state(trainable, tx, key=KEY)

    def loss_fn(model, batch, rngs):
      del rngs
      logits = model(batch[:, :-1])
      return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch[:, 1:]
      ).mean(), {}

    step = peftlib.make_train_step(graphdef, loss_fn, tx)
    losses = []
    for _ in range(30):
      train_state, metrics = step(train_state, frozen, self.tokens)
      losses.append(float(metrics['loss']))
    self.assertLess(losses[-1], 0.9 * losses[0])

  def test_beside_lora(self):
    config = peftlib.AdapterConfig(
      _config('prefix').rules
      + peftlib.LoraConfig(module_path='.*_proj', rank=2).rules,
      virtual_tokens=_config('prefix').virtual_tokens,
    )
    both = peftlib.inject(*self.base, config, self.tokens, key=KEY)
    alone = peftlib.inject(*self.base, _config('prefix'), key=KEY)
    np.testing.assert_allclose(
      _logits(*both, self.tokens), _logits(*alone, self.tokens), atol=1e-6
    )

  def test_errors(self):
    with self.assertRaisesRegex(
      ValueError, 'a LaxScan reads no virtual tokens; it needs a method'
    ):
      peftlib.inject(
        *nnx.split(toy_models.LaxScan(nnx.Rngs(0))), _config('prompt'), key=KEY
      )
    once = peftlib.inject(*self.base, _config('prompt'), key=KEY)
    with self.assertRaisesRegex(
      ValueError, "adapter 'b': the model has prompt already"
    ):
      peftlib.inject(*once, _config('prompt'), key=KEY, adapter='b')
    with self.assertRaisesRegex(
      ValueError, "VirtualTokens.kind='suffix': must be 'prefix' or 'prompt'"
    ):
      peftlib.VirtualTokens(kind='suffix', length=1)
    with self.assertRaisesRegex(
      ValueError, 'VirtualTokens.length=0: must be an int >= 1'
    ):
      peftlib.VirtualTokens(kind='prefix', length=0)


if __name__ == '__main__':
  absltest.main()
