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
    return cls.loop.run()

  @parameterized.parameters(*CHECKS)
  def test_under(self, check):
    with CHECKS[check]():
      self.loop.run(steps=2)
