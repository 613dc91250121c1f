"""How the decoder's variables are spread over a mesh."""

from __future__ import annotations

from collections.abc import Iterable
import re
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from peftlib.models import config as config_lib

Rules = tuple[tuple[str, PartitionSpec], ...]

# Kernels that widen the hidden state split their output over `tensor`, those
# that narrow it their input, so that one all-reduce follows each pair (Shoeybi
# et al. 2019, https://arxiv.org/abs/1909.08053). `fsdp` splits the other axis.
_WIDENING = r'layers\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)'
_NARROWING = r'layers\.(self_attn\.o_proj|mlp\.down_proj)'


def partition_rules(config: config_lib.DecoderConfig) -> Rules:
  r"""Sharding of every variable, by path pattern.

  For a mesh with the axes `fsdp` and `tensor`. The layer axis is never split:
  the scan takes one layer at a time.

  Args:
    config: The decoder's configuration.

  Returns:
    Pairs of a regular expression, that has to match the whole dotted path, and
    the `PartitionSpec`. For every variable of the decoder exactly one matches.

  Example:
    >>> dict(partition_rules(config))[r'norm\.scale']  # doctest: +SKIP
    PartitionSpec(None,)
  """
  rules = [
    (r'embed_tokens\.embedding', PartitionSpec('tensor', 'fsdp')),
    (_WIDENING + r'\.kernel', PartitionSpec(None, 'fsdp', 'tensor')),
    (_NARROWING + r'\.kernel', PartitionSpec(None, 'tensor', 'fsdp')),
    (r'layers\.\w+_layernorm\.scale', PartitionSpec(None, None)),
    (r'norm\.scale', PartitionSpec(None)),
  ]
  if config.attention_bias or config.mlp_bias:
    rules += [
      (_WIDENING + r'\.bias', PartitionSpec(None, 'tensor')),
      (_NARROWING + r'\.bias', PartitionSpec(None, None)),
    ]
  if not config.tie_embeddings:
    rules.append((r'lm_head\.kernel', PartitionSpec('fsdp', 'tensor')))
  return tuple(rules)


def partition_specs(
  state: nnx.State[Any, Any], rules: Iterable[tuple[str, PartitionSpec]]
) -> nnx.State[Any, Any]:
  """The specs of a state's variables.

  Args:
    state: Variables of a decoder, concrete or abstract, all or some.
    rules: From `partition_rules`, or your own; the first that matches counts.

  Returns:
    State of the structure of `state` with a `PartitionSpec` as each variable's
    value.

  Raises:
    ValueError: No rule matches a variable.
  """
  rules = tuple(rules)
  specs = {}
  for path, variable in nnx.to_flat_state(state):
    name = '.'.join(map(str, path))
    for pattern, spec in rules:
      if re.fullmatch(pattern, name):
        specs[path] = variable.replace(spec)
        break
    else:
      raise ValueError(
        f'No sharding rule matches {name} of shape {variable.shape}; rules: '
        f'{", ".join(pattern for pattern, _ in rules)}.'
      )
  return nnx.from_flat_state(specs)
