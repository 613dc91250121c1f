"""Makes the golden adapter directories of this folder with HF peft.

usage: python make_hf_peft.py OUT_DIR   (torch, transformers, peft, safetensors)

OUT_DIR/base/            tiny random Llama, written by transformers
OUT_DIR/moe/             tiny random Qwen3-MoE
OUT_DIR/<name>/          adapter directory as peft's save_pretrained writes it
OUT_DIR/<name>/golden.safetensors   input_ids, base_logits, logits (after training), losses of 4 steps
OUT_DIR/<name>/golden.json          versions, trainable parameters, base used, optimizer
"""

import json
import os
import sys

import peft
from safetensors.torch import save_file
import torch
import transformers

out = sys.argv[1]
only = sys.argv[2:]
ids = torch.tensor(
  [
    [1, 17, 93, 4, 56, 120, 7, 33, 2, 64],
    [5, 88, 13, 101, 45, 9, 71, 26, 3, 110],
  ]
)


def base(kind):
  torch.manual_seed(0)
  if kind == 'moe':
    c = transformers.Qwen3MoeConfig(
      vocab_size=128,
      hidden_size=32,
      intermediate_size=64,
      moe_intermediate_size=48,
      num_hidden_layers=2,
      num_attention_heads=4,
      num_key_value_heads=2,
      head_dim=8,
      num_experts=4,
      num_experts_per_tok=2,
      decoder_sparse_step=1,
      max_position_embeddings=64,
    )
    m = transformers.Qwen3MoeForCausalLM(c)
  else:
    c = transformers.LlamaConfig(
      vocab_size=128,
      hidden_size=32,
      intermediate_size=80,
      num_hidden_layers=3,
      num_attention_heads=4,
      num_key_value_heads=2,
      max_position_embeddings=64,
      tie_word_embeddings=False,
      rope_theta=10000.0,
    )
    m = transformers.LlamaForCausalLM(c)
  with torch.no_grad():
    for p in m.parameters():
      if p.ndim > 1:
        p.normal_(0, 0.08)
  return m.float()


ATT = ['q_proj', 'k_proj', 'v_proj', 'o_proj']
ALL = ATT + ['gate_proj', 'up_proj', 'down_proj']
T = dict(task_type='CAUSAL_LM')
CASES = {
  'lora': lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=ALL, **T),
  'lora_all_linear': lambda: peft.LoraConfig(
    r=4, lora_alpha=8, target_modules='all-linear', **T
  ),
  'lora_regex': lambda: peft.LoraConfig(
    r=4, lora_alpha=8, target_modules=r'.*layers\.(0|2)\..*(q_proj|v_proj)', **T
  ),
  'lora_layers': lambda: peft.LoraConfig(
    r=4, lora_alpha=8, target_modules=ATT, layers_to_transform=[1, 2], **T
  ),
  'lora_patterns': lambda: peft.LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=ALL,
    rank_pattern={'q_proj': 8, r'layers\.1\.mlp\.up_proj': 2},
    alpha_pattern={'v_proj': 32},
    **T,
  ),
  'rslora': lambda: peft.LoraConfig(
    r=4, lora_alpha=8, use_rslora=True, target_modules=ALL, **T
  ),
  'dora': lambda: peft.LoraConfig(
    r=4, lora_alpha=8, use_dora=True, target_modules=ALL, **T
  ),
  'lora_bias': lambda: peft.LoraConfig(
    r=4, lora_alpha=8, lora_bias=True, target_modules=ATT, **T
  ),
  'lora_head_embed': lambda: peft.LoraConfig(
    r=4, lora_alpha=8, target_modules=ATT + ['embed_tokens', 'lm_head'], **T
  ),
  'lora_modules_to_save': lambda: peft.LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=ATT,
    modules_to_save=['lm_head', 'norm'],
    **T,
  ),
  'lora_tokens': lambda: peft.LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=ATT,
    trainable_token_indices=[3, 7, 120],
    **T,
  ),
  'pissa': lambda: peft.LoraConfig(
    r=4, lora_alpha=4, init_lora_weights='pissa', target_modules=ALL, **T
  ),
  'olora': lambda: peft.LoraConfig(
    r=4, lora_alpha=4, init_lora_weights='olora', target_modules=ALL, **T
  ),
  'moe_parameters': lambda: peft.LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=ATT,
    target_parameters=['mlp.experts.gate_up_proj', 'mlp.experts.down_proj'],
    **T,
  ),
  'vera': lambda: peft.VeraConfig(
    r=8, target_modules=['q_proj', 'o_proj'], projection_prng_key=11, **T
  ),
  'vera_not_saved': lambda: peft.VeraConfig(
    r=8,
    target_modules=['q_proj', 'o_proj'],
    projection_prng_key=11,
    save_projection=False,
    **T,
  ),
  'ia3': lambda: peft.IA3Config(
    target_modules=['k_proj', 'v_proj', 'down_proj'],
    feedforward_modules=['down_proj'],
    **T,
  ),
  'loha': lambda: peft.LoHaConfig(r=4, alpha=8, target_modules=ALL, **T),
  'lokr': lambda: peft.LoKrConfig(
    r=4, alpha=8, target_modules=ALL, decompose_factor=4, **T
  ),
  'oft': lambda: peft.OFTConfig(oft_block_size=8, target_modules=ATT, **T),
  'miss': lambda: peft.MissConfig(r=8, target_modules=ATT, **T),
  'miss_bat': lambda: peft.MissConfig(
    r=8, target_modules=ATT, init_weights='bat', **T
  ),
  'hira': lambda: peft.HiraConfig(r=4, target_modules=ALL, **T),
  'shira': lambda: peft.ShiraConfig(
    r=4, target_modules=ALL, random_seed=5, **T
  ),
  'gralora': lambda: peft.GraloraConfig(
    r=8, gralora_k=2, target_modules=ATT, **T
  ),
  'prefix': lambda: peft.PrefixTuningConfig(num_virtual_tokens=5, **T),
  'prompt': lambda: peft.PromptTuningConfig(num_virtual_tokens=5, **T),
  'ln_tuning': lambda: peft.LNTuningConfig(
    target_modules=['input_layernorm', 'post_attention_layernorm', 'norm'], **T
  ),
}
CASES.update(globals().get('MORE', {}))

