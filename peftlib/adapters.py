"""Several adapters in one model: by name, switched, and chosen by row."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import difflib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from peftlib import _checks
from peftlib import injection
from peftlib import interception
from peftlib import merging
from peftlib import slots as slots_lib
from peftlib import virtual_tokens


def adapter_names(
  graphdef: nnx.GraphDef[Any], state: nnx.State[Any, Any]
) -> tuple[str, ...]:
  """Names of the adapters in a model, in the order of injection.

  Used in: peftlib/guide/your_own_model.md.
  """
  _checks.check_split('peftlib.adapter_names', graphdef, state)
  return tuple(virtual_tokens.names_of(nnx.merge(graphdef, state, copy=True)))


def adapter_filter(name: str | None = None) -> Callable[[Any, Any], bool]:
  """A filter for the variables of one adapter, or of all.

  Used in: peftlib/guide/your_own_model.md.

  Example:
    >>> import transforms, peftlib
    >>> graphdef, state = peftlib.inject(
    ...   *nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0))),
    ...   peftlib.LoraConfig(rank=2),
    ...   jnp.ones((1, 8)),
    ...   key=jax.random.key(0),
    ... )
    >>> sorted(transforms.select(state, adapter_filter('default')))
    ['kernel_lora_a', 'kernel_lora_b']

  Args:
    name: Name of the adapter; None picks every adapter's variables. Those of
      its method alone, trained and constant ones; not dropout keys and gates.
  """

  def picks(path: Any, variable: Any) -> bool:
    del path
    if not isinstance(variable, nnx.LoRAParam | slots_lib.AdapterConstant):
      return False
    own = variable.get_metadata().get('adapter')
    return own is not None if name is None else own == name

  return picks


def remove_adapter(
  graphdef: nnx.GraphDef[Any], state: nnx.State[Any, Any], name: str
) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
  """Takes an adapter out; with the last one the model is the plain one again.

  Used in: peftlib/guide/your_own_model.md.

  Args:
    graphdef: Graph definition of an injected model.
    state: Its whole state.
    name: Which adapter.

  Returns:
    Graphdef and state without it; all other variables are the very objects.

  Raises:
    ValueError: If the model has no such adapter (the text has the nearest), or
      if it holds a part of the base's weights (PiSSA, OLoRA), which would be
      lost: take the State from before `inject` then.
  """
  function = 'peftlib.remove_adapter'
  _checks.check_split(function, graphdef, state)
  model = nnx.merge(graphdef, state, copy=True)
  _check_present(function, name, virtual_tokens.names_of(model))
  for module, slot in slots_lib.of_model(model):
    if slot.adapter == name:
      _check_separable(function, slot)
      merging.drop(module, slot)
  for tokens in virtual_tokens.of_model(model):
    if tokens.adapter == name:
      delattr(tokens.module, tokens.attribute)
  if not slots_lib.of_model(model) and not interception.is_quantized(model):
    model = interception.unwrapped(model)
  return injection.split_onto(model, state)


def rename_adapter(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  name: str,
  new_name: str,
) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
  """Gives an adapter another name.

  Two adapters of equal shape under one name have equal graphdefs, so that a
  compiled function takes one in the place of the other.

  Used in: peftlib/guide/your_own_model.md.

  Args:
    graphdef: Graph definition of an injected model.
    state: Its whole state.
    name: Which adapter.
    new_name: Its new name.

  Returns:
    Graphdef and state; arrays are the very objects.

  Raises:
    ValueError: If the model has no such adapter, or has one of the new name.
  """
  function = 'peftlib.rename_adapter'
  _checks.check_split(function, graphdef, state)
  model = nnx.merge(graphdef, state, copy=True)
  names = virtual_tokens.names_of(model)
  _check_present(function, name, names)
  injection.check_name(function, new_name, [n for n in names if n != name])
  for module, slot in slots_lib.of_model(model):
    if slot.adapter != name:
      continue
    renamed = dataclasses.replace(slot, adapter=new_name)
    for before, after in zip(slot.attributes, renamed.attributes, strict=True):
      variable = getattr(module, before, None)
      if variable is None:
        continue
      delattr(module, before)
      setattr(module, after, _of_adapter(variable, new_name))
    slots_lib.put(
      module,
      tuple(renamed if s == slot else s for s in slots_lib.of_module(module)),
    )
  replaced = set()
  paths = {id(m): p for p, m in nnx.iter_modules(model)}
  for tokens in virtual_tokens.of_model(model):
    if tokens.adapter == name:
      renamed_tokens = _of_adapter(tokens.variable, new_name)
      setattr(tokens.module, tokens.attribute, renamed_tokens)
      path = (*paths[id(tokens.module)], tokens.attribute)
      replaced.add(tuple(map(str, path)))
  return injection.split_onto(model, state, replaced)


def _of_adapter(variable: nnx.Variable[Any], name: str) -> nnx.Variable[Any]:
  """The variable with another adapter's name, where it has one."""
  metadata = dict(variable.get_metadata())
  if 'adapter' in metadata:
    metadata['adapter'] = name
  return type(variable).from_metadata(variable.get_raw_value(), metadata)


