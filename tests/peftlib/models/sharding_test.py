import re

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from peftlib import models
from tests.peftlib.models import golden

chex.set_n_cpu_devices(8)


class PartitionRulesTest(parameterized.TestCase):
  @parameterized.product(tied=(False, True), bias=(False, True))
  def test_one_rule_for_every_variable_and_none_for_nothing(self, tied, bias):
    config = golden.tiny_config(
      tie_embeddings=tied, attention_bias=bias, mlp_bias=bias
    )
    _, state = golden.tiny_model(config)
    rules = models.partition_rules(config)
    used = set()
    for path, variable in nnx.to_flat_state(state):
      name = '.'.join(path)
      matching = [r for r in rules if re.fullmatch(r[0], name)]
      self.assertLen(matching, 1, name)
      self.assertLen(matching[0][1], variable.ndim, name)
      used.add(matching[0][0])
    self.assertEqual(used, {pattern for pattern, _ in rules})

  def test_specs(self):
    config = golden.tiny_config()
    _, state = golden.tiny_model(config)
    specs = models.partition_specs(state, models.partition_rules(config))
    attention = specs['layers']['self_attn']
    self.assertEqual(
      attention['q_proj']['kernel'].get_value(),
      PartitionSpec(None, 'fsdp', 'tensor'),
    )
    self.assertEqual(
      attention['o_proj']['kernel'].get_value(),
      PartitionSpec(None, 'tensor', 'fsdp'),
    )

  def test_no_rule(self):
    _, state = golden.tiny_model()
    with self.assertRaisesRegex(
      ValueError, r'No sharding rule matches embed_tokens.embedding of shape'
    ):
      models.partition_specs(state, [('norm.*', PartitionSpec(None))])

  @parameterized.parameters('logits', 'losses', 'losses, frozen head')
  def test_values_and_gradients_are_those_of_one_device(self, kind):
    config = golden.tiny_config(vocab_size=40, head_dim=4)
    graphdef, state = golden.tiny_model(config)
    mesh = jax.make_mesh(
      (4, 2), ('fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 2
    )
    specs = models.partition_specs(state, models.partition_rules(config))
    sharded = jax.tree.map(
      lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
      state,
      specs,
      is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    kernel = sharded['layers']['mlp']['up_proj']['kernel'].get_value()
    self.assertEqual(kernel.addressable_shards[0].data.shape, (3, 4, 12))
    tokens = jnp.asarray(
      np.random.default_rng(0).integers(0, 40, (8, 70)), jnp.int32
    )

    def loss(state, tokens):
      if kind == 'logits':
        logits = nnx.merge(graphdef, state)(tokens)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])
      if kind == 'losses, frozen head':
        head = jax.lax.stop_gradient(state['lm_head'])
        state = nnx.State({**state, 'lm_head': head})
      return jnp.mean(nnx.merge(graphdef, state)(tokens, loss_targets=tokens))

    step = jax.jit(jax.value_and_grad(loss))
    expected, expected_grads = step(state, tokens)
    tokens = jax.device_put(
      tokens, NamedSharding(mesh, PartitionSpec('fsdp', None))
    )
    value, grads = step(sharded, tokens)
    self.assertAlmostEqual(float(value), float(expected), delta=1e-5)
    chex.assert_trees_all_close(
      jax.device_get(grads), jax.device_get(expected_grads), atol=1e-5
    )


if __name__ == '__main__':
  absltest.main()
