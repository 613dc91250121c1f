"""LoRA-GA on a whole model."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from flax import nnx
import jax

from peftlib import injection
from peftlib import slots as slots_lib
from peftlib import training
from peftlib import weight_ops
from peftlib.initialization import _common
from peftlib.methods import lora
from peftlib.methods import lora_ga_start


def initialize_lora_ga(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  loss_fn: training.LossFn,
  batches: Iterable[training.Batch],
  *,
  key: jax.Array,
  adapter: str = slots_lib.DEFAULT_ADAPTER,
  direction: lora_ga_start.Direction = 'ArB2r',
  scale: lora_ga_start.Scale = 'stable',
  stable_gamma: float = 16.0,
) -> nnx.State[Any, Any]:
  """Starts LoRA along the gradient of the frozen weights.

  The gradients of all adapted weights, averaged over the batches, are in memory
  at the same time. The weights become `w - scale * a @ b`, so that the output
  is unchanged.

  Used in: peftlib/guide/your_own_method.md.

  Example:
    >>> import peftlib
    >>> import jax.numpy as jnp
    >>> injected = peftlib.inject(
    ...   *nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0))),
    ...   peftlib.LoraConfig(rank=2),
    ...   jnp.ones((1, 8)),
    ...   key=jax.random.key(0),
    ... )
    >>> loss_fn = lambda model, batch, rngs: (jnp.mean(model(batch) ** 2), {})
    >>> state = initialize_lora_ga(
    ...   *injected, loss_fn, [jnp.eye(8)], key=jax.random.key(1)
    ... )
    >>> bool(jnp.any(state['kernel_lora_b'][...] != 0))
    True

  Args:
    graphdef: Graph definition of a model as `inject` returned it.
    state: Its whole state; a floating-point base.
    loss_fn: The loss that is trained on.
    batches: Its batches; those of equal shapes share a compilation.
    key: PRNG key for the random numbers of `loss_fn` and of
      `direction='random'`.
    adapter: Which adapter; all of its methods have to be LoRA's.
    direction: See `methods.lora_ga`.
    scale: See `methods.lora_ga`.
    stable_gamma: See `methods.lora_ga`.

  Returns:
    The state with new values of `lora_a`, `lora_b` and the adapted weights.

  Raises:
    TypeError: If a Module is given instead of graphdef and state.
    ValueError: If there is no such adapter, no batch, or a weight that can't be
      started like this: quantized, of another method, or of too small a rank.

  References:
    Wang et al., LoRA-GA: Low-Rank Adaptation with Gradient Approximation, 2024.
  """
  what = 'peftlib.initialize_lora_ga'
  model = _common.merged(what, graphdef, state, adapter)
  slots = _common.slots_of(what, model, adapter)
  paths = {id(m): path for path, m in nnx.iter_modules(model)}
  owned = {}
  for module, slot in slots:
    if _common.is_quantized(module, slot):
      raise ValueError(
        f'{what}: {slot.op.label} is quantized; the weight has to change, so'
        ' start before quantize_base.'
      )
    owned[_common.path_of(paths[id(module)], slot)] = module, slot
  gradients, number = _common.summed_gradients(
    what,
    graphdef,
    state,
    lambda path, _: tuple(map(str, path)) in owned,
    loss_fn,
    batches,
    key,
  )
  replaced = set(owned)
  for path, variable in nnx.to_flat_state(gradients):
    own = tuple(map(str, path))
    module, slot = owned[own]
    weight = weight_ops.get_weight(module, slot.op.name)
    start = _LoraGa(slot.method, direction, scale, stable_gamma)
    out = _common.run_on_layers(
      start,
      slot,
      {
        'value': weight.get_raw_value(),
        'gradient': variable.get_raw_value() / number,
      },
      jax.random.fold_in(key, len(replaced)),
    )
    left = _common.of_layers(slot, weight.get_raw_value(), out.pop('left'))
    weight_ops.set_weight(module, slot.op.name, weight.replace(left))
    replaced |= _common.set_variables(module, paths[id(module)], slot, out)
  return injection.split_onto(model, state, replaced)[1]


class _LoraGa(NamedTuple):
  """From a layer's weight and its gradient."""

  method: lora.Lora
  direction: lora_ga_start.Direction
  scale: lora_ga_start.Scale
  stable_gamma: float

  def __call__(self, op: weight_ops.WeightOp, key: Any, v: Any) -> Any:
    """Starts one layer's factors, and says what is left of the weight."""

    def of_matrix(value: Any, gradient: Any, key: Any) -> Any:
      a, b = lora_ga_start.lora_ga(
        value,
        gradient,
        rank=self.method.rank,
        scaling=self.method.scale,
        direction=self.direction,
        scale=self.scale,
        stable_gamma=self.stable_gamma,
        key=key,
      )
      factors = {'lora_a': a, 'lora_b': b}
      left = value - (self.method.merge(value, factors) - value)
      return factors, left

    factors, left = _common.batched(of_matrix, op)(
      op.to_matrix(op.from_variable(v['value'])),
      op.to_matrix(op.from_variable(v['gradient'])),
      jax.random.split(key, op.batch_shape) if op.batch else key,
    )
    left = op.to_variable(op.from_matrix(left), v['value'].shape)
    return {**factors, 'left': left.astype(v['value'].dtype)}
