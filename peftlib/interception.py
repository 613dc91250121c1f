"""The only place that touches qwix's internals: who is called with what weight.

Qwix replaces jax's contractions while an intercepted method runs and asks a
provider instead. The provider here finds the weight that takes part, notes it
(`record`) or computes the op with dequantized weight and adapters
(`wrapped`). It decides by the *identity* of arrays, followed back through
casts, transposes and reshapes, never by shape or name.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import math
import sys
import threading
from typing import Any, NamedTuple
import weakref

from flax import nnx
import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import qwix

# Not public in qwix: the wrapper that its own providers know as a quantized
# weight, and how such a weight is described. tests/peftlib/interception_test.py
# notices when either goes away or changes.
from qwix._src.core import qarray as _qwix_qarray
from qwix._src.providers import ptq as _qwix_ptq

from peftlib import bfloat16
from peftlib import config as config_lib
from peftlib import contractions
from peftlib import frozen_ops
from peftlib import slots as slots_lib
from peftlib import usage
from peftlib import weight_ops

QuantizedWeight = _qwix_ptq.WithAux

# qwix makes a new class at each call; graphdefs of equal injections compare
# equal only when their classes are one.
_CLASSES: dict[type[nnx.Module], type[nnx.Module]] = {}
# Ops that leave the axes of a weight as they are.
_SAME_AXES = frozenset(
  {
    'convert_element_type',
    'copy',
    'copy_p',
    'sharding_constraint',
    'reduce_precision',
    'optimization_barrier',
  }
)
# What qwix does not replace by itself. `x @ w` and `table[ids]` are methods of
# the arrays' classes; that of concrete arrays has no public name.
_MORE_OPS = (
  'jax.numpy.matmul',
  'jax.numpy.tensordot',
  'jax.numpy.take',
  'jax.core.Tracer.__matmul__',
  'jax.core.Tracer.__rmatmul__',
  'jaxlib._jax.ArrayImpl.__matmul__',
  'jaxlib._jax.ArrayImpl.__rmatmul__',
  'jax.core.Tracer.__getitem__',
  'jaxlib._jax.ArrayImpl.__getitem__',
)


_PARTS = ('qvalue', 'scale', 'zero_point')
# Where the arrays of a quantized weight are, its scales' own included.
_PARTS_OF_QUANTIZED = tuple(
  ('array', *part)
  for part in (
    *((name,) for name in _PARTS),
    *(('scale', name) for name in _PARTS),
  )
)
# QLoRA's; blocks are shorter where it doesn't divide the number of scales.
SCALE_BLOCK = 256


class Missed(NamedTuple):
  """A weight that takes part in a contraction as no adapter can follow.

  Attributes:
    path: Of its module, parts joined by '/'; '' for the model itself.
    name: Its name in the module.
    op: jax's name of the op that it could not be traced back from; None if it
      could be, and what is wrong is how it is used.
    why: The reason.
  """

  path: str
  name: str
  op: str | None
  why: str

  @property
  def text(self) -> str:
    """Label and reason, for messages."""
    return f'{_joined((self.path,), self.name)}: {self.why}'


class Recording(NamedTuple):
  """What an abstract forward pass showed.

  Attributes:
    ops: One entry a weight, in the order of first use.
    missed: Weights that take part in a contraction in a way that no adapter
      can follow.
    attention: Paths of the modules that contract two activations. Whether
      there is a softmax in between isn't asked: attention does without one
      (linear attention), and fused kernels hide it.
  """

  ops: tuple[weight_ops.WeightOp, ...]
  missed: tuple[Missed, ...]
  attention: tuple[str, ...]


def wrapped(model: nnx.Module) -> nnx.Module:
  """A copy of `model` whose `__call__` applies quantized weights and adapters.

  The class made for it is the same object for equal models, so that graphdefs
  compare equal and jitted functions are not compiled anew.
  """
  out = qwix.quantize_model(model, _provider(), None, skip_nnx_init=True)
  base = _plain_class(type(model))
  out.__class__ = _CLASSES.setdefault(base, type(out))
  return out


def unwrapped(model: nnx.Module) -> nnx.Module:
  """A copy of `model` of its own class, without what `wrapped` left in it."""
  out = nnx.clone(model)
  out.__class__ = _plain_class(type(model))
  for _, module in nnx.iter_modules(out):
    for name in ('qwix_path', 'disable_quant_stats_update', 'qwix_rngs'):
      if hasattr(module, name):
        delattr(module, name)
    slots_lib.put(module, ())
  return out


def record(model: nnx.Module, *args: Any, **kwargs: Any) -> Recording:
  """Lists the weights that take part in a forward pass, traced abstractly.

  Args:
    model: A merged model, of concrete or abstract arrays. Not changed.
    *args: Inputs of its `__call__`: arrays or `jax.ShapeDtypeStruct`s, or
      trees of them; anything else is handed on as it is.
    **kwargs: The same, by name.
  """
  notes = _Notes({}, {}, {})
  recording = qwix.quantize_model(
    model, _Provider(notes), None, skip_nnx_init=True
  )
  graphdef, state = nnx.split(recording)
  leaves, treedef = jax.tree.flatten((args, kwargs))
  traced = [x for x in leaves if _is_array(x)]

  def forward(state: nnx.State[Any, Any], traced: list[Any]) -> Any:
    values = iter(traced)
    leaves_ = [next(values) if _is_array(x) else x for x in leaves]
    args_, kwargs_ = jax.tree.unflatten(treedef, leaves_)
    out = nnx.merge(graphdef, state, copy=True)(*args_, **kwargs_)
    return [x for x in jax.tree.leaves(out) if _is_array(x)]

  jaxpr = jax.make_jaxpr(forward)(state, traced)
  missed = {
    (path, name): Missed('/'.join(map(str, path)), name, None, why)
    for (path, name), why in notes.refused.items()
  }
  used = usage.contracted_inputs(jaxpr, len(jax.tree.leaves(state)))
  modules = {
    tuple(map(str, path)): path
    for path, module in nnx.iter_modules(recording)
    if not isinstance(module, nnx.List | nnx.Dict)
  }
  for (path, variable), uses in zip(_leaves_of(state), used, strict=True):
    key = _module_and_name(modules, path)
    if key in notes.ops or key in missed or not uses:
      continue
    if isinstance(variable, nnx.Param) and not isinstance(
      variable, nnx.LoRAParam
    ):
      missed[key] = Missed(
        '/'.join(map(str, key[0])),
        key[1],
        uses,
        f'its use in {uses} could not be traced back to it',
      )
  return Recording(
    tuple(op for key, op in notes.ops.items() if key not in missed),
    tuple(missed.values()),
    tuple(notes.attention),
  )


def how_to_quantize(
  op: weight_ops.WeightOp,
  *,
  qtype: str,
  tile_size: int | None,
  calibration_method: str,
) -> _qwix_qarray.HowToQuantize:
  """How qwix would quantize the weight of `op`; hashable, unlike qwix's own."""
  tiled: Mapping[int, int] = {}
  if tile_size is not None and op.inputs:
    tiled = {op.inputs[-1]: tile_size}
  return _qwix_qarray.HowToQuantize(
    qtype=config_lib.WEIGHT_QTYPES[qtype],
    channelwise_axes=tuple(
      i for i in range(len(op.shape)) if i not in op.inputs
    ),
    tiled_axes=flax.core.FrozenDict(tiled),
    calibration_method=calibration_method,
  )


