"""EVA on a whole model: its inputs are seen through a backward pass."""

from collections.abc import Iterable
import dataclasses
from typing import Any, ClassVar, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from peftlib import _checks
from peftlib import frozen_ops
from peftlib import injection
from peftlib import merging
from peftlib import slots as slots_lib
from peftlib import training
from peftlib import weight_ops
from peftlib.initialization import _common
from peftlib.methods import eva_start
from peftlib.methods import method as method_lib

_PROBE = 'peftlib_probe'


def initialize_eva(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  loss_fn: training.LossFn,
  batches: Iterable[training.Batch],
  *,
  key: jax.Array,
  adapter: str = slots_lib.DEFAULT_ADAPTER,
  whiten: bool = False,
) -> nnx.State[Any, Any]:
  """Sets `lora_a` to the directions in which each layer's inputs vary most.

  The inputs are seen where the backward pass of `loss_fn` gets to, so this
  works in stacks, under `nnx.remat` and over a quantized base; positions that
  a loss masks out count too. `lora_b` is left as it is: zero, so that the
  model is still the base's. Every layer keeps its rank. Sums of outer products
  of all inputs of all layers are in memory, (rows, rows) in f32 for each.

  Used in: peftlib/guide/your_own_method.md.

  Example:
    >>> import peftlib
    >>> config = peftlib.LoraConfig(rank=2)
    >>> graphdef, state = peftlib.inject(
    ...   *nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0))),
    ...   config,
    ...   jnp.ones((1, 8)),
    ...   key=jax.random.key(0),
    ... )
    >>> loss_fn = lambda model, batch, rngs: (jnp.mean(model(batch)), {})
    >>> state = initialize_eva(
    ...   graphdef,
    ...   state,
    ...   loss_fn,
    ...   [jax.random.normal(jax.random.key(1), (16, 8))],
    ...   key=jax.random.key(2),
    ... )
    >>> state['kernel_lora_a'].shape
    (8, 2)

  Args:
    graphdef: Graph definition of an injected model.
    state: Its whole state.
    loss_fn: The loss that is trained on; only what it feeds to the layers
      matters.
    batches: Its batches; those of equal shapes share a compilation.
    key: PRNG key for the random numbers of `loss_fn`.
    adapter: Which adapter; all of its methods have to be LoRA's.
    whiten: Whether each direction is divided by the root of its singular value.

  Returns:
    The state with new values of `lora_a`.

  Raises:
    TypeError: If a Module is given instead of graphdef and state.
    ValueError: If there is no such adapter, no batch, or a weight that can't be
      started like this: not linear, of another method, of too few inputs, or
      one that the loss doesn't depend on.

  References:
    Paischer et al., Parameter Efficient Fine-tuning via Explained Variance
    Adaptation, 2024.
  """
  what = 'peftlib.initialize_eva'
  model = _common.merged(what, graphdef, state, adapter)
  slots = _common.slots_of(what, model, adapter)
  for _, slot in slots:
    if slot.op.kind not in ('dot_general', 'einsum'):
      raise ValueError(
        f'{what}: {slot.op.label} is used by {slot.op.kind}; EVA is for linear'
        ' layers.'
      )
    if slot.method.rank > slot.op.weight.rows:
      raise ValueError(
        f'{what}: rank={slot.method.rank} of {slot.op.label} is more than its'
        f' {slot.op.weight.rows} inputs have directions.'
      )
  probes = []
  for module, slot in slots:
    probe = dataclasses.replace(
      slot, adapter=_PROBE, index=0, method=_Probe(), layers=None
    )
    injection.add_slot(module, probe, key)
    probes.append(probe)
  sums, _ = _common.summed_gradients(
    what, *nnx.split(model), _is_of_probe, loss_fn, batches, key
  )
  nnx.update(model, sums)
  unseen = []
  replaced = set()
  paths = {id(m): path for path, m in nnx.iter_modules(model)}
  for (module, slot), probe in zip(slots, probes, strict=True):
    found = slots_lib.values_of(module, probe, whole=True).variables
    number = found['number']
    if not isinstance(number, jax.core.Tracer) and float(number.min()) < 2:
      unseen.append(slot.op.label)
    start = _Eva(slot.method.rank, whiten)
    replaced |= _common.set_variables(
      module, paths[id(module)], slot, _common.run_on_layers(start, slot, found)
    )
    merging.drop(module, probe)
  if unseen:
    raise ValueError(
      f'{what}: the loss does not depend on {_checks.some(unseen)}, or it had'
      ' fewer than two inputs, so nothing is known of them.'
    )
  return injection.split_onto(model, state, replaced)[1]


class _Eva(NamedTuple):
  """From the sums over a layer's inputs."""

  rank: int
  whiten: bool

  def __call__(self, op: weight_ops.WeightOp, key: Any, v: Any) -> Any:
    """Starts one layer's `lora_a`."""
    del key

    def of_matrix(v: Any) -> Any:
      found = eva_start.Moments(v['number'][0, 0], v['total'][0], v['gram'])
      return eva_start.eva(found, rank=self.rank, whiten=self.whiten)

    specs = _Probe().variables(op.weight)
    matrices = frozen_ops.as_matrices(op, specs, v)
    return {'lora_a': _common.batched(of_matrix, op)(matrices)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Probe(method_lib.Method):
  """No adapter: its "gradients" are sums over the inputs of the op."""

  name: ClassVar[str] = _PROBE
  linear_apply: ClassVar[bool] = True
  reads_weight: ClassVar[bool] = False
  starts_from_weight: ClassVar[bool] = False

  def variables(self, weight: method_lib.Weight) -> dict[str, Any]:
    """`number` (1, 1), `total` (1, inputs), `gram` (inputs, inputs)."""
    inputs = method_lib.INPUTS
    return {
      'number': method_lib.VariableSpec((1, 1)),
      'total': method_lib.VariableSpec((1, inputs)),
      'gram': method_lib.VariableSpec((weight.rows, inputs)),
    }

  def init(self, key: Any, weight: method_lib.Weight, value: Any) -> Any:
    """Zeros."""
    del key, value
    return {
      name: jnp.zeros(spec.shape(weight))
      for name, spec in self.variables(weight).items()
    }

  def merge(self, value: jax.Array, v: method_lib.Variables) -> jax.Array:
    """The weight as it is."""
    del v
    return value

  def apply(
    self, x: jax.Array, op: method_lib.FrozenOp, v: method_lib.Variables
  ) -> jax.Array:
    """The output as it is."""
    return _tapped(op(x), x, dict(v))


# Gradients are what a scan, a vmap or a remat stacks and adds up by itself.
@jax.custom_vjp
def _tapped(y: jax.Array, x: jax.Array, v: dict[str, jax.Array]) -> jax.Array:
  del x, v
  return y


def _tapped_forward(
  y: jax.Array, x: jax.Array, v: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  del v
  return y, x


def _tapped_backward(x: jax.Array, ct: jax.Array) -> Any:
  found = eva_start.moments(x)
  sums = {
    'number': found.number[None, None],
    'total': found.total[None],
    'gram': found.gram,
  }
  return ct, jnp.zeros_like(x), sums


_tapped.defvjp(_tapped_forward, _tapped_backward)


def _is_of_probe(path: Any, variable: Any) -> bool:
  del path
  return bool(variable.get_metadata().get('adapter') == _PROBE)
