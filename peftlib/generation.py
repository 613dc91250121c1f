"""Text generation from split models, on token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax import typing as jax_typing
import jax.numpy as jnp
import numpy as np

from peftlib import _checks
from peftlib import adapters
from peftlib.models import cache as cache_lib

__all__ = [
  'generate',
  'nucleus',
  'stream',
]

# Prompts are read this many rows at a time: on a CPU the activations of more
# rows leave the caches, which costs a quarter of the speed.
_GROUP_ROWS = 8

# Shorter common beginnings of prompts aren't worth a forward pass of their own.
_MIN_SHARED = 8


class _Sampling(NamedTuple):
  """How the next token is chosen; static for `jit` but for the numbers."""

  greedy: bool
  nucleus: bool


class _Loop(NamedTuple):
  """Carry of the decoding loop.

  Attributes:
    step: int32 (), tokens generated so far.
    token: int32 (B,), the newest, not yet in the cache.
    done: bool (B,), rows that met an end token.
    output: int32 (B, max_new_tokens).
    cache: The model's cache.
  """

  step: jax.Array
  token: jax.Array
  done: jax.Array
  output: jax.Array
  cache: cache_lib.Cache


def generate(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  prompts: Sequence[Sequence[int]],
  *,
  max_new_tokens: int,
  eos_ids: Sequence[int],
  pad_id: int = 0,
  temperature: float = 0.0,
  top_p: float = 1.0,
  key: jax.Array | None = None,
  batch_size: int = 64,
  cache_dtype: jax_typing.DTypeLike | None = None,
) -> list[list[int]]:
  """Continues prompts.

  Prompts are sorted by length and padded to a few lengths, so that little is
  computed on padding and little compiled; a beginning that all of them share is
  read once. What a row gives doesn't depend on
  the rows beside it, except for rounding.

  Args:
    graphdef: Graph definition of a model that is called like
      `peftlib.models.Decoder` and has its `init_cache`; with adapters or
      without.
    state: Its whole state. Where `peftlib.assign_rows` gave rows adapters of
      their own, row i is `prompts[i]`.
    prompts: Token ids, none empty.
    max_new_tokens: Where to stop at the latest.
    eos_ids: Tokens that end a row.
    pad_id: Any valid token id; fills up rows, and is never seen by others.
    temperature: 0 takes the most likely token, 1 samples from the model's
      distribution.
    top_p: Sample only from the most likely tokens that together have this
      probability (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751).
    key: PRNG key; needed when `temperature` is not 0. A prompt's samples depend
      on it and on the prompt's index.
    batch_size: Rows computed at once, at most.
    cache_dtype: Dtype of the key-value cache; the model's compute dtype by
      default.

  Returns:
    The new tokens of each prompt, in the order of `prompts`, without the end
    token.

  Raises:
    TypeError: A Module is given instead of graphdef and state.
    ValueError: An argument is out of range.

  Example:
    >>> generate(  # doctest: +SKIP
    ...   model.graphdef,
    ...   model.state,
    ...   [tokenizer.encode('Once upon a time')],
    ...   max_new_tokens=20,
    ...   eos_ids=tokenizer.eos_ids,
    ... )
  """
  _checks.check_split('peftlib.generation.generate', graphdef, state)
  sampling = _check_arguments(max_new_tokens, temperature, top_p, key)
  if batch_size < 1:
    raise ValueError(f'batch_size={batch_size}: expected at least 1.')
  for i, prompt in enumerate(prompts):
    _check_prompt(prompt, f'prompts[{i}]')
  if not prompts:
    return []
  key = jax.random.key(0) if key is None else key
  order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
  assigned = adapters.assigned_rows(graphdef, state)
  if assigned not in (None, len(prompts)):
    raise ValueError(
      f'peftlib.generation.generate: adapters are assigned to {assigned} rows;'
      f' there are {len(prompts)} prompts.'
    )
  # What adapters of their own make of a common beginning differs.
  shared = _shared_length(prompts) if assigned is None else 0
  prefix = np.asarray(prompts[0][:shared], np.int32)
  # Batches of one size: a smaller last one would have to be compiled too.
  num_batches = -(-len(prompts) // batch_size)
  used_rows = -(-len(prompts) // num_batches)
  group_rows = min(used_rows, _GROUP_ROWS)
  if assigned is not None:
    group_rows = used_rows
  rows = -(-used_rows // group_rows) * group_rows
  results: list[list[int]] = [[] for _ in prompts]
  for start in range(0, len(order), used_rows):
    members = order[start : start + used_rows]
    tokens, lengths = _pad([prompts[i][shared:] for i in members], rows, pad_id)
    own = state
    if assigned is not None:
      filled = members + [members[0]] * (rows - len(members))
      own = adapters.take_rows(graphdef, state, filled)
    output = _generate_batch(
      graphdef,
      own,
      prefix,
      tokens,
      lengths,
      np.arange(rows) < len(members),
      jax.vmap(functools.partial(jax.random.fold_in, key))(
        np.asarray(members + [0] * (rows - len(members)), np.uint32)
      ),
      np.float32(temperature),
      np.float32(top_p),
      sampling=sampling,
      group_rows=group_rows,
      max_new_tokens=max_new_tokens,
      eos_ids=tuple(eos_ids),
      pad_id=pad_id,
      cache_dtype=None if cache_dtype is None else jnp.dtype(cache_dtype),
    )
    for i, row in zip(members, np.asarray(output).tolist()):
      results[i] = _until_end(row, eos_ids)
  return results


def stream(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  prompt: Sequence[int],
  *,
  max_new_tokens: int,
  eos_ids: Sequence[int],
  temperature: float = 0.0,
  top_p: float = 1.0,
  key: jax.Array | None = None,
  cache_dtype: jax_typing.DTypeLike | None = None,
) -> Iterator[int]:
  """Continues one prompt, giving each token as soon as it is there.

  The tokens are those of `generate` for a single prompt and the same key.

  Args:
    graphdef: See `generate`.
    state: See `generate`.
    prompt: Token ids, not empty.
    max_new_tokens: Where to stop at the latest.
    eos_ids: Tokens that end the text; not given.
    temperature: See `generate`.
    top_p: See `generate`.
    key: See `generate`.
    cache_dtype: See `generate`.

  Returns:
    Iterator over token ids. Arguments are checked before the first is asked
    for.

  Raises:
    TypeError: A Module is given instead of graphdef and state.
    ValueError: An argument is out of range.
  """
  _checks.check_split('peftlib.generation.stream', graphdef, state)
  sampling = _check_arguments(max_new_tokens, temperature, top_p, key)
  _check_prompt(prompt, 'prompt')
  key = jax.random.key(0) if key is None else key
  numbers = (np.float32(temperature), np.float32(top_p))

  def tokens() -> Iterator[int]:
    padded, lengths = _pad([prompt], 1, prompt[0])
    keys = jax.random.fold_in(key, 0)[None]
    token, cache = _jitted_first(
      graphdef,
      state,
      padded,
      lengths,
      keys,
      *numbers,
      sampling=sampling,
      num_slots=padded.shape[1] + _bucket(max_new_tokens),
      cache_dtype=None if cache_dtype is None else jnp.dtype(cache_dtype),
    )
    for step in range(1, max_new_tokens + 1):
      # The next step is under way while the caller looks at this token.
      following = token
      if step < max_new_tokens:
        following, cache = _jitted_next(
          graphdef,
          state,
          token,
          lengths + np.int32(step - 1),
          cache,
          keys,
          np.int32(step),
          *numbers,
          sampling=sampling,
        )
      value = int(token[0])
      if value in eos_ids:
        return
      yield value
      token = following

  return tokens()


def _check_arguments(
  max_new_tokens: int,
  temperature: float,
  top_p: float,
  key: jax.Array | None,
) -> _Sampling:
  if max_new_tokens < 1:
    raise ValueError(f'max_new_tokens={max_new_tokens}: expected at least 1.')
  if not temperature >= 0:
    raise ValueError(f'temperature={temperature}: expected 0 or more.')
  if not 0 < top_p <= 1:
    raise ValueError(f'top_p={top_p}: expected a number in (0, 1].')
  if temperature > 0 and key is None:
    raise ValueError(f'temperature={temperature}: sampling needs a key.')
  return _Sampling(greedy=temperature == 0, nucleus=top_p < 1)


def _check_prompt(prompt: Sequence[int], name: str) -> None:
  if len(prompt) == 0:
    raise ValueError(f'{name} is empty; expected at least one token.')
  if min(prompt) < 0:
    raise ValueError(f'{name}: token id {min(prompt)} is negative.')


def _bucket(length: int) -> int:
  """The next multiple of 16, of 32 beyond 128, of 64 beyond 256, ..."""
  step = max(16, 1 << max(0, (length - 1).bit_length() - 3))
  return -(-length // step) * step


def _pad(
  prompts: Sequence[Sequence[int]], rows: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Right-padded int32 (rows, S) and lengths; rows without prompt have one."""
  width = _bucket(max(map(len, prompts)))
  tokens = np.full((rows, width), pad_id, np.int32)
  lengths = np.ones((rows,), np.int32)
  for i, prompt in enumerate(prompts):
    tokens[i, : len(prompt)] = prompt
    lengths[i] = len(prompt)
  return tokens, lengths


