"""One jitted step in which only the trainable variables move."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple, Protocol

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from peftlib import _checks
from peftlib import config as config_lib
from peftlib import injection
from peftlib import slots as slots_lib
from peftlib import targets

Batch = Any
Metrics = dict[str, jax.Array]


class LossFn(Protocol):
  """A loss over one batch, written by the user.

  The model is the caller's own copy, in training mode inside of a train step
  and in evaluation mode inside of an eval step.
  """

  def __call__(
    self, model: Any, batch: Batch, rngs: nnx.Rngs
  ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """Returns the scalar loss and further metrics, e.g. `{'tokens': n}`."""
    ...


class TrainState(NamedTuple):
  """All that changes in training: a pytree of arrays.

  Attributes:
    step: Number of steps taken, int32 scalar.
    trainable: The variables that are trained.
    opt_state: State of the optimizer, over `trainable` alone.
    key: PRNG key of the run; the step folds its number into it.
    mutable: Variables that the forward pass itself updates (batch
      statistics, counters); an empty State where there are none.
  """

  step: jax.Array
  trainable: nnx.State[Any, Any]
  opt_state: optax.OptState
  key: jax.Array
  mutable: nnx.State[Any, Any]


def trainable_filter(config: config_lib.Config | None) -> Any:
  """The filter that picks what is trained, for `transforms.partition`.

  This is the one place that decides it: optimizer, step, shardings and
  checkpoints all go by it.

  Used in: tests/consumers/own_step.py.

  Args:
    config: The adapter's config, or None where there is none.

  Returns:
    With a config `nnx.LoRAParam` and what `config.train` names; `nnx.Param`,
    the whole model, without.
  """
  if config is None:
    return nnx.Param
  if not config.train:
    return nnx.LoRAParam
  named = nnx.All(nnx.Param, _Named(config.train))
  return nnx.Any(nnx.LoRAParam, named)


def saved_filter(config: config_lib.Config | None) -> Any:
  """The filter that picks what an adapter's file has to have.

  Used in: peftlib/guide/your_own_loop.md.

  Args:
    config: As `trainable_filter`.

  Returns:
    What is trained, and the adapters' constants (`peftlib.AdapterConstant`).
  """
  return nnx.Any(trainable_filter(config), slots_lib.AdapterConstant)


@dataclasses.dataclass(frozen=True)
class _Named:
  """Picks variables by the ends of their paths, or of their modules' paths."""

  names: tuple[str, ...]

  def __call__(self, path: tuple[Any, ...], variable: Any) -> bool:
    parts = list(map(str, path))
    return any(
      targets.path_matches('/'.join(parts[:n]), self.names)
      for n in range(1, len(parts) + 1)
    )


def init_train_state(
  trainable: nnx.State[Any, Any],
  tx: optax.GradientTransformation,
  *,
  key: jax.Array,
  mutable: nnx.State[Any, Any] | None = None,
) -> TrainState:
  """Makes the state of a run at step 0.

  Works on concrete arrays, under `jax.jit` and under `jax.eval_shape`.

  Used in: tests/consumers/dpo.py.

  Example:
    >>> import peftlib
    >>> config = peftlib.LoraConfig(rank=2)
    >>> graphdef, state = peftlib.inject(
    ...   *nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0))),
    ...   config,
    ...   jnp.ones((1, 8)),
    ...   key=jax.random.key(0),
    ... )
    >>> trainable, frozen = nnx.split_state(
    ...   state, trainable_filter(config), ...
    ... )
    >>> train_state = init_train_state(
    ...   trainable, optax.adamw(1e-3), key=jax.random.key(1)
    ... )
    >>> int(train_state.step)
    0

  Args:
    trainable: The variables to train. The arrays are copied, since the step
      donates its state and the caller's must survive that.
    tx: The optimizer.
    key: PRNG key for dropout and other randomness of the run.
    mutable: Variables that the forward pass updates by itself.

  Returns:
    The train state.

  Raises:
    TypeError: If `trainable` is a Module.
    ValueError: If there is nothing to train, or a trainable leaf isn't
      floating point.
  """
  _checks.check_state('peftlib.init_train_state', 'trainable', trainable)
  flat = nnx.to_flat_state(trainable)
  if not jax.tree.leaves(trainable):
    raise ValueError(
      'peftlib.init_train_state: there is nothing to train: the trainable'
      ' State is empty. Was the model injected, and was the adapter filter'
      ' (trainable_filter) the first one of the partition?'
    )
  for path, variable in flat:
    for leaf in jax.tree.leaves(variable):
      if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise ValueError(
          'peftlib.init_train_state: '
          f'{"/".join(map(str, path))} has dtype {leaf.dtype}; only'
          ' floating-point variables can be trained.'
        )
  own = jax.tree.map(_copy, trainable)
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    trainable=own,
    opt_state=tx.init(own),
    key=_copy(key),
    mutable=nnx.State({}) if mutable is None else jax.tree.map(_copy, mutable),
  )


