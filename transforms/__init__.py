"""Pure transformations of `flax.nnx` States; jax, flax and chex alone."""

from transforms import filtering
from transforms import metadata
from transforms import reshard as reshard_lib
from transforms import scan_axis

PathMatches = filtering.PathMatches
add_scan_axis = scan_axis.add_scan_axis
drop_intermediates = filtering.drop_intermediates
exclude = filtering.exclude
merge = filtering.merge
mesh_context = reshard_lib.mesh_context
move_scan_axis = scan_axis.move_scan_axis
partition = filtering.partition
remove_scan_axis = scan_axis.remove_scan_axis
select = filtering.select
stack_layers = scan_axis.stack_layers
unstack_layers = scan_axis.unstack_layers
update_sharding_metadata = metadata.update_sharding_metadata

__all__ = (
  'PathMatches',
  'add_scan_axis',
  'drop_intermediates',
  'exclude',
  'merge',
  'mesh_context',
  'move_scan_axis',
  'partition',
  'remove_scan_axis',
  'select',
  'stack_layers',
  'unstack_layers',
  'update_sharding_metadata',
)
