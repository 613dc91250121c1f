"""Checks at the border of every public function of this package.

Each check runs before anything is computed or allocated, and each message
starts with the name of the function that the caller used.
"""

from collections.abc import Sequence
from typing import Any

from flax import nnx

type Path = tuple[Any, ...]


def path_text(path: Sequence[Any]) -> str:
  """Returns the text that stands for a path in every message and pattern.

  Args:
    path: The keys from the root of a State to a leaf.

  Returns:
    The keys joined by `/`, for instance `layers/0/kernel`.
  """
  return '/'.join(map(str, path))


def listed(texts: Sequence[str], shown: int = 5) -> str:
  """Returns the first texts for a message, and how many more there are."""
  more = len(texts) - shown
  return '; '.join(texts[:shown]) + (f'; and {more} more' if more > 0 else '')


def check_no_module(function: str, *trees: Any) -> None:
  """Raises TypeError if a mutable module (or its GraphDef) was handed in.

  Args:
    function: The public function that was called.
    *trees: What it was called with.

  Raises:
    TypeError: One of `trees` is an `nnx.Module` or an `nnx.GraphDef`.
  """
  for tree in trees:
    if isinstance(tree, nnx.Module):
      raise TypeError(
        f'{function}: got the nnx.Module {type(tree).__name__}; nnx.split it '
        'first and hand in the State.'
      )
    if isinstance(tree, nnx.GraphDef):
      raise TypeError(
        f'{function}: got an nnx.GraphDef; hand in the State that nnx.split '
        'returned with it.'
      )


def check_state(function: str, state: Any) -> None:
  """Raises TypeError unless `state` is an `nnx.State`.

  Args:
    function: The public function that was called.
    state: What it was called with.

  Raises:
    TypeError: `state` is an `nnx.Module` or anything else but a State.
  """
  check_no_module(function, state)
  if not isinstance(state, nnx.State):
    raise TypeError(
      f'{function}: expected an nnx.State, got {type(state).__name__}.'
    )
