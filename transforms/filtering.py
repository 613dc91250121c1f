"""Selecting, splitting and joining the leaves of a State.

All functions here only move leaves about: the Variables (or raw arrays,
abstract values, shardings) in a result are the very objects of the input. They
therefore work alike on concrete and abstract States, on States of shardings,
and under `jax.jit` and `jax.eval_shape`.

A filter is any filter of `flax.nnx.filterlib`: a Variable type, a tag string,
`True` / `...`, `False` / `None`, a predicate on (path, leaf), or a tuple or
list of these, any of which may match. `PathMatches` adds patterns on the whole
path.

A State keeps no record of empty sub-States: they're dropped, as by
`nnx.split_state`.
"""

import dataclasses
import re
from typing import Any

from flax import nnx

from transforms import _checks

type Filter = nnx.filterlib.Filter

_SHOWN_PATHS = 5


@dataclasses.dataclass(frozen=True)
class PathMatches:
  """A filter on the whole path of a leaf, by regular expression.

  Qwix matches module paths in the same way: the keys are joined by `/` and the
  expression has to match all of the text.

  Example:
    >>> state = nnx.State({'mlp': {'w': nnx.Param(1.0), 'b': nnx.Param(2.0)}})
    >>> nnx.to_flat_state(select(state, PathMatches('.*/w'))).paths
    (('mlp', 'w'),)

  Attributes:
    pattern: The regular expression.

  Raises:
    ValueError: `pattern` is no valid regular expression.
  """

  pattern: str

  def __post_init__(self) -> None:
    try:
      re.compile(self.pattern)
    except re.error as error:
      raise ValueError(
        f'PathMatches: {self.pattern!r} is no regular expression: {error}.'
      ) from error

  def __call__(self, path: tuple[Any, ...], leaf: Any) -> bool:
    """Returns whether the pattern matches all of the joined path."""
    del leaf
    return re.fullmatch(self.pattern, _checks.path_text(path)) is not None


def select(state: nnx.State[Any, Any], *filters: Filter) -> nnx.State[Any, Any]:
  """Returns the State of the leaves that match any of `filters`.

  Used in: peftlib/guide/your_own_loop.md.

  Example:
    >>> state = nnx.State({'w': nnx.Param(1.0), 'a': nnx.LoRAParam(2.0)})
    >>> list(select(state, nnx.LoRAParam))
    ['a']

  Args:
    state: A State with leaves of any kind.
    *filters: At least one nnx filter.

  Returns:
    A State with the same leaf objects at the same paths.

  Raises:
    TypeError: `state` is no State, or a filter is no filter.
    ValueError: No filter is given.
  """
  return _filtered('select', state, filters, matching=True)


def exclude(
  state: nnx.State[Any, Any], *filters: Filter
) -> nnx.State[Any, Any]:
  """Returns the State of the leaves that match none of `filters`.

  The exact complement of `select`, with the same arguments and errors.

  Used in: tests/consumers/own_step.py.

  Example:
    >>> state = nnx.State({'w': nnx.Param(1.0), 'a': nnx.LoRAParam(2.0)})
    >>> list(exclude(state, nnx.LoRAParam))
    ['w']
  """
  return _filtered('exclude', state, filters, matching=False)


def partition(
  state: nnx.State[Any, Any], *filters: Filter
) -> tuple[nnx.State[Any, Any], ...]:
  """Splits a State into one State per filter; the first that matches wins.

  `nnx.LoRAParam` is a subclass of `nnx.Param`, so the narrower filter has to
  come first.

  Used in: tests/consumers/own_step.py.

  Example:
    >>> state = nnx.State({'w': nnx.Param(1.0), 'a': nnx.LoRAParam(2.0)})
    >>> adapters, base = partition(state, nnx.LoRAParam, ...)
    >>> list(adapters), list(base)
    (['a'], ['w'])

  Args:
    state: A State with leaves of any kind.
    *filters: At least one nnx filter. `...` or `True`, as the last ones, take
      what is left.

  Returns:
    A tuple with a State for each filter, also if there is only one.
    `merge(*partition(state, ...))` equals `state`, with the same leaf objects.

  Raises:
    TypeError: `state` is no State, or a filter is no filter.
    ValueError: No filter is given, a leaf matches none, or `...` isn't last.
  """
  _checks.check_state('partition', state)
  predicates = [to_predicate('partition', item) for item in filters]
  if not filters:
    raise ValueError('partition: give at least one filter.')
  for position, item in enumerate(filters):
    if _is_rest(item) and not all(map(_is_rest, filters[position:])):
      raise ValueError(
        f'partition: {item} takes all that is left and has to come last, but '
        f'is filter {position} of {len(filters)}.'
      )
  parts: list[list[tuple[_checks.Path, Any]]] = [[] for _ in predicates]
  unmatched = []
  for path, leaf in _flat(state):
    for part, predicate in zip(parts, predicates, strict=True):
      if predicate(path, leaf):
        part.append((path, leaf))
        break
    else:
      unmatched.append(path)
  if unmatched:
    shown = ', '.join(map(_checks.path_text, unmatched[:_SHOWN_PATHS]))
    more = len(unmatched) - _SHOWN_PATHS
    raise ValueError(
      f'partition: {len(unmatched)} leaves match no filter: {shown}'
      + (f' and {more} more' if more > 0 else '')
      + '; end with `...` to take what is left.'
    )
  return tuple(nnx.from_flat_state(part) for part in parts)


