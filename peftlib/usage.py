"""Which inputs of a traced function take part in a contraction."""

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend import core

_CONTRACTIONS = frozenset(
  {'dot_general', 'conv_general_dilated', 'ragged_dot', 'ragged_dot_general'}
)
# What depends on an activation is one, whatever else it is made from.
_ACTIVATION = -1


def contracted_inputs(jaxpr: core.ClosedJaxpr, count: int) -> list[str]:
  """For each of the first `count` inputs the op that contracts it, or ''.

  An input is followed through everything that makes one array of it alone, of
  it and constants, or of several of the `count` (casts, transposes, slices,
  masks, norms of itself), and into the bodies of scans, conditionals, calls
  and derivative rules. A lookup of rows counts as a contraction with one-hot
  vectors.

  Args:
    jaxpr: From `jax.make_jaxpr`.
    count: How many of its inputs are asked for; the others are activations.
  """
  used = [''] * count
  colors = {
    v: i if i < count else _ACTIVATION for i, v in enumerate(jaxpr.jaxpr.invars)
  }
  _walk(jaxpr.jaxpr, colors, used)
  return used


def _walk(jaxpr: Any, colors: dict[Any, int], used: list[str]) -> None:
  for equation in jaxpr.eqns:
    known = [colors[v] for v in equation.invars if _is_known(v, colors)]
    if not known:
      continue
    bodies = list(_bodies(equation.params))
    for body in bodies:
      _enter(body, equation, colors, used)
    if bodies:
      continue
    name = equation.primitive.name
    weights = [i for i in known if i != _ACTIVATION]
    first = equation.invars[0]
    if name == 'gather' and _is_known(first, colors) and colors[first] >= 0:
      used[colors[first]] = used[colors[first]] or name
      color = _ACTIVATION
    elif name in _CONTRACTIONS:
      # Of two weights with each other: neither meets an activation.
      if _ACTIVATION in known or len(known) < len(equation.invars):
        for i in weights:
          used[i] = used[i] or name
        color = _ACTIVATION
      else:
        color = weights[0]
    else:
      color = _ACTIVATION if _ACTIVATION in known else weights[0]
    for outvar in equation.outvars:
      colors[outvar] = color


def _is_known(v: Any, colors: dict[Any, int]) -> bool:
  return not isinstance(v, core.Literal) and v in colors


def _enter(
  body: Any, equation: Any, colors: dict[Any, int], used: list[str]
) -> None:
  """Follows inputs into the body of an op that has one."""
  inner = getattr(body, 'jaxpr', body)
  outer = list(equation.invars)
  params = equation.params
  name = equation.primitive.name
  if name == 'while':
    if body is params['cond_jaxpr']:
      return
    outer = outer[params['cond_nconsts'] :]
  # A conditional's first input says which branch; the others are aligned.
  outer = outer[len(outer) - len(inner.invars) :]
  own = {
    v: colors[o]
    for v, o in zip(inner.invars, outer, strict=True)
    if _is_known(o, colors)
  }
  carried = _carried(equation, inner)
  # What a loop carries may be a constant, or a variable, only the first time.
  for v in carried:
    own.setdefault(v, _ACTIVATION)
  _walk(inner, own, used)
  fed_back = inner.outvars[: len(carried)]
  while changed := [
    v
    for v, result in zip(carried, fed_back, strict=True)
    if own[v] != _ACTIVATION
    and _is_known(result, own)
    and own[result] == _ACTIVATION
  ]:
    own |= dict.fromkeys(changed, _ACTIVATION)
    _walk(inner, own, used)
  for outvar, result in zip(equation.outvars, inner.outvars):
    if _is_known(result, own):
      colors[outvar] = own[result]


def _carried(equation: Any, inner: Any) -> list[Any]:
  """Inputs of a loop's body that its results are fed back to."""
  name = equation.primitive.name
  if name == 'while':
    return inner.invars[equation.params['body_nconsts'] :]
  if name != 'scan':
    return []
  # Constants, carry, slices; the latter and stacked results change shape.
  count = sum(
    outer.aval.shape == result.aval.shape
    for outer, result in zip(equation.outvars, inner.outvars, strict=True)
  )
  whole = sum(
    outer.aval.shape == v.aval.shape
    for outer, v in zip(equation.invars, inner.invars, strict=True)
  )
  return inner.invars[whole - count : whole]


def _bodies(params: Mapping[str, Any]) -> Iterator[Any]:
  for value in params.values():
    for x in value if isinstance(value, tuple | list) else (value,):
      if isinstance(x, core.ClosedJaxpr | core.Jaxpr):
        yield x
