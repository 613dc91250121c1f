"""The frozen op of a plain linear layer, for tests of methods."""

import jax
import jax.numpy as jnp


class LinearOp:
  """`x @ weight`; drops the inputs where `keep` is False."""

  def __init__(self, weight, keep=None, rate=0.0):
    self._weight = jnp.asarray(weight)
    self._keep = keep
    self._rate = rate

  @property
  def weight(self) -> jax.Array:
    return self._weight

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.using(self._weight, x)

  def using(self, weight: jax.Array, x: jax.Array) -> jax.Array:
    return x @ weight.astype(x.dtype)

  def low_rank(self, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return x @ a.astype(x.dtype) @ b.astype(x.dtype)

  def dropout(self, x: jax.Array) -> jax.Array:
    if self._keep is None:
      return x
    return jnp.where(self._keep, x / (1 - self._rate), 0)


class LookupOp(LinearOp):
  """`weight[ids]`."""

  def using(self, weight: jax.Array, x: jax.Array) -> jax.Array:
    return weight[x]

  def low_rank(self, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return a[x] @ b
