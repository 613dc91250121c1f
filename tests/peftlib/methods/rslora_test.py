from absl.testing import absltest

from peftlib.methods import rslora
from tests.peftlib.methods import method_cases


class RsLoraTest(method_cases.MethodTestCase):
  def test_laws(self):
    self.check_laws(rslora.RsLora(rank=4, alpha=6))

  def test_formula(self):
    self.check_formula(
      rslora.RsLora(rank=4, alpha=6),
      lambda x, w, v, _: x @ w + 6 / 2 * x @ v['lora_a'] @ v['lora_b'],
    )

  def test_golden(self):
    self.check_golden(
      'rslora',
      rslora.RsLora(rank=4, alpha=6),
      method_cases.transposed(('lora_A', 'lora_a'), ('lora_B', 'lora_b')),
    )


if __name__ == '__main__':
  absltest.main()
