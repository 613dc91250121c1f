"""Prefix tuning and prompt tuning: learned tokens before the first one."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

from flax import nnx
import jax
import jax.numpy as jnp

from peftlib import config as config_lib
from peftlib import slots as slots_lib


@runtime_checkable
class TakesVirtualTokens(Protocol):
  """What a model has to have, as `peftlib.models.Decoder` does."""

  def virtual_token_shapes(
    self, kind: str, length: int
  ) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Shapes of the variables that its forward pass reads, by path."""


class Tokens(NamedTuple):
  """A variable of virtual tokens, and where it is."""

  module: nnx.Module
  attribute: str
  variable: nnx.LoRAParam

  @property
  def adapter(self) -> str:
    """Name of the adapter that it belongs to."""
    return str(self.variable.get_metadata()['adapter'])


def of_model(model: nnx.Module) -> list[Tokens]:
  """The variables of virtual tokens in a model, told by their metadata."""
  return [
    Tokens(module, name, node)
    for _, module in nnx.iter_modules(model)
    for name, node in list(vars(module).items())
    if isinstance(node, nnx.LoRAParam)
    and 'virtual_tokens' in node.get_metadata()
  ]


def names_of(model: nnx.Module) -> list[str]:
  """Names of all adapters, those of weights before those of tokens alone."""
  own = (tokens.adapter for tokens in of_model(model))
  return list(dict.fromkeys((*slots_lib.names_of(model), *own)))


def check(
  model: nnx.Module, tokens: config_lib.VirtualTokens, adapter: str
) -> dict[tuple[str, ...], tuple[int, ...]]:
  """The variables that a model gets, by path.

  Raises:
    ValueError: If it reads none, or has some already.
  """
  if not isinstance(model, TakesVirtualTokens):
    raise ValueError(
      f'peftlib.inject: a {type(model).__name__} reads no virtual tokens; it'
      ' needs a method virtual_token_shapes, as peftlib.models.Decoder has.'
    )
  shapes = model.virtual_token_shapes(tokens.kind, tokens.length)
  for path in shapes:
    if _module(model, path) is not None and hasattr(
      _module(model, path), path[-1]
    ):
      raise ValueError(
        f'peftlib.inject: adapter {adapter!r}: the model has'
        f' {"/".join(path)} already, and reads one set of virtual tokens.'
      )
  return shapes


def add(
  model: nnx.Module,
  shapes: dict[tuple[str, ...], tuple[int, ...]],
  tokens: config_lib.VirtualTokens,
  adapter: str,
  key: jax.Array,
  abstract: bool,
) -> None:
  """Adds the variables to a merged model of the caller's own."""
  for i, (path, shape) in enumerate(shapes.items()):
    make = _starter(shape, tokens.stddev)
    own_key = jax.random.fold_in(key, i)
    value: Any = (
      jax.eval_shape(make, own_key) if abstract else jax.jit(make)(own_key)
    )
    setattr(
      _module(model, path),
      path[-1],
      nnx.LoRAParam(
        value, adapter=adapter, role=path[-1], virtual_tokens=tokens.kind
      ),
    )


def _starter(shape: tuple[int, ...], stddev: float) -> Any:
  return lambda key: stddev * jax.random.normal(key, shape, jnp.float32)


def _module(model: nnx.Module, path: tuple[str, ...]) -> Any:
  for part in path[:-1]:
    model = getattr(model, part)
  return model
