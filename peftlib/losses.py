"""Losses for training steps."""

from collections.abc import Mapping
import functools
import inspect
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import optax

__all__ = [
  'causal_lm_loss',
]


def causal_lm_loss(
  model: Any, batch: Mapping[str, Any], rngs: nnx.Rngs
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Cross entropy of the tokens that a batch says should be learnt.

  The model's head is computed at `loss_positions` alone, and its logits aren't
  kept where the model can do without them. The loss is the
  weighted mean over the batch: `sum(weight * loss) / max(sum(weight), 1)`, so
  that a batch of nothing but padding has loss 0.

  Example:
    >>> step = peftlib.make_train_step(
    ...   graphdef, causal_lm_loss, tx
    ... )  # doctest: +SKIP

  Args:
    model: Called as `model(tokens, positions=, segment_ids=, logits_at=)`;
      gives float logits (B, K, vocabulary). One whose signature has
      `loss_targets`, as that of `peftlib.models.Decoder`, gets the targets too
      and gives the cross entropy of each, (B, K).
    batch: The arrays of `peftlib.data.make_pipeline`: `tokens`, `positions`,
      `segment_ids`, int32 (B, S); `loss_positions`, `targets`, int32 (B, K);
      `loss_weights`, float32 (B, K).
    rngs: Unused; part of the signature of `peftlib.training.LossFn`.

  Returns:
    The loss, float32 (), and `{'tokens': sum of the weights}`, float32 ().
  """
  del rngs
  call = functools.partial(
    model,
    batch['tokens'],
    positions=batch['positions'],
    segment_ids=batch['segment_ids'],
    logits_at=batch['loss_positions'],
  )
  if 'loss_targets' in inspect.signature(model).parameters:
    losses = call(loss_targets=batch['targets'])
  else:
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
      call(), batch['targets']
    )
  weights = batch['loss_weights']
  tokens = jnp.sum(weights)
  return jnp.sum(losses * weights) / jnp.maximum(tokens, 1), {'tokens': tokens}
