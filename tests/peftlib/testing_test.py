"""What the assertions on what is trained pass, and how they fail."""

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx

import peftlib
from peftlib import methods
from peftlib import testing

CONFIG = peftlib.AdapterConfig(
  rules=(peftlib.Rule('.*up', methods.Lora(rank=2)),),
  train=('out/bias',),
)


def _state(layers=1):
  flat = []
  for n in range(layers):
    flat += [
      ((f'l{n}', 'kernel'), nnx.Param(1.0)),
      ((f'l{n}', 'kernel_lora_a'), nnx.LoRAParam(1.0)),
      ((f'l{n}', 'kernel_lora_b'), nnx.LoRAParam(1.0)),
    ]
  flat += [(('out', 'bias'), nnx.Param(1.0)), (('steps',), nnx.BatchStat(0))]
  return nnx.from_flat_state(flat)


class AssertTrainableTest(parameterized.TestCase):
  def _fails(self, text, *args, error=AssertionError):
    with self.assertRaises(error) as caught:
      testing.assert_trainable(*args)
    self.assertEqual(str(caught.exception), f'assert_trainable: {text}')

  @parameterized.named_parameters(
    ('config', CONFIG, ['l0/kernel_lora_a', '.*_b', 'out/bias']),
    ('filter', nnx.LoRAParam, ('l0/kernel_lora_.*',)),
    ('overlapping', nnx.LoRAParam, ['.*_a', '.*_lora_.*']),
    ('nothing', False, []),
    ('all', ..., ['.*']),
  )
  def test_passes(self, config, paths):
    testing.assert_trainable(_state(), config, paths)

  def test_trained_but_not_named(self):
    self._fails(
      'trained, but not named: l0/kernel_lora_b, out/bias. Trained are 3 of 5 '
      'variables.',
      _state(),
      CONFIG,
      ['l0/kernel_lora_a'],
    )

  def test_named_but_not_trained(self):
    self._fails(
      'named, but not trained: l0/kernel. Trained are 2 of 5 variables.',
      _state(),
      nnx.LoRAParam,
      ['l0/kernel.*'],
    )

  def test_pattern_that_matches_nothing(self):
    # A pattern has to match all of the path.
    self._fails(
      "no variable is at 'kernel_lora_a'; trained, but not named: "
      'l0/kernel_lora_a, l0/kernel_lora_b. Trained are 2 of 5 variables.',
      _state(),
      nnx.LoRAParam,
      ['kernel_lora_a'],
    )

  def test_more_than_are_shown(self):
    self._fails(
      'trained, but not named: l0/kernel_lora_a, l0/kernel_lora_b, '
      'l1/kernel_lora_a, l1/kernel_lora_b, l2/kernel_lora_a and 1 more; named, '
      'but not trained: steps. Trained are 6 of 11 variables.',
      _state(3),
      nnx.LoRAParam,
      ['steps'],
    )

  @parameterized.named_parameters(
    (
      'none',
      (None, []),
      TypeError,
      'config is None, which could be the whole model or nothing; give '
      'nnx.Param for the whole model, False for nothing.',
    ),
    (
      'text',
      (CONFIG, 'out/bias'),
      TypeError,
      "paths is 'out/bias'; it must be a sequence of str.",
    ),
    (
      'number',
      (CONFIG, [1]),
      TypeError,
      'paths is [1]; it must be a sequence of str.',
    ),
  )
  def test_bad_arguments(self, args, error, text):
    self._fails(text, _state(), *args, error=error)

  def test_bad_state_pattern_and_filter(self):
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    self._fails(
      'state is a Linear, an nnx.Module; nnx.split it first.',
      model,
      CONFIG,
      [],
      error=TypeError,
    )
    with self.assertRaisesRegex(ValueError, r"'\(' is no regular expression"):
      testing.assert_trainable(_state(), CONFIG, ['('])
    with self.assertRaisesRegex(TypeError, '3 of type int is no filter'):
      testing.assert_trainable(_state(), 3, [])


if __name__ == '__main__':
  absltest.main()
