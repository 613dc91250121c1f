"""The only place that touches qwix's internals: who is called with what weight.

Qwix replaces jax's contractions while an intercepted method runs and asks a
provider instead. The provider here finds the weight that takes part, notes it
(`record`) or computes the op with dequantized weight and adapters
(`wrapped`). It decides by the *identity* of arrays, followed back through
casts, never by shape or name.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import math
import string
import sys
import threading
from typing import Any, NamedTuple

from flax import nnx
import flax.core
import jax
import jax.numpy as jnp
import qwix

# Not public in qwix: the wrapper that its own providers know as a quantized
# weight, and how such a weight is described. tests/peftlib/interception_test.py
# notices when either goes away or changes.
from qwix._src.core import qarray as _qwix_qarray
from qwix._src.providers import ptq as _qwix_ptq

from peftlib import config as config_lib

DEFAULT_ADAPTER = 'default'

QuantizedWeight = _qwix_ptq.WithAux

_INTERCEPTED = '_peftlib_adapters'
# qwix makes a new class at each call; graphdefs of equal injections compare
# equal only when their classes are one.
_CLASSES: dict[tuple[type[nnx.Module], tuple[Any, ...]], type[nnx.Module]] = {}
_DROPOUT = 'adapter_dropout'
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


class AdapterKey(nnx.RngKey):
  """PRNG key of one adapter's dropout, one per layer of a scanned stack."""


@dataclasses.dataclass(frozen=True)
class Contraction:
  """An op that contracts an activation with a weight, as einsum subscripts.

  Attributes:
    x: Subscripts of the activation, one letter a dimension.
    weight: Subscripts of the weight.
    out: Subscripts of the result.
  """

  x: str
  weight: str
  out: str

  @property
  def batch(self) -> str:
    """Letters of the weight that are in all three."""
    return ''.join(c for c in self.weight if c in self.x and c in self.out)

  @property
  def contracted(self) -> str:
    """Letters of the weight that are summed over."""
    return ''.join(c for c in self.weight if c in self.x and c not in self.out)

  @property
  def remaining(self) -> str:
    """Letters that the weight alone has."""
    return ''.join(c for c in self.weight if c not in self.x)

  def axes(self, letters: str) -> tuple[int, ...]:
    """Axes of the weight that carry these letters."""
    return tuple(self.weight.index(c) for c in letters)


@dataclasses.dataclass(frozen=True)
class WeightOp:
  """One weight that takes part in an op, seen in an abstract forward pass.

  Attributes:
    path: Path of the module that holds the weight.
    name: Attribute under which the module holds it.
    kind: 'dot_general', 'einsum' or 'conv_general_dilated'.
    shape: Shape with which it takes part: one layer's, inside of a scan.
    dtype: Dtype with which it takes part.
    contraction: The op's subscripts; None for a convolution.
    exact: Whether the axes are those of the variable (it was not reshaped or
      transposed on the way to the op).
  """

  path: tuple[Any, ...]
  name: str
  kind: str
  shape: tuple[int, ...]
  dtype: Any
  contraction: Contraction | None
  exact: bool

  @property
  def module_path(self) -> str:
    """The path as `LoraConfig.module_path` matches it."""
    return '/'.join(map(str, self.path))

  @property
  def label(self) -> str:
    """How error messages call the weight."""
    return f'{self.module_path}.{self.name}' if self.path else self.name

  @property
  def contracted_axes(self) -> tuple[int, ...]:
    """Axes of the weight that are summed over."""
    if self.contraction is None:
      return tuple(range(len(self.shape) - 1))
    return self.contraction.axes(self.contraction.contracted)

  @property
  def contracted_width(self) -> int:
    """Extent of the innermost contracted axis: the one that is tiled."""
    return self.shape[self.contracted_axes[-1]] if self.contracted_axes else 1

  def factor_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of `a` and `b`; those that qwix gives them."""
    if self.contraction is None:
      return (*self.shape[:-1], rank), (rank, self.shape[-1])
    c = self.contraction
    batch, contracted, remaining = (
      tuple(self.shape[i] for i in c.axes(letters))
      for letters in (c.batch, c.contracted, c.remaining)
    )
    if self.kind == 'dot_general':
      contracted, remaining = (math.prod(contracted),), (math.prod(remaining),)
    return (*batch, *contracted, rank), (*batch, rank, *remaining)

  def factor_axes(
    self,
  ) -> tuple[tuple[int | None, ...], tuple[int | None, ...]]:
    """For each axis of `a` and `b` the weight's axis that it stands for."""
    if self.contraction is None:
      last = len(self.shape) - 1
      return (*range(last), None), (None, last)
    c = self.contraction
    batch, contracted, remaining = (
      c.axes(letters) for letters in (c.batch, c.contracted, c.remaining)
    )
    if self.kind == 'dot_general':
      # The leading one of merged axes gives the sharding, as in qwix.
      contracted = contracted[:1] or (None,)
      remaining = remaining[:1] or (None,)
    return (*batch, *contracted, None), (*batch, None, *remaining)


