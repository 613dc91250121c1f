"""Composing State transformations into one."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from transforms import _checks

type StateFn = Callable[[nnx.State[Any, Any]], nnx.State[Any, Any]]
type GraphStateFn = Callable[
  [nnx.GraphDef[Any], nnx.State[Any, Any]],
  tuple[nnx.GraphDef[Any], nnx.State[Any, Any]],
]


class _Lifted:
  """A `(graphdef, State)` function that leaves the GraphDef alone."""

  def __init__(self, fn: StateFn):
    self.fn = fn
    self.__name__ = _name(fn)

  def __call__(
    self, graphdef: nnx.GraphDef[Any], state: nnx.State[Any, Any]
  ) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
    return graphdef, self.fn(state)


def lift(fn: StateFn) -> GraphStateFn:
  """Makes a function on States one on `(graphdef, State)`.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> from transforms import filtering
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> clean = lift(filtering.drop_intermediates)
    >>> graphdef, state = clean(*nnx.split(model))
    >>> list(state)
    ['bias', 'kernel']

  Args:
    fn: From a State to a State of the same structure.

  Returns:
    A function that passes the GraphDef through.

  Raises:
    TypeError: `fn` can't be called.
  """
  if not callable(fn):
    raise TypeError(f'lift: {fn!r} cannot be called.')
  return _Lifted(fn)


def chain(*links: Callable[..., Any]) -> Callable[..., Any]:
  """Composes transformations; the first one is applied first.

  Links are functions on States, or functions on `(graphdef, State)`, made by
  `lift` where need be. A chain is a function of the same kind: it can be a link
  itself, be jitted as a whole, and be traced abstractly.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> from transforms import filtering
    >>> state = nnx.State({'w': nnx.Param(1.0), 'a': nnx.LoRAParam(2.0)})
    >>> adapters = chain(
    ...   filtering.drop_intermediates,
    ...   lambda state: filtering.select(state, nnx.LoRAParam),
    ... )
    >>> list(adapters(state))
    ['a']

  Args:
    *links: Functions from a State to a State, or from a GraphDef and a State to
      both. Without any the chain returns what it's given.

  Returns:
    A function that takes and returns a State, or a GraphDef and a State. What a
    link raises says, in a note, which link it was; a link that returns
    something else makes it raise TypeError.

  Raises:
    TypeError: A link can't be called.
  """
  for number, link in enumerate(links):
    if not callable(link):
      raise TypeError(f'chain: link {number}, {link!r}, cannot be called.')

  def chained(*args: Any) -> Any:
    _check_arguments(args)
    for number, link in enumerate(links):
      where = f'chain: link {number} of {len(links)}, {_name(link)}'
      try:
        result = link(*args)
      except Exception as error:
        error.add_note(f'{where}, failed.')
        raise
      results = result if len(args) == 2 else (result,)
      if not _is_like(args, results):
        expected = 'a State' if len(args) == 1 else '(graphdef, State)'
        raise TypeError(
          f'{where}, returned {_kind(result)}; expected {expected}.'
        )
      args = tuple(results)
    return args if len(args) == 2 else args[0]

  return chained


def _check_arguments(args: tuple[Any, ...]) -> None:
  if len(args) == 2 and isinstance(args[0], nnx.GraphDef):
    _checks.check_state('chain', args[1])
  elif len(args) == 1:
    _checks.check_state('chain', args[0])
  else:
    _checks.check_no_module('chain', *args[1:])
    raise TypeError(
      f'chain: expected a State, or a GraphDef and a State, got {_kind(args)}.'
    )


def _is_like(args: tuple[Any, ...], results: Any) -> bool:
  if not isinstance(results, tuple) or len(results) != len(args):
    return False
  if not isinstance(results[-1], nnx.State):
    return False
  return len(args) == 1 or isinstance(results[0], nnx.GraphDef)


def _kind(value: Any) -> str:
  if isinstance(value, tuple):
    return '(' + ', '.join(map(_kind, value)) + ')'
  return type(value).__name__


def _name(fn: Any) -> str:
  name = getattr(fn, '__name__', None)
  if name is None and hasattr(fn, 'func'):
    # functools.partial has no name of its own.
    return _name(fn.func)
  return str(name) if name is not None else type(fn).__name__
