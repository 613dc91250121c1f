"""Tunix: its Llama 3 model, qwix's LoRA and its trainer.

usage: python tests/benchmarks/peers/tunix_trainer.py SPEC

Fields of the spec, in JSON: `case` ('step'), `folder` (see material.py), and
those that `step` reads.
"""

import functools
import json
import pathlib
import sys
import time

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
import safetensors
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params
from tunix.sft import peft_trainer
from tunix.sft import utils

# The checkout; this file is run by its path.
sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))

from tests.benchmarks import worker

_HF_NAMES = {
  'attn': 'self_attn',
  'w_lora_a': 'lora_A.weight',
  'w_lora_b': 'lora_B.weight',
  'kernel_lora_a': 'lora_A.weight',
  'kernel_lora_b': 'lora_B.weight',
}
_QUANTIZE = {None: {}, 'nf4': {'weight_qtype': 'nf4', 'tile_size': 64}}


class Trainer(peft_trainer.PeftTrainer):
  """Keeps the loss of a step, which the trainer's hooks tell a step later."""

  def _post_process_train_step(self, aux):
    self.loss = self._buffered_train_metrics.losses[-1]


def read_model(folder, dtype, remat):
  """Tunix's model with the weights of a directory that transformers reads."""
  hf = json.loads((folder / 'config.json').read_text())
  remats = llama3.RematConfig
  config = llama3.ModelConfig(
    num_layers=hf['num_hidden_layers'],
    vocab_size=hf['vocab_size'],
    embed_dim=hf['hidden_size'],
    hidden_dim=hf['intermediate_size'],
    num_heads=hf['num_attention_heads'],
    head_dim=hf['head_dim'],
    num_kv_heads=hf['num_key_value_heads'],
    rope_theta=hf['rope_theta'],
    norm_eps=hf['rms_norm_eps'],
    weight_tying=hf['tie_word_embeddings'],
    remat_config=remats.DECODER if remat else remats.NONE,
  )
  # The model ignores its config's theta: all turn with the default's 1e6.
  llama3.apply_rope = functools.partial(
    llama3.apply_rope, rope_theta=config.rope_theta
  )
  return params.create_model_from_safe_tensors(str(folder), config, dtype=dtype)


def read_adapter(model, path):
  """Sets qwix's LoRA weights to the tensors of peft."""
  state = nnx.state(model, nnx.LoRAParam)
  with safetensors.safe_open(path, 'np') as tensors:
    for names, variable in nnx.to_flat_state(state):
      key = '.'.join(_HF_NAMES.get(name, str(name)) for name in names)
      value = tensors.get_tensor(f'base_model.model.model.{key}').T
      # Heads have an axis of their own.
      value = value.reshape(variable.shape)
      variable.set_value(jnp.asarray(value, variable.dtype))
  nnx.update(model, state)


def load(spec):
  """The model with its weights and the adapter."""
  folder = pathlib.Path(spec['folder'])
  model = read_model(
    folder / 'model',
    jnp.dtype(spec.get('dtype', 'float32')),
    spec.get('remat', False),
  )
  provider = qwix.LoraProvider(
    module_path='.*_proj',
    rank=16,
    alpha=32.0,
    **_QUANTIZE[spec.get('quantize')],
  )
  model = qwix.apply_lora_to_model(
    model, provider, rngs=nnx.Rngs(0), **model.get_model_input()
  )
  read_adapter(model, folder / 'adapter/adapter_model.safetensors')
  return model


def model_input(batch):
  """What the trainer's loss takes, as Tunix's examples make it."""
  return {
    'input_tokens': batch.input_tokens,
    'input_mask': batch.input_mask,
    'positions': utils.build_positions_from_mask(batch.input_mask),
    'attention_mask': utils.make_causal_attn_mask(batch.input_mask),
  }


def step(spec):
  """Training steps on `rows` rows of `length` tokens, loss on all."""
  trainer = Trainer(
    load(spec),
    optax.adamw(spec['learning_rate']),
    peft_trainer.TrainingConfig(eval_every_n_steps=sys.maxsize),
  ).with_gen_model_input_fn(model_input)
  # What training returns has a device; without one now it compiles twice.
  for node in trainer.model, trainer.optimizer:
    nnx.update(node, jax.device_put(nnx.state(node), jax.devices()[0]))
  # So it can be called again and trains on, as Tunix's own RL learners do.
  trainer.is_managed_externally = True
  tokens = np.load(pathlib.Path(spec['folder'], 'tokens.npy'))
  batches = worker.batches(tokens, spec)

  def work():
    rows = next(batches)
    # The trainer's loss shifts them itself.
    batch = peft_trainer.TrainingInput(
      input_tokens=rows, input_mask=np.ones(rows.shape, bool)
    )
    start = time.perf_counter()
    trainer.train([batch])
    loss = trainer.loss.item()
    return {'seconds': time.perf_counter() - start, 'loss': loss}

  return work


if __name__ == '__main__':
  worker.serve({'step': step}, lambda: worker.jax_peak(jax.devices()[0]))