class Adapter(NamedTuple):
  """A named adapter and its config; hashable."""

  name: str
  config: config_lib.LoraConfig


class VariableNames(NamedTuple):
  """Attributes under which a module holds one adapter of one weight."""

  a: str
  b: str
  key: str


def variable_names(weight: str, adapter: str) -> VariableNames:
  """Attributes that hold an adapter of `weight`; qwix's for the default one."""
  suffix = '' if adapter == DEFAULT_ADAPTER else f'_{adapter}'
  return VariableNames(
    f'{weight}_lora_a{suffix}',
    f'{weight}_lora_b{suffix}',
    f'{weight}_lora_key{suffix}',
  )


def adapters_of(model: nnx.Module) -> tuple[Adapter, ...]:
  """The adapters that a merged model was injected with."""
  return getattr(type(model), _INTERCEPTED, ())


def set_dropout(model: nnx.Module, active: bool) -> None:
  """Turns adapter dropout on or off in a merged model of the caller's own."""
  model.set_attributes(**{_DROPOUT: active}, raise_if_not_found=False)


def mark_dropout(module: nnx.Module) -> None:
  """Gives a module the static flag that `set_dropout` sets; off at first."""
  setattr(module, _DROPOUT, False)


def wrapped(
  model: nnx.Module, adapters: tuple[Adapter, ...], *inputs: Any
) -> nnx.Module:
  """A copy of `model` whose `__call__` applies quantized weights and adapters.

  The class made for it is the same object for equal arguments, so that
  graphdefs compare equal and jitted functions are not compiled anew.
  """
  out = qwix.quantize_model(
    model, _provider(adapters), *(inputs or (None,)), skip_nnx_init=True
  )
  base = _plain_class(type(model))
  setattr(type(out), _INTERCEPTED, adapters)
  out.__class__ = _CLASSES.setdefault((base, adapters), type(out))
  return out


def unwrapped(model: nnx.Module) -> nnx.Module:
  """A copy of `model` of its own class, without what `wrapped` left in it."""
  out = nnx.clone(model)
  out.__class__ = _plain_class(type(model))
  for _, module in nnx.iter_modules(out):
    for name in ('qwix_path', 'disable_quant_stats_update', 'qwix_rngs'):
      if hasattr(module, name):
        delattr(module, name)
    if hasattr(module, _DROPOUT):
      delattr(module, _DROPOUT)
  return out


def record(model: nnx.Module, *args: Any, **kwargs: Any) -> list[WeightOp]:
  """Lists the weights that take part in a forward pass, traced abstractly.

  Args:
    model: A merged model, of concrete or abstract arrays. Not changed.
    *args: Inputs of its `__call__`: arrays or `jax.ShapeDtypeStruct`s, or
      trees of them; anything else is handed on as it is.
    **kwargs: The same, by name.

  Returns:
    One entry a weight, in the order of first use.

  Raises:
    ValueError: If one weight takes part in two ops of different form.
  """
  ops: dict[tuple[Any, ...], WeightOp] = {}
  provider = _Provider(adapters_of(model), ops)
  recording = qwix.quantize_model(
    model, provider, *(args or (None,)), skip_nnx_init=True
  )
  graphdef, state = nnx.split(recording)
  leaves, treedef = jax.tree.flatten((args, kwargs))
  traced = [x for x in leaves if _is_array(x)]

  def forward(state: nnx.State, traced: list[Any]) -> Any:
    values = iter(traced)
    leaves_ = [next(values) if _is_array(x) else x for x in leaves]
    args_, kwargs_ = jax.tree.unflatten(treedef, leaves_)
    out = nnx.merge(graphdef, state, copy=True)(*args_, **kwargs_)
    return [x for x in jax.tree.leaves(out) if _is_array(x)]

  jax.eval_shape(forward, state, traced)
  return list(ops.values())


