"""Ops that contract an activation with a weight, seen as matrix products."""

from collections.abc import Sequence
import dataclasses
import math
import string
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Contraction:
  """An op that contracts an activation with a weight, as einsum subscripts.

  Attributes:
    x: Subscripts of the activation, one letter a dimension.
    weight: Subscripts of the weight.
    out: Subscripts of the result.
  """

  x: str
  weight: str
  out: str

  @property
  def batch(self) -> str:
    """Letters of the weight that are in all three."""
    return ''.join(c for c in self.weight if c in self.x and c in self.out)

  @property
  def contracted(self) -> str:
    """Letters of the weight that are summed over."""
    return ''.join(c for c in self.weight if c in self.x and c not in self.out)

  @property
  def remaining(self) -> str:
    """Letters that the weight alone has."""
    return ''.join(c for c in self.weight if c not in self.x)

  @property
  def dropped(self) -> str:
    """Letters of the weight alone that the result hasn't: of extent 1."""
    return ''.join(c for c in self.remaining if c not in self.out)

  @property
  def leading(self) -> str:
    """Letters that come from the activation alone."""
    return ''.join(c for c in self.x if c not in self.weight and c in self.out)

  @property
  def summed(self) -> str:
    """Letters of the activation alone that the result hasn't."""
    return ''.join(
      c for c in self.x if c not in self.weight and c not in self.out
    )

  def axes(self, letters: str) -> tuple[int, ...]:
    """Axes of the weight that carry these letters."""
    return tuple(self.weight.index(c) for c in letters)

  def permuted(self, axes: Sequence[int]) -> 'Contraction':
    """The same op on the weight whose axis `axes[i]` is this one's axis i."""
    letters = [''] * len(self.weight)
    for letter, axis in zip(self.weight, axes, strict=True):
      letters[axis] = letter
    return Contraction(self.x, ''.join(letters), self.out)

  def x_matrix(self, x: jax.Array) -> jax.Array:
    """`x` as (*batch, *leading, inputs)."""
    if self.summed:
      x = x.sum(tuple(self.x.index(c) for c in self.summed))
    letters = ''.join(c for c in self.x if c not in self.summed)
    x = transposed(x, letters, self.batch + self.leading + self.contracted)
    return merged(x, len(self.contracted))

  def y_matrix(self, y: jax.Array) -> jax.Array:
    """The result as (*batch, *leading, outputs)."""
    y = y.reshape(*y.shape, *(1 for _ in self.dropped))
    y = transposed(
      y, self.out + self.dropped, self.batch + self.leading + self.remaining
    )
    return merged(y, len(self.remaining))

  def y_from_matrix(self, y: jax.Array, weight: Sequence[int]) -> jax.Array:
    """What `y_matrix` did, undone; `weight` is the weight's shape."""
    remaining = [weight[i] for i in self.axes(self.remaining)]
    y = y.reshape(*y.shape[:-1], *remaining)
    y = transposed(
      y, self.batch + self.leading + self.remaining, self.out + self.dropped
    )
    return y.reshape(y.shape[: len(self.out)])


def transposed(x: jax.Array, before: str, after: str) -> jax.Array:
  """`x` with its axes in another order; itself if the order is the same."""
  if before == after:
    return x
  return x.transpose([before.index(c) for c in after])


def merged(x: jax.Array, count: int) -> jax.Array:
  """`x` with its last `count` axes as one."""
  if count == 1:
    return x
  lead = x.ndim - count
  return x.reshape(*x.shape[:lead], math.prod(x.shape[lead:]))


def dot(x: jax.Array, weight: jax.Array, precision: Any = None) -> jax.Array:
  """`x @ weight` for (..., rows) and (rows, columns), fast on every backend."""
  weight = weight.astype(x.dtype)
  lead = x.shape[:-1]
  if x.ndim > 2 and _leading_axes_unsharded(x, len(lead)):
    # One plain matrix product: the gradient of `weight` would otherwise
    # contract several axes at once, which XLA runs 2 to 4 times slower on CPU.
    rows = x.reshape(-1, x.shape[-1])
    out = jnp.dot(rows, weight, precision=precision)
    return out.reshape(*lead, weight.shape[-1])
  return jnp.dot(x, weight, precision=precision)


