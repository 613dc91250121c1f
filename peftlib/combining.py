"""Arithmetic on LoRA adapters: sums, merges of several, extraction."""

from collections.abc import Callable, Iterator, Sequence
import functools
import math
from typing import Any, Literal, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from peftlib import _checks

Combination = Literal[
  'concatenate', 'svd', 'ties_svd', 'dare_linear_svd', 'dare_ties_svd', 'linear'
]
_COMBINATIONS = (
  'concatenate',
  'svd',
  'ties_svd',
  'dare_linear_svd',
  'dare_ties_svd',
  'linear',
)


def combine_adapters(
  states: Sequence[nnx.State[Any, Any]],
  weights: Sequence[float],
  *,
  how: Combination = 'concatenate',
  rank: int | None = None,
  density: float = 0.5,
  key: jax.Array | None = None,
) -> nnx.State[Any, Any]:
  """One LoRA adapter out of several, each with a weight.

  All have to be LoRA adapters of the same weights, with the same scale
  `alpha / rank`; so has the result, whose `alpha` is the scale times its rank.
  A negative weight takes an adapter away, `weights=[-1]` negates one,
  `weights=[1 - t, t]` goes a part t of the way from one to the other.

  Used in: peftlib/guide/your_own_method.md.

  Example:
    >>> import peftlib, transforms
    >>> graphdef, state = peftlib.inject(
    ...   *nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0))),
    ...   peftlib.LoraConfig(rank=2),
    ...   jnp.ones((1, 8)),
    ...   key=jax.random.key(0),
    ... )
    >>> one = transforms.select(state, nnx.LoRAParam)
    >>> combine_adapters([one, one], [0.5, 0.5])['kernel_lora_a'].shape
    (8, 4)

  Args:
    states: States with the variables `lora_a` and `lora_b` of each.
    weights: A finite number for each.
    how: 'concatenate': the sum of the updates exactly; ranks add. 'svd': the
      sum, cut to `rank` by a singular value decomposition. 'ties_svd': each
      update without its smallest entries, signs elected by their sum, the
      mean of the entries of the elected sign, each times its weight (Yadav et
      al., 2023; weights as in HF peft), then cut to `rank`.
      'dare_linear_svd', 'dare_ties_svd': entries of each update dropped at
      random and the others scaled up (Yu et al., 2024), then summed or as in
      'ties_svd'. 'linear': sums of the factors, each with the square root of
      its weight's magnitude; what HF peft calls so; ranks have to be equal.
    rank: Rank of the result where it is cut; None is the largest of `states`.
      Not for 'concatenate' and 'linear', which have a rank of their own.
    density: Part of the entries that 'ties' and 'dare' keep, in (0, 1].
    key: PRNG key, for 'dare'.

  Returns:
    A State of the same paths and metadata.

  Raises:
    ValueError: If the adapters don't fit one another or an argument is out of
      range.
  """
  function = 'peftlib.combine_adapters'
  _check(function, states, weights, how, rank, density, key)
  flats = [dict(nnx.to_flat_state(state)) for state in states]
  pairs = [list(_pairs(function, flat)) for flat in flats]
  out = []
  for i, group in enumerate(zip(*pairs)):
    factors = [_Factors.of(flat, pair) for flat, pair in zip(flats, group)]
    _check_sizes(function, group[0], factors)
    own_key = None if key is None else jax.random.fold_in(key, i)
    size = max(f.a.shape[-1] for f in factors) if rank is None else rank
    a, b = _combined(function, factors, weights, how, size, density, own_key)
    first = group[0]
    out.append((first.a, flats[0][first.a].replace(factors[0].a_back(a))))
    out.append((first.b, flats[0][first.b].replace(factors[0].b_back(b))))
  return nnx.from_flat_state(out)


