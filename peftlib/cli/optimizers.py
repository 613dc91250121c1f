"""The optimizer that the flags describe."""

from collections.abc import Callable
from typing import Any

import optax

from peftlib.cli import options as options_lib


def make_schedule(
  options: options_lib.Finetune, steps: int
) -> Callable[[Any], Any]:
  """The learning rate by step, counted from 0.

  It rises linearly, the first step's being above zero already, to
  `learning_rate` after `warmup_steps`, then falls to reach zero where step
  `steps` would be.

  Args:
    options: `learning_rate`, `warmup_steps` and `schedule` are used.
    steps: Number of steps of the whole run.

  Returns:
    A function from the step, an integer or int32 (), to the rate, float32 ().
  """
  peak, warmup = options.learning_rate, options.warmup_steps
  left = max(steps - warmup, 1)
  falling = {
    'cosine': lambda: optax.schedules.cosine_decay_schedule(peak, left),
    'linear': lambda: optax.schedules.linear_schedule(peak, 0.0, left),
    'constant': lambda: optax.schedules.constant_schedule(peak),
  }[options.schedule]()
  if not warmup:
    return falling
  rising = optax.schedules.linear_schedule(peak / warmup, peak, warmup - 1)
  if warmup == 1:
    rising = optax.schedules.constant_schedule(peak)
  return optax.schedules.join_schedules([rising, falling], [warmup])


def make_optimizer(
  options: options_lib.Finetune, steps: int
) -> optax.GradientTransformation:
  """AdamW after clipping, over the mean gradient of `accumulate` steps.

  Args:
    options: The flags.
    steps: Number of steps of the whole run.

  Returns:
    The optimizer; its state holds `learning_rate` for the step's metrics.

  References:
    Loshchilov & Hutter, Decoupled Weight Decay Regularization, 2019.
  """
  schedule = make_schedule(options, steps)
  every = options.accumulate
  tx: optax.GradientTransformation = optax.inject_hyperparams(optax.adamw)(
    # The optimizer counts updates, the schedule steps.
    learning_rate=lambda count: schedule(count * every),
    weight_decay=options.weight_decay,
  )
  if options.clip_norm:
    tx = optax.chain(optax.clip_by_global_norm(options.clip_norm), tx)
  if every > 1:
    tx = optax.MultiSteps(tx, every).gradient_transformation()
  return tx
