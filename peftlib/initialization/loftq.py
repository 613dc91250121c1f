"""LoftQ on a whole model: quantization, and adapters that make up for it."""

from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from peftlib import _checks
from peftlib import config as config_lib
from peftlib import injection
from peftlib import interception
from peftlib import quantization
from peftlib import slots as slots_lib
from peftlib import weight_ops
from peftlib.initialization import _common
from peftlib.methods import loftq_start
from peftlib.methods import lora
from peftlib.methods import method as method_lib


def initialize_loftq(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  config: config_lib.Config,
  *inputs: Any,
  adapter: str = slots_lib.DEFAULT_ADAPTER,
  iterations: int = 1,
  **named_inputs: Any,
) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
  """Quantizes the base, and starts LoRA at what the quantization took away.

  In place of `quantize_base`: weights without an adapter are quantized just as
  there.

  Used in: peftlib/guide/your_own_method.md.

  Example:
    >>> import peftlib
    >>> config = peftlib.LoraConfig(rank=2, weight_qtype='nf4')
    >>> x = jnp.ones((1, 8))
    >>> injected = peftlib.inject(
    ...   *nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0))),
    ...   config,
    ...   x,
    ...   key=jax.random.key(0),
    ... )
    >>> graphdef, state = initialize_loftq(*injected, config, x)
    >>> state['kernel']['array']['qvalue'].dtype
    dtype(uint4)

  Args:
    graphdef: Graph definition of a model as `inject` returned it.
    state: Its whole state; a floating-point base.
    config: As for `quantize_base`.
    *inputs: Inputs of the model's `__call__`; only shapes and dtypes matter.
    adapter: Which adapter; all of its methods have to be LoRA's.
    iterations: How often to alternate between quantizing what the adapter
      leaves and taking the largest singular values of what that leaves.
    **named_inputs: Further inputs by name.

  Returns:
    Graphdef and state of the quantized model, new values of `lora_a` and
    `lora_b` in it.

  Raises:
    TypeError: If a Module is given instead of graphdef and state.
    ValueError: If `quantize_base` does, there is no such adapter, or an adapted
      weight isn't quantized, has another method or too small a rank.

  References:
    Li et al., LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language
    Models, 2023.
  """
  what = 'peftlib.initialize_loftq'
  method_lib.check_argument(
    what,
    'iterations',
    iterations,
    method_lib.is_int(iterations) and iterations >= 1,
    'an int >= 1',
  )
  model = _common.merged(what, graphdef, state, adapter)
  for _, slot in (slots := _common.slots_of(what, model, adapter)):
    side = min(slot.op.weight.rows, slot.op.weight.columns)
    if slot.method.rank > side:
      raise ValueError(
        f'{what}: rank={slot.method.rank} of {slot.op.label} is more than'
        f' {side}, its smaller side.'
      )
  new_graphdef, new_state = quantization.quantize_base(
    graphdef, state, config, *inputs, **named_inputs
  )
  quantized = nnx.merge(new_graphdef, new_state, copy=True)
  modules = dict(nnx.iter_modules(quantized))
  paths = {id(m): path for path, m in nnx.iter_modules(model)}
  left_out = [
    slot.op.label
    for module, slot in slots
    if not _common.is_quantized(modules[paths[id(module)]], slot)
  ]
  if left_out:
    raise ValueError(
      f'{what}: the config does not quantize {_checks.some(left_out)}; LoftQ'
      ' starts an adapter at the error of its own quantized weight.'
    )
  replaced = set()
  for module, slot in slots:
    path = paths[id(module)]
    target = modules[path]
    node = weight_ops.get_weight(target, slot.op.name)
    value = weight_ops.get_weight(module, slot.op.name).get_raw_value()
    double = interception.is_double(node.array)
    start = _LoftQ(slot.method, node.how, double, iterations)
    out = _common.run_on_layers(start, slot, {'value': value})
    parts = jax.tree.map(
      lambda old, new, slot=slot: old.replace(
        _common.of_layers(slot, old.get_raw_value(), new)
      ),
      node.array,
      out.pop('array'),
      is_leaf=lambda v: isinstance(v, nnx.Variable),
    )
    weight_ops.set_weight(
      target, slot.op.name, interception.QuantizedWeight(parts, node.how)
    )
    own = _common.path_of(path, slot)
    replaced |= interception.paths_of_parts(own)
    replaced |= _common.set_variables(target, path, slot, out)
  return injection.split_onto(quantized, new_state, replaced)


class _LoftQ(NamedTuple):
  """From a layer's weight and how it is quantized."""

  method: lora.Lora
  how: Any
  double: bool
  iterations: int

  def __call__(self, op: weight_ops.WeightOp, key: Any, v: Any) -> Any:
    """Starts one layer's factors, and quantizes what they leave."""
    del key
    value = v['value'].astype(jnp.float32)
    left = value

    def factors_of(matrix: jax.Array) -> Any:
      return loftq_start.low_rank(
        matrix, rank=self.method.rank, scale=self.method.scale
      )

    for _ in range(self.iterations):
      array = interception.quantize(
        left.astype(v['value'].dtype), self.how, self.double
      )
      error = value - interception.dense(array).astype(jnp.float32)
      a, b = _common.batched(factors_of, op)(op.to_matrix(error))
      update = self.method.scale * jnp.matmul(a, b, precision='highest')
      left = value - op.from_matrix(update)
    return {'lora_a': a, 'lora_b': b, 'array': array}
