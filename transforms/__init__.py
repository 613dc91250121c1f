"""Pure transformations of `flax.nnx` States; jax, flax and chex alone."""

from transforms import compose
from transforms import filtering
from transforms import inspecting
from transforms import mapping
from transforms import metadata
from transforms import offload
from transforms import partitioning
from transforms import reshard as reshard_lib
from transforms import scan_axis

Difference = inspecting.Difference
PathMatches = filtering.PathMatches
add_scan_axis = scan_axis.add_scan_axis
cast = mapping.cast
chain = compose.chain
describe = inspecting.describe
diff = inspecting.diff
drop_intermediates = filtering.drop_intermediates
exclude = filtering.exclude
host_offload = offload.host_offload
lift = compose.lift
map_variables = mapping.map_variables
merge = filtering.merge
mesh_context = reshard_lib.mesh_context
move_scan_axis = scan_axis.move_scan_axis
named_shardings = partitioning.named_shardings
param_bytes = mapping.param_bytes
param_count = mapping.param_count
partition = filtering.partition
partition_specs = partitioning.partition_specs
remove_scan_axis = scan_axis.remove_scan_axis
reshard = reshard_lib.reshard
select = filtering.select
stack_layers = scan_axis.stack_layers
to_device = offload.to_device
unstack_layers = scan_axis.unstack_layers
update_sharding_metadata = metadata.update_sharding_metadata

__all__ = (
  'Difference',
  'PathMatches',
  'add_scan_axis',
  'cast',
  'chain',
  'describe',
  'diff',
  'drop_intermediates',
  'exclude',
  'host_offload',
  'lift',
  'map_variables',
  'merge',
  'mesh_context',
  'move_scan_axis',
  'named_shardings',
  'param_bytes',
  'param_count',
  'partition',
  'partition_specs',
  'remove_scan_axis',
  'reshard',
  'select',
  'stack_layers',
  'to_device',
  'unstack_layers',
  'update_sharding_metadata',
)
