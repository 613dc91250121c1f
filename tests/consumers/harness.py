"""Runs a research loop as it is, and under jax's own checks."""

import functools
from typing import Any

from absl.testing import parameterized
import chex
import jax

# Before the backend starts: afterwards it is too late.
chex.set_n_cpu_devices(8)

CHECKS = {'leaks': jax.checking_leaks, 'nans': lambda: jax.debug_nans(True)}


class LoopTestCase(parameterized.TestCase):
  """The tests of one loop.

  Attributes:
    loop: Module of the loop, which has `run(steps)`.
  """

  loop: Any = None

  @classmethod
  @functools.cache
  def result(cls) -> dict[str, Any]:
    """What the whole loop returns, run once for all tests of the class."""
    return cls.run_loop()

  @classmethod
  def run_loop(cls, **arguments: Any) -> dict[str, Any]:
    return cls.loop.run(**arguments)

  def test_no_nan(self):
    with CHECKS['nans']():
      self.run_loop(steps=2)


class LeakCheckedTestCase(LoopTestCase):
  """As `LoopTestCase`, and no tracer outlives its trace."""

  def test_no_leak(self):
    with CHECKS['leaks']():
      self.run_loop(steps=2)
