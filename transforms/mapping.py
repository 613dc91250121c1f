"""Mapping over Variables, and counting what a State holds."""

from collections.abc import Callable
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from transforms import _checks
from transforms import _leaves
from transforms import filtering


def map_variables(
  f: Callable[[Any], Any],
  state: nnx.State[Any, Any],
  filters: filtering.Filter = ...,
) -> nnx.State[Any, Any]:
  """Maps a function over the selected leaves of a State.

  Used in: peftlib/guide/your_own_method.md.

  Example:
    >>> state = nnx.State({'w': nnx.Param(1.0), 'a': nnx.LoRAParam(2.0)})
    >>> zeroed = map_variables(
    ...   lambda variable: variable.replace(0.0), state, nnx.LoRAParam
    ... )
    >>> zeroed['w'] is state['w'], zeroed['a'].get_raw_value()
    (True, 0.0)

  Args:
    f: From a Variable, or whatever the State has as a leaf, to a new one.
    state: A State with leaves of any kind.
    filters: An nnx filter for the leaves to map.

  Returns:
    A State with the results; all other leaves are the very same objects.

  Raises:
    TypeError: `state` is no State, the filter is no filter, or `f` raised it.
    ValueError: `f` raised it; the path of the leaf is put in front.
  """
  _checks.check_state('map_variables', state)
  return _mapped('map_variables', f, state, filters)


def cast(
  state: nnx.State[Any, Any], dtype: Any, filters: filtering.Filter = ...
) -> nnx.State[Any, Any]:
  """Casts the floating-point arrays of the selected leaves.

  Integers, booleans and keys are left alone: casting those changes what they
  mean. So are the quantized values of a composite value, but not its scales.

  Used in: peftlib/guide/many_devices.md.

  Example:
    >>> state = nnx.State({'w': nnx.Param(jnp.ones(2)), 'n': nnx.Variable(3)})
    >>> cast(state, jnp.bfloat16)['w'].dtype == jnp.bfloat16
    True

  Args:
    state: A State of arrays.
    dtype: A floating-point dtype.
    filters: An nnx filter for the leaves to cast.

  Returns:
    A State with new Variables where the dtype changed, and the very same
    objects elsewhere.

  Raises:
    TypeError: `state` is no State, the filter is no filter, or a value is a
      sharding.
    ValueError: `dtype` isn't a floating-point one.
  """
  _checks.check_state('cast', state)
  wanted = jnp.dtype(dtype)
  if not jnp.issubdtype(wanted, jnp.floating):
    raise ValueError(f'cast: {wanted} is no floating-point dtype.')

  def convert(leaf: Any) -> Any:
    value = _leaves.raw_value(leaf)
    result = _leaves.map_parts(lambda part: _converted(part, wanted), value)
    if result is value:
      return leaf
    return leaf.replace(result) if isinstance(leaf, nnx.Variable) else result

  return _mapped('cast', convert, state, filters)


def param_count(state: nnx.State[Any, Any], prefix: str = '') -> int:
  """Returns the number of elements of all arrays below a path.

  Used in: peftlib/guide/your_own_model.md.

  Example:
    >>> state = nnx.State({'mlp': {'w': nnx.Param(jnp.ones((2, 3)))}})
    >>> param_count(state), param_count(state, 'mlp/w')
    (6, 6)

  Args:
    state: A State of arrays, abstract ones too.
    prefix: Keys joined by `/`; all of the State if empty.

  Returns:
    The count. A key of a PRNG counts as one element.

  Raises:
    TypeError: `state` is no State, or a value is a sharding.
    ValueError: Nothing is below `prefix`.
  """
  return sum(map(_leaves.size, _parts('param_count', state, prefix)))


def param_bytes(state: nnx.State[Any, Any], prefix: str = '') -> int:
  """Returns the bytes in memory of all arrays below a path.

  Arrays of less than 8 bits an element are counted as they are stored, packed:
  `.nbytes` says a whole byte an element. An array that's sharded or replicated
  counts once.

  Used in: peftlib/guide/your_own_model.md.

  Example:
    >>> state = nnx.State({'q': nnx.Param(jnp.ones((2, 3), jnp.int4))})
    >>> param_bytes(state)
    3

  Args:
    state: A State of arrays, abstract ones too.
    prefix: Keys joined by `/`; all of the State if empty.

  Returns:
    The number of bytes.

  Raises:
    TypeError: `state` is no State, or a value is a sharding.
    ValueError: Nothing is below `prefix`.
  """
  return sum(map(array_bytes, _parts('param_bytes', state, prefix)))


def array_bytes(part: Any) -> int:
  """Returns the bytes of one array, concrete or abstract, as it's stored.

  Args:
    part: An array, an abstract value or a Python scalar.

  Returns:
    The number of bytes; a part of a byte is rounded up.
  """
  return math.ceil(_leaves.size(part) * _bits(_leaves.dtype(part)) / 8)


def _bits(dtype: Any) -> int:
  if jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == np.bool_:
    return int(dtype.itemsize * 8)
  if jnp.issubdtype(dtype, jnp.integer):
    return int(jnp.iinfo(dtype).bits)
  if jnp.issubdtype(dtype, jnp.floating):
    return int(jnp.finfo(dtype).bits)
  return int(np.dtype(dtype).itemsize * 8)


def _parts(function: str, state: nnx.State[Any, Any], prefix: str) -> list[Any]:
  _checks.check_state(function, state)
  wanted = prefix.split('/') if prefix else []
  found: list[Any] = []
  matched = not wanted
  for path, leaf in nnx.to_flat_state(state):
    if list(map(str, path))[: len(wanted)] == wanted:
      matched = True
      found += _leaves.parts(_leaves.raw_value(leaf))
  if not matched:
    keys = sorted({str(key) for key in state})
    raise ValueError(
      f'{function}: nothing is below {prefix!r}; at the top there are: '
      f'{", ".join(keys) or "no keys"}.'
    )
  if any(map(_leaves.is_sharding, found)):
    raise TypeError(f'{function}: expected a State of arrays, not shardings.')
  return found


def _converted(part: Any, dtype: Any) -> Any:
  if _leaves.is_sharding(part):
    raise TypeError('it is a sharding; expected an array.')
  have = _leaves.dtype(part)
  if have == dtype or not jnp.issubdtype(have, jnp.floating):
    return part
  if isinstance(part, jax.ShapeDtypeStruct):
    return part.update(dtype=dtype)
  if isinstance(part, (jax.Array, np.ndarray)):
    return part.astype(dtype)
  return jnp.asarray(part, dtype)


def _mapped(
  function: str,
  f: Callable[[Any], Any],
  state: nnx.State[Any, Any],
  filters: Any,
) -> nnx.State[Any, Any]:
  predicate = filtering.to_predicate(function, filters)
  results = []
  for path, leaf in nnx.to_flat_state(state):
    if predicate(path, leaf):
      with _leaves.located(function, path, leaf):
        leaf = f(leaf)
    results.append((path, leaf))
  return nnx.from_flat_state(results)
