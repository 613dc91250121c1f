"""Llama decoder as a Flax NNX module, its layers stacked and scanned.

Layers are one module whose variables have a leading axis of length
`num_layers`. The forward pass scans over *all* variables found in it, whatever
they are, so that adapters or quantized weights put in from outside take part
without the decoder knowing of them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax import ad_checkpoint
from jax import typing as jax_typing
import jax.numpy as jnp

from peftlib.models import attention
from peftlib.models import cache as cache_lib
from peftlib.models import config as config_lib
from peftlib.models import rope
from peftlib.models import token_losses

# Standard deviation of freshly made weights, as in transformers.
_INIT_STDDEV = 0.02
_PROJECTED = 'projected'
_POLICIES = {
  # What a projection gives with its adapters is kept as well: where the
  # backward pass then has no use for their summands, those aren't.
  'dots': jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(_PROJECTED),
  ),
  'full': jax.checkpoint_policies.nothing_saveable,
}


def _linear(
  config: config_lib.DecoderConfig,
  features_in: int,
  features_out: int,
  *,
  use_bias: bool,
  rngs: nnx.Rngs,
) -> nnx.Linear:
  return nnx.Linear(
    features_in,
    features_out,
    use_bias=use_bias,
    dtype=config.dtype,
    param_dtype=config.param_dtype,
    kernel_init=nnx.initializers.normal(_INIT_STDDEV),
    rngs=rngs,
  )


def _norm(config: config_lib.DecoderConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
  return nnx.RMSNorm(
    config.hidden_size,
    epsilon=config.rms_norm_eps,
    dtype=config.dtype,
    param_dtype=config.param_dtype,
    rngs=rngs,
  )


def _projected(linear: nnx.Linear, x: jax.Array) -> jax.Array:
  return ad_checkpoint.checkpoint_name(linear(x), _PROJECTED)


class _Context(NamedTuple):
  """What is the same for all layers of one forward pass."""

  batch_size: int
  cos: jax.Array
  sin: jax.Array
  mask: jax.Array


class _Seen(NamedTuple):
  """Keys and values of tokens that come before all others, (1, KV, N, D)."""

  keys: jax.Array
  values: jax.Array


class _LayerCache(NamedTuple):
  """The whole cache's keys and values, and where in them to write."""

  keys: jax.Array
  values: jax.Array
  layer: jax.Array
  slot: jax.Array


