"""Checks of arguments that every public function makes."""

from collections.abc import Iterable
from typing import Any

from flax import nnx


def check_split(function: str, graphdef: Any, state: Any) -> None:
  """Raises TypeError unless a model came as `(graphdef, state)`."""
  for name, value in (('graphdef', graphdef), ('state', state)):
    if isinstance(value, nnx.Module):
      raise TypeError(
        f'{function}: {name} is a {type(value).__name__}, an nnx.Module;'
        ' nnx.split it first and hand over graphdef and state.'
      )
  check_state(function, 'state', state)
  if not isinstance(graphdef, nnx.GraphDef):
    raise TypeError(
      f'{function}: graphdef is a {type(graphdef).__name__}; it must be the'
      ' nnx.GraphDef that nnx.split returns.'
    )


def check_state(function: str, name: str, state: Any) -> None:
  """Raises TypeError unless `state` is an nnx.State."""
  if isinstance(state, nnx.Module):
    raise TypeError(
      f'{function}: {name} is a {type(state).__name__}, an nnx.Module;'
      ' nnx.split it first.'
    )
  if not isinstance(state, nnx.State):
    raise TypeError(
      f'{function}: {name} is a {type(state).__name__}; it must be an'
      ' nnx.State, as nnx.split returns it.'
    )


def some(items: Iterable[str], count: int = 5) -> str:
  """Names for a message: the first ones, and how many more there are."""
  items = list(items)
  if not items:
    return 'none'
  more = f' and {len(items) - count} more' if len(items) > count else ''
  return f'{", ".join(items[:count])}{more}'
