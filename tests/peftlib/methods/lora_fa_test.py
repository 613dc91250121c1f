from absl.testing import absltest

from peftlib.methods import lora_fa
from tests.peftlib.methods import method_cases


class LoraFATest(method_cases.MethodTestCase):
  def test_laws(self):
    self.check_laws(lora_fa.LoraFA(rank=4, alpha=6))

  def test_formula(self):
    self.check_formula(
      lora_fa.LoraFA(rank=4, alpha=6),
      lambda x, w, v, _: x @ w + 6 / 4 * x @ v['lora_a'] @ v['lora_b'],
      constants=('lora_a',),
    )

  def test_only_b_is_trained(self):
    weight, _ = method_cases.weight_of()
    specs = lora_fa.LoraFA(rank=4).variables(weight)
    self.assertEqual(
      {name: spec.trainable for name, spec in specs.items()},
      {'lora_a': False, 'lora_b': True},
    )


if __name__ == '__main__':
  absltest.main()
