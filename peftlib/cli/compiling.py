"""A jitted step, compiled where it can be timed."""

from collections.abc import Callable, Mapping
import time
from typing import Any

from flax import nnx
import jax

import peftlib
from peftlib.cli import malloc

# Seconds. As often as Linux by default looks for huge pages to make: it fills
# those that are all holes again, after `malloc.trim` emptied them.
_TRIM_EVERY = 10.0


class Step:
  """A jitted step, compiled once for each shape of batch, and timed.

  Attributes:
    seconds: Time that tracing and compiling took so far.
  """

  def __init__(self, step: Callable[..., Any]) -> None:
    self.seconds = 0.0
    self._step: Any = step
    self._trimmed = time.monotonic()
    self._compiled: dict[Any, Callable[..., Any]] = {}

  def compile(
    self,
    state: peftlib.TrainState,
    frozen: nnx.State[Any, Any],
    batch: Mapping[str, Any],
  ) -> Callable[..., Any]:
    """The step for arguments of these shapes, compiled if need be."""
    shapes = tuple((k, v.shape) for k, v in sorted(batch.items()))
    if shapes not in self._compiled:
      began = time.perf_counter()
      lowered = self._step.lower(state, frozen, batch)
      self._compiled[shapes] = lowered.compile()
      del lowered
      # What the compiler leaves is a tenth of a gigabyte or two, and would
      # stay beside all that the step needs.
      self._trim()
      self.seconds += time.perf_counter() - began
    return self._compiled[shapes]

  def __call__(
    self,
    state: peftlib.TrainState,
    frozen: nnx.State[Any, Any],
    batch: Mapping[str, Any],
  ) -> tuple[peftlib.TrainState, dict[str, jax.Array]]:
    """Takes a step; its new state has the shardings of the old one."""
    compiled = self.compile(state, frozen, batch)
    if time.monotonic() - self._trimmed > _TRIM_EVERY:
      self._trim()
    placed = jax.tree.map(lambda x: x.sharding, state)
    state, metrics = compiled(state, frozen, batch)
    # The compiler may have put results elsewhere than it wants them next.
    return jax.device_put(state, placed), metrics

  def _trim(self) -> None:
    malloc.trim()
    self._trimmed = time.monotonic()