def _shared_length(prompts: Sequence[Sequence[int]]) -> int:
  """How many tokens all prompts begin with, leaving each at least one."""
  if len(prompts) == 1:
    return 0
  ordered = sorted(map(tuple, prompts))
  first, last = ordered[0], ordered[-1]
  limit = min(map(len, prompts)) - 1
  shared = 0
  while shared < limit and first[shared] == last[shared]:
    shared += 1
  return shared if shared >= _MIN_SHARED else 0


def _until_end(row: list[int], eos_ids: Sequence[int]) -> list[int]:
  for i, token in enumerate(row):
    if token in eos_ids:
      return row[:i]
  return row


def _choose(
  logits: jax.Array,
  keys: jax.Array,
  step: jax.Array,
  temperature: jax.Array,
  top_p: jax.Array,
  sampling: _Sampling,
) -> jax.Array:
  """The next token of each row, int32 (B,), from logits (B, V)."""
  if sampling.greedy:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
  logits = logits / temperature
  if sampling.nucleus:
    logits = nucleus(logits, top_p)
  step_keys = jax.vmap(lambda k: jax.random.fold_in(k, step))(keys)
  return jax.vmap(jax.random.categorical)(step_keys, logits).astype(jnp.int32)


def nucleus(logits: jax.Array, top_p: jax.typing.ArrayLike) -> jax.Array:
  """Masks all but the most likely tokens that together have `top_p`.

  Args:
    logits: (..., V).
    top_p: The probability to be reached; the token that crosses it is kept.

  Returns:
    `logits` with -inf at the tokens left out; the likeliest always stays.
  """
  sorted_logits = jnp.sort(logits, axis=-1, descending=True)
  probabilities = jax.nn.softmax(sorted_logits, axis=-1)
  before = jnp.cumsum(probabilities, axis=-1) - probabilities
  kept = (before < top_p).at[..., 0].set(True)
  threshold = jnp.min(
    jnp.where(kept, sorted_logits, jnp.inf), axis=-1, keepdims=True
  )
  return jnp.where(logits >= threshold, logits, -jnp.inf)


