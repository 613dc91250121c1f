"""OFT: inputs rotated block by block before the frozen weight."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from peftlib.methods import method


@method.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Oft(method.Method):
  """`x @ r @ w`, where `r` is a block-diagonal rotation.

  Each block is the Cayley transform of a skew-symmetric matrix, of which the
  upper triangle is trained.

  Example:
    >>> Oft(block_size=4).variables(method.Weight((8,), (6,)))['oft_r'].axes
    (2, 6)

  Attributes:
    block_size: Width of a block; divides the inputs.
    cayley_neumann: Whether the transform is a truncated Neumann series instead
      of a solved system: (nearly) a rotation, and faster (Qiu et al., 2025).
    neumann_terms: Number of its terms, at least 1.
    constrained: Whether blocks are kept within `epsilon` of the identity. The
      projection is part of the forward pass; gradients pass it unchanged.
    epsilon: How far they may go, divided by the root of their number.
    block_share: Whether all blocks are one.

  References:
    Qiu et al., Controlling Text-to-Image Diffusion by Orthogonal Finetuning,
    2023; Orthogonal Finetuning Made Scalable, 2025.
  """

  name: ClassVar[str] = 'oft'
  linear_apply: ClassVar[bool] = True
  reads_weight: ClassVar[bool] = True
  starts_from_weight: ClassVar[bool] = False

  block_size: int = 32
  cayley_neumann: bool = True
  neumann_terms: int = 5
  constrained: bool = False
  epsilon: float = 6e-5
  block_share: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    method.check_no_dropout(self)
    method.check_field(
      self,
      'block_size',
      method.is_int(self.block_size) and self.block_size >= 2,
      'an int >= 2',
    )
    method.check_positive(self, 'neumann_terms')
    method.check_scale(self, 'epsilon')

  def check(self, weight: method.Weight) -> None:
    """Refuses weights that the blocks don't divide, and convolutions."""
    if weight.kind != 'linear':
      raise ValueError(
        f'Oft: {weight.label} is of kind {weight.kind!r}; only the inputs of'
        ' linear layers are rotated.'
      )
    if weight.rows % self.block_size:
      near = [n for n in range(2, weight.rows + 1) if weight.rows % n == 0]
      near.sort(key=lambda n: abs(n - self.block_size))
      raise ValueError(
        f'Oft.block_size={self.block_size}: does not divide the {weight.rows}'
        f' inputs of {weight.label}; nearest that do: {sorted(near[:3])}.'
      )

  def variables(self, weight: method.Weight) -> dict[str, method.VariableSpec]:
    """`oft_r` (blocks, block_size * (block_size - 1) / 2)."""
    blocks = 1 if self.block_share else weight.rows // self.block_size
    entries = self.block_size * (self.block_size - 1) // 2
    return {'oft_r': method.VariableSpec((blocks, entries))}

  def init(
    self, key: jax.Array, weight: method.Weight, value: jax.Array
  ) -> dict[str, jax.Array]:
    """Zeros: no rotation."""
    return {'oft_r': jnp.zeros(self.variables(weight)['oft_r'].shape(weight))}

  def apply(
    self, x: jax.Array, op: method.FrozenOp, v: method.Variables
  ) -> jax.Array:
    """The base's op on the rotated input."""
    blocks = x.reshape(*x.shape[:-1], -1, self.block_size)
    rotation = self._rotation(v, blocks.shape[-2])
    # In the dtype of the variables: near the identity, less would be lost.
    rotated = jnp.einsum('...rk,rkc->...rc', blocks, rotation)
    return op(rotated.reshape(x.shape).astype(x.dtype))

  def merge(self, value: jax.Array, v: method.Variables) -> jax.Array:
    """Rotates the rows of the weight."""
    blocks = value.reshape(-1, self.block_size, value.shape[-1])
    rotation = self._rotation(v, blocks.shape[0])
    rotated = jnp.einsum('rkc,rco->rko', rotation, blocks)
    return rotated.reshape(value.shape).astype(value.dtype)

  def _rotation(self, v: method.Variables, count: int) -> jax.Array:
    entries = v['oft_r']
    rows, columns = jnp.triu_indices(self.block_size, 1)
    upper = jnp.zeros(
      (entries.shape[0], self.block_size, self.block_size), entries.dtype
    )
    upper = upper.at[:, rows, columns].set(entries)
    skew = upper - upper.swapaxes(-1, -2)
    if self.constrained:
      skew = skew + jax.lax.stop_gradient(self._projected(skew) - skew)
    identity = jnp.eye(self.block_size, dtype=entries.dtype)
    if self.cayley_neumann:
      rotation = self._series(skew, identity)
    else:
      # x @ (1 + q) = 1 - q, by its transpose.
      rotation = jnp.linalg.solve(
        (identity + skew).swapaxes(-1, -2), (identity - skew).swapaxes(-1, -2)
      ).swapaxes(-1, -2)
    if self.block_share:
      rotation = jnp.broadcast_to(rotation, (count, *rotation.shape[1:]))
    return rotation

  def _series(self, skew: jax.Array, identity: jax.Array) -> jax.Array:
    """1 + 2 q + 2 q^2 + ... + q^(n - 1), the last term once."""
    total = jnp.broadcast_to(identity, skew.shape)
    if self.neumann_terms == 1:
      return total
    total = total + 2 * skew
    if self.neumann_terms == 2:
      return total
    power = skew @ skew
    total = total + 2 * power
    for _ in range(3, self.neumann_terms - 1):
      power = power @ skew
      total = total + 2 * power
    return total + power @ skew

  def _projected(self, skew: jax.Array) -> jax.Array:
    limit = self.epsilon / math.sqrt(skew.shape[0])
    norm = jnp.linalg.norm(skew, axis=(-2, -1), keepdims=True)
    safe = jnp.where(norm > 0, norm, 1.0)
    return jnp.where(norm <= limit, skew, limit * skew / safe)
