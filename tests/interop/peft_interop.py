"""The side of HF peft in `make interop-test`; runs in its own venv.

usage: python tests/interop/peft_interop.py train OUT [REGEX]
       python tests/interop/peft_interop.py load FOLDER

`train` writes tiny base models to OUT/bases/<kind>, each with
OUT/bases/<kind>.safetensors (`inputs`, `logits`). It trains an adapter of each
case (that REGEX matches) for some steps, and writes OUT/cases/<case>/: the directory that peft
saves, golden.safetensors (`base_logits`, `logits`), and golden.json with the
`base` and the number of `trainable` parameters; or error.txt, if peft can't.

`load` reads each adapter in FOLDER/ours, as peft does, onto the base that its
golden.json names, and each model directory in FOLDER/merged, and writes
logits.safetensors into it, or error.txt.
"""

import json
import pathlib
import re
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
  'fused': {'pad_token_id': 0, 'rms_norm_eps': 1e-6},
}
# Of Phi-3, and what a Llama has instead, with the number of outputs.
_FUSED = {
  'qkv_proj': {'q_proj': 32, 'k_proj': 16, 'v_proj': 16},
  'gate_up_proj': {'gate_proj': 80, 'up_proj': 80},
}
# Inputs of models that aren't of transformers.
_OWN = {
  'images': torch.randn(4, 3, 7, 9, generator=torch.Generator().manual_seed(0)),
  'experts': torch.randn(6, 8, generator=torch.Generator().manual_seed(0)),
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
  'oft, constrained': _of(peft.OFTConfig, oft_block_size=8, coft=True, eps=0.1),
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
  'lora, convolutions': lambda: _lora(
    target_modules=['wide', 'deep', 'head'], task_type=None
  ),
  'rslora, convolutions': lambda: _lora(
    target_modules=['wide', 'deep'], use_rslora=True, task_type=None
  ),
  'dora, convolutions': lambda: _lora(
    target_modules=['wide', 'deep'], use_dora=True, task_type=None
  ),
  'lora, convolutions and modules_to_save': lambda: _lora(
    target_modules=['wide'], modules_to_save=['deep', 'head'], task_type=None
  ),
  'loha, convolutions': _of(
    peft.LoHaConfig, r=4, alpha=8, target_modules=['wide'], task_type=None
  ),
  'lokr, convolutions': _of(
    peft.LoKrConfig, r=4, alpha=8, target_modules=['wide'], task_type=None
  ),
  'ia3, convolutions': _of(
    peft.IA3Config,
    target_modules=['wide', 'deep'],
    feedforward_modules=['deep'],
    task_type=None,
  ),
  'lora, experts': lambda: _lora(
    target_modules=['head'],
    target_parameters=['experts.gate_up_proj', 'experts.down_proj'],
    task_type=None,
  ),
  'lora, experts alone': lambda: _lora(
    target_modules=[],
    target_parameters=['experts.gate_up_proj'],
    use_rslora=True,
    task_type=None,
  ),
  'lora, experts with patterns': lambda: _lora(
    target_modules=['router'],
    target_parameters=['gate_up_proj', 'down_proj'],
    rank_pattern={'down_proj': 2},
    alpha_pattern={'experts.gate_up_proj': 3},
    modules_to_save=['head'],
    task_type=None,
  ),
  'lora, fused': lambda: _lora(target_modules='all-linear'),
  'lora, fused with patterns': lambda: _lora(
    target_modules=[*_FUSED, 'o_proj', 'down_proj'],
    rank_pattern={'qkv_proj': 2, r'layers\.1\.mlp\.gate_up_proj': 8},
    alpha_pattern={'gate_up_proj': 3},
    lora_bias=True,
  ),
  'lora, fused layers and modules_to_save': lambda: _lora(
    target_modules=r'.*layers\.(0|2)\..*qkv_proj',
    modules_to_save=['gate_up_proj'],
  ),
  'rslora, fused': lambda: _lora(
    target_modules=[*_FUSED], use_rslora=True, layers_to_transform=[1, 2]
  ),
  'dora, fused': lambda: _lora(
    target_modules=[*_FUSED, 'down_proj'], use_dora=True
  ),
  'hira, fused': _of(peft.HiraConfig, r=4, target_modules=['qkv_proj']),
  'ia3, fused': _of(
    peft.IA3Config,
    target_modules=['qkv_proj', 'down_proj'],
    feedforward_modules=['down_proj'],
  ),
  'miss, fused': _of(peft.MissConfig, r=8, target_modules=['qkv_proj']),
  'boft': _of(peft.BOFTConfig, boft_block_size=4),
}


class Images(torch.nn.Module):
  """Convolutions; its other half is in own_models.py."""

  def __init__(self):
    super().__init__()
    self.wide = torch.nn.Conv2d(3, 8, (3, 2))
    self.deep = torch.nn.Conv2d(8, 6, (2, 3), stride=2, bias=False)
    self.head = torch.nn.Linear(6, 10)

  def forward(self, images: torch.Tensor) -> torch.Tensor:
    x = torch.relu(self.deep(torch.relu(self.wide(images))))
    return self.head(x.mean((2, 3)))


