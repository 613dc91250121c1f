"""Pure transformations of `flax.nnx` States; jax, flax and chex alone."""

from transforms import filtering
from transforms import reshard as reshard_lib

PathMatches = filtering.PathMatches
drop_intermediates = filtering.drop_intermediates
exclude = filtering.exclude
merge = filtering.merge
mesh_context = reshard_lib.mesh_context
partition = filtering.partition
select = filtering.select

__all__ = (
  'PathMatches',
  'drop_intermediates',
  'exclude',
  'merge',
  'mesh_context',
  'partition',
  'select',
)