def dot_narrow(
  x: jax.Array, weight: jax.Array, precision: Any = None
) -> jax.Array:
  """`dot` with a weight of many rows and few columns."""
  if jax.default_backend() != 'cpu' or weight.shape[0] <= weight.shape[1]:
    return dot(x, weight, precision)
  # The gradient then is (columns, rows), which XLA makes up to 5 times faster
  # on CPU than (rows, columns); the barrier keeps it from turning that around.
  turned = jax.lax.optimization_barrier(weight.astype(x.dtype).T)
  return dot(x, turned.T, precision)


def _leading_axes_unsharded(x: jax.Array, count: int) -> bool:
  """Whether axes 1 to count can be merged into axis 0 on an explicit mesh."""
  sharding = getattr(jax.typeof(x), 'sharding', None)
  spec = tuple(getattr(sharding, 'spec', ()) or ())
  return all(axis is None for axis in spec[1:count])


def of_dot_general(
  lhs_ndim: int, rhs_ndim: int, dimension_numbers: Any
) -> tuple[str, str, str]:
  """Subscripts of both operands and of the result of a `lax.dot_general`."""
  (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
  letters = iter(string.ascii_letters)
  left: list[str] = [''] * lhs_ndim
  right: list[str] = [''] * rhs_ndim
  out: list[str] = []
  for i, j in zip(lhs_batch, rhs_batch, strict=True):
    left[i] = right[j] = next(letters)
    out.append(left[i])
  for i, j in zip(lhs_contracted, rhs_contracted, strict=True):
    left[i] = right[j] = next(letters)
  for side in (left, right):
    for i, letter in enumerate(side):
      if not letter:
        side[i] = next(letters)
        out.append(side[i])
  return ''.join(left), ''.join(right), ''.join(out)


def of_matmul(
  lhs: tuple[int, ...], rhs: tuple[int, ...]
) -> tuple[str, str, str]:
  """Subscripts of a `jnp.matmul` of operands of these shapes.

  A batch axis of extent 1 that meets a longer one has a letter of its own,
  which the result hasn't.
  """
  letters = iter(string.ascii_lowercase)
  left, right, out = '', '', ''
  lhs_batch, rhs_batch = lhs[:-2], rhs[:-2]
  for i in range(max(len(lhs_batch), len(rhs_batch)), 0, -1):
    of_left = lhs_batch[-i] if i <= len(lhs_batch) else None
    of_right = rhs_batch[-i] if i <= len(rhs_batch) else None
    shared = next(letters)
    longer = max(of_left or 1, of_right or 1)
    out += shared
    if of_left is not None:
      left += shared if of_left == longer else next(letters)
    if of_right is not None:
      right += shared if of_right == longer else next(letters)
  rows = '' if len(lhs) == 1 else 'X'
  columns = '' if len(rhs) == 1 else 'Y'
  return f'{left}{rows}K', f'{right}K{columns}', f'{out}{rows}{columns}'


def of_tensordot(
  lhs_ndim: int, rhs_ndim: int, axes: Any
) -> tuple[str, str, str]:
  """Subscripts of a `jnp.tensordot`."""
  if isinstance(axes, int):
    contracted: Any = (
      tuple(range(lhs_ndim - axes, lhs_ndim)),
      tuple(range(axes)),
    )
  else:
    contracted = tuple(
      (side,) if isinstance(side, int) else tuple(side) for side in axes
    )
  normal = (
    tuple(i % lhs_ndim for i in contracted[0]),
    tuple(i % rhs_ndim for i in contracted[1]),
  )
  return of_dot_general(lhs_ndim, rhs_ndim, (normal, ((), ())))


def of_einsum(
  einsum_str: str, lhs_ndim: int, rhs_ndim: int
) -> tuple[str, str, str]:
  """Subscripts of an einsum of two operands, ellipses written out."""
  inputs, arrow, out = einsum_str.replace(' ', '').partition('->')
  left, right = inputs.split(',')
  used = set(inputs + out)
  unused = [c for c in string.ascii_letters if c not in used]
  widths = [
    ndim - len(side) + 3 if '...' in side else 0
    for side, ndim in ((left, lhs_ndim), (right, rhs_ndim))
  ]
  ellipsis = ''.join(unused[: max(widths)])
  if not arrow:
    counts = (left + right).replace('.', '')
    out = ('...' if max(widths) else '') + ''.join(
      sorted(c for c in set(counts) if counts.count(c) == 1)
    )
  left = left.replace('...', ellipsis[len(ellipsis) - widths[0] :])
  right = right.replace('...', ellipsis[len(ellipsis) - widths[1] :])
  return left, right, out.replace('...', ellipsis)
