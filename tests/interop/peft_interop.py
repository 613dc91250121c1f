"""The side of HF peft in `make interop-test`; runs in its own venv.

usage: python tests/interop/peft_interop.py train OUT [CASE ...]
       python tests/interop/peft_interop.py load FOLDER

`train` writes tiny base models to OUT/bases/<kind>, trains an adapter of each
case for some steps, and writes OUT/cases/<case>/: the directory that peft
saves, golden.safetensors (`input_ids`, `base_logits`, `logits`), and
golden.json with the `base` and the number of `trainable` parameters; or
error.txt, if peft can't.

`load` reads each directory of FOLDER that we have written, as peft does,
onto the base that its golden.json names, and writes logits.safetensors into
it, or error.txt.
"""

import json
import pathlib
import sys
import traceback
from typing import Any
import warnings

import peft
from safetensors.torch import save_file
import torch
import transformers

_IDS = torch.tensor(
  [
    [1, 17, 93, 4, 56, 120, 7, 33, 2, 64],
    [5, 88, 13, 101, 45, 9, 71, 26, 3, 110],
  ]
)
_KINDS: dict[str, dict[str, Any]] = {
  'plain': {},
  'tied': {'tie_word_embeddings': True},
  'biases': {'attention_bias': True, 'mlp_bias': True},
}
_ATTENTION = ['q_proj', 'k_proj', 'v_proj', 'o_proj']
_ALL = [*_ATTENTION, 'gate_proj', 'up_proj', 'down_proj']


def _lora(**fields: Any) -> peft.PeftConfig:
  return peft.LoraConfig(
    **{
      'r': 4,
      'lora_alpha': 8,
      'target_modules': _ALL,
      'task_type': 'CAUSAL_LM',
      **fields,
    }
  )


def _of(cls: Any, **fields: Any) -> Any:
  return lambda: cls(
    **{'target_modules': _ALL, 'task_type': 'CAUSAL_LM', **fields}
  )


