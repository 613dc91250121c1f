from absl.testing import absltest
from absl.testing import parameterized

from peftlib import LoraConfig


class LoraConfigTest(parameterized.TestCase):
  def test_equal_fields_compare_and_hash_equal(self):
    make = lambda: LoraConfig(module_path='.*q', rank=4, alpha=8.0)
    self.assertEqual(make(), make())
    self.assertEqual(hash(make()), hash(make()))
    self.assertNotEqual(make(), LoraConfig(module_path='.*q', rank=5))

  def test_scale(self):
    self.assertEqual(LoraConfig(rank=16, alpha=32).scale, 2.0)

  @parameterized.parameters(
    (
      dict(module_path='('),
      r"LoraConfig.module_path='\(' is not a regular expression: missing"
      r' \), unterminated subpattern',
    ),
    (dict(rank=0), r'LoraConfig.rank=0: must be an int >= 1\.'),
    (dict(rank=True), r'LoraConfig.rank=True: must be an int >= 1\.'),
    (dict(rank=4.0), r'LoraConfig.rank=4.0: must be an int >= 1\.'),
    (dict(alpha=0), r'LoraConfig.alpha=0: must be a finite number > 0\.'),
    (
      dict(alpha=float('inf')),
      r'LoraConfig.alpha=inf: must be a finite number > 0\.',
    ),
    (dict(dropout=1.0), r'LoraConfig.dropout=1.0: must be a number in'),
    (
      dict(weight_qtype='nf5'),
      r"LoraConfig.weight_qtype='nf5': must be None or one of \['fp8',"
      r" 'int4', 'int8', 'nf4'\]\.",
    ),
    (
      dict(weight_qtype='nf4', tile_size=0),
      r'LoraConfig.tile_size=0: must be None or an int >= 1\.',
    ),
    (
      dict(tile_size=64),
      r'LoraConfig.tile_size=64: must be None where weight_qtype is None',
    ),
    (dict(dtype='int8'), r"LoraConfig.dtype='int8': must be a floating"),
    (dict(dtype='f33'), r"LoraConfig.dtype='f33': must be a floating"),
  )
  def test_refuses(self, fields, message):
    with self.assertRaisesRegex(ValueError, message):
      LoraConfig(**fields)


if __name__ == '__main__':
  absltest.main()