class Mixture(torch.nn.Module):
  """The weights of experts: (experts, outputs, inputs)."""

  def __init__(self):
    super().__init__()
    self.gate_up_proj = torch.nn.Parameter(torch.randn(3, 20, 8) * 0.3)
    self.down_proj = torch.nn.Parameter(torch.randn(3, 8, 10) * 0.3)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    both = torch.einsum('bi,eoi->ebo', x, self.gate_up_proj)
    gate, up = both.chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up
    return torch.einsum('ebi,eoi->ebo', inner, self.down_proj)


class Experts(torch.nn.Module):
  """A mixture of experts; its other half is in own_models.py."""

  def __init__(self):
    super().__init__()
    self.router = torch.nn.Linear(8, 3, bias=False)
    self.experts = Mixture()
    self.head = torch.nn.Linear(8, 10, bias=False)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    shares = torch.softmax(self.router(x), -1)
    mixed = torch.einsum('ebo,be->bo', self.experts(x), shares)
    return self.head(x + mixed)


def _kind(case: str) -> str:
  for kind in ('tied', 'fused'):
    if kind in case:
      return kind
  if 'convolutions' in case:
    return 'images'
  if 'experts' in case:
    return 'experts'
  return 'biases' if 'biases' in case else 'plain'


def _base(kind: str) -> torch.nn.Module:
  torch.manual_seed(0)
  if kind in _OWN:
    return {'images': Images, 'experts': Experts}[kind]().float().eval()
  model = _llama(kind)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      if parameter.ndim > 1 or name.endswith('.bias'):
        parameter.normal_(0, 0.08)
  return model


def _llama(kind: str) -> torch.nn.Module:
  of_config, of_model = (
    (transformers.Phi3Config, transformers.Phi3ForCausalLM)
    if kind == 'fused'
    else (transformers.LlamaConfig, transformers.LlamaForCausalLM)
  )
  config = of_config(
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
  return of_model(config).float().eval()


def _split(model: torch.nn.Module) -> torch.nn.Module:
  """The Llama that computes the same as a Phi-3."""
  llama = _llama('plain')
  weights = {}
  for name, weight in model.state_dict().items():
    short = name.split('.')[-2]
    parts = _FUSED.get(short, {short: len(weight)})
    for part, own in zip(
      parts, weight.split(list(parts.values())), strict=True
    ):
      weights[name.replace(short, part)] = own
  llama.load_state_dict(weights)
  return llama


def _logits(model: Any, kind: str) -> torch.Tensor:
  with torch.no_grad():
    if kind in _OWN:
      return model(_OWN[kind])
    return model(input_ids=_IDS).logits[:, -_IDS.shape[1] :].clone()


def _loss(model: Any, kind: str) -> torch.Tensor:
  if kind in _OWN:
    logits = model(_OWN[kind])
    return torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)))
  return model(input_ids=_IDS, labels=_IDS).loss


def _save_base(kind: str, folder: pathlib.Path) -> None:
  model = _base(kind)
  folder.mkdir(parents=True)
  if kind in _OWN:
    save_file(model.state_dict(), folder / 'model.safetensors')
  else:
    (_split(model) if kind == 'fused' else model).save_pretrained(folder)
  inputs = _OWN.get(kind, _IDS)
  save_file(
    {'inputs': inputs, 'logits': _logits(model, kind).contiguous()},
    folder.with_suffix('.safetensors'),
  )


def _train(case: str, folder: pathlib.Path) -> None:
  kind = _kind(case)
  model = _base(kind)
  base_logits = _logits(model, kind)
  torch.manual_seed(1)
  model = peft.get_peft_model(model, CASES[case]()).eval()
  # No dropout, so that both sides compute the same.
  optimizer = torch.optim.SGD(
    [p for p in model.parameters() if p.requires_grad], lr=0.5
  )
  for _ in range(4):
    _loss(model, kind).backward()
    optimizer.step()
    optimizer.zero_grad()
  if 'bfloat16' in case:
    model = model.to(torch.bfloat16)
  model.save_pretrained(folder)
  model = model.float()
  # A case that peft itself does not read back would show nothing.
  again = peft.PeftModel.from_pretrained(_base(kind), folder).eval()
  logits = _logits(again, kind)
  difference = (logits - _logits(model, kind)).abs().max().item()
  save_file(
    {
      'base_logits': base_logits.contiguous(),
      'logits': logits.contiguous(),
    },
    folder / 'golden.safetensors',
  )
  trainable, _ = model.get_nb_trainable_parameters()
  (folder / 'golden.json').write_text(
    json.dumps(
      {
        'base': kind,
        'trainable': trainable,
        'reload_difference': difference,
      }
    )
  )


def _load(folder: pathlib.Path) -> None:
  kind = json.loads((folder / 'golden.json').read_text())['base']
  model = peft.PeftModel.from_pretrained(_base(kind), folder).eval()
  logits = _logits(model, kind).contiguous()
  save_file({'logits': logits}, folder / 'logits.safetensors')


def _load_merged(folder: pathlib.Path) -> None:
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32
  )
  logits = _logits(model.eval(), 'plain').contiguous()
  save_file({'logits': logits}, folder / 'logits.safetensors')


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
    for kind in (*_KINDS, *_OWN):
      _save_base(kind, out / 'bases' / kind)
    for case in filter(re.compile(*chosen or ('',)).search, CASES):
      own = out / 'cases' / case
      _noting_errors(_train, own, case, own)
  else:
    for name, load in (('ours', _load), ('merged', _load_merged)):
      for own in sorted((out / name).glob('*')):
        _noting_errors(load, own, own)


if __name__ == '__main__':
  main()