CASES: dict[str, Any] = {
  'lora': lambda: _lora(),
  'lora, all-linear': lambda: _lora(target_modules='all-linear'),
  'lora, regex': lambda: _lora(
    target_modules=r'.*layers\.(0|2)\..*(q_proj|v_proj)'
  ),
  'lora, layers': lambda: _lora(layers_to_transform=[1, 2]),
  'lora, layers_pattern': lambda: _lora(
    layers_to_transform=1, layers_pattern='layers'
  ),
  'lora, whole names': lambda: _lora(
    target_modules=['model.layers.1.mlp.up_proj', 'layers.0.self_attn.q_proj']
  ),
  'lora, exclude regex': lambda: _lora(exclude_modules=r'.*\.1\..*|.*q_proj'),
  'lora, exclude list': lambda: _lora(
    exclude_modules=['mlp.up_proj', 'k_proj']
  ),
  'lora, patterns': lambda: _lora(
    rank_pattern={'q_proj': 8, r'layers\.1\.mlp\.up_proj': 2},
    alpha_pattern={'v_proj': 32, r'^model\.layers\.0\..*': 3},
  ),
  'lora, dropout': lambda: _lora(lora_dropout=0.25),
  'lora, gaussian': lambda: _lora(init_lora_weights='gaussian'),
  'lora, orthogonal': lambda: _lora(init_lora_weights='orthogonal'),
  'lora, random start': lambda: _lora(init_lora_weights=False),
  'lora, bias and layers': lambda: _lora(
    lora_bias=True, layers_to_transform=[0, 2]
  ),
  'lora, bias and rslora': lambda: _lora(lora_bias=True, use_rslora=True),
  'lora, bias over biases': lambda: _lora(lora_bias=True),
  'lora, over biases': lambda: _lora(),
  'lora, head and embeddings': lambda: _lora(
    target_modules=[*_ATTENTION, 'embed_tokens', 'lm_head']
  ),
  'lora, embeddings alone': lambda: _lora(target_modules=['embed_tokens']),
  'lora, embeddings with rslora': lambda: _lora(
    target_modules=['q_proj', 'embed_tokens'],
    use_rslora=True,
    rank_pattern={'embed_tokens': 2},
  ),
  'lora, modules_to_save': lambda: _lora(modules_to_save=['lm_head', 'norm']),
  'lora, modules_to_save among targets': lambda: _lora(
    modules_to_save=['embed_tokens', 'q_proj']
  ),
  'lora, modules_to_save with biases': lambda: _lora(
    modules_to_save=['o_proj', 'lm_head']
  ),
  'lora, modules_to_save by whole name': lambda: _lora(
    modules_to_save=['layers.1.self_attn.q_proj', 'layers.0.input_layernorm']
  ),
  'lora, tokens': lambda: _lora(trainable_token_indices=[3, 7, 120]),
  'lora, tokens by name': lambda: _lora(
    trainable_token_indices={'embed_tokens': [120, 5]},
    modules_to_save=['lm_head'],
  ),
  'lora, tokens of the head': lambda: _lora(
    trainable_token_indices={'lm_head': [3, 7]}
  ),
  'lora, tied tokens': lambda: _lora(trainable_token_indices=[3, 7]),
  'lora, tied embeddings': lambda: _lora(
    target_modules=['q_proj', 'embed_tokens']
  ),
  'lora, tied head': lambda: _lora(target_modules=['q_proj', 'lm_head']),
  'lora, tied head and embeddings': lambda: _lora(
    target_modules=['q_proj', 'embed_tokens', 'lm_head'],
  ),
  'lora, tied, ensure_weight_tying': lambda: _lora(
    target_modules=['q_proj', 'embed_tokens'], ensure_weight_tying=True
  ),
  'lora, tied head, ensure_weight_tying': lambda: _lora(
    target_modules=['q_proj', 'lm_head'], ensure_weight_tying=True
  ),
  'lora, ensure_weight_tying of nothing': lambda: _lora(
    target_modules=['q_proj', 'embed_tokens'], ensure_weight_tying=True
  ),
  'lora, embeddings by whole name': lambda: _lora(
    target_modules=['q_proj', 'model.embed_tokens']
  ),
  'lora, embeddings by regex': lambda: _lora(
    target_modules=r'.*(q_proj|embed_tokens)'
  ),
  'lora, head and tokens': lambda: _lora(
    target_modules=['q_proj', 'lm_head'], trainable_token_indices=[3]
  ),
  'lora, bfloat16': lambda: _lora(trainable_token_indices=[3]),
  'lora, modules_to_save of a block': lambda: _lora(modules_to_save=['mlp']),
  'lora, tied, modules_to_save': lambda: _lora(
    modules_to_save=['embed_tokens']
  ),
  'lora, tied, modules_to_save, ensure_weight_tying': lambda: _lora(
    modules_to_save=['embed_tokens'], ensure_weight_tying=True
  ),
  'lora, tied, head to save': lambda: _lora(modules_to_save=['lm_head']),
  'lora, tied, all-linear': lambda: _lora(target_modules='all-linear'),
  'rslora': lambda: _lora(use_rslora=True),
  'rslora, patterns': lambda: _lora(
    use_rslora=True,
    rank_pattern={'q_proj': 8},
    alpha_pattern={r'layers\.1\..*': 16},
  ),
  'dora': lambda: _lora(use_dora=True),
  'dora, patterns and modules_to_save': lambda: _lora(
    use_dora=True,
    rank_pattern={'q_proj': 2},
    alpha_pattern={'v_proj': 3},
    modules_to_save=['lm_head'],
  ),
  'dora, head': lambda: _lora(use_dora=True, target_modules=['lm_head']),
  'dora, embeddings': lambda: _lora(
    use_dora=True, target_modules=['q_proj', 'embed_tokens']
  ),
  'dora, over biases': lambda: _lora(use_dora=True),
  'dora, rslora': lambda: _lora(use_dora=True, use_rslora=True),
  'dora, tokens and layers': lambda: _lora(
    use_dora=True, trainable_token_indices=[3], layers_to_transform=[0]
  ),
  'pissa': lambda: _lora(lora_alpha=4, init_lora_weights='pissa'),
  'pissa, layers': lambda: _lora(
    init_lora_weights='pissa', layers_to_transform=[0, 2]
  ),
  'pissa, rslora': lambda: _lora(init_lora_weights='pissa', use_rslora=True),
  'pissa, dora': lambda: _lora(init_lora_weights='pissa', use_dora=True),
  'pissa_niter_4': lambda: _lora(init_lora_weights='pissa_niter_4'),
  'olora': lambda: _lora(lora_alpha=4, init_lora_weights='olora'),
  'olora, patterns': lambda: _lora(
    init_lora_weights='olora', rank_pattern={'q_proj': 2}
  ),
  'olora, rslora': lambda: _lora(init_lora_weights='olora', use_rslora=True),
  'lora, bias of the base': lambda: _lora(bias='all'),
  'lora, replicated layers': lambda: _lora(layer_replication=[(0, 3), (1, 3)]),
  'vera': _of(
    peft.VeraConfig, r=8, target_modules=_ATTENTION, projection_prng_key=11
  ),
  'vera, every size': _of(
    peft.VeraConfig, r=8, d_initial=0.3, layers_to_transform=[0, 2]
  ),
  'vera, not saved': _of(peft.VeraConfig, r=8, save_projection=False),
  'vera, modules_to_save': _of(
    peft.VeraConfig, r=8, modules_to_save=['lm_head']
  ),
  'ia3': _of(
    peft.IA3Config,
    target_modules=['k_proj', 'v_proj', 'down_proj'],
    feedforward_modules=['down_proj'],
  ),
  'ia3, all': _of(
    peft.IA3Config,
    feedforward_modules=r'.*\.(down|o)_proj',
    modules_to_save=['norm'],
  ),
  'ia3, exclude': _of(
    peft.IA3Config,
    feedforward_modules=['down_proj'],
    exclude_modules=r'.*\.1\..*',
  ),
  'ia3, over biases': _of(peft.IA3Config, feedforward_modules=['down_proj']),
  'ia3, feedforward over biases': _of(
    peft.IA3Config,
    target_modules=['down_proj', 'o_proj'],
    feedforward_modules=['down_proj', 'o_proj'],
  ),
  'loha': _of(peft.LoHaConfig, r=4, alpha=8),
  'loha, patterns': _of(
    peft.LoHaConfig,
    r=4,
    alpha=8,
    rank_pattern={'q_proj': 2},
    alpha_pattern={r'layers\.1\..*': 3},
    layers_to_transform=[0, 1],
  ),
  'lokr': _of(peft.LoKrConfig, r=4, alpha=8, decompose_factor=4),
  'lokr, default factor': _of(peft.LoKrConfig, r=4, alpha=8),
  'lokr, both': _of(
    peft.LoKrConfig, r=2, alpha=8, decompose_both=True, decompose_factor=4
  ),
  'lokr, full': _of(peft.LoKrConfig, r=64, alpha=8, decompose_factor=4),
  'lokr, patterns': _of(
    peft.LoKrConfig,
    r=4,
    alpha=8,
    rank_pattern={'q_proj': 2},
    alpha_pattern={'v_proj': 3},
    modules_to_save=['lm_head'],
  ),
  'lokr, lycoris': _of(peft.LoKrConfig, r=4, init_weights='lycoris'),
  'oft': _of(peft.OFTConfig, oft_block_size=8),
  'oft, adjusted blocks': _of(peft.OFTConfig, oft_block_size=7),
  'oft, number of blocks': _of(peft.OFTConfig, r=4, oft_block_size=0),
  'oft, constrained': _of(
    peft.OFTConfig, oft_block_size=8, coft=True, eps=1e-3
  ),
  'oft, shared block': _of(peft.OFTConfig, oft_block_size=8, block_share=True),
  'oft, exact': _of(peft.OFTConfig, oft_block_size=8, use_cayley_neumann=False),
  'oft, over biases': _of(peft.OFTConfig, oft_block_size=8),
  'miss': _of(peft.MissConfig, r=8),
  'miss, odd rank': _of(peft.MissConfig, r=5),
  'miss, bat': _of(peft.MissConfig, r=8, init_weights='bat'),
  'miss, mini': _of(peft.MissConfig, r=8, mini_r=2, init_weights='mini'),
  'miss, random start': _of(peft.MissConfig, r=8, init_weights=False),
  'miss, layers': _of(
    peft.MissConfig, r=8, layers_to_transform=[1], modules_to_save=['norm']
  ),
  'miss, over biases': _of(peft.MissConfig, r=8),
  'hira': _of(peft.HiraConfig, r=4),
  'hira, patterns': _of(
    peft.HiraConfig,
    r=4,
    rank_pattern={'q_proj': 2},
    exclude_modules=['k_proj'],
    modules_to_save=['lm_head'],
  ),
  'hira, embeddings': _of(
    peft.HiraConfig, r=4, target_modules=['embed_tokens', 'q_proj']
  ),
  'shira': _of(peft.ShiraConfig, r=4, random_seed=5),
  'shira, modules_to_save': _of(
    peft.ShiraConfig,
    r=4,
    random_seed=5,
    target_modules='all-linear',
    modules_to_save=['norm'],
  ),
  'gralora': _of(peft.GraloraConfig, r=8, gralora_k=2),
  'gralora, hybrid': _of(
    peft.GraloraConfig, r=8, gralora_k=4, hybrid_r=2, alpha=24
  ),
  'gralora, layers': _of(
    peft.GraloraConfig, r=8, gralora_k=2, layers_to_transform=[2]
  ),
  'prefix': lambda: peft.PrefixTuningConfig(
    num_virtual_tokens=5, task_type='CAUSAL_LM'
  ),
  'prefix, projection': lambda: peft.PrefixTuningConfig(
    num_virtual_tokens=5,
    prefix_projection=True,
    encoder_hidden_size=16,
    task_type='CAUSAL_LM',
  ),
  'prompt': lambda: peft.PromptTuningConfig(
    num_virtual_tokens=5, task_type='CAUSAL_LM'
  ),
  'ln_tuning': _of(
    peft.LNTuningConfig,
    target_modules=['input_layernorm', 'post_attention_layernorm', 'norm'],
  ),
  'ln_tuning, modules_to_save': _of(
    peft.LNTuningConfig, target_modules=['norm'], modules_to_save=['lm_head']
  ),
  'boft': _of(peft.BOFTConfig, boft_block_size=4),
}