def _first(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  tokens: jax.Array,
  lengths: jax.Array,
  keys: jax.Array,
  temperature: jax.Array,
  top_p: jax.Array,
  *,
  sampling: _Sampling,
  num_slots: int,
  cache_dtype: jax_typing.DTypeLike | None,
  prefix_cache: cache_lib.Cache | None = None,
) -> tuple[jax.Array, cache_lib.Cache]:
  """Reads the prompts; gives each row's first token and the cache."""
  model = nnx.merge(graphdef, state, copy=True)
  rows, width = tokens.shape
  if prefix_cache is None:
    cache = model.init_cache(rows, num_slots, cache_dtype)
  else:
    cache = cache_lib.extend(prefix_cache, batch_size=rows, length=num_slots)
  logits, cache = model(
    tokens,
    segment_ids=(jnp.arange(width) < lengths[:, None]).astype(jnp.int32),
    cache=cache,
    logits_at=lengths[:, None] - 1,
  )
  step = jnp.zeros((), jnp.int32)
  token = _choose(logits[:, 0], keys, step, temperature, top_p, sampling)
  return token, cache


def _next(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  token: jax.Array,
  positions: jax.Array,
  cache: cache_lib.Cache,
  keys: jax.Array,
  step: jax.Array,
  temperature: jax.Array,
  top_p: jax.Array,
  *,
  sampling: _Sampling,
) -> tuple[jax.Array, cache_lib.Cache]:
  """Reads one token of each row; gives the token of number `step`."""
  model = nnx.merge(graphdef, state, copy=True)
  logits, cache = model(
    token[:, None], positions=positions[:, None], cache=cache
  )
  token = _choose(logits[:, 0], keys, step, temperature, top_p, sampling)
  return token, cache