def how_to_quantize(
  op: WeightOp, config: config_lib.LoraConfig
) -> _qwix_qarray.HowToQuantize:
  """How qwix would quantize the weight of `op`; hashable, unlike qwix's own."""
  contracted = op.contracted_axes
  tiled: Mapping[int, int] = {}
  if config.tile_size is not None and contracted:
    tiled = {contracted[-1]: config.tile_size}
  return _qwix_qarray.HowToQuantize(
    qtype=config_lib.WEIGHT_QTYPES[str(config.weight_qtype)],
    channelwise_axes=tuple(
      i for i in range(len(op.shape)) if i not in contracted
    ),
    tiled_axes=flax.core.FrozenDict(tiled),
    calibration_method=config.weight_calibration_method,
  )


def quantize(array: jax.Array, how: _qwix_qarray.HowToQuantize) -> qwix.QArray:
  """Quantizes one layer's weight."""
  return _qwix_qarray.quantize(array, how)


def _is_array(x: Any) -> bool:
  return hasattr(x, 'shape') and hasattr(x, 'dtype')


@functools.cache
def _provider(adapters: tuple[Adapter, ...]) -> '_Provider':
  return _Provider(adapters)


def _plain_class(cls: type[nnx.Module]) -> type[nnx.Module]:
  return getattr(cls, '_unquantized_type', cls)


def _current_module() -> nnx.Module:
  frame = sys._getframe(1)
  while frame is not None:
    module = frame.f_locals.get('self')
    if isinstance(module, nnx.Module):
      return module
    frame = frame.f_back
  raise RuntimeError('peftlib: an intercepted op runs outside of a module.')


class _Found(NamedTuple):
  module: nnx.Module
  name: str
  exact: bool


