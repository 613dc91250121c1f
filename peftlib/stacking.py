"""Training many adapters of one frozen base in one step."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from peftlib import _checks
from peftlib import injection
from peftlib import training


def stack_adapters(
  states: Sequence[nnx.State[Any, Any]],
) -> nnx.State[Any, Any]:
  """Adapters of equal structure as one State with a leading adapter axis.

  LoRA adapters of unequal rank are padded with zeros to the largest. Both
  factors of the padding are zero, so are their gradients, and so it stays zero
  under every optimizer that leaves a variable without gradient where it is;
  `make_stacked_train_step` holds it there under any other. Their scale
  `alpha / rank` has to be that of the graphdef, made for the largest rank.

  Used in: tests/consumers/population.py.

  Example:
    >>> import peftlib, transforms
    >>> def adapter(rank):
    ...   graphdef, state = peftlib.inject(
    ...     *nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0))),
    ...     peftlib.LoraConfig(rank=rank, alpha=2 * rank),
    ...     jnp.ones((1, 8)),
    ...     key=jax.random.key(0),
    ...   )
    ...   return transforms.select(state, nnx.LoRAParam)
    >>> stacked = stack_adapters([adapter(2), adapter(3)])
    >>> stacked['kernel_lora_a'].shape, stacked['kernel_lora_b'].shape
    ((2, 8, 3), (2, 3, 4))

  Args:
    states: Trainable States, of arrays or abstract values.

  Returns:
    A State whose variables have one axis more, in front.

  Raises:
    TypeError: If one is a Module.
    ValueError: If they differ in more than their ranks; the text says how.
  """
  function = 'peftlib.stack_adapters'
  if not states:
    raise ValueError(f'{function}: states is empty.')
  for i, state in enumerate(states):
    _checks.check_state(function, f'states[{i}]', state)
  flats = [dict(nnx.to_flat_state(state)) for state in states]
  for i, flat in enumerate(flats):
    if flat.keys() != flats[0].keys():
      names = sorted(_joined(p) for p in flat.keys() ^ flats[0].keys())
      raise ValueError(
        f'{function}: states[0] and states[{i}] have not the same variables:'
        f' {", ".join(names)}.'
      )
  out = []
  ranks: dict[Any, dict[str, _Differing]] = {}
  for path, first in flats[0].items():
    variables = [flat[path] for flat in flats]
    shape, differing = _common_shape(function, path, variables)
    if differing is not None:
      pair = (*path[:-1], str(path[-1]).replace(differing.role, ''))
      ranks.setdefault(pair, {})[differing.role] = differing
    values = [v.get_raw_value() for v in variables]
    stack = lambda values, shape=shape: jnp.stack(
      [jnp.pad(v, [(0, n - m) for m, n in zip(v.shape, shape)]) for v in values]
    )
    if isinstance(values[0], jax.ShapeDtypeStruct):
      stacked = jax.eval_shape(stack, values)
    else:
      stacked = stack(values)
    out.append((path, _with_axis(first.replace(stacked))))
  for factors in ranks.values():
    _check_factors(function, factors)
  return nnx.from_flat_state(out)


def unstack_adapters(
  stacked: nnx.State[Any, Any],
  like: Sequence[nnx.State[Any, Any]] | None = None,
) -> list[nnx.State[Any, Any]]:
  """The adapters of a stacked State.

  Used in: tests/consumers/population.py.

  Args:
    stacked: From `stack_adapters`, or after training.
    like: The States that were stacked, or abstract ones of their shapes: what
      was padded is cut off. None leaves all of equal shape.

  Returns:
    One State an adapter.

  Raises:
    TypeError: If `stacked` is a Module.
    ValueError: If `like` has another number of adapters, or other variables.
  """
  function = 'peftlib.unstack_adapters'
  _checks.check_state(function, 'stacked', stacked)
  flat = nnx.to_flat_state(stacked)
  counts = {v.get_raw_value().shape[0] for _, v in flat}
  if len(counts) != 1 or (like is not None and {len(like)} != counts):
    raise ValueError(
      f'{function}: the variables are stacks of {sorted(counts)} adapters'
      f'{"" if like is None else f", like has {len(like)}"}.'
    )
  shapes = [
    None if like is None else dict(nnx.to_flat_state(like[i]))
    for i in range(counts.pop())
  ]
  states = []
  for i, wanted in enumerate(shapes):
    if wanted is not None and wanted.keys() != dict(flat).keys():
      names = sorted(_joined(p) for p in wanted.keys() ^ dict(flat).keys())
      raise ValueError(
        f'{function}: stacked and like[{i}] have not the same variables:'
        f' {", ".join(names)}.'
      )
    own = []
    for path, variable in flat:
      value = variable.get_raw_value()
      cut = tuple(
        slice(n)
        for n in (value.shape[1:] if wanted is None else wanted[path].shape)
      )
      take = lambda v, i=i, cut=cut: v[i][cut]
      if isinstance(value, jax.ShapeDtypeStruct):
        one: Any = jax.eval_shape(take, value)
      else:
        one = take(value)
      own.append((path, _without_axis(variable.replace(one))))
    states.append(nnx.from_flat_state(own))
  return states


def padding_mask(states: Sequence[nnx.State[Any, Any]]) -> nnx.State[Any, Any]:
  """Where a stack of adapters has values and where padding, as ones and zeros.

  Args:
    states: What `stack_adapters` gets.

  Returns:
    A State of its shapes.
  """
  ones = [
    jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), state)
    for state in states
  ]
  return stack_adapters(ones)


def init_stacked_train_state(
  stacked: nnx.State[Any, Any],
  tx: optax.GradientTransformation,
  *,
  keys: jax.Array,
  mutable: nnx.State[Any, Any] | None = None,
) -> training.TrainState:
  """Makes the state of a run of many adapters at step 0.

  A hyperparameter of `optax.inject_hyperparams` has one value for each adapter
  afterwards; `optax.tree.set(train_state, learning_rate=rates)` with an array
  of shape (adapters,) gives each its own.

  Used in: tests/consumers/population.py.

  Args:
    stacked: From `stack_adapters`.
    tx: The optimizer of each of them.
    keys: PRNG keys (adapters,): each run's own.
    mutable: Variables that the forward pass updates, (adapters, ...).

  Returns:
    A train state whose every array has the adapter axis in front.
  """

  def init(
    trainable: nnx.State[Any, Any],
    key: jax.Array,
    mutable: nnx.State[Any, Any] | None,
  ) -> training.TrainState:
    return training.init_train_state(trainable, tx, key=key, mutable=mutable)

  made = jax.vmap(init)(_each(_without_axis, stacked), keys, mutable)
  return _each(_with_axis, made)


def make_stacked_train_step(
  graphdef: nnx.GraphDef[Any],
  loss_fn: training.LossFn,
  tx: optax.GradientTransformation,
  *,
  mask: nnx.State[Any, Any] | None = None,
  batch_axis: int | None = 0,
  donate: bool = True,
) -> Callable[
  [training.TrainState, nnx.State[Any, Any], Any],
  tuple[training.TrainState, training.Metrics],
]:
  """Makes a jitted step that trains many adapters over one frozen base.

  It computes what as many steps of `make_train_step` would, each with its own
  adapter, batch, optimizer state and key; the base's ops run once on the batch
  of all.

  Used in: tests/consumers/population.py.

  Args:
    graphdef: Graph definition of the injected model, of the largest rank.
    loss_fn: See `training.LossFn`; gets one adapter's batch.
    tx: The optimizer of each adapter.
    mask: From `padding_mask`, to hold the padding of smaller ranks at zero
      under an optimizer that would move it, by noise for example.
    batch_axis: Where the leaves of `batch` have the adapter axis; None if all
      adapters see the same batch.
    donate: Whether the memory of the train state that goes in is reused.

  Returns:
    The step `(train_state, frozen, batch) -> (train_state, metrics)`. The
    metrics have the adapter axis in front.
  """
  one = training.make_train_step(graphdef, loss_fn, tx, donate=False)

  def step(
    train_state: training.TrainState, frozen: nnx.State[Any, Any], batch: Any
  ) -> tuple[training.TrainState, training.Metrics]:
    new, metrics = jax.vmap(one, in_axes=(0, None, batch_axis))(
      _each(_without_axis, train_state), frozen, batch
    )
    new = _each(_with_axis, new)
    if mask is not None:
      new = new._replace(
        trainable=jax.tree.map(jnp.multiply, new.trainable, mask)
      )
    return new, metrics

  return jax.jit(step, donate_argnums=(0,) if donate else ())


class _Differing(NamedTuple):
  """A factor whose extents along one axis differ from State to State."""

  path: Any
  role: str
  axis: int
  extents: tuple[int, ...]


def _common_shape(
  function: str, path: Any, variables: Sequence[nnx.Variable[Any]]
) -> tuple[tuple[int, ...], _Differing | None]:
  """The shape that all are padded to, and along which axis they are."""
  shapes = [tuple(v.get_raw_value().shape) for v in variables]
  dtypes = {str(v.get_raw_value().dtype) for v in variables}
  roles = {v.get_metadata().get('role') for v in variables}
  if len({len(shape) for shape in shapes}) == 1 and len(dtypes) == 1:
    by_axis = list(zip(*shapes, strict=True))
    differing = [i for i, n in enumerate(by_axis) if len(set(n)) > 1]
    if not differing:
      return shapes[0], None
    if len(differing) == 1 and roles in ({'lora_a'}, {'lora_b'}):
      (axis,) = differing
      padded = tuple(max(n) for n in by_axis)
      return padded, _Differing(path, str(roles.pop()), axis, by_axis[axis])
  raise ValueError(
    f'{function}: {_joined(path)} differs in more than the rank: shapes'
    f' {sorted(set(shapes))}, dtypes {sorted(dtypes)}.'
  )


def _check_factors(function: str, factors: dict[str, _Differing]) -> None:
  """Refuses factors that differ, but not in a rank that they share."""
  a, b = factors.get('lora_a'), factors.get('lora_b')
  # The rank is behind the inputs in `a`, in front of the outputs in `b`.
  if a and b and a.extents == b.extents and a.axis > b.axis:
    return
  (first, *_) = factors.values()
  raise ValueError(
    f'{function}: {_joined(first.path)} has extents {first.extents} along axis'
    f' {first.axis}, which is not a rank that its other factor has too.'
  )


def _each(f: Callable[[Any], Any], tree: Any) -> Any:
  is_variable = lambda x: isinstance(x, nnx.Variable)
  return jax.tree.map(
    lambda x: f(x) if is_variable(x) else x, tree, is_leaf=is_variable
  )


def _with_axis(variable: Any) -> Any:
  """The variable with an unsharded axis in front of its sharding's."""
  return _renamed(variable, lambda names: (None, *names))


def _without_axis(variable: Any) -> Any:
  return _renamed(variable, lambda names: names[1:])


def _renamed(variable: Any, f: Callable[[tuple[Any, ...]], Any]) -> Any:
  new = {}
  for key in injection.SHARDING_KEYS:
    names = variable.get_metadata().get(key)
    if names is None:
      continue
    if isinstance(names, jax.sharding.PartitionSpec):
      new[key] = jax.sharding.PartitionSpec(*f(tuple(names)))
    else:
      new[key] = type(names)(f(tuple(names)))
  return variable.replace(**new) if new else variable


def _joined(path: Any) -> str:
  return '/'.join(map(str, path))