def set_active(
  graphdef: nnx.GraphDef[Any], state: nnx.State[Any, Any], names: Sequence[str]
) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
  """Turns the named adapters on and all others off.

  Which are on is a variable (`peftlib.AdapterGate`) beside each weight: the
  first call adds it, later ones change its value only, so that a compiled
  function is not compiled again. With none the model is the base.

  Used in: tests/consumers/dpo.py.

  Args:
    graphdef: Graph definition of an injected model.
    state: Its whole state.
    names: Names of the adapters to use, applied in the order of injection.

  Returns:
    Graphdef and state with the gates set.

  Raises:
    ValueError: If the model has no adapter of one of the names, or one that
      would be off holds a part of the base's weights (PiSSA, OLoRA) or has
      virtual tokens, which a model reads as long as it has them.
  """
  function = 'peftlib.set_active'
  if isinstance(names, str):
    raise TypeError(f'{function}: names={names!r}; give a list: [{names!r}].')
  on = dict.fromkeys(names, True)
  return _gated(
    function, graphdef, state, names, lambda n: jnp.array(n in on), set(on)
  )


def assign_rows(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  names: Sequence[str],
  rows: jax.typing.ArrayLike,
) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
  """Gives each row of the batch an adapter of its own, or none.

  The first axis of a weight's input has to be the batch, or batch and length
  as one. Works for training and generation alike. Other batches of as many
  rows take the same compiled function.

  Used in: peftlib/guide/your_own_model.md.

  Args:
    graphdef: Graph definition of an injected model.
    state: Its whole state.
    names: Names of adapters.
    rows: int (batch,): for each row an index into `names`, or -1 for the base
      alone. May be traced.

  Returns:
    Graphdef and state with the gates set.

  Raises:
    ValueError: If the model has no adapter of one of the names, a name is there
      twice, `rows` is not an array of integers or has one that is no index
      (seen where it isn't traced), or an adapter holds a part of the base's
      weights (PiSSA, OLoRA) or has virtual tokens, so that no row can do
      without it.
  """
  function = 'peftlib.assign_rows'
  if isinstance(names, str):
    raise TypeError(f'{function}: names={names!r}; give a list: [{names!r}].')
  if len(set(names)) < len(names):
    raise ValueError(f'{function}: names={list(names)}: one is there twice.')
  rows = jnp.asarray(rows)
  if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
    raise ValueError(
      f'{function}: rows is {rows.dtype}{list(rows.shape)}; it must be'
      ' integers of shape (batch,).'
    )
  if not isinstance(rows, jax.core.Tracer):
    wrong = (rows < -1) | (rows >= len(names))
    if wrong.any():
      raise ValueError(
        f'{function}: rows[{wrong.argmax()}]={rows[wrong.argmax()]}; must be -1'
        f' or an index into the {len(names)} names.'
      )
  order: Mapping[str, int] = {name: i for i, name in enumerate(names)}
  return _gated(
    function, graphdef, state, names, lambda n: rows == order.get(n, -2), set()
  )