def quantize(
  array: jax.Array, how: _qwix_qarray.HowToQuantize, double: bool = False
) -> qwix.QArray:
  """Quantizes one layer's weight; `double`: its scales too, to 8 bits."""
  out: qwix.QArray = _qwix_qarray.quantize(array, how)
  if not double:
    return out
  scale = out.scale
  # The first of the longest axes, in blocks that divide it.
  axis = max(range(scale.ndim), key=lambda i: (scale.shape[i], -i))
  block = max(
    n for n in range(1, SCALE_BLOCK + 1) if scale.shape[axis] % n == 0
  )
  return dataclasses.replace(
    out,
    scale=_qwix_qarray.quantize(
      scale,
      _qwix_qarray.HowToQuantize(
        qtype=jnp.int8,
        channelwise_axes=tuple(i for i in range(scale.ndim) if i != axis),
        tiled_axes={axis: block},
        # All are positive: symmetric, half of the levels would be idle.
        calibration_method='minmax',
      ),
    ),
  )


def paths_of_parts(path: tuple[str, ...]) -> set[tuple[str, ...]]:
  """The paths of the arrays that a quantized weight at `path` may have."""
  return {(*path, *part) for part in _PARTS_OF_QUANTIZED}


def is_double(array: qwix.QArray) -> bool:
  """Whether the scales of a quantized weight are quantized too."""
  return isinstance(array.scale, qwix.QArray)


