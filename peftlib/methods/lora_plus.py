"""LoRA+: the second factor of LoRA learns faster than the first."""

from collections.abc import Callable
from typing import Any

from flax import nnx
import jax
import optax

from peftlib.methods import method


def scale_lora_b(ratio: float) -> optax.GradientTransformation:
  """Multiplies the updates of every `lora_b` by `ratio`.

  To be chained after an optimizer, whose learning rate is then that of the
  other variables. What is a `lora_b` is in the metadata of the variables that
  `inject` makes, whatever they are called.

  Example:
    >>> tx = optax.chain(optax.adam(1e-4), scale_lora_b(16.0))

  Args:
    ratio: Learning rate of `lora_b` by that of `lora_a`, above zero.

  Raises:
    ValueError: If `ratio` isn't a finite number above zero; by `init`, if the
      trained State has no `lora_b`.
  """
  method.check_argument(
    'peftlib.methods.scale_lora_b',
    'ratio',
    ratio,
    method.is_number(ratio) and ratio > 0,
    'a finite number > 0, e.g. 16.0',
  )

  def init(params: Any) -> optax.EmptyState:
    leaves = jax.tree.leaves(params, is_leaf=_is_variable)
    if not any(map(_is_lora_b, leaves)):
      raise ValueError(
        'peftlib.methods.scale_lora_b: none of the trained variables is a'
        ' lora_b; LoRA+ is for LoRA and the methods made from it.'
      )
    return optax.EmptyState()

  def update(
    updates: Any, state: optax.OptState, params: Any = None
  ) -> tuple[Any, optax.OptState]:
    del params
    faster = lambda leaf: jax.tree.map(lambda u: u * ratio, leaf)
    scaled = jax.tree.map(
      lambda leaf: faster(leaf) if _is_lora_b(leaf) else leaf,
      updates,
      is_leaf=_is_variable,
    )
    return scaled, state

  return optax.GradientTransformation(init, update)


def loraplus(
  learning_rate: optax.ScalarOrSchedule,
  ratio: float = 16.0,
  *,
  optimizer: Callable[..., optax.GradientTransformation] = optax.adamw,
  **options: Any,
) -> optax.GradientTransformation:
  """An optimizer whose learning rate for `lora_b` is `ratio` times higher.

  As HF peft's `create_loraplus_optimizer`, except that there every variable of
  one axis learns faster too.

  Example:
    >>> tx = loraplus(2e-4, ratio=16.0, weight_decay=0.01)

  Args:
    learning_rate: Of all variables but `lora_b`; a number or a schedule.
    ratio: Learning rate of `lora_b` by that of the others; 16 in the paper.
    optimizer: Makes an optax optimizer from a learning rate.
    **options: Its other arguments.

  Raises:
    ValueError: As `scale_lora_b`.

  References:
    Hayou et al., LoRA+: Efficient Low Rank Adaptation of Large Models, 2024.
  """
  return optax.chain(optimizer(learning_rate, **options), scale_lora_b(ratio))


def _is_variable(leaf: Any) -> bool:
  return isinstance(leaf, nnx.Variable)


def _is_lora_b(leaf: Any) -> bool:
  return _is_variable(leaf) and leaf.get_metadata().get('role') == 'lora_b'