for kind in ('base', 'moe'):
  base(kind).save_pretrained(os.path.join(out, kind))
for name, make in CASES.items():
  if only and name not in only:
    continue
  try:
    kind = 'moe' if name.startswith('moe') else 'base'
    m = base(kind)
    m.config._name_or_path = kind
    m.eval()
    with torch.no_grad():
      base_logits = m(input_ids=ids).logits.clone()
    torch.manual_seed(1)
    cfg = make()
    cfg.base_model_name_or_path = kind
    pm = peft.get_peft_model(m, cfg)
    # Deterministic, non-zero start, so that every variable matters.
    pm.eval()
    with torch.no_grad():
      start_logits = pm(input_ids=ids).logits[:, -ids.shape[1] :].clone()
    opt = torch.optim.SGD(
      [p for p in pm.parameters() if p.requires_grad], lr=0.5
    )
    losses = []
    for _ in range(4):
      loss = pm(input_ids=ids, labels=ids).loss
      loss.backward()
      opt.step()
      opt.zero_grad()
      losses.append(float(loss))
    with torch.no_grad():
      logits = pm(input_ids=ids).logits[:, -ids.shape[1] :].clone()
    d = os.path.join(out, name)
    pm.save_pretrained(d)
    for f in ('README.md',):
      if os.path.exists(os.path.join(d, f)):
        os.remove(os.path.join(d, f))
    re = peft.PeftModel.from_pretrained(base(kind), d).eval()
    with torch.no_grad():
      err = (
        (re(input_ids=ids).logits[:, -ids.shape[1] :] - logits)
        .abs()
        .max()
        .item()
      )
    tr, tot = pm.get_nb_trainable_parameters()
    save_file(
      dict(
        input_ids=ids,
        base_logits=base_logits,
        start_logits=start_logits,
        logits=logits,
        losses=torch.tensor(losses),
      ),
      os.path.join(d, 'golden.safetensors'),
    )
    json.dump(
      dict(
        base=kind,
        trainable=tr,
        total=tot,
        optimizer='SGD lr=0.5, 4 steps, loss on labels=input_ids',
        reload_max_abs_error_in_peft=err,
        torch=torch.__version__,
        transformers=transformers.__version__,
        peft=peft.__version__,
      ),
      open(os.path.join(d, 'golden.json'), 'w'),
      indent=1,
    )
    moved = (logits - base_logits).abs().max().item()
    print(
      f'{name:22} trainable {tr:6d} losses {losses} moved {moved:.3f}'
      f' reload err {err:.1e}'
    )
  except Exception as e:
    print(f'{name:22} FAILED {type(e).__name__}: {str(e)[:200]}')