def _kind(case: str) -> str:
  if 'tied' in case:
    return 'tied'
  return 'biases' if 'biases' in case else 'plain'


def _base(kind: str) -> transformers.LlamaForCausalLM:
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    **{
      'vocab_size': 128,
      'hidden_size': 32,
      'intermediate_size': 80,
      'num_hidden_layers': 3,
      'num_attention_heads': 4,
      'num_key_value_heads': 2,
      'max_position_embeddings': 64,
      'tie_word_embeddings': False,
      **_KINDS[kind],
    }
  )
  model = transformers.LlamaForCausalLM(config).float().eval()
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if parameter.ndim > 1 or name.endswith('.bias'):
        parameter.normal_(0, 0.08)
  return model


def _logits(model: Any) -> torch.Tensor:
  with torch.no_grad():
    return model(input_ids=_IDS).logits[:, -_IDS.shape[1] :].clone()


def _train(case: str, folder: pathlib.Path) -> None:
  model = _base(_kind(case))
  base_logits = _logits(model)
  torch.manual_seed(1)
  model = peft.get_peft_model(model, CASES[case]()).eval()
  # No dropout, so that both sides compute the same.
  optimizer = torch.optim.SGD(
    [p for p in model.parameters() if p.requires_grad], lr=0.5
  )
  for _ in range(4):
    model(input_ids=_IDS, labels=_IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
  if 'bfloat16' in case:
    model = model.to(torch.bfloat16)
  model.save_pretrained(folder)
  model = model.float()
  # A case that peft itself does not read back would show nothing.
  again = peft.PeftModel.from_pretrained(_base(_kind(case)), folder).eval()
  logits = _logits(again)
  difference = (logits - _logits(model)).abs().max().item()
  save_file(
    {'input_ids': _IDS, 'base_logits': base_logits, 'logits': logits},
    folder / 'golden.safetensors',
  )
  trainable, _ = model.get_nb_trainable_parameters()
  (folder / 'golden.json').write_text(
    json.dumps(
      {
        'base': _kind(case),
        'trainable': trainable,
        'reload_difference': difference,
      }
    )
  )


def _load(folder: pathlib.Path, bases: pathlib.Path) -> None:
  kind = json.loads((folder / 'golden.json').read_text())['base']
  model = transformers.LlamaForCausalLM.from_pretrained(
    bases / kind, dtype=torch.float32
  )
  model = peft.PeftModel.from_pretrained(model, folder).eval()
  save_file({'logits': _logits(model)}, folder / 'logits.safetensors')


def _noting_errors(function: Any, folder: pathlib.Path, *arguments: Any):
  folder.mkdir(parents=True, exist_ok=True)
  try:
    function(*arguments)
  except Exception as error:  # Whatever it is, the other side reports it.
    traceback.print_exc()
    text = f'{type(error).__name__}: {error}'
    (folder / 'error.txt').write_text(text)


def main() -> None:
  warnings.simplefilter('ignore')
  command, folder, *chosen = sys.argv[1:]
  out = pathlib.Path(folder)
  if command == 'train':
    for kind in _KINDS:
      _base(kind).save_pretrained(out / 'bases' / kind)
    for case in chosen or CASES:
      own = out / 'cases' / case
      _noting_errors(_train, own, case, own)
  else:
    for own in sorted((out / 'ours').iterdir()):
      _noting_errors(_load, own, own, out / 'bases')


if __name__ == '__main__':
  main()