class SelfAttention(nnx.Module):
  """Causal grouped-query attention with rotary positions.

  Works on tokens flattened to (B * S, hidden_size): XLA:CPU runs the linear
  layers 1.7 times faster that way than on (B, S, hidden_size).
  """

  def __init__(self, config: config_lib.DecoderConfig, *, rngs: nnx.Rngs):
    """Makes the four projections.

    Args:
      config: Sizes and dtypes.
      rngs: Stream `params` is used.
    """
    self.config = config
    make = functools.partial(
      _linear, config, use_bias=config.attention_bias, rngs=rngs
    )
    width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    self.q_proj = make(config.hidden_size, width)
    self.k_proj = make(config.hidden_size, kv_width)
    self.v_proj = make(config.hidden_size, kv_width)
    self.o_proj = make(width, config.hidden_size)

  def __call__(
    self,
    x: jax.Array,
    context: _Context,
    cache: _LayerCache | None,
    seen: _Seen | None = None,
  ) -> tuple[jax.Array, _LayerCache | None, _Seen]:
    """Applies the layer.

    Args:
      x: (B * S, hidden_size).
      context: What is the same for all layers.
      cache: None, or the cache to read from and write to.
      seen: None, or what every token sees before the first one.

    Returns:
      (B * S, hidden_size), the cache with the new keys and values, and those.
    """
    cfg = self.config
    heads = (context.batch_size, -1, cfg.num_heads, cfg.head_dim)
    kv_heads = (context.batch_size, -1, cfg.num_kv_heads, cfg.head_dim)
    queries = rope.rotate(
      _projected(self.q_proj, x).reshape(heads), context.cos, context.sin
    )
    keys = rope.rotate(
      _projected(self.k_proj, x).reshape(kv_heads), context.cos, context.sin
    )
    values = _projected(self.v_proj, x).reshape(kv_heads)
    # The cache's layout, which attention multiplies without transposing it.
    keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
    own = _Seen(keys, values)
    if cache is not None:
      start = (cache.layer, 0, 0, cache.slot, 0)
      cache = cache._replace(
        keys=jax.lax.dynamic_update_slice(
          cache.keys, keys[None].astype(cache.keys.dtype), start
        ),
        values=jax.lax.dynamic_update_slice(
          cache.values, values[None].astype(cache.values.dtype), start
        ),
      )
      keys = jax.lax.dynamic_index_in_dim(
        cache.keys, cache.layer, keepdims=False
      )
      values = jax.lax.dynamic_index_in_dim(
        cache.values, cache.layer, keepdims=False
      )
    mask = context.mask
    for before in (seen, self._prefix()):
      if before is not None:
        keys, values, mask = _with_seen(keys, values, mask, before)
    # A cache's slots say nothing of who is behind whom.
    attend = attention.attend if cache else attention.attend_causal
    mixed = attend(queries, keys, values, mask)
    mixed = _projected(self.o_proj, mixed.reshape(x.shape[0], -1))
    return mixed, cache, own

  def _prefix(self) -> _Seen | None:
    """The layer's learned keys and values, where prefix tuning put some."""
    if not hasattr(self, 'prefix_key'):
      return None
    # Attributes that `peftlib.inject` adds.
    keys, values = self.prefix_key[...], self.prefix_value[...]  # type: ignore[attr-defined]
    return _Seen(keys.swapaxes(0, 1)[None], values.swapaxes(0, 1)[None])


