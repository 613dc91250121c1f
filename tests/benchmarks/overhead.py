"""What the host does for a step beside starting its computation."""

from collections.abc import Callable
import functools
import statistics
import time
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import optax

import peftlib
import transforms

_CONFIG = peftlib.LoraConfig(module_path='.*', rank=1, alpha=1.0)
_CALLS = 20


class Layers(nnx.Module):
  """Many layers of next to no computation; four variables each, with LoRA."""

  def __init__(self, count: int, rngs: nnx.Rngs):
    self.layers = nnx.List(nnx.Linear(2, 2, rngs=rngs) for _ in range(count))

  def __call__(self, x: jax.Array) -> jax.Array:
    for layer in self.layers:
      x = layer(x)
    return x


def _loss(
  model: Any, batch: jax.Array, rngs: nnx.Rngs
) -> tuple[jax.Array, dict[str, jax.Array]]:
  del rngs
  return (model(batch) ** 2).mean(), {}


def prepare(variables: int) -> Callable[[], dict[str, Any]]:
  """Compiles a step: ours, on Variables and on arrays, bare, by `nnx.jit`.

  Args:
    variables: Of the model with its adapters.

  Returns:
    What times calls of them in turns. Of its result `bare` is `jax.jit` of the
    same function on the lists of the same arrays; `variables` (our step on
    States as `nnx.split` makes them), `arrays` (after `nnx.as_pure`) and `nnx`
    are how much longer the others take; seconds, medians.
  """
  # The computation is the same in all, and no matter here.
  jax.config.update('jax_disable_most_optimizations', True)
  batch = jnp.ones((1, 2))
  graphdef, state = nnx.split(Layers(variables // 4, nnx.Rngs(0)))
  graphdef, state = peftlib.inject(
    graphdef, state, _CONFIG, batch, key=jax.random.key(0)
  )
  tx = optax.sgd(1e-3)
  trainable, frozen = transforms.partition(
    state, peftlib.trainable_filter(_CONFIG), ...
  )
  step = peftlib.make_train_step(graphdef, _loss, tx)
  init = functools.partial(
    peftlib.init_train_state, tx=tx, key=jax.random.key(0)
  )
  leaves, tree = jax.tree.flatten(init(trainable))
  frozen_leaves, frozen_tree = jax.tree.flatten(frozen)

  def on_lists(
    leaves: list[Any], frozen_leaves: list[Any], batch: jax.Array
  ) -> tuple[list[Any], Any]:
    new, metrics = step.__wrapped__(
      jax.tree.unflatten(tree, leaves),
      jax.tree.unflatten(frozen_tree, frozen_leaves),
      batch,
    )
    return jax.tree.leaves(new), metrics

  bare = jax.jit(on_lists, donate_argnums=0)
  model = nnx.merge(graphdef, state, copy=True)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)

  @nnx.jit
  def by_nnx(model: Any, optimizer: Any, batch: jax.Array) -> Any:
    loss, grads = nnx.value_and_grad(
      lambda model: _loss(model, batch, nnx.Rngs(0))[0],
      argnums=nnx.DiffState(0, nnx.LoRAParam),
    )(model)
    optimizer.update(model, grads)
    return {
      'loss': loss,
      'grad_norm': optax.tree.norm(grads),
      'update_norm': optax.tree.norm(grads),
    }

  def ours(trainable: Any, frozen: Any) -> Callable[[], Any]:
    train_state = init(trainable)

    def call() -> Any:
      nonlocal train_state
      train_state, metrics = step(train_state, frozen, batch)
      return metrics

    return call

  def call_bare() -> Any:
    nonlocal leaves
    leaves, metrics = bare(leaves, frozen_leaves, batch)
    return metrics

  def call_nnx() -> Any:
    return by_nnx(model, optimizer, batch)

  calls = {
    'bare': call_bare,
    'variables': ours(trainable, frozen),
    'arrays': ours(nnx.as_pure(trainable), nnx.as_pure(frozen)),
    'nnx': call_nnx,
  }
  for call in calls.values():
    # Twice: what a step returns may differ from what it got first.
    jax.block_until_ready(call())
    jax.block_until_ready(call())

  def work() -> dict[str, Any]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_CALLS):
      for name, call in calls.items():
        start = time.perf_counter()
        jax.block_until_ready(call())
        found[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(own) for name, own in found.items()}
    bare = medians.pop('bare')
    over = {name: seconds - bare for name, seconds in medians.items()}
    return {'seconds': medians['arrays'], 'bare': bare, **over}

  return work
