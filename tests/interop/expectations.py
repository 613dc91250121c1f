"""What peft can't do by itself, and what peftlib refuses, with the reasons."""

# Regular expressions that peft's own error has to match.
PEFT_FAILS: dict[str, str] = {}

_TIED = r'the head of this model is its table \(tie_embeddings=True\); peft'
_NOT_BOTH = 'no method here is both'
_NO_CONVOLUTION = 'a convolution: only LORA is known there'
# Regular expressions that the refusal of `hf.load_adapter` has to match.
REFUSED: dict[str, str] = {
  'boft': "peft_type='BOFT'; known are",
  'ia3, convolutions': _NO_CONVOLUTION,
  'ia3, over biases': 'which has a bias: peft scales it too',
  'loha, convolutions': _NO_CONVOLUTION,
  'lokr, convolutions': _NO_CONVOLUTION,
  'lora, bias of the base': "bias='all': trained biases of the base",
  'lora, modules_to_save by whole name': (
    r'layers \[0\] of layers/input_layernorm/scale are trained whole, the'
    ' others are not'
  ),
  'lora, replicated layers': 'layer_replication=.*: the model here has its own',
  'lora, tied embeddings': _TIED,
  'lora, tied head': _TIED,
  'lora, tied head and embeddings': _TIED,
  'lora, tied, head to save': _TIED,
  'lora, tied, modules_to_save': _TIED,
  'lora, tokens of the head': (
    "lm_head.kernel is of kind 'linear', not a table that is looked up"
  ),
  'miss, fused': (
    'miss_block is of a projection that is .* together; only LoRA, HiRA, OFT'
  ),
  'olora, rslora': f"use_rslora and init_lora_weights='olora': {_NOT_BOTH}",
  'pissa, dora': f"use_dora and init_lora_weights='pissa': {_NOT_BOTH}",
  'pissa, rslora': f"use_rslora and init_lora_weights='pissa': {_NOT_BOTH}",
  'pissa_niter_4': 'it changes the base weights in a way that is not in the',
  'vera, not saved': "its projections are torch's random numbers",
}

# Parameters that peft trains and are not among those that it saves, or twice;
# negative where we have more.
MORE_IN_PEFT: dict[str, int] = {
  # The head is the table, and so is its adapter.
  'lora, tied head, ensure_weight_tying': (128 + 32) * 4,
  'lora, tied, ensure_weight_tying': (128 + 32) * 4,
  # What makes the prefix: a table and two layers, for a prefix of 5 x 96.
  'prefix, projection': 5 * 16 + (16 + 1) * 16 + (16 + 1) * 96 - 5 * 96,
  # Each part of a projection has its own first matrix: of layers, parts less
  # one, ranks and inputs.
  'lora, fused': -3 * (2 + 1) * 4 * 32,
  'lora, fused with patterns': -(3 * 2 * 2 + 1 * (4 + 8 + 4)) * 32,
  'lora, fused layers and modules_to_save': -2 * 2 * 4 * 32,
  'rslora, fused': -2 * (2 + 1) * 4 * 32,
  'dora, fused': -3 * (2 + 1) * 4 * 32,
  'hira, fused': -3 * 2 * 4 * 32,
}
