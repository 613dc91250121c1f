"""Makes tests/golden/llama: tiny Llama models and their logits.

usage: python tests/interop/make_llama_golden.py OUT_DIR

Needs torch, transformers and safetensors, nothing of this repository. For each
case OUT_DIR/<case>/ has config.json and model.safetensors as transformers
saves them, and golden.safetensors with input_ids and logits (float32).
"""

import os
import sys

from safetensors.torch import save_file
import torch
import transformers

_SIZES = {
  'vocab_size': 61,
  'hidden_size': 24,
  'intermediate_size': 40,
  'num_hidden_layers': 2,
  'num_attention_heads': 6,
  'num_key_value_heads': 2,
  'max_position_embeddings': 64,
  'rope_theta': 10000.0,
  'tie_word_embeddings': False,
}
_LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 4.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 16,
}
CASES = {
  'grouped': {},
  'tied': {'tie_word_embeddings': True, 'num_key_value_heads': 1},
  'ungrouped': {'num_key_value_heads': 6, 'rms_norm_eps': 1e-3},
  'attention_bias': {'attention_bias': True},
  'all_biases_tied': {
    'attention_bias': True,
    'mlp_bias': True,
    'tie_word_embeddings': True,
  },
  'wide_heads': {'head_dim': 10, 'rope_theta': 500000.0},
  'linear_rope': {'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}},
  'llama3_rope': {'rope_scaling': _LLAMA3, 'head_dim': 16},
}


def make_config(case: str) -> transformers.LlamaConfig:
  """The configuration, in the spelling of transformers 4 or 5."""
  fields = {**_SIZES, **CASES[case]}
  if int(transformers.__version__.split('.')[0]) >= 5:
    # transformers 5 moved both into one dict.
    scaling = fields.pop('rope_scaling', {'rope_type': 'default'})
    theta = fields.pop('rope_theta')
    fields['rope_parameters'] = {**scaling, 'rope_theta': theta}
  return transformers.LlamaConfig(**fields)


def make(case: str, directory: str) -> None:
  """Writes one case."""
  torch.manual_seed(sorted(CASES).index(case))
  model = transformers.LlamaForCausalLM(make_config(case)).float().eval()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if 'norm' in name:
        parameter.normal_(1.0, 0.1)
      else:
        # Large enough that softmax and biases matter.
        parameter.normal_(0.0, 0.2)
  input_ids = torch.randint(0, _SIZES['vocab_size'], (2, 40))
  with torch.no_grad():
    logits = model(input_ids).logits
  model.save_pretrained(directory)
  generation_config = os.path.join(directory, 'generation_config.json')
  if os.path.exists(generation_config):
    os.remove(generation_config)
  save_file(
    {'input_ids': input_ids, 'logits': logits.contiguous()},
    os.path.join(directory, 'golden.safetensors'),
  )


def main() -> None:
  (out,) = sys.argv[1:]
  for case in CASES:
    make(case, os.path.join(out, case))
    print(case)


if __name__ == '__main__':
  main()