def extract_adapter(
  base: nnx.State[Any, Any],
  tuned: nnx.State[Any, Any],
  like: nnx.State[Any, Any],
  *,
  scale: float,
) -> nnx.State[Any, Any]:
  """The LoRA adapter that comes closest to what training did to the weights.

  Used in: peftlib/guide/your_own_method.md.

  Args:
    base: State of the model before.
    tuned: State of the model after a full fine-tuning.
    like: LoRA State of the result's shapes: from `inject` into the base, its
      values don't matter. Of linear layers, whose weights are (..., in, out).
    scale: `alpha / rank` of its config.

  Returns:
    `like` with the best update of its rank (Eckart and Young, 1936).

  Raises:
    ValueError: If a weight isn't in both models, or isn't (..., in, out), or
      `scale` isn't above zero.
  """
  function = 'peftlib.extract_adapter'
  if not (math.isfinite(scale) and scale > 0):
    raise ValueError(f'{function}: scale={scale}: must be a number > 0.')
  for name, value in (('base', base), ('tuned', tuned), ('like', like)):
    _checks.check_state(function, name, value)
  before, after = dict(nnx.to_flat_state(base)), dict(nnx.to_flat_state(tuned))
  flat = dict(nnx.to_flat_state(like))
  out = []
  for pair in _pairs(function, flat):
    factors = _Factors.of(flat, pair)
    if pair.weight not in before or pair.weight not in after:
      raise ValueError(
        f'{function}: {_joined(pair.weight)} is not in both models.'
      )
    old, new = before[pair.weight].get_value(), after[pair.weight].get_value()
    shape = (*factors.a.shape[:-1], factors.b.shape[-1])
    if old.shape != shape or new.shape != shape:
      raise ValueError(
        f'{function}: {_joined(pair.weight)} has shapes {old.shape} and'
        f' {new.shape}; the adapter is for {shape}.'
      )
    delta = (new.astype(jnp.float32) - old.astype(jnp.float32)) / scale
    a, b = _cut(delta, factors.a.shape[-1])
    out.append((pair.a, flat[pair.a].replace(factors.a_back(a))))
    out.append((pair.b, flat[pair.b].replace(factors.b_back(b))))
  return nnx.from_flat_state(out)


class _Pair(NamedTuple):
  a: tuple[Any, ...]
  b: tuple[Any, ...]
  weight: tuple[Any, ...]


class _Factors(NamedTuple):
  """Both factors with (in, rank) and (rank, out) last."""

  a: jax.Array
  b: jax.Array
  a_shape: tuple[int, ...]
  b_shape: tuple[int, ...]
  a_dtype: Any
  b_dtype: Any

  @classmethod
  def of(cls, flat: dict[Any, Any], pair: _Pair) -> '_Factors':
    a, b = flat[pair.a].get_value(), flat[pair.b].get_value()
    return cls(
      a.astype(jnp.float32),
      b.astype(jnp.float32),
      a.shape,
      b.shape,
      a.dtype,
      b.dtype,
    )

  def a_back(self, a: jax.Array) -> jax.Array:
    return a.astype(self.a_dtype)

  def b_back(self, b: jax.Array) -> jax.Array:
    return b.astype(self.b_dtype)


def _pairs(function: str, flat: dict[Any, Any]) -> Iterator[_Pair]:
  """The factors of each weight, by the roles that `inject` gave them."""
  roles: dict[tuple[Any, str], dict[str, Any]] = {}
  for path, variable in flat.items():
    metadata = variable.get_metadata()
    role = metadata.get('role')
    if role not in ('lora_a', 'lora_b'):
      raise ValueError(
        f'{function}: {_joined(path)} is {role or "no part of an adapter"};'
        ' only LoRA adapters can be combined.'
      )
    weight, _, suffix = str(path[-1]).rpartition(f'_{role}')
    roles.setdefault((path[:-1], weight + suffix), {})[role] = (path, weight)
  for (front, _), own in sorted(roles.items(), key=lambda item: str(item[0])):
    if len(own) != 2:
      path, _ = next(iter(own.values()))
      raise ValueError(f'{function}: {_joined(path)} has no other factor.')
    a, weight = own['lora_a']
    shape_a = flat[a].get_value().shape
    shape_b = flat[own['lora_b'][0]].get_value().shape
    # Layers in front, and the rank between the two.
    if len(shape_a) < 2 or (*shape_a[:-2], shape_a[-1]) != shape_b[:-1]:
      raise ValueError(
        f'{function}: {_joined(a)} has shape {shape_a}, its other factor'
        f' {shape_b}; only adapters of plain linear layers, stacked in front,'
        ' can be combined.'
      )
    yield _Pair(a, own['lora_b'][0], (*front, weight))


def _check(
  function: str,
  states: Sequence[nnx.State[Any, Any]],
  weights: Sequence[float],
  how: str,
  rank: int | None,
  density: float,
  key: jax.Array | None,
) -> None:
  for i, state in enumerate(states):
    _checks.check_state(function, f'states[{i}]', state)
  if not states or len(states) != len(weights):
    raise ValueError(
      f'{function}: {len(states)} states and {len(weights)} weights; there has'
      ' to be a weight for each.'
    )
  if not all(math.isfinite(w) for w in weights):
    raise ValueError(f'{function}: weights={list(weights)}: must be finite.')
  if how not in _COMBINATIONS:
    raise ValueError(f'{function}: how={how!r}: one of {_COMBINATIONS}.')
  if rank is not None and not how.endswith('svd'):
    raise ValueError(
      f'{function}: rank={rank}: how={how!r} does not cut the rank; leave it'
      " out, or take how='svd'."
    )
  if rank is not None and rank < 1:
    raise ValueError(f'{function}: rank={rank}: must be at least 1.')
  if not 0 < density <= 1:
    raise ValueError(f'{function}: density={density}: must be in (0, 1].')
  if how.startswith('dare') and key is None:
    raise ValueError(f'{function}: how={how!r} draws numbers; give a key.')
  names = [set(dict(nnx.to_flat_state(state))) for state in states]
  for i, own in enumerate(names):
    if own != names[0]:
      different = ', '.join(sorted(_joined(p) for p in own ^ names[0]))
      raise ValueError(
        f'{function}: states[0] and states[{i}] have not the same variables:'
        f' {different}.'
      )