def dequantize(array: qwix.QArray) -> jax.Array:
  """What a quantized weight stands for."""
  if is_double(array):
    array = dataclasses.replace(array, scale=qwix.dequantize(array.scale))
  return qwix.dequantize(array)


def stored(weight: Any) -> Any:
  """The arrays of a weight as they are kept: one, or a `qwix.QArray`."""
  if isinstance(weight, QuantizedWeight):
    return jax.tree.map(
      lambda v: v.get_raw_value(),
      weight.array,
      is_leaf=lambda v: isinstance(v, nnx.Variable),
    )
  return weight.get_raw_value()


def dense(stored: Any) -> jax.Array:
  """What `stored` gives, in floating point."""
  return dequantize(stored) if _is_quantized(stored) else stored


def is_quantized(model: nnx.Module) -> bool:
  """Whether a model has quantized weights."""
  return any(
    isinstance(node, QuantizedWeight)
    for _, module in nnx.iter_modules(model)
    for _, node in weight_ops.weights_of(module)
  )


def _is_array(x: Any) -> bool:
  return hasattr(x, 'shape') and hasattr(x, 'dtype')


def _on_device(model: nnx.Module) -> list[tuple[nnx.Variable[Any], np.ndarray]]:
  """Makes numpy arrays in a model jax's; returns what they were.

  Reading a variable of numpy makes a new array, which is not known as it.
  """
  before = []
  for _, node in nnx.iter_graph(model):
    if isinstance(node, nnx.Variable):
      value = node.get_raw_value()
      if isinstance(value, np.ndarray):
        before.append((node, value))
        _set_raw(node, jnp.asarray(value))
  return before


def _set_raw(variable: nnx.Variable[Any], value: Any) -> None:
  # nnx refuses it in a trace that is not the variable's; it is undone in time.
  object.__setattr__(variable, '_raw_value', value)


def _joined(path: tuple[Any, ...], name: str) -> str:
  module = '/'.join(map(str, path))
  return f'{module}.{name}' if module else name


def _leaves_of(
  state: nnx.State[Any, Any],
) -> Iterator[tuple[tuple[Any, ...], Any]]:
  """Path and variable of each array, in the order of the State's leaves."""
  for path, variable in nnx.to_flat_state(state):
    for _ in jax.tree.leaves(variable):
      yield path, variable


def _module_and_name(
  modules: Mapping[tuple[str, ...], tuple[Any, ...]], path: tuple[Any, ...]
) -> tuple[tuple[Any, ...], str]:
  """The path of a variable's module and the name that it has there."""
  parts = tuple(map(str, path))
  for length in (2, 3):
    if parts[-length:] in _PARTS_OF_QUANTIZED:
      parts = parts[:-length]
  end = next(n for n in range(len(parts) - 1, -1, -1) if parts[:n] in modules)
  return modules[parts[:end]], '/'.join(parts[end:])


@functools.cache
def _provider() -> '_Provider':
  return _Provider()


def _plain_class(cls: type[nnx.Module]) -> type[nnx.Module]:
  return getattr(cls, '_unquantized_type', cls)


