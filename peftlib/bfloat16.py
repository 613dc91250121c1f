"""Products of bfloat16 matrices on processors that have no units for them."""

from collections.abc import Callable
import functools
import pathlib

import jax
import jax.numpy as jnp

Product = Callable[[jax.Array, jax.Array], jax.Array]

# With fewer rows the conversion of the weight costs more than it gains.
MIN_ROWS = 256
# x86's names, and ARM's.
_UNITS = frozenset({'avx512_bf16', 'amx_bf16', 'bf16'})


def widened(op: Product, rows: int) -> Product:
  """A product of an activation and a weight, made the faster way.

  XLA:CPU multiplies bfloat16 matrices up to a third slower than float32 ones
  where the processor has no units for them. Products of two bfloat16 numbers
  are exact in float32 and are summed in it either way, so that only the order
  of sums may differ. A LoRA step of SmolLM2-135M, 4x128, takes 0.99 to 1.08 of
  the float32 step's time so; the rest goes into conversions.

  Args:
    op: Called with the activation and the weight.
    rows: Rows of the activation, seen as a matrix.

  Returns:
    `op` itself, or, from `MIN_ROWS` rows on and where `slow_here`, one that
    converts operands of bfloat16 to float32, and the result to the dtype that
    `op` gives.
  """
  if rows < MIN_ROWS or not slow_here():
    return op

  def wide(x: jax.Array, weight: jax.Array) -> jax.Array:
    if not x.dtype == weight.dtype == jnp.bfloat16:
      return op(x, weight)
    dtype = jax.eval_shape(op, x, weight).dtype
    out = op(x.astype(jnp.float32), weight.astype(jnp.float32))
    return out.astype(dtype)

  # Kept, the float32 weights of all layers of a scan would be its residuals.
  return jax.checkpoint(wide)


def slow_here() -> bool:
  """Whether bfloat16 products are slower than float32 ones on this backend.

  Of the default backend, as a model that is being traced doesn't know for which
  one: what a CPU's process compiles for another device has float32 products.
  """
  return jax.default_backend() == 'cpu' and not has_units()


@functools.cache
def has_units() -> bool:
  """Whether the processor multiplies bfloat16; true where it doesn't say.

  XLA compiles for the features that LLVM finds by the CPUID instruction, and
  doesn't tell them. Linux lists the same ones in /proc/cpuinfo; other systems
  have no such file, and there products stay as they are.
  """
  try:
    cpuinfo = pathlib.Path('/proc/cpuinfo').read_text()
  except OSError:
    return True
  return lists_units(cpuinfo)


def lists_units(cpuinfo: str) -> bool:
  """Whether the text of /proc/cpuinfo names units for bfloat16.

  Args:
    cpuinfo: The text. x86 calls the line of the features flags, ARM Features;
      where no line is called so, units are taken to be there.
  """
  for line in cpuinfo.splitlines():
    name, _, values = line.partition(':')
    if name.strip() in ('flags', 'Features'):
      return not _UNITS.isdisjoint(values.split())
  return True
