"""A mixture of experts as somebody else would write it: Qwen3-MoE, tiny."""

import json
import pathlib

from flax import nnx
import jax
import jax.numpy as jnp
from safetensors import numpy as safetensors_numpy

from peftlib import hf


def _linear(rngs, weight):
  """A layer with HF's (outputs, inputs)."""
  layer = nnx.Linear(*weight.shape[::-1], use_bias=False, rngs=rngs)
  layer.kernel.set_value(jnp.asarray(weight.T))
  return layer


def _norm(rngs, weight):
  norm = nnx.RMSNorm(weight.shape[0], epsilon=1e-6, rngs=rngs)
  norm.scale.set_value(jnp.asarray(weight))
  return norm


def _rotated(x):
  """(B, S, heads, D), by angles as in Llama with theta 10,000."""
  length, width = x.shape[1], x.shape[-1]
  speeds = 10_000.0 ** (-jnp.arange(0, width, 2) / width)
  angles = jnp.outer(jnp.arange(length), speeds)[:, None]
  cos, sin = (jnp.tile(f(angles), 2) for f in (jnp.cos, jnp.sin))
  first, second = jnp.split(x, 2, axis=-1)
  return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


class Attention(nnx.Module):
  def __init__(self, rngs, weights, config):
    self.width = config['head_dim']
    for name in ('q_proj', 'k_proj', 'v_proj', 'o_proj'):
      setattr(self, name, _linear(rngs, weights[f'{name}.weight']))
    self.q_norm = _norm(rngs, weights['q_norm.weight'])
    self.k_norm = _norm(rngs, weights['k_norm.weight'])

  def __call__(self, x):
    heads = (*x.shape[:2], -1, self.width)
    queries = _rotated(self.q_norm(self.q_proj(x).reshape(heads)))
    keys = _rotated(self.k_norm(self.k_proj(x).reshape(heads)))
    values = self.v_proj(x).reshape(heads)
    mixed = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
    return self.o_proj(mixed.reshape(*x.shape[:2], -1))


class Experts(nnx.Module):
  def __init__(self, weights, count):
    of_each = lambda name: jnp.stack(
      [jnp.asarray(weights[f'{i}.{name}.weight'].T) for i in range(count)]
    )
    # (experts, inputs, outputs)
    self.gate_up_proj = nnx.Param(
      jnp.concatenate([of_each('gate_proj'), of_each('up_proj')], axis=-1)
    )
    self.down_proj = nnx.Param(of_each('down_proj'))

  def __call__(self, x, shares):
    # Each expert has inputs of its own, as where tokens are sent to them.
    sent = jnp.broadcast_to(x, (self.down_proj.shape[0], *x.shape))
    both = jnp.einsum('ebsi,eio->ebso', sent, self.gate_up_proj[...])
    gate, up = jnp.split(both, 2, axis=-1)
    out = jnp.einsum('ebsi,eio->ebso', nnx.silu(gate) * up, self.down_proj[...])
    return jnp.einsum('ebso,bse->bso', out, shares)


class Mixture(nnx.Module):
  def __init__(self, rngs, weights, config):
    self.chosen = config['num_experts_per_tok']
    self.gate = _linear(rngs, weights['gate.weight'])
    self.experts = Experts(
      _below(weights, 'experts'), config['num_local_experts']
    )

  def __call__(self, x):
    shares = jax.nn.softmax(self.gate(x), axis=-1)
    least = jax.lax.top_k(shares, self.chosen)[0][..., -1:]
    return self.experts(x, jnp.where(shares >= least, shares, 0))


class Layer(nnx.Module):
  def __init__(self, rngs, weights, config):
    self.input_layernorm = _norm(rngs, weights['input_layernorm.weight'])
    self.self_attn = Attention(rngs, _below(weights, 'self_attn'), config)
    name = 'post_attention_layernorm'
    self.post_attention_layernorm = _norm(rngs, weights[f'{name}.weight'])
    self.mlp = Mixture(rngs, _below(weights, 'mlp'), config)

  def __call__(self, x):
    x = x + self.self_attn(self.input_layernorm(x))
    return x + self.mlp(self.post_attention_layernorm(x))


class Model(nnx.Module):
  def __init__(self, rngs, weights, config):
    table = weights['model.embed_tokens.weight']
    self.embed_tokens = nnx.Embed(*table.shape, rngs=rngs)
    self.embed_tokens.embedding.set_value(jnp.asarray(table))
    self.layers = nnx.List(
      [
        Layer(rngs, _below(weights, f'model.layers.{i}'), config)
        for i in range(config['num_hidden_layers'])
      ]
    )
    self.norm = _norm(rngs, weights['model.norm.weight'])
    self.lm_head = _linear(rngs, weights['lm_head.weight'])

  def __call__(self, ids):
    x = self.embed_tokens(ids)
    for layer in self.layers:
      x = layer(x)
    return self.lm_head(self.norm(x))


def _below(weights, prefix):
  return {
    name.removeprefix(f'{prefix}.'): weight
    for name, weight in weights.items()
    if name.startswith(f'{prefix}.')
  }


def load(folder):
  """The model in a directory of HF, split, and HF's modules in it."""
  folder = pathlib.Path(folder)
  config = json.loads((folder / 'config.json').read_text())
  weights = safetensors_numpy.load_file(folder / 'model.safetensors')
  model = Model(nnx.Rngs(0), weights, config)
  places = {}
  for i in range(config['num_hidden_layers']):
    own = ('layers', str(i))
    for name in ('q_proj', 'k_proj', 'v_proj', 'o_proj'):
      places[f'model.layers.{i}.self_attn.{name}'] = hf.Place(
        f'model.layers.{i}.self_attn.{name}',
        (*own, 'self_attn', name),
        'kernel',
        None,
        True,
      )
    for name in ('gate_up_proj', 'down_proj'):
      places[f'model.layers.{i}.mlp.experts.{name}'] = hf.Place(
        f'model.layers.{i}.mlp.experts.{name}',
        (*own, 'mlp', 'experts'),
        name,
        None,
        True,
        parameter=True,
      )
  return nnx.split(model), places
