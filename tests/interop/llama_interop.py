"""The side of transformers in `make interop-test`; runs in its own venv.

usage: python tests/interop/llama_interop.py SOURCE TOKENS OUT

SOURCE is a Hugging Face directory or a GGUF file, TOKENS a safetensors file
with `input_ids` (batch, length). Loads the model in float32 and writes OUT, a
safetensors file with its `logits`.
"""

import os
import sys

from safetensors.torch import load_file
from safetensors.torch import save_file
import torch
import transformers


def main() -> None:
  source, tokens, out = sys.argv[1:]
  if os.path.isdir(source):
    model = transformers.AutoModelForCausalLM.from_pretrained(
      source, dtype=torch.float32
    )
  else:
    folder, name = os.path.split(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, gguf_file=name, dtype=torch.float32
    )
  with torch.no_grad():
    logits = model.eval()(load_file(tokens)['input_ids']).logits
  save_file({'logits': logits.contiguous()}, out)


if __name__ == '__main__':
  main()
