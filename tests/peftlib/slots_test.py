from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import peftlib
from peftlib import methods
from peftlib import slots
from peftlib import weight_ops
from tests.peftlib import toy_models


def _slot(name='kernel', adapter='default', index=0, **kwargs):
  op = weight_ops.WeightOp(
    path=(),
    name=name,
    kind='dot_general',
    shape=(2, 3),
    batch=(),
    inputs=(0,),
    outputs=(1,),
    dtype=jnp.dtype('float32'),
    route=(),
    exact=True,
  )
  return slots.Slot(adapter, index, methods.Lora(rank=1), op, **kwargs)


class SlotTest(parameterized.TestCase):
  @parameterized.parameters(
    (_slot(), 'kernel_lora_a', 'kernel_lora_key', 'kernel_adapter_gate'),
    (
      _slot(adapter='style'),
      'kernel_lora_a_style',
      'kernel_lora_key_style',
      'kernel_adapter_gate_style',
    ),
    (
      _slot(index=2),
      'kernel_lora_a_2',
      'kernel_lora_key_2',
      'kernel_adapter_gate_2',
    ),
    (
      _slot('weights/0', 'style', 2),
      'weights_0_lora_a_style_2',
      'weights_0_lora_key_style_2',
      'weights_0_adapter_gate_style_2',
    ),
  )
  def test_attributes(self, slot, a, key, gate):
    self.assertEqual(slot.attribute('lora_a'), a)
    self.assertEqual((slot.key, slot.gate), (key, gate))
    b = slot.attribute('lora_b')
    self.assertEqual(slot.attributes, (a, b, key, gate))

  def test_the_method_s_variables(self):
    self.assertEqual(
      {k: v.shape(_slot().op.weight) for k, v in _slot().variables.items()},
      {'lora_a': (2, 1), 'lora_b': (1, 3)},
    )


class ModuleTest(absltest.TestCase):
  def test_put_and_take(self):
    module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    plain = nnx.split(module)[0]
    self.assertEqual(slots.of_module(module), ())
    first, second = _slot(), _slot(adapter='style')
    slots.put(module, (first, second))
    slots.mark_dropout(module)
    self.assertEqual(slots.of_module(module), (first, second))
    self.assertEqual(slots.names_of(module), ['default', 'style'])
    self.assertNotEqual(nnx.split(module)[0], plain)
    slots.put(module, ())
    self.assertEqual(slots.of_model(module), [])
    self.assertEqual(nnx.split(module)[0], plain)

  def test_values(self):
    module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    slot = _slot()
    module.kernel_lora_a = nnx.LoRAParam(jnp.ones((2, 1)))
    module.kernel_lora_b = nnx.LoRAParam(jnp.ones((1, 3)))
    values = slots.values_of(module, slot)
    self.assertEqual(list(values.variables), ['lora_a', 'lora_b'])
    self.assertIsNone(values.key)
    self.assertIsNone(values.gate)
    module.kernel_lora_key = slots.AdapterKey(
      jax.random.key(0), tag='adapter_dropout'
    )
    module.kernel_adapter_gate = slots.AdapterGate(jnp.array(True))
    slots.mark_dropout(module)
    values = slots.values_of(module, slot)
    self.assertIsNone(values.key)
    self.assertTrue(values.gate)
    slots.set_dropout(module, True)
    self.assertEqual(slots.values_of(module, slot).key, jax.random.key(0))

  def test_an_adapter_without_a_dropout_key_among_others(self):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    slots.set_dropout(model, True)
    self.assertEqual(slots.names_of(model), [])


class LayersTest(parameterized.TestCase):
  @parameterized.parameters(0, 1, 2)
  def test_expanded(self, axis):
    value = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)
    value = np.moveaxis(value, 0, axis)
    got = slots.expanded(jnp.asarray(value), layers=(1, 3), stack=5, axis=axis)
    expected = np.moveaxis(np.zeros((5, 3, 4), np.float32), 0, axis)
    index = [slice(None)] * 3
    index[axis] = [1, 3]
    expected[tuple(index)] = value
    np.testing.assert_array_equal(got, expected)

  def test_expand_and_restore(self):
    rule = peftlib.Rule('.*up', methods.Lora(rank=2), layers=(0, 2))
    graphdef, state = peftlib.inject(
      *nnx.split(toy_models.LaxScan(nnx.Rngs(0))),
      peftlib.AdapterConfig((rule,)),
      toy_models.inputs(),
      key=jax.random.key(0),
    )
    model = nnx.merge(graphdef, state)
    a = model.layers.up.kernel_lora_a
    before = slots.expand_layers(model)
    self.assertEqual(a.shape, (2, 8, 2))
    expanded = model.layers.up.kernel_lora_a.get_value()
    self.assertEqual(expanded.shape, (3, 8, 2))
    np.testing.assert_array_equal(expanded[jnp.array([0, 2])], a.get_value())
    np.testing.assert_array_equal(expanded[1], np.zeros((8, 2)))
    slots.restore_layers(before)
    self.assertIs(model.layers.up.kernel_lora_a, a)


if __name__ == '__main__':
  absltest.main()