class _Provider(qwix.PtqProvider):
  """Answers for jax's contractions while an injected model runs."""

  def __init__(
    self,
    adapters: tuple[Adapter, ...],
    ops: dict[tuple[Any, ...], WeightOp] | None = None,
  ) -> None:
    super().__init__(rules=[])
    self._adapters = adapters
    self._ops = ops
    self._local = threading.local()

  # Casts on concrete values or under vmap and grad leave no trace that leads
  # back to the weight, so nnx's own cast is noted here.
  def promote_dtype(self, *args: Any, **kwargs: Any) -> Any:
    inputs = args[0] if len(args) == 1 and _is_sequence(args[0]) else args
    outputs = super().promote_dtype(*args, **kwargs)
    aliases = self._aliases()
    for before, after in zip(inputs, outputs, strict=True):
      if after is not before and after is not None:
        aliases[id(after)] = (after, before)
    return outputs

  def process_model_inputs(self, model: Any, args: Any, kwargs: Any) -> Any:
    self._aliases().clear()
    return super().process_model_inputs(model, args, kwargs)

  def process_model_output(self, method_name: str, output: Any) -> Any:
    self._aliases().clear()
    return super().process_model_output(method_name, output)

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
      lambda: _dot_general_subscripts(lhs, rhs, dimension_numbers),
      precision,
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
      lambda: _einsum_subscripts(einsum_str, lhs.ndim, rhs.ndim),
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
    if self._ops is not None:
      self._note(found, 'conv_general_dilated', rhs, None)
    out = _frozen(conv)(lhs, rhs)
    for config, a, b, x in self._factors(found, lhs):
      # The kernel of rank channels first, then a 1x1 map to the output's, as
      # qwix does it; the channels are last in flax's convolutions.
      low = conv(x, a.astype(x.dtype))
      out = out + (low @ b.astype(x.dtype)).astype(out.dtype) * config.scale
    return out

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
      return op(_dense(lhs, rhs), _dense(rhs, lhs))
    left, right, out_letters = subscripts()
    if swapped:
      left, right = right, left
    contraction = Contraction(left, right, out_letters)
    if self._ops is not None:
      self._note(found, kind, weight, contraction)

    def base(x: jax.Array, weight: jax.Array) -> jax.Array:
      return op(weight, x) if swapped else op(x, weight)

    out = _frozen(base)(x, weight)
    for config, a, b, dropped in self._factors(found, x):
      delta = _low_rank(
        dropped, a, b, contraction, tuple(weight.shape), precision
      )
      out = out + (delta * config.scale).astype(out.dtype)
    return out

  def _factors(
    self, found: _Found, x: jax.Array
  ) -> Iterator[tuple[config_lib.LoraConfig, jax.Array, jax.Array, jax.Array]]:
    for adapter in self._adapters:
      names = variable_names(found.name, adapter.name)
      a = getattr(found.module, names.a, None)
      if a is None:
        continue
      b = getattr(found.module, names.b)
      key = getattr(found.module, names.key, None)
      if key is not None and getattr(found.module, _DROPOUT, False):
        x_ = _dropout(x, adapter.config.dropout, key.get_value())
      else:
        x_ = x
      yield adapter.config, a.get_value(), b.get_value(), x_

  def _note(
    self,
    found: _Found,
    kind: str,
    weight: Any,
    contraction: Contraction | None,
  ) -> None:
    assert self._ops is not None
    path = _path(found.module)
    op = WeightOp(
      path,
      found.name,
      kind,
      tuple(weight.shape),
      jnp.dtype(weight.dtype),
      contraction,
      found.exact,
    )
    before = self._ops.setdefault((path, found.name), op)
    if before.factor_axes() != op.factor_axes() or before.shape != op.shape:
      raise ValueError(
        f'peftlib: {op.label} takes part in two ops of different form,'
        f' {before.kind} {before.contraction} and {op.kind}'
        f' {op.contraction}; one adapter cannot serve both.'
      )

  def _aliases(self) -> dict[int, tuple[Any, Any]]:
    if not hasattr(self._local, 'aliases'):
      self._local.aliases = {}
    return self._local.aliases

  def _find(self, x: Any) -> _Found | None:
    """The variable of the current module from which `x` comes."""
    module = _current_module()
    candidates = {id(raw): name for name, raw in _raw_weights(module)}
    x, exact = _raw(x), True
    while True:
      if id(x) in candidates:
        return _Found(module, candidates[id(x)], exact)
      if id(x) in self._aliases():
        x = _raw(self._aliases()[id(x)][1])
        continue
      # Tracers of jit and scan know the equation that made them.
      equation: Any = getattr(x, 'parent', None)
      inputs: Any = getattr(equation, 'in_tracers', ())
      if len(inputs) != 1:
        return None
      exact = exact and equation.primitive.name in _SAME_AXES
      x = inputs[0]

  def _is_ours(self, found: _Found) -> bool:
    """Whether the weight is quantized, has an adapter, or is being listed."""
    return (
      self._ops is not None
      or isinstance(getattr(found.module, found.name), QuantizedWeight)
      or any(
        hasattr(found.module, variable_names(found.name, a.name).a)
        for a in self._adapters
      )
    )

  def _refuse_lost(self, x: Any) -> None:
    """Raises where an adapter would be left out because `x` lost its origin."""
    if isinstance(x, qwix.QArray) or hasattr(x, 'parent'):
      return
    module = _current_module()
    for name, raw in _raw_weights(module):
      found = _Found(module, name, True)
      if (
        self._ops is None
        and getattr(raw, 'shape', None) == getattr(x, 'shape', ())
        and self._is_ours(found)
      ):
        raise ValueError(
          f'peftlib: {_label(found)} reaches an op as a value that no longer'
          ' leads back to it (cast or reshaped outside of jit). Call the'
          ' model under jax.jit.'
        )


def _path(module: nnx.Module) -> tuple[Any, ...]:
  """Where qwix has noted that the module is."""
  return tuple(getattr(module, 'qwix_path', ()))


def _label(found: _Found) -> str:
  path = '/'.join(map(str, _path(found.module)))
  return f'{path}.{found.name}' if path else found.name


def _is_sequence(x: Any) -> bool:
  return isinstance(x, tuple | list)


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
  for name, node in vars(module).items():
    if isinstance(node, QuantizedWeight) or (
      isinstance(node, nnx.Param) and not isinstance(node, nnx.LoRAParam)
    ):
      yield name, _raw(node)


def _dense(weight: Any, like: Any) -> Any:
  """The weight in floating point; a quantized one in the dtype of `like`."""
  if isinstance(weight, qwix.QArray | QuantizedWeight):
    return qwix.dequantize(_qarray(weight)).astype(jnp.result_type(like))
  return weight


def _qarray(weight: Any) -> qwix.QArray:
  return weight.value.array if isinstance(weight, QuantizedWeight) else weight