def make_train_step(
  graphdef: nnx.GraphDef[Any],
  loss_fn: LossFn,
  tx: optax.GradientTransformation,
  *,
  donate: bool = True,
) -> Callable[
  [TrainState, nnx.State[Any, Any], Batch], tuple[TrainState, Metrics]
]:
  """Makes the jitted step `(train_state, frozen, batch) -> (state, metrics)`.

  Gradients are taken with respect to `train_state.trainable` alone, so that
  none is computed for a frozen weight. Adapter dropout is on; its masks depend
  on the run's key and the step's number only. The train state is donated, the
  frozen base isn't.

  States of arrays alone are welcome, `nnx.as_pure(trainable)` before
  `init_train_state` and `nnx.as_pure(frozen)`: jax takes a Variable apart and
  puts it together again in Python at each call, about 6 us each, which is felt
  where a model has hundreds of them and a step is short.

  Used in: tests/consumers/dpo.py.

  Args:
    graphdef: Graph definition of the (injected) model.
    loss_fn: See `LossFn`. `rngs` has a default stream and one called
      'dropout'.
    tx: The optimizer that `init_train_state` got.
    donate: Whether the memory of the train state that goes in is reused.

  Returns:
    The step. Its metrics are those of `loss_fn` and: 'loss', 'grad_norm' and
    'update_norm' (global L2 norms), and 'learning_rate' where the optimizer
    was made by `optax.inject_hyperparams`.

  Raises:
    TypeError: If a Module is given instead of a graphdef.
  """
  _check_graphdef('peftlib.make_train_step', graphdef)

  def step(
    train_state: TrainState, frozen: nnx.State[Any, Any], batch: Batch
  ) -> tuple[TrainState, Metrics]:
    key = jax.random.fold_in(train_state.key, train_state.step)
    adapter_key, default_key, dropout_key = jax.random.split(key, 3)

    def loss(trainable: nnx.State[Any, Any]) -> Any:
      state = nnx.merge_state(trainable, train_state.mutable, frozen)
      model = nnx.merge(
        *injection.with_dropout(graphdef, state, adapter_key), copy=True
      )
      model.train()
      rngs = nnx.Rngs(default_key, dropout=dropout_key)
      value, metrics = loss_fn(model, batch, rngs)
      return value, (dict(metrics), _read_back(model, train_state.mutable))

    (value, (metrics, mutable)), grads = jax.value_and_grad(loss, has_aux=True)(
      train_state.trainable
    )
    updates, opt_state = tx.update(
      grads, train_state.opt_state, train_state.trainable
    )
    trainable = optax.apply_updates(train_state.trainable, updates)
    metrics |= {
      'loss': value,
      'grad_norm': optax.tree.norm(grads),
      'update_norm': optax.tree.norm(updates),
    }
    learning_rate = _learning_rate(opt_state)
    if learning_rate is not None:
      metrics['learning_rate'] = learning_rate
    return (
      TrainState(
        train_state.step + 1, trainable, opt_state, train_state.key, mutable
      ),
      metrics,
    )

  return jax.jit(step, donate_argnums=(0,) if donate else ())


def make_eval_step(
  graphdef: nnx.GraphDef[Any], loss_fn: LossFn
) -> Callable[[nnx.State[Any, Any], nnx.State[Any, Any], Batch], Metrics]:
  """Makes the jitted step `(trainable, frozen, batch) -> metrics`.

  Dropout is off and the model is in evaluation mode.

  Used in: tests/consumers/dpo.py.

  Args:
    graphdef: Graph definition of the (injected) model.
    loss_fn: See `LossFn`.

  Returns:
    The step; its metrics are those of `loss_fn` and 'loss'. `trainable` and
    `frozen` are any two States that make up the model's.

  Raises:
    TypeError: If a Module is given instead of a graphdef.
  """
  _check_graphdef('peftlib.make_eval_step', graphdef)

  def step(
    trainable: nnx.State[Any, Any], frozen: nnx.State[Any, Any], batch: Batch
  ) -> Metrics:
    model = nnx.merge(graphdef, trainable, frozen, copy=True)
    model.eval()
    value, metrics = loss_fn(model, batch, nnx.Rngs(0))
    return {**metrics, 'loss': value}

  return jax.jit(step)


def _check_graphdef(function: str, graphdef: Any) -> None:
  _checks.check_split(function, graphdef, nnx.State({}))


def _copy(x: Any) -> Any:
  return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.copy(x)


def _read_back(
  model: nnx.Module, mutable: nnx.State[Any, Any]
) -> nnx.State[Any, Any]:
  """The values that the forward pass left in the mutable variables."""
  old = dict(nnx.to_flat_state(mutable))
  if not old:
    return mutable
  _, state = nnx.split(model)
  new = nnx.from_flat_state(
    [(p, v) for p, v in nnx.to_flat_state(state) if p in old]
  )
  # The structure must be that of what went in, or the next call compiles anew.
  typed = any(isinstance(v, nnx.Variable) for v in old.values())
  return new if typed else nnx.as_pure(new)


def _learning_rate(opt_state: optax.OptState) -> jax.Array | None:
  found = optax.tree_utils.tree_get_all_with_path(opt_state, 'hyperparams')
  values = [h['learning_rate'] for _, h in found if 'learning_rate' in h]
  return values[0] if len(values) == 1 else None
