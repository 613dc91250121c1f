"""Flax NNX with qwix's LoRA, as somebody writes it by hand who has no more.

usage: python tests/benchmarks/peers/nnx_loop.py SPEC

Fields of the spec, in JSON: `case` ('step'), `folder` (see material.py), and
those that `step` reads.
"""

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

# The checkout; this file is run by its path.
sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))

from tests.benchmarks import worker

_WEIGHTS = {'kernel': 'weight', 'scale': 'weight', 'embedding': 'weight'}
_ADAPTER = {'kernel_lora_a': 'lora_A.weight', 'kernel_lora_b': 'lora_B.weight'}
_QUANTIZE = {
  None: {},
  'int8': {'weight_qtype': 'int8'},
  'nf4': {'weight_qtype': 'nf4', 'tile_size': 64},
}


class Attention(nnx.Module):
  """Causal attention of grouped queries, with rotary positions."""

  def __init__(self, config, linear):
    self.head_dim = config['head_dim']
    width = config['hidden_size']
    queries = config['num_attention_heads'] * self.head_dim
    keys = config['num_key_value_heads'] * self.head_dim
    self.q_proj = linear(width, queries)
    self.k_proj = linear(width, keys)
    self.v_proj = linear(width, keys)
    self.o_proj = linear(queries, width)

  def __call__(self, x, cos, sin):
    def heads(y):
      return y.reshape(*y.shape[:2], -1, self.head_dim)

    q, k, v = (heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return self.o_proj(out.reshape(*x.shape[:2], -1))


class Mlp(nnx.Module):
  """A gated MLP."""

  def __init__(self, config, linear):
    width, inner = config['hidden_size'], config['intermediate_size']
    self.gate_proj = linear(width, inner)
    self.up_proj = linear(width, inner)
    self.down_proj = linear(inner, width)

  def __call__(self, x):
    return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
  """A layer: attention, then the MLP, each with a norm before."""

  def __init__(self, config, linear, norm):
    self.input_layernorm = norm()
    self.self_attn = Attention(config, linear)
    self.post_attention_layernorm = norm()
    self.mlp = Mlp(config, linear)

  def __call__(self, x, cos, sin):
    x = x + self.self_attn(self.input_layernorm(x), cos, sin)
    return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
  """Llama with a tied head; its modules have the names of transformers'."""

  def __init__(self, config, dtype, *, remat=False, rngs):
    dtypes = {'dtype': dtype, 'param_dtype': dtype, 'rngs': rngs}
    width = config['hidden_size']

    def linear(inputs, outputs):
      return nnx.Linear(inputs, outputs, use_bias=False, **dtypes)

    def norm():
      return nnx.RMSNorm(width, epsilon=config['rms_norm_eps'], **dtypes)

    self.embed_tokens = nnx.Embed(config['vocab_size'], width, **dtypes)
    self.layers = nnx.List(
      Layer(config, linear, norm) for _ in range(config['num_hidden_layers'])
    )
    self.norm = norm()
    self.head_dim, self.theta = config['head_dim'], config['rope_theta']
    self.remat = remat

  def __call__(self, tokens):
    x = self.embed_tokens(tokens)
    cos, sin = angles(tokens.shape[1], self.head_dim, self.theta)
    call = nnx.remat(Layer.__call__) if self.remat else Layer.__call__
    for layer in self.layers:
      x = call(layer, x, cos, sin)
    return self.embed_tokens.attend(self.norm(x))


def angles(length, head_dim, theta):
  """Cosines and sines (length, 1, head_dim / 2) of the rotary positions."""
  frequencies = theta ** -(jnp.arange(0, head_dim, 2) / head_dim)
  turns = jnp.outer(jnp.arange(length), frequencies)[:, None]
  return jnp.cos(turns), jnp.sin(turns)


def rotate(x, cos, sin):
  """Turns x (rows, length, heads, head_dim), half of it against the other."""
  a, b = jnp.split(x, 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


def read(model, kind, path, prefix, names):
  """Sets the variables of a kind to the tensors of transformers or peft."""
  state = nnx.state(model, kind)
  with safetensors.safe_open(path, 'np') as tensors:
    for (*modules, name), variable in nnx.to_flat_state(state):
      key = '.'.join([prefix, *map(str, modules), names[name]])
      value = tensors.get_tensor(key)
      # An embedding alone is stored as torch stores it.
      value = value if name == 'embedding' else value.T
      assert variable.shape == value.shape, key
      variable.set_value(jnp.asarray(value, variable.dtype))
  nnx.update(model, state)


def load(spec):
  """The model with its weights and the adapter."""
  folder = pathlib.Path(spec['folder'])
  config = json.loads((folder / 'model/config.json').read_text())
  # Shapes only: the weights are read.
  model = nnx.eval_shape(
    lambda: Llama(
      config,
      jnp.dtype(spec.get('dtype', 'float32')),
      remat=spec.get('remat', False),
      rngs=nnx.Rngs(0),
    )
  )
  read(model, nnx.Param, folder / 'model/model.safetensors', 'model', _WEIGHTS)
  provider = qwix.LoraProvider(
    module_path='.*_proj',
    rank=16,
    alpha=32.0,
    **_QUANTIZE[spec.get('quantize')],
  )
  model = qwix.apply_lora_to_model(
    model, provider, jnp.zeros((1, 8), jnp.int32), rngs=nnx.Rngs(0)
  )
  read(
    model,
    nnx.LoRAParam,
    folder / 'adapter/adapter_model.safetensors',
    'base_model.model.model',
    _ADAPTER,
  )
  return model


@nnx.jit
def train_step(model, optimizer, batch):
  """A step on tokens (rows, length + 1); returns the loss before it."""

  def loss_fn(model):
    losses = optax.softmax_cross_entropy_with_integer_labels(
      model(batch[:, :-1]).astype(jnp.float32), batch[:, 1:]
    )
    return losses.mean()

  loss, grads = nnx.value_and_grad(
    loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam)
  )(model)
  optimizer.update(model, grads)
  return loss


def step(spec):
  """Training steps on `rows` rows of `length` tokens, loss on all."""
  tokens = np.load(pathlib.Path(spec['folder'], 'tokens.npy'))
  model = load(spec)
  optimizer = nnx.Optimizer(
    model, optax.adamw(spec['learning_rate']), wrt=nnx.LoRAParam
  )
  batches = worker.batches(tokens, spec)

  def work():
    batch = next(batches)
    start = time.perf_counter()
    loss = train_step(model, optimizer, batch).item()
    return {'seconds': time.perf_counter() - start, 'loss': loss}

  return work


if __name__ == '__main__':
  worker.serve({'step': step}, lambda: worker.jax_peak(jax.devices()[0]))
