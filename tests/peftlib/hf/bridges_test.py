from absl.testing import absltest
from absl.testing import parameterized

from peftlib import methods
from peftlib.hf import bridges

LORA = {'peft_type': 'LORA', 'r': 4, 'lora_alpha': 8}


class BridgesTest(parameterized.TestCase):
  @parameterized.parameters(
    ({'use_qalora': True}, 'use_qalora=True: not a field that is known'),
    ({'new_field': 3}, 'new_field=3: not a field that is known'),
    (
      {'layer_replication': [[0, 2]]},
      r'layer_replication=\[\[0, 2\]\]: the',
    ),
    ({'alora_invocation_tokens': [1]}, r'alora_invocation_tokens=\[1\]: not'),
    ({'bias': 'all'}, "bias='all': trained biases of the base are not read"),
    ({'fan_in_fan_out': True}, 'fan_in_fan_out=True: weights of the models'),
    ({'init_lora_weights': 'loftq'}, "init_lora_weights='loftq': it changes"),
    ({'init_lora_weights': 'corda'}, "init_lora_weights='corda': it changes"),
    ({'init_lora_weights': 'pissa_niter_4'}, 'pissa_niter_4.: it changes'),
    ({'lora_ga_config': {'x': 1}}, r"lora_ga_config=\{'x': 1\}: not a field"),
    ({'task_type': 'SEQ_CLS'}, "task_type='SEQ_CLS': only CAUSAL_LM"),
  )
  def test_fields_that_cannot_be_honoured(self, fields, message):
    with self.assertRaisesRegex(ValueError, f'LORA with .*{message}'):
      bridges.bridge_of(LORA | fields)

  def test_all_of_them_are_named(self):
    with self.assertRaisesRegex(
      ValueError, "bias='all': .*; fan_in_fan_out=True: .*; use_bdlora=1: "
    ):
      bridges.bridge_of(
        LORA | {'bias': 'all', 'fan_in_fan_out': True, 'use_bdlora': 1}
      )

  @parameterized.parameters(
    ('LOHA', {'rank_dropout': 0.1}, 'rank_dropout=0.1: the weight or the'),
    ('LOKR', {'module_dropout': 0.1}, 'module_dropout=0.1: the weight or'),
    ('OFT', {'module_dropout': 0.1}, 'module_dropout=0.1: the weight or'),
    ('SHIRA', {'mask_type': 'own'}, "mask_type='own': only the random"),
    ('VERA', {'save_projection': False}, 'save_projection=False: its'),
  )
  def test_of_other_types(self, peft_type, fields, message):
    with self.assertRaisesRegex(ValueError, f'{peft_type} with {message}'):
      bridges.bridge_of({'peft_type': peft_type} | fields)

  def test_a_type_that_is_not_known(self):
    with self.assertRaisesRegex(
      ValueError, r"peft_type='BOFT'; known are \['GRALORA', 'HIRA', 'IA3', "
    ):
      bridges.bridge_of({'peft_type': 'BOFT'})

  @parameterized.parameters(
    ({}, methods.Lora(rank=4, alpha=8.0)),
    ({'use_rslora': True}, methods.RsLora(rank=4, alpha=8.0)),
    ({'use_dora': True}, methods.Dora(rank=4, alpha=8.0)),
    ({'init_lora_weights': 'pissa'}, methods.Pissa(rank=4, alpha=8.0)),
    (
      {'lora_dropout': 0.1, 'lora_bias': True},
      methods.Lora(rank=4, alpha=8.0, dropout=0.1, bias=True),
    ),
  )
  def test_lora_there_and_back(self, fields, method):
    bridge = bridges.bridge_of(LORA | fields)
    self.assertEqual(bridge.method(LORA | fields, {}), method)
    back = bridge.fields(method)
    self.assertEqual(bridge.method(back, {}), method)

  def test_patterns(self):
    config = LORA | {'rank_pattern': {'q_proj': 8}, 'alpha_pattern': {'v': 1}}
    bridge = bridges.bridge_of(config)
    own = bridge.of_module(config, 'model.layers.0.self_attn.q_proj')
    self.assertEqual((own['r'], own['lora_alpha']), (8, 8))
    own = bridge.of_module(config, 'model.layers.0.v')
    self.assertEqual((own['r'], own['lora_alpha']), (4, 1))


if __name__ == '__main__':
  absltest.main()
