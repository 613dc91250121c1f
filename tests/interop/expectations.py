"""What peft can't do by itself, and what peftlib refuses, with the reasons."""

# Regular expressions that peft's own error has to match.
PEFT_FAILS: dict[str, str] = {}

_TIED = r'the head of this model is its table \(tie_embeddings=True\); peft'
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
  'vera, not saved': "its projections are torch's random numbers",
}

# Parameters of a head that is the table: peft has them, and counts them, twice.
COUNTED_TWICE: dict[str, int] = {
  'lora, tied head, ensure_weight_tying': (128 + 32) * 4,
  'lora, tied, ensure_weight_tying': (128 + 32) * 4,
}