def _check_sizes(
  function: str, pair: _Pair, factors: Sequence[_Factors]
) -> None:
  sizes = {(*f.a.shape[:-1], f.b.shape[-1]) for f in factors}
  if len(sizes) > 1:
    raise ValueError(
      f'{function}: the adapters of {_joined(pair.weight)} are for weights of'
      f' shapes {sorted(sizes)}.'
    )


def _combined(
  function: str,
  factors: Sequence[_Factors],
  weights: Sequence[float],
  how: str,
  rank: int,
  density: float,
  key: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  if how == 'concatenate':
    a = jnp.concatenate([f.a * w for f, w in zip(factors, weights)], axis=-1)
    return a, jnp.concatenate([f.b for f in factors], axis=-2)
  if how == 'linear':
    ranks = sorted({f.a.shape[-1] for f in factors})
    if len(ranks) > 1:
      raise ValueError(
        f"{function}: how='linear' adds factors; their ranks are {ranks}."
      )
    roots = [math.copysign(math.sqrt(abs(w)), w) for w in weights]
    a = jnp.stack([f.a * r for f, r in zip(factors, roots)]).sum(0)
    b = jnp.stack([f.b * abs(r) for f, r in zip(factors, roots)]).sum(0)
    return a, b
  deltas = [f.a @ f.b for f in factors]
  over = functools.partial(_over_matrices, deltas[0].ndim - 2)
  if how.startswith('dare'):
    assert key is not None
    deltas = [
      _dropped(delta, density, jax.random.fold_in(key, i))
      for i, delta in enumerate(deltas)
    ]
  elif how.startswith('ties'):
    deltas = [over(lambda d: _trimmed(d, density))(d) for d in deltas]
  stacked = jnp.stack(deltas)
  weighted = jnp.stack([d * w for d, w in zip(deltas, weights)])
  if 'ties' in how:
    return _cut(_elected(stacked, weighted), rank)
  return _cut(weighted.sum(0), rank)


def _over_matrices(count: int, f: Callable[..., Any]) -> Callable[..., Any]:
  for _ in range(count):
    f = jax.vmap(f)
  return f


def _trimmed(delta: jax.Array, density: float) -> jax.Array:
  """The entries of largest magnitude; zeros for the others."""
  count = max(1, int(density * delta.size))
  magnitudes = jnp.abs(delta).ravel()
  _, kept = jax.lax.top_k(magnitudes, count)
  mask = jnp.zeros(delta.size, bool).at[kept].set(True)
  return jnp.where(mask.reshape(delta.shape), delta, 0.0)


def _dropped(delta: jax.Array, density: float, key: jax.Array) -> jax.Array:
  keep = jax.random.bernoulli(key, density, delta.shape)
  return jnp.where(keep, delta / density, 0.0)


def _elected(deltas: jax.Array, weighted: jax.Array) -> jax.Array:
  """The mean of those weighted entries whose sign is that of the sum."""
  sign = jnp.where(deltas.sum(0) >= 0, 1.0, -1.0)
  kept = jnp.sign(deltas) == sign
  return jnp.where(kept, weighted, 0.0).sum(0) / jnp.maximum(kept.sum(0), 1)


def _cut(delta: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
  """The best factors of this rank, the singular values shared by both."""
  u, s, vt = jnp.linalg.svd(delta, full_matrices=False)
  root = jnp.sqrt(s[..., :rank])
  a, b = u[..., :rank] * root[..., None, :], root[..., None] * vt[..., :rank, :]
  missing = rank - a.shape[-1]
  if missing > 0:
    pad = [(0, 0)] * (a.ndim - 2)
    a = jnp.pad(a, [*pad, (0, 0), (0, missing)])
    b = jnp.pad(b, [*pad, (0, missing), (0, 0)])
  return a, b


def _joined(path: Any) -> str:
  return '/'.join(map(str, path))
