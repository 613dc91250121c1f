from absl.testing import absltest
from absl.testing import parameterized

from peftlib.hf import selection

LINEAR = [
  f'model.layers.{i}.{m}'
  for i in range(3)
  for m in ('self_attn.q_proj', 'self_attn.v_proj', 'mlp.up_proj')
] + ['lm_head']
OTHERS = ['model.embed_tokens', 'model.norm']


def _short(names):
  return [n.removeprefix('model.').removeprefix('layers.') for n in names]


class SelectionTest(parameterized.TestCase):
  # By the rules of check_target_module_exists in peft 0.21.
  @parameterized.parameters(
    ({'target_modules': ['v_proj']}, [f'{i}.self_attn.v_proj' for i in range(3)]),
    ({'target_modules': ['proj']}, []),
    ({'target_modules': r'.*layers\.(0|2)\..*v_proj'},
     ['0.self_attn.v_proj', '2.self_attn.v_proj']),
    ({'target_modules': r'v_proj'}, []),
    ({'target_modules': ['q_proj', 'v_proj'], 'layers_to_transform': [1]},
     ['1.self_attn.q_proj', '1.self_attn.v_proj']),
    ({'target_modules': ['up_proj'], 'layers_to_transform': 2,
      'layers_pattern': 'layers'}, ['2.mlp.up_proj']),
    ({'target_modules': ['up_proj'], 'layers_to_transform': [2],
      'layers_pattern': ['h']}, []),
    ({'target_modules': ['model.layers.0.mlp.up_proj', 'v_proj'],
      'layers_to_transform': [1]}, ['0.mlp.up_proj', '1.self_attn.v_proj']),
    ({'target_modules': ['q_proj'], 'exclude_modules': r'.*\.1\..*'},
     ['0.self_attn.q_proj', '2.self_attn.q_proj']),
    ({'target_modules': ['q_proj', 'up_proj'],
      'exclude_modules': ['self_attn.q_proj']},
     [f'{i}.mlp.up_proj' for i in range(3)]),
    ({'target_modules': ['lm_head', 'embed_tokens'],
      'modules_to_save': ['lm_head']}, ['embed_tokens']),
    ({'target_modules': 'all-linear'}, _short(LINEAR[:-1])),
    ({'target_modules': None}, []),
  )  # fmt: skip
  def test_modules(self, config, expected):
    got = selection.modules(config, LINEAR, OTHERS, ['lm_head'])
    self.assertEqual(_short(got), expected)

  @parameterized.parameters(
    ({'q_proj': 8}, 'model.layers.0.self_attn.q_proj', 8),
    ({'q_proj': 8}, 'model.layers.0.self_attn.xq_proj', 4),
    ({r'layers\.1\.mlp\.up_proj': 2}, 'model.layers.1.mlp.up_proj', 2),
    ({r'layers\.1\.mlp\.up_proj': 2}, 'model.layers.0.mlp.up_proj', 4),
    ({'.*up_proj': 1, 'up_proj': 2}, 'model.layers.0.mlp.up_proj', 1),
  )
  def test_by_pattern(self, patterns, name, expected):
    self.assertEqual(selection.by_pattern(patterns, name, 4), expected)


if __name__ == '__main__':
  absltest.main()