def _with_seen(
  keys: jax.Array, values: jax.Array, mask: jax.Array, seen: _Seen
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Keys, values and mask with tokens in front that everyone sees."""
  shape = (keys.shape[0], *seen.keys.shape[1:])
  in_front = lambda x, y: jnp.concatenate(
    [jnp.broadcast_to(x, shape).astype(y.dtype), y], axis=2
  )
  visible = jnp.ones((*mask.shape[:2], shape[2]), mask.dtype)
  return (
    in_front(seen.keys, keys),
    in_front(seen.values, values),
    jnp.concatenate([visible, mask], axis=2),
  )


class MLP(nnx.Module):
  """SwiGLU feed-forward layer (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

  def __init__(self, config: config_lib.DecoderConfig, *, rngs: nnx.Rngs):
    """Makes the three projections.

    Args:
      config: Sizes and dtypes.
      rngs: Stream `params` is used.
    """
    make = functools.partial(
      _linear, config, use_bias=config.mlp_bias, rngs=rngs
    )
    self.gate_proj = make(config.hidden_size, config.intermediate_size)
    self.up_proj = make(config.hidden_size, config.intermediate_size)
    self.down_proj = make(config.intermediate_size, config.hidden_size)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Applies the layer.

    Args:
      x: (B * S, hidden_size).

    Returns:
      Array of the shape of `x`.
    """
    gate = _projected(self.gate_proj, x)
    return self.down_proj(jax.nn.silu(gate) * _projected(self.up_proj, x))


class DecoderLayer(nnx.Module):
  """One pre-norm transformer layer."""

  def __init__(self, config: config_lib.DecoderConfig, *, rngs: nnx.Rngs):
    """Makes the sublayers.

    Args:
      config: Sizes and dtypes.
      rngs: Stream `params` is used.
    """
    self.input_layernorm = _norm(config, rngs)
    self.self_attn = SelfAttention(config, rngs=rngs)
    self.post_attention_layernorm = _norm(config, rngs)
    self.mlp = MLP(config, rngs=rngs)

  def __call__(
    self,
    x: jax.Array,
    context: _Context,
    cache: _LayerCache | None,
    seen: _Seen | None = None,
  ) -> tuple[jax.Array, _LayerCache | None, _Seen]:
    """Applies the layer.

    Args:
      x: (B * S, hidden_size).
      context: What is the same for all layers.
      cache: None, or the cache to read from and write to.
      seen: None, or what every token sees before the first one.

    Returns:
      (B * S, hidden_size), the cache with the new keys and values, and those.
    """
    mixed, cache, own = self.self_attn(
      self.input_layernorm(x), context, cache, seen
    )
    x = x + mixed
    return x + self.mlp(self.post_attention_layernorm(x)), cache, own


class Decoder(nnx.Module):
  """Llama decoder (Touvron et al. 2023, https://arxiv.org/abs/2302.13971).

  Variables have the paths of Hugging Face's parameters without `model.` and the
  layer's number: `layers.self_attn.q_proj.kernel` of shape (num_layers, in,
  out), `layers.input_layernorm.scale`, `embed_tokens.embedding`, `norm.scale`,
  `lm_head.kernel` unless the head is tied.

  Also works under `nnx.eval_shape`, allocating nothing.

  Example:
    >>> import jax
    >>> from flax import nnx
    >>> from peftlib.models import config as config_lib
    >>> config = config_lib.DecoderConfig(
    ...   vocab_size=64,
    ...   hidden_size=16,
    ...   intermediate_size=32,
    ...   num_layers=2,
    ...   num_heads=4,
    ...   num_kv_heads=2,
    ...   head_dim=4,
    ... )
    >>> graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    >>> tokens = jax.numpy.zeros((2, 8), 'int32')
    >>> nnx.merge(graphdef, state)(tokens).shape
    (2, 8, 64)
  """

  def __init__(self, config: config_lib.DecoderConfig, *, rngs: nnx.Rngs):
    """Makes the model with random weights.

    Args:
      config: Sizes and dtypes.
      rngs: Stream `params` is used.
    """
    self.config = config
    self.embed_tokens = nnx.Embed(
      config.vocab_size,
      config.hidden_size,
      # The table is read in its own dtype and what was read is cast: casting
      # all of it would cost more than the layers for a small batch.
      dtype=config.param_dtype,
      param_dtype=config.param_dtype,
      embedding_init=nnx.initializers.normal(_INIT_STDDEV),
      rngs=rngs,
    )

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(in_axes=0, out_axes=0, axis_size=config.num_layers)
    def make_layers(layer_rngs: nnx.Rngs) -> DecoderLayer:
      return DecoderLayer(config, rngs=layer_rngs)

    self.layers = make_layers(rngs)
    self.norm = _norm(config, rngs)
    if not config.tie_embeddings:
      self.lm_head = nnx.Linear(
        config.hidden_size,
        config.vocab_size,
        use_bias=False,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        preferred_element_type=jnp.float32,
        kernel_init=nnx.initializers.normal(_INIT_STDDEV),
        rngs=rngs,
      )

  def init_cache(
    self,
    batch_size: int,
    length: int,
    dtype: jax_typing.DTypeLike | None = None,
  ) -> cache_lib.Cache:
    """An empty cache for this model; see `peftlib.models.cache.init_cache`."""
    return cache_lib.init_cache(self.config, batch_size, length, dtype)

  def __call__(
    self,
    tokens: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    cache: cache_lib.Cache | None = None,
    logits_at: jax.Array | None = None,
    loss_targets: jax.Array | None = None,
  ) -> Any:
    """Logits of the next token, or losses.

    Args:
      tokens: int32 (B, S).
      positions: int32 (B, S) or None: 0, 1, 2, ... counted from the cache's
        first slot. Rotary embeddings see only differences, so packed rows and
        left-padded ones need no positions of their own.
      segment_ids: int32 (B, S) or None: tokens attend to earlier tokens of the
        same id; 0 marks padding. With a cache, tokens of None have id 1.
      cache: None, or the cache that the tokens continue and are written to.
      logits_at: int32 (B, K) or None: indices into S; the head is computed for
        these alone. With a large vocabulary it is a third of the work.
      loss_targets: int32 (B, S or K) or None: the token that should come next
        at each position. Its cross entropy is the result then, in place of the
        logits, which are not kept; see `peftlib.models.token_losses`.

    Returns:
      float32 logits (B, S or K, vocab_size), or losses (B, S or K); with a
      cache the pair of these and the new cache.

    Raises:
      ValueError: Shapes don't fit one another.
    """
    _check_inputs(
      tokens, positions, segment_ids, cache, logits_at, loss_targets
    )
    batch_size, length = tokens.shape
    if positions is None:
      positions = jnp.arange(length)[None]
      if cache is not None:
        positions += cache.next_slot
    layer_cache = None
    if cache is None:
      mask = attention.causal_mask(length, segment_ids)
    else:
      if segment_ids is None:
        segment_ids = jnp.ones(tokens.shape, jnp.int32)
      cached_ids = jax.lax.dynamic_update_slice(
        cache.segment_ids, segment_ids.astype(jnp.int32), (0, cache.next_slot)
      )
      mask = attention.cached_mask(segment_ids, cached_ids, cache.next_slot)
      layer_cache = _LayerCache(
        keys=cache.keys,
        values=cache.values,
        layer=jnp.zeros((), jnp.int32),
        slot=cache.next_slot,
      )
      cache = cache._replace(
        segment_ids=cached_ids, next_slot=cache.next_slot + length
      )
    # Virtual tokens come before the first one.
    positions = positions + self._num_virtual_tokens()
    cos, sin = rope.angles(positions, self.config)
    context = _Context(batch_size, cos, sin, mask)

    x = self.embed_tokens(tokens.reshape(-1)).astype(self.config.dtype)
    x, layer_cache = self._apply_layers(x, context, layer_cache)
    if logits_at is not None:
      x = x.reshape(batch_size, length, -1)
      x = jnp.take_along_axis(x, logits_at[..., None], axis=1)
      x = x.reshape(-1, x.shape[-1])
    x = self.norm(x)
    if loss_targets is None:
      out = self._head(x).reshape(batch_size, -1, self.vocab_size)
    else:
      out = token_losses.token_losses(
        self._head,
        x.reshape(*loss_targets.shape, -1),
        loss_targets,
        whole=self._head_is_quantized(),
      )
    if cache is None:
      return out
    assert layer_cache is not None
    return out, cache._replace(keys=layer_cache.keys, values=layer_cache.values)

  @property
  def vocab_size(self) -> int:
    """Width of the logits."""
    return self.config.vocab_size

  def virtual_token_shapes(
    self, kind: str, length: int
  ) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Shapes of the variables of prefix or prompt tuning, by path.

    Put into the module, `peftlib.inject` does it, they are read in every pass:
    the keys (not rotated) and values of tokens before the first one in each
    layer, or the embeddings of such tokens.

    Args:
      kind: 'prefix' or 'prompt'.
      length: Number of tokens.
    """
    cfg = self.config
    if kind == 'prompt':
      return {('prompt',): (length, cfg.hidden_size)}
    shape = (cfg.num_layers, length, cfg.num_kv_heads, cfg.head_dim)
    attention_path = ('layers', 'self_attn')
    return {
      (*attention_path, 'prefix_key'): shape,
      (*attention_path, 'prefix_value'): shape,
    }

  def _num_virtual_tokens(self) -> int:
    if hasattr(self, 'prompt'):
      return int(self.prompt[...].shape[0])
    if hasattr(self.layers.self_attn, 'prefix_key'):
      return int(self.layers.self_attn.prefix_key[...].shape[1])
    return 0

  def _apply_layers(
    self, x: jax.Array, context: _Context, cache: _LayerCache | None
  ) -> tuple[jax.Array, _LayerCache | None]:
    graphdef, state = nnx.split(self.layers)
    # What a prompt's tokens become depends on nothing behind them: each layer
    # computes it once, for all rows.
    prompt, prompt_context = None, context
    if hasattr(self, 'prompt'):
      prompt = self.prompt[...].astype(x.dtype)
      length = prompt.shape[0]
      cos, sin = rope.angles(jnp.arange(length)[None], self.config)
      prompt_context = _Context(1, cos, sin, attention.causal_mask(length))

    def body(carry: Any, layer_state: nnx.State[Any, Any]) -> tuple[Any, None]:
      hidden, layer_cache, prompt = carry
      # copy=True: the variables of `self.layers` may have been made outside of
      # a `jax.grad` that this runs under, and must not be written to.
      layer = nnx.merge(graphdef, layer_state, copy=True)
      seen = None
      if prompt is not None:
        prompt, _, seen = layer(prompt, prompt_context, None)
      hidden, layer_cache, _ = layer(hidden, context, layer_cache, seen)
      if layer_cache is not None:
        layer_cache = layer_cache._replace(layer=layer_cache.layer + 1)
      return (hidden, layer_cache, prompt), None

    if self.config.remat != 'none':
      # In a scan the two passes are apart anyway: XLA has nothing to merge.
      body = jax.checkpoint(
        body, prevent_cse=False, policy=_POLICIES[self.config.remat]
      )
    (x, cache, _), _ = jax.lax.scan(body, (x, cache, prompt), state)
    return x, cache

  def _head(self, x: jax.Array) -> jax.Array:
    if not self.config.tie_embeddings:
      return self.lm_head(x)
    return jax.lax.dot_general(
      x,
      self.embed_tokens.embedding[...].astype(self.config.dtype),
      (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
    )

  def _head_is_quantized(self) -> bool:
    """Whether each pass through the head dequantizes all of its weight."""
    if self.config.tie_embeddings:
      return not isinstance(self.embed_tokens.embedding, nnx.Variable)
    return not isinstance(self.lm_head.kernel, nnx.Variable)


def _check_inputs(
  tokens: jax.Array,
  positions: jax.Array | None,
  segment_ids: jax.Array | None,
  cache: cache_lib.Cache | None,
  logits_at: jax.Array | None,
  loss_targets: jax.Array | None,
) -> None:
  if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
    raise ValueError(
      f'tokens: expected integers of shape (batch, length), got '
      f'{tokens.dtype.name}{list(tokens.shape)}.'
    )
  for name, value in (('positions', positions), ('segment_ids', segment_ids)):
    if value is not None and value.shape != tokens.shape:
      raise ValueError(
        f'{name}: expected the shape of tokens {tokens.shape}, got '
        f'{value.shape}.'
      )
  if logits_at is not None and (
    logits_at.ndim != 2 or logits_at.shape[0] != tokens.shape[0]
  ):
    raise ValueError(
      f'logits_at: expected shape ({tokens.shape[0]}, K), got '
      f'{logits_at.shape}.'
    )
  where = tokens if logits_at is None else logits_at
  if loss_targets is not None and (
    loss_targets.shape != where.shape
    or not jnp.issubdtype(loss_targets.dtype, jnp.integer)
  ):
    raise ValueError(
      f'loss_targets: expected integers of shape {where.shape}, got '
      f'{loss_targets.dtype.name}{list(loss_targets.shape)}.'
    )
  if cache is not None and (
    cache.segment_ids.shape[0] != tokens.shape[0]
    or cache.length < tokens.shape[1]
  ):
    raise ValueError(
      f'cache: made for {cache.segment_ids.shape[0]} rows of {cache.length} '
      f'slots; tokens have shape {tokens.shape}.'
    )