_jitted_first = jax.jit(
  _first,
  static_argnames=('graphdef', 'sampling', 'num_slots', 'cache_dtype'),
)
_jitted_next = jax.jit(
  _next,
  static_argnames=('graphdef', 'sampling'),
  donate_argnames=('cache',),
)


@functools.partial(
  jax.jit,
  static_argnames=(
    'graphdef',
    'sampling',
    'group_rows',
    'max_new_tokens',
    'eos_ids',
    'pad_id',
    'cache_dtype',
  ),
)
def _generate_batch(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  prefix: jax.Array,
  tokens: jax.Array,
  lengths: jax.Array,
  real: jax.Array,
  keys: jax.Array,
  temperature: jax.Array,
  top_p: jax.Array,
  *,
  sampling: _Sampling,
  group_rows: int,
  max_new_tokens: int,
  eos_ids: tuple[int, ...],
  pad_id: int,
  cache_dtype: jax_typing.DTypeLike | None,
) -> jax.Array:
  """New tokens int32 (B, max_new_tokens); what follows an end is `pad_id`."""
  ends = jnp.asarray(eos_ids, jnp.int32)

  def is_end(token: jax.Array) -> jax.Array:
    return jnp.any(token[:, None] == ends, axis=-1)

  def unfinished(loop: _Loop) -> jax.Array:
    return (loop.step < max_new_tokens) & ~jnp.all(loop.done)

  def advance(loop: _Loop) -> _Loop:
    token, cache = _next(
      graphdef,
      state,
      loop.token,
      shared + lengths + loop.step - 1,
      loop.cache,
      keys,
      loop.step,
      temperature,
      top_p,
      sampling=sampling,
    )
    token = jnp.where(loop.done, pad_id, token)
    return _Loop(
      step=loop.step + 1,
      token=token,
      done=loop.done | is_end(token),
      output=loop.output.at[:, loop.step].set(token),
      cache=cache,
    )

  rows, width = tokens.shape
  shared = prefix.shape[0]
  prefix_cache = None
  if shared:
    model = nnx.merge(graphdef, state, copy=True)
    _, prefix_cache = model(
      prefix[None],
      cache=model.init_cache(1, shared, cache_dtype),
      logits_at=jnp.zeros((1, 1), jnp.int32),
    )

  def read(
    group: tuple[jax.Array, jax.Array, jax.Array],
  ) -> tuple[jax.Array, cache_lib.Cache]:
    return _first(
      graphdef,
      state,
      *group,
      temperature,
      top_p,
      sampling=sampling,
      num_slots=shared + width,
      cache_dtype=cache_dtype,
      prefix_cache=prefix_cache,
    )

  groups = jax.tree.map(
    lambda x: x.reshape(-1, group_rows, *x.shape[1:]), (tokens, lengths, keys)
  )
  token, caches = jax.lax.map(read, groups)
  token = token.reshape(rows)
  cache = cache_lib.extend(
    cache_lib.join_rows(caches),
    batch_size=rows,
    length=shared + width + max_new_tokens,
  )
  output = jnp.full((rows, max_new_tokens), pad_id, jnp.int32)
  loop = _Loop(
    step=jnp.ones((), jnp.int32),
    token=token,
    done=is_end(token) | ~real,
    output=output.at[:, 0].set(token),
    cache=cache,
  )
  return jax.lax.while_loop(unfinished, advance, loop).output