# Functions there hold no module that their callers do not.
_WITHOUT_MODULES = ('jax.', 'flax.nnx.transforms.')


def _modules_at_work() -> Iterator[nnx.Module]:
  """Modules that the running functions know, the innermost function first.

  The `self` of each function comes before its other variables, among which a
  layer is that the body of a `lax.scan` has merged.
  """
  frame = sys._getframe(1)
  while frame is not None:
    # Reading a frame's variables keeps them as long as the frame: not those of
    # jax and of flax's transforms, which drop the tracers of a scan in time.
    if frame.f_globals.get('__name__', '').startswith(_WITHOUT_MODULES):
      frame = frame.f_back
      continue
    variables = frame.f_locals
    own = variables.get('self')
    if isinstance(own, nnx.Module):
      yield own
    for value in list(variables.values()):
      if isinstance(value, nnx.Module) and value is not own:
        yield value
    if hasattr(own, '_unquantized_type'):
      return
    frame = frame.f_back


def _with_descendants(module: nnx.Module) -> Iterator[nnx.Module]:
  yield module
  for path, below in nnx.iter_modules(module):
    if path and not isinstance(below, nnx.List | nnx.Dict):
      yield below


class _Found(NamedTuple):
  module: nnx.Module
  name: str
  route: tuple[weight_ops.Step, ...]
  # Whether some step can't be undone, and which.
  lost: str | None
  shape: tuple[int, ...]


class _Notes(NamedTuple):
  """What a recording provider collects, by module path and weight name."""

  ops: dict[tuple[tuple[Any, ...], str], weight_ops.WeightOp]
  refused: dict[tuple[tuple[Any, ...], str], str]
  attention: dict[str, None]


def _forget(entries: dict[Any, Any], key: Any, reference: Any) -> None:
  """Drops the entry of an object that is gone, unless it is another's now."""
  if key in entries and entries[key][0] is reference:
    del entries[key]