def assigned_rows(
  graphdef: nnx.GraphDef[Any], state: nnx.State[Any, Any]
) -> int | None:
  """Size of the batch to whose rows adapters are assigned; None if to none."""
  sizes = {
    slot.gathered(gate).shape[-1]
    for slot, gate in _row_gates(graphdef, state).values()
  }
  return sizes.pop() if sizes else None


def take_rows(
  graphdef: nnx.GraphDef[Any], state: nnx.State[Any, Any], rows: Sequence[int]
) -> nnx.State[Any, Any]:
  """The State for a batch of some of the rows that adapters are assigned to.

  Args:
    graphdef: Graph definition of an injected model.
    state: Its whole state, from `assign_rows`.
    rows: Which rows of the batch, in which order.

  Returns:
    `state` with shorter gates; all other variables are the very objects.
  """
  gates = _row_gates(graphdef, state)
  flat = []
  for path, variable in nnx.to_flat_state(state):
    own = gates.get(tuple(map(str, path)))
    if own is not None:
      slot, gate = own
      taken = slot.gathered(gate)[..., jnp.asarray(rows)]
      variable = variable.replace(slot.spread(taken))
    flat.append((path, variable))
  return nnx.from_flat_state(flat)


def _row_gates(
  graphdef: nnx.GraphDef[Any], state: nnx.State[Any, Any]
) -> dict[tuple[str, ...], tuple[slots_lib.Slot, jax.Array]]:
  model = nnx.merge(graphdef, state, copy=True)
  paths = {id(m): p for p, m in nnx.iter_modules(model)}
  found = {}
  for module, slot in slots_lib.of_model(model):
    gate = getattr(module, slot.gate, None)
    if gate is None:
      continue
    value = gate.get_value()
    if slot.gathered(value).ndim > len(slot.axes):
      found[(*map(str, paths[id(module)]), slot.gate)] = slot, value
  return found


def _gated(
  function: str,
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  names: Sequence[str],
  gate: Callable[[str], jax.Array],
  always_on: set[str],
) -> tuple[nnx.GraphDef[Any], nnx.State[Any, Any]]:
  _checks.check_split(function, graphdef, state)
  model = nnx.merge(graphdef, state, copy=True)
  present = virtual_tokens.names_of(model)
  for name in names:
    _check_present(function, name, present)
  for tokens in virtual_tokens.of_model(model):
    if tokens.adapter not in always_on:
      raise ValueError(
        f'{function}: adapter {tokens.adapter!r} has virtual tokens'
        f' ({tokens.attribute}), which are read by every row as long as the'
        ' model has them; peftlib.remove_adapter takes them out.'
      )
  replaced = set()
  paths = {id(m): p for p, m in nnx.iter_modules(model)}
  for module, slot in slots_lib.of_model(model):
    if slot.adapter not in always_on:
      _check_separable(function, slot)
    variable = getattr(module, next(iter(map(slot.attribute, slot.variables))))
    axes = slot.axes
    value = gate(slot.adapter)
    if slot.layers is not None:
      layers = jnp.zeros(axes, bool).at[jnp.asarray(slot.layers)].set(True)
      value = layers.reshape(*axes, *(1,) * value.ndim) & value
    else:
      value = jnp.broadcast_to(value, (*axes, *value.shape))
    setattr(
      module,
      slot.gate,
      slots_lib.AdapterGate.from_metadata(
        slot.spread(value), injection.plain_metadata(variable)
      ),
    )
    replaced.add((*paths[id(module)], slot.gate))
  return injection.split_onto(model, state, replaced)


def _check_separable(function: str, slot: slots_lib.Slot) -> None:
  if slot.method.residual:
    raise ValueError(
      f'{function}: adapter {slot.adapter!r} ({slot.method.name}) holds a part'
      f' of the weight of {slot.op.label}; what is left without it is not the'
      ' base. Merge it, or go back to the State from before inject.'
    )


def _check_present(function: str, name: str, present: Sequence[str]) -> None:
  if name not in present:
    near = difflib.get_close_matches(name, present, n=3, cutoff=0.3)
    raise ValueError(
      f'{function}: the model has no adapter {name!r}; nearest:'
      f' {near or list(present)}.'
    )
