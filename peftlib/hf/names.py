"""The modules of HF's models that a decoder's variables are."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import nnx
import numpy as np

from peftlib import models
from peftlib.hf import selection
from peftlib.models import naming

PREFIX = 'base_model.model.'
HEAD = 'lm_head'
TABLE = 'model.embed_tokens'


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a module of HF's model is in ours.

  Attributes:
    name: HF's name, e.g. 'model.layers.0.self_attn.q_proj'.
    path: Path of our module, e.g. ('layers', 'self_attn', 'q_proj').
    weight: Name of its weight there: 'kernel', 'embedding' or 'scale'.
    layer: Number on the stack's axis, or None.
    transposed: Whether our weight is HF's transposed: (in, out), or (*window,
      in, out) of a convolution, where HF has (out, in, *window).
    bias: Whether the module has a bias.
    parameter: Whether HF has it as a parameter of a module, as the weights of
      experts are, not as a module with a weight: `name` is the parameter's,
      'model.layers.0.mlp.experts.gate_up_proj'.
  """

  name: str
  path: tuple[str, ...]
  weight: str
  layer: int | None
  transposed: bool
  bias: bool = False
  parameter: bool = False

  @property
  def variable(self) -> tuple[str, ...]:
    """The path of our weight."""
    return (*self.path, self.weight)

  @property
  def target(self) -> tuple[str, ...]:
    """The path by which a rule means it: of our module, or of a parameter."""
    return self.variable if self.parameter else self.path

  def from_hf(self, weight: np.ndarray) -> np.ndarray:
    """Our weight of HF's."""
    if not self.transposed:
      return weight
    return weight.transpose(*range(2, weight.ndim), 1, 0)

  def to_hf(self, weight: np.ndarray) -> np.ndarray:
    """HF's weight of ours."""
    if not self.transposed:
      return weight
    last = weight.ndim - 1
    return weight.transpose(last, last - 1, *range(last - 1))


def places_of(model: nnx.Module) -> dict[str, Place]:
  """The modules of a decoder by HF's names, in HF's order.

  Raises:
    TypeError: If the model isn't one of ours, whose names are known.
  """
  if not isinstance(model, models.Decoder):
    raise TypeError(
      'peftlib.hf: only for peftlib.models.Decoder are the names of HF known;'
      f' this is a {type(model).__name__}. Give places={{...}} for it.'
    )
  return places_from_targets(naming.targets(model.config))


def places_from_targets(targets: Mapping[str, Any]) -> dict[str, Place]:
  """The modules of a table of tensors; see `models.naming.targets`."""
  places: dict[str, Place] = {}
  for tensor, target in targets.items():
    name, _, kind = tensor.rpartition('.')
    if kind == 'weight':
      *path, weight = target.path
      places[name] = Place(
        name, tuple(path), weight, target.layer, target.transposed
      )
  for tensor in targets:
    name, _, kind = tensor.rpartition('.')
    if kind == 'bias':
      places[name] = dataclasses.replace(places[name], bias=True)
  return places


def table_of_head(model: nnx.Module) -> str | None:
  """The table that is the output head too; None if the head has its own."""
  if isinstance(model, models.Decoder) and model.config.tie_embeddings:
    return TABLE
  return None


def linear(places: Mapping[str, Place]) -> list[str]:
  """Names of the linear layers."""
  return [
    p.name for p in places.values() if p.weight == 'kernel' and not p.parameter
  ]


def others(places: Mapping[str, Place]) -> list[str]:
  """Names of embeddings and norms."""
  return [
    p.name for p in places.values() if p.weight != 'kernel' and not p.parameter
  ]


def heads(places: Mapping[str, Place]) -> list[str]:
  """Names of output heads."""
  return [p.name for p in places.values() if p.name.endswith('lm_head')]


def chosen(fields: Mapping[str, Any], places: Mapping[str, Place]) -> list[str]:
  """The modules that a configuration means; see `selection.modules`."""
  return selection.modules(
    fields, linear(places), others(places), heads(places)
  )
