"""Assertions on what is trained, for tests and for loops of your own.

They add to `transforms.testing`, which has those that need no adapters. That
the base stayed as it was is one of these:
`assert_only_changed(before, after, peftlib.trainable_filter(config))`.

The package doesn't import this module by itself: write
`from peftlib import testing`.
"""

from collections.abc import Sequence
from typing import Any

from flax import nnx

from peftlib import _checks
from peftlib import config as config_lib
from peftlib import training
import transforms

__all__ = [
  'assert_trainable',
]


def assert_trainable(
  state: nnx.State[Any, Any],
  config: config_lib.Config | nnx.filterlib.Filter,
  paths: Sequence[str],
) -> None:
  """Asserts that exactly the variables at some paths are trained.

  Example:
    >>> import jax, peftlib
    >>> config = peftlib.LoraConfig(rank=2)
    >>> _, state = peftlib.inject(
    ...   *nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
    ...   config,
    ...   jax.numpy.ones((1, 2)),
    ...   key=jax.random.key(0),
    ... )
    >>> assert_trainable(state, config, ['kernel_lora_.*'])
    >>> assert_trainable(state, config, ['kernel.*'])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: ...: named, but not trained: kernel. ...

  Args:
    state: All of the model's State, abstract ones too.
    config: What was injected, of which `peftlib.trainable_filter` says what is
      trained; or a filter of your own.
    paths: Paths with their keys joined by `/`, such as
      `layers/up/kernel_lora_a`; or regular expressions that match all of such
      a path, as those of `transforms.PathMatches`. What they match together
      has to be what is trained, and each has to match something. An empty
      sequence says that nothing is trained.

  Raises:
    AssertionError: Something else is trained too, something is not, or a
      pattern matches no variable.
    TypeError: `state` is no State, `config` is None or no filter, or `paths`
      is no sequence of str.
    ValueError: A path is no regular expression.
  """
  function = 'assert_trainable'
  _checks.check_state(function, 'state', state)
  if config is None:
    raise TypeError(
      f'{function}: config is None, which could be the whole model or nothing; '
      'give nnx.Param for the whole model, False for nothing.'
    )
  if isinstance(paths, str) or not all(isinstance(p, str) for p in paths):
    raise TypeError(
      f'{function}: paths is {paths!r}; it must be a sequence of str.'
    )
  if isinstance(config, (config_lib.AdapterConfig, config_lib.LoraConfig)):
    trained = _paths(
      transforms.select(state, training.trainable_filter(config))
    )
  else:
    trained = _paths(transforms.select(state, config))
  problems = []
  matched: dict[str, None] = {}
  for pattern in paths:
    matching = _paths(transforms.select(state, transforms.PathMatches(pattern)))
    if not matching:
      problems.append(f'no variable is at {pattern!r}')
    matched.update(matching)
  extra = [path for path in trained if path not in matched]
  if extra:
    problems.append(f'trained, but not named: {_checks.some(extra)}')
  frozen = [path for path in matched if path not in trained]
  if frozen:
    problems.append(f'named, but not trained: {_checks.some(frozen)}')
  if problems:
    raise AssertionError(
      f'{function}: {"; ".join(problems)}. Trained are {len(trained)} of '
      f'{len(_paths(state))} variables.'
    )


def _paths(state: nnx.State[Any, Any]) -> dict[str, None]:
  return {
    '/'.join(map(str, path)): None for path, _ in nnx.to_flat_state(state)
  }