def merge(
  state: nnx.State[Any, Any], *states: nnx.State[Any, Any]
) -> nnx.State[Any, Any]:
  """Joins States that have no path in common; the inverse of `partition`.

  Used in: tests/consumers/grpo.py.

  Example:
    >>> adapters = nnx.State({'a': nnx.LoRAParam(2.0)})
    >>> base = nnx.State({'w': nnx.Param(1.0)})
    >>> list(merge(adapters, base))
    ['a', 'w']

  Args:
    state: A State with leaves of any kind.
    *states: Further ones.

  Returns:
    A State with the leaf objects of all.

  Raises:
    TypeError: An argument is no State.
    ValueError: Two States have a leaf at the same path, or one has a leaf where
      the other has a sub-State.
  """
  states = (state, *states)
  for item in states:
    _checks.check_state('merge', item)
  origin: dict[_checks.Path, int] = {}
  inner: dict[_checks.Path, tuple[int, _checks.Path]] = {}
  merged: list[tuple[_checks.Path, Any]] = []
  for number, item in enumerate(states):
    for path, leaf in _flat(item):
      if path in origin:
        raise ValueError(
          f'merge: {_checks.path_text(path)} is in state {origin[path]} and in '
          f'state {number}; States to merge must not overlap.'
        )
      if path in inner:
        _raise_nested(path, number, *inner[path])
      for end in range(1, len(path)):
        if path[:end] in origin:
          _raise_nested(path[:end], origin[path[:end]], number, path)
        inner.setdefault(path[:end], (number, path))
      origin[path] = number
      merged.append((path, leaf))
  return nnx.from_flat_state(sorted(merged, key=lambda entry: entry[0]))


def drop_intermediates(state: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
  """Returns the State without what a forward pass sowed into it.

  These are the leaves of type `nnx.Intermediate` and its subclasses, such as
  `nnx.Perturbation`. Works under `jax.jit`, so a step can drop them before it
  returns its State.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> state = nnx.State({'w': nnx.Param(1.0), 'h': nnx.Intermediate((2.0,))})
    >>> list(drop_intermediates(state))
    ['w']

  Args:
    state: A State with leaves of any kind.

  Returns:
    A State with the same leaf objects at the same paths.

  Raises:
    TypeError: `state` is no State.
  """
  _checks.check_state('drop_intermediates', state)
  return exclude(state, nnx.Intermediate)


def to_predicate(function: str, item: Filter) -> nnx.filterlib.Predicate:
  """Makes a predicate on (path, leaf) of a filter, having checked it.

  Args:
    function: The public function that was called, for the message.
    item: Any filter.

  Returns:
    The predicate.

  Raises:
    TypeError: `item` is no filter.
  """
  _check_filter(function, item)
  return nnx.filterlib.to_predicate(item)


def _flat(state: nnx.State[Any, Any]) -> nnx.FlatState[Any]:
  # Neither nnx.state nor nnx.filter_state takes a State on every flax version.
  return nnx.to_flat_state(state)


def _is_rest(item: Filter) -> bool:
  return item is ... or item is True


def _filtered(
  function: str,
  state: nnx.State[Any, Any],
  filters: tuple[Filter, ...],
  *,
  matching: bool,
) -> nnx.State[Any, Any]:
  _checks.check_state(function, state)
  if not filters:
    raise ValueError(f'{function}: give at least one filter.')
  predicate = to_predicate(function, filters)
  return nnx.from_flat_state(
    (path, leaf)
    for path, leaf in _flat(state)
    if bool(predicate(path, leaf)) is matching
  )


def _check_filter(function: str, item: Any) -> None:
  # nnx's own complaint about a bad filter is a broken format string.
  if isinstance(item, (list, tuple)):
    for part in item:
      _check_filter(function, part)
  elif not (
    item is None
    or item is ...
    or isinstance(item, (str, type, bool))
    or callable(item)
  ):
    raise TypeError(
      f'{function}: {item!r} of type {type(item).__name__} is no filter; '
      'expected a Variable type, a tag, a bool, `...`, None, a predicate on '
      '(path, leaf), or a tuple or list of these.'
    )


def _raise_nested(
  outer: _checks.Path,
  outer_number: int,
  inner_number: int,
  inner: _checks.Path,
) -> None:
  raise ValueError(
    f'merge: {_checks.path_text(outer)} is a leaf in state {outer_number}, but '
    f'state {inner_number} has {_checks.path_text(inner)} below it; States to '
    'merge must not overlap.'
  )