class _Provider(qwix.PtqProvider):
  """Answers for jax's contractions while an injected model runs."""

  def __init__(self, notes: _Notes | None = None) -> None:
    super().__init__(rules=[])
    self._notes = notes
    self._local = threading.local()

  def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
    flipped = lambda a, b: self._matmul(b, a)
    more = (
      self._matmul,
      self._tensordot,
      self._take,
      self._matmul,
      flipped,
      self._matmul,
      flipped,
      self._getitem,
      self._getitem,
    )
    return super().get_intercept_map() | dict(zip(_MORE_OPS, more, strict=True))

  # Casts on concrete values or under vmap and grad leave no trace that leads
  # back to the weight, so nnx's own cast is noted here.
  def promote_dtype(self, *args: Any, **kwargs: Any) -> Any:
    inputs = args[0] if len(args) == 1 and _is_sequence(args[0]) else args
    outputs = super().promote_dtype(*args, **kwargs)
    for before, after in zip(inputs, outputs, strict=True):
      if after is not before and after is not None:
        self._note_alias(after, before)
    return outputs

  def process_model_inputs(self, model: Any, args: Any, kwargs: Any) -> Any:
    self._reset()
    self._local.numpy = _on_device(model)
    self._local.shortened = slots_lib.expand_layers(model)
    return super().process_model_inputs(model, args, kwargs)

  def process_model_output(self, method_name: str, output: Any) -> Any:
    self._reset()
    return super().process_model_output(method_name, output)

  def _reset(self) -> None:
    """Forgets a call, one that was ended by an exception too."""
    self._aliases().clear()
    self._local.known = {}
    slots_lib.restore_layers(getattr(self._local, 'shortened', []))
    self._local.shortened = []
    for variable, value in getattr(self._local, 'numpy', []):
      _set_raw(variable, value)
    self._local.numpy = []

  def dot_general(
    self,
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
  ) -> jax.Array:
    def op(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
      return jax.lax.dot_general(
        lhs,
        rhs,
        dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
      )

    return self._contract(
      'dot_general',
      op,
      lhs,
      rhs,
      lambda: contractions.of_dot_general(
        lhs.ndim, rhs.ndim, dimension_numbers
      ),
      precision,
    )

  def _matmul(self, a: Any, b: Any, **kwargs: Any) -> jax.Array:
    if isinstance(a, nnx.Variable):
      a = a.get_value()
    if isinstance(b, nnx.Variable):
      b = b.get_value()
    if not (_is_array(a) and _is_array(b)):
      # Of another library's type: let Python ask its `__rmatmul__`.
      return NotImplemented if not kwargs else jnp.matmul(a, b, **kwargs)
    return self._contract(
      'dot_general',
      lambda a, b: jnp.matmul(a, b, **kwargs),
      a,
      b,
      lambda: contractions.of_matmul(a.shape, b.shape),
      kwargs.get('precision'),
    )

  def _tensordot(self, a: Any, b: Any, axes: Any = 2, **kwargs: Any) -> Any:
    return self._contract(
      'dot_general',
      lambda a, b: jnp.tensordot(a, b, axes, **kwargs),
      a,
      b,
      lambda: contractions.of_tensordot(a.ndim, b.ndim, axes),
      kwargs.get('precision'),
    )

  def _take(
    self, a: Any, indices: Any, axis: int | None = None, *args: Any, **kw: Any
  ) -> jax.Array:
    look_up = lambda table, ids: jnp.take(table, ids, axis, *args, **kw)
    return self._look_up(look_up, a, indices, axis == 0)

  def _getitem(self, a: Any, index: Any) -> jax.Array:
    rows = _is_array(index) and jnp.issubdtype(index.dtype, jnp.integer)
    return self._look_up(lambda table, ids: table[ids], a, index, rows)

  def _look_up(
    self, look_up: Callable[[Any, Any], jax.Array], a: Any, ids: Any, rows: bool
  ) -> jax.Array:
    found = self._find(a) if rows and getattr(a, 'ndim', 0) == 2 else None
    if found is None:
      a = a.get_value() if isinstance(a, nnx.Variable) else a
      return look_up(_dense(a, jnp.zeros((), jnp.float32)), ids)
    ids = jnp.asarray(ids)
    if self._notes is not None:
      self._note(found, 'embedding', a, ((), (0,), (1,)))
    like = a if not _is_quantized(a) else jnp.zeros((), _qarray(a).scale.dtype)
    out = look_up(_dense(a, like), ids)
    slots = self._slots(found)
    if not slots:
      return out
    return frozen_ops.looked_up(
      slots,
      [slots_lib.values_of(found.module, slot) for slot in slots],
      look_up,
      ids,
      out,
      lambda stored: _dense(stored, like),
      a,
    )

  def einsum(self, einsum_str: Any, *operands: Any, **kwargs: Any) -> jax.Array:
    if not isinstance(einsum_str, str) or len(operands) != 2:
      for x in operands:
        found = self._find(x)
        if found is not None and self._is_ours(found):
          raise ValueError(
            f'peftlib: einsum {einsum_str!r} of {len(operands)} operands uses'
            f' {_label(found)}; only an einsum of two operands in string'
            ' form can carry an adapter or a quantized weight.'
          )
      return jnp.einsum(einsum_str, *operands, **kwargs)

    def op(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
      return jnp.einsum(einsum_str, lhs, rhs, **kwargs)

    lhs, rhs = operands
    return self._contract(
      'einsum',
      op,
      lhs,
      rhs,
      lambda: contractions.of_einsum(einsum_str, lhs.ndim, rhs.ndim),
      kwargs.get('precision'),
    )

  def conv_general_dilated(
    self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any
  ) -> jax.Array:
    found = self._find(rhs)

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
      return jax.lax.conv_general_dilated(x, w, *args, **kwargs)

    if found is None:
      self._refuse_lost(rhs)
      return conv(lhs, _dense(rhs, lhs))
    numbers, groups = _conv_form(lhs, rhs, args, kwargs)
    kernel_out, kernel_in, *spatial = numbers.rhs_spec
    if self._notes is not None:
      axes = ((), (*sorted(spatial), kernel_in), (kernel_out,))
      self._note(found, 'conv', rhs, axes)
    out = _frozen(conv)(lhs, rhs)
    slots = self._slots(found)
    if not slots:
      return out
    last = rhs.ndim - 1
    return frozen_ops.convolved(
      slots,
      [slots_lib.values_of(found.module, slot) for slot in slots],
      conv,
      groups == 1
      and kernel_out == last
      and kernel_in == last - 1
      and numbers.out_spec[1] == last,
      lhs,
      out,
      lambda stored: _dense(stored, lhs),
      rhs,
    )

  def _contract(
    self,
    kind: str,
    op: Callable[[jax.Array, jax.Array], jax.Array],
    lhs: Any,
    rhs: Any,
    subscripts: Callable[[], tuple[str, str, str]],
    precision: Any,
  ) -> jax.Array:
    found, weight, x = self._find(rhs), rhs, lhs
    swapped = found is None and self._find(lhs) is not None
    if swapped:
      found, weight, x = self._find(lhs), lhs, rhs
    if found is None:
      self._refuse_lost(lhs)
      self._refuse_lost(rhs)
      if self._notes is not None:
        module = next(_modules_at_work(), None)
        if module is not None:
          self._notes.attention['/'.join(map(str, _path(module)))] = None
      return op(_dense(lhs, rhs), _dense(rhs, lhs))
    left, right, out_letters = subscripts()
    if swapped:
      left, right = right, left
    contraction = contractions.Contraction(left, right, out_letters)
    turn = _turn(found)
    if turn is not None:
      contraction = contraction.permuted(turn)
    if self._notes is not None:
      self._note(found, kind, weight, contraction)

    def base(x: jax.Array, weight: jax.Array) -> jax.Array:
      return op(weight, x) if swapped else op(x, weight)

    rows = math.prod(
      size
      for letter, size in zip(contraction.x, x.shape, strict=True)
      if letter not in contraction.weight
    )
    out = _frozen(bfloat16.widened(base, rows))(x, weight)
    slots = self._slots(found)
    if not slots:
      return out

    def dense(stored: Any) -> jax.Array:
      value = _dense(stored, x)
      return value if turn is None else value.transpose(_inverse(turn))

    return frozen_ops.contracted(
      slots,
      [slots_lib.values_of(found.module, slot) for slot in slots],
      contraction,
      x,
      out,
      dense,
      _qarray(weight) if _is_quantized(weight) else weight,
      precision,
      _is_quantized(weight),
    )

  def _slots(self, found: _Found) -> tuple[slots_lib.Slot, ...]:
    return tuple(
      slot
      for slot in slots_lib.of_module(found.module)
      if slot.op.name == found.name
    )

  def _note(
    self,
    found: _Found,
    kind: str,
    weight: Any,
    form: contractions.Contraction | tuple[tuple[int, ...], ...],
  ) -> None:
    assert self._notes is not None
    key = (_path(found.module), found.name)
    turn = _turn(found)
    shape = found.shape if turn is not None else tuple(weight.shape)
    if isinstance(form, contractions.Contraction):
      batch, inputs, outputs = (
        form.axes(letters)
        for letters in (form.batch, form.contracted, form.remaining)
      )
      extents = dict(zip(form.weight, shape, strict=True))
      if len(extents) < len(shape) or any(extents[c] > 1 for c in form.dropped):
        self._notes.refused[key] = (
          f'{kind} {form.x},{form.weight}->{form.out} takes a diagonal of it or'
          ' sums over an axis that it alone has'
        )
    else:
      batch, inputs, outputs = form
    if found.lost is not None:
      self._notes.refused[key] = f'it goes through {found.lost} before its use'
    op = weight_ops.WeightOp(
      path=key[0],
      name=found.name,
      kind=kind,
      shape=shape,
      batch=batch,
      inputs=inputs,
      outputs=outputs,
      dtype=jnp.dtype(weight.dtype),
      route=() if turn is not None else found.route,
      exact=not found.route,
    )
    before = self._notes.ops.setdefault(key, op)
    same = (op.shape, op.batch) == (before.shape, before.batch)
    axes = {(before.inputs, before.outputs), (before.outputs, before.inputs)}
    linear = 'conv' not in (op.kind, before.kind) or op.kind == before.kind
    if not (same and linear and (op.inputs, op.outputs) in axes):
      self._notes.refused[key] = (
        f'it takes part in two ops of different form, {before.form} and'
        f' {op.form}'
      )

  def _aliases(self) -> dict[int, tuple[Any, Any]]:
    if not hasattr(self._local, 'aliases'):
      self._local.aliases = {}
    return self._local.aliases

  # Held weakly, so that no tracer outlives the scan or loop that made it: the
  # entry goes with the array, and with it what the array was made from.
  def _note_alias(self, after: Any, before: Any) -> None:
    aliases = self._aliases()
    forget = functools.partial(_forget, aliases, id(after))
    aliases[id(after)] = (weakref.ref(after, forget), before)

  def _find(self, x: Any) -> _Found | None:
    """The variable of a module at work from which `x` comes."""
    chain = list(self._ancestry(_raw(x)))
    near = list(_modules_at_work())
    for deep in (False, True):
      for module in near:
        known = self._known_weights(module, deep)
        for origin, route, lost in chain:
          if id(origin) not in known:
            continue
          raw, owner, name = known[id(origin)]
          if raw() is origin:
            return _Found(owner(), name, route, lost, tuple(origin.shape))
    return None

  def _known_weights(
    self, module: nnx.Module, deep: bool
  ) -> dict[int, tuple[Callable[[], Any], Callable[[], Any], str]]:
    """Array, module and name of each weight, by identity; once in a call.

    Arrays and modules are weak references, as in `_note_alias`.
    """
    if not hasattr(self._local, 'known'):
      self._local.known = {}
    cache = self._local.known
    key = id(module), deep
    if key not in cache:
      owners = _with_descendants(module) if deep else (module,)
      cache[key] = (
        weakref.ref(module, functools.partial(_forget, cache, key)),
        {
          id(raw): (weakref.ref(raw), weakref.ref(owner), name)
          for owner in owners
          for name, raw in _raw_weights(owner)
        },
      )
    return cache[key][1]

  def _ancestry(
    self, x: Any
  ) -> Iterator[tuple[Any, tuple[weight_ops.Step, ...], str | None]]:
    """`x` and what it was made from, with what was done in between."""
    route: tuple[weight_ops.Step, ...] = ()
    lost = None
    while True:
      yield x, route, lost
      if id(x) in self._aliases():
        x = _raw(self._aliases()[id(x)][1])
        continue
      # Tracers of jit and scan know the equation that made them.
      equation: Any = getattr(x, 'parent', None)
      inputs: Any = getattr(equation, 'in_tracers', ())
      if len(inputs) != 1:
        return
      primitive = equation.primitive.name
      before, after = tuple(inputs[0].shape), tuple(x.shape)
      if primitive == 'transpose':
        how = tuple(equation.params['permutation'])
        route = (('transpose', how), *route)
      elif primitive not in _SAME_AXES or before != after:
        if _keeps_order(primitive, equation.params, before, after):
          route = (('reshape', after), *route)
        else:
          lost = primitive
      x = inputs[0]

  def _is_ours(self, found: _Found) -> bool:
    """Whether the weight is quantized, has an adapter, or is being listed."""
    return (
      self._notes is not None
      or isinstance(
        weight_ops.get_weight(found.module, found.name), QuantizedWeight
      )
      or bool(self._slots(found))
    )

  def _refuse_lost(self, x: Any) -> None:
    """Raises where an adapter would be left out because `x` lost its origin."""
    if _is_quantized(x) or hasattr(x, 'parent') or self._notes is not None:
      return
    for module in _modules_at_work():
      for name, raw in _raw_weights(module):
        found = _Found(module, name, (), None, ())
        if getattr(raw, 'shape', None) == getattr(
          x, 'shape', ()
        ) and self._is_ours(found):
          raise ValueError(
            f'peftlib: {_label(found)} reaches an op as a value that no longer'
            ' leads back to it (cast or reshaped outside of jit). Call the'
            ' model under jax.jit.'
          )


def _keeps_order(
  primitive: str,
  params: Mapping[str, Any],
  before: tuple[int, ...],
  after: tuple[int, ...],
) -> bool:
  """Whether an op is a reshape, under whatever name."""
  if primitive in ('reshape', 'squeeze', 'expand_dims'):
    return True
  if primitive == 'broadcast_in_dim':
    dims = params['broadcast_dimensions']
    others = [n for i, n in enumerate(after) if i not in dims]
    return all(n == 1 for n in others) and before == tuple(
      after[i] for i in dims
    )
  return False


def _turn(found: _Found) -> tuple[int, ...] | None:
  """Which axis of the variable each axis of the op's weight is.

  None where a reshape has come between them.
  """
  axes = tuple(range(len(found.shape)))
  for kind, how in found.route:
    if kind != 'transpose':
      return None
    axes = tuple(axes[i] for i in how)
  return axes


def _inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
  return tuple(permutation.index(i) for i in range(len(permutation)))


def _conv_form(
  lhs: Any, rhs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[jax.lax.ConvDimensionNumbers, int]:
  names = (
    'window_strides',
    'padding',
    'lhs_dilation',
    'rhs_dilation',
    'dimension_numbers',
    'feature_group_count',
    'batch_group_count',
  )
  given = dict(zip(names, args)) | kwargs
  numbers = jax.lax.conv_dimension_numbers(
    lhs.shape, rhs.shape, given.get('dimension_numbers')
  )
  groups = given.get('feature_group_count', 1) * given.get(
    'batch_group_count', 1
  )
  return numbers, groups


def _path(module: nnx.Module) -> tuple[Any, ...]:
  """Where qwix has noted that the module is."""
  return tuple(getattr(module, 'qwix_path', ()))


def _label(found: _Found) -> str:
  return _joined(_path(found.module), found.name)


def _is_sequence(x: Any) -> bool:
  return isinstance(x, tuple | list)


def _is_quantized(x: Any) -> bool:
  return isinstance(x, qwix.QArray | QuantizedWeight)


def _raw(x: Any) -> Any:
  """The array by whose identity a weight is known."""
  if isinstance(x, QuantizedWeight):
    x = x.array
  if isinstance(x, qwix.QArray):
    x = x.qvalue
  if isinstance(x, nnx.Variable):
    x = x.get_raw_value()
  return x


def _raw_weights(module: nnx.Module) -> Iterator[tuple[str, Any]]:
  for name, node in weight_ops.weights_of(module):
    if isinstance(node, QuantizedWeight) or (
      isinstance(node, nnx.Param) and not isinstance(node, nnx.LoRAParam)
    ):
      yield name, _raw(node)


def _dense(weight: Any, like: Any) -> Any:
  """The weight in floating point; a quantized one in the dtype of `like`."""
  if _is_quantized(weight):
    return dequantize(_qarray(weight)).astype(jnp.result_type(like))
  return weight


def _qarray(weight: Any) -> qwix.QArray:
  return weight.value.array if isinstance(weight, QuantizedWeight) else weight


def _frozen(
  op: Callable[[jax.Array, jax.Array], jax.Array],
) -> Callable[[jax.Array, Any], jax.Array]:
  """`op` over a weight that may be quantized."""

  def call(x: jax.Array, weight: Any) -> jax.Array:
    if not _is_quantized(weight):
      return op(x, weight)
    weight = _qarray(weight)
    # Dequantized again in the backward pass: kept, the dense weights of all
    # layers of a scan would be its residuals.
    return jax.checkpoint(lambda x, w: op(x, _dense(w, x)))(x, weight)

  return call