def _frozen(
  op: Callable[[jax.Array, jax.Array], jax.Array],
) -> Callable[[jax.Array, Any], jax.Array]:
  """`op` over a weight that may be quantized."""

  def call(x: jax.Array, weight: Any) -> jax.Array:
    if not isinstance(weight, qwix.QArray | QuantizedWeight):
      return op(x, weight)
    weight = _qarray(weight)
    # Dequantized again in the backward pass: kept, the dense weights of all
    # layers of a scan would be its residuals.
    return jax.checkpoint(lambda x, w: op(x, _dense(w, x)))(x, weight)

  return call


def _dropout(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
  keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
  return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def _low_rank(
  x: jax.Array,
  a: jax.Array,
  b: jax.Array,
  c: Contraction,
  shape: tuple[int, ...],
  precision: Any,
) -> jax.Array:
  """`x @ a @ b` in the form of the weight's op."""
  sizes = dict(zip(c.weight, shape, strict=True))
  rank = b.shape[len(c.batch)]
  a, b = a.astype(x.dtype), b.astype(x.dtype)
  if (
    not c.batch
    and c.x.endswith(c.contracted)
    and c.out == c.x[: len(c.x) - len(c.contracted)] + c.remaining
    and _leading_axes_unsharded(x, len(c.x) - len(c.contracted))
  ):
    # Two plain matrix products: the gradients of `a` and `b` would otherwise
    # contract several axes at once, which XLA runs 2 to 4 times slower on CPU.
    rows = x.reshape(-1, math.prod(sizes[i] for i in c.contracted))
    low = jnp.dot(rows, a.reshape(-1, rank), precision=precision)
    out = jnp.dot(low, b.reshape(rank, -1), precision=precision)
    return out.reshape(
      *x.shape[: x.ndim - len(c.contracted)], *(sizes[i] for i in c.remaining)
    )
  r = next(i for i in string.ascii_letters if i not in c.x + c.weight)
  a = a.reshape(*(sizes[i] for i in c.batch + c.contracted), rank)
  b = b.reshape(
    *(sizes[i] for i in c.batch), rank, *(sizes[i] for i in c.remaining)
  )
  low_letters = ''.join(i for i in c.x if i not in c.contracted) + r
  low = jnp.einsum(
    f'{c.x},{c.batch}{c.contracted}{r}->{low_letters}',
    x,
    a,
    precision=precision,
  )
  return jnp.einsum(
    f'{low_letters},{c.batch}{r}{c.remaining}->{c.out}',
    low,
    b,
    precision=precision,
  )


def _leading_axes_unsharded(x: jax.Array, count: int) -> bool:
  """Whether axes 1 to count can be merged into axis 0 on an explicit mesh."""
  sharding = getattr(jax.typeof(x), 'sharding', None)
  spec = tuple(getattr(sharding, 'spec', ()) or ())
  return all(axis is None for axis in spec[1:count])


def _dot_general_subscripts(
  lhs: Any, rhs: Any, dimension_numbers: Any
) -> tuple[str, str, str]:
  (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
  letters = iter(string.ascii_letters)
  left: list[str] = [''] * lhs.ndim
  right: list[str] = [''] * rhs.ndim
  out: list[str] = []
  for i, j in zip(lhs_batch, rhs_batch, strict=True):
    left[i] = right[j] = next(letters)
    out.append(left[i])
  for i, j in zip(lhs_contracted, rhs_contracted, strict=True):
    left[i] = right[j] = next(letters)
  for side in (left, right):
    for i, letter in enumerate(side):
      if not letter:
        side[i] = next(letters)
        out.append(side[i])
  return ''.join(left), ''.join(right), ''.join(out)


def _einsum_subscripts(
  einsum_str: str, lhs_ndim: int, rhs_ndim: int
) -> tuple[str, str, str]:
  inputs, arrow, out = einsum_str.replace(' ', '').partition('->')
  left, right = inputs.split(',')
  used = set(inputs + out)
  unused = [c for c in string.ascii_letters if c not in used]
  widths = [
    ndim - len(side) + 3 if '...' in side else 0
    for side, ndim in ((left, lhs_ndim), (right, rhs_ndim))
  ]
  ellipsis = ''.join(unused[: max(widths)])
  if not arrow:
    counts = (left + right).replace('.', '')
    out = ('...' if max(widths) else '') + ''.join(
      sorted(c for c in set(counts) if counts.count(c) == 1)
    )
  left = left.replace('...', ellipsis[len(ellipsis) - widths[0] :])
  right = right.replace('...', ellipsis[len(ellipsis) - widths[1] :])
  return left, right, out.replace('...', ellipsis)
