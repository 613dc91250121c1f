"""Weights that are parameters of a module of HF, as those of experts are."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from peftlib import methods
from peftlib.hf import names
from peftlib.hf import selection

_SUFFIXES = ('lora_A.weight', 'lora_B.weight')


def check(function: str, place: names.Place, method: methods.Method) -> None:
  """Raises ValueError where peft has no adapter of a parameter.

  Args:
    function: The public function that asks.
    place: Where the weight is.
    method: Its method.
  """
  if not place.parameter:
    return
  plain = (methods.Lora, methods.RsLora, methods.OrthogonalLora, methods.LoraFA)
  if type(method) not in plain or method.dropout or method.bias:  # type: ignore[attr-defined]
    raise ValueError(
      f'{function}: {method.name} of {place.name}, a parameter: peft adapts'
      ' those by lora and rslora alone, without dropout and bias.'
    )


def chosen(
  function: str, fields: Mapping[str, Any], places: Mapping[str, names.Place]
) -> list[str]:
  """The parameters that `target_parameters` means, in HF's order.

  Raises:
    ValueError: If an entry means none.
  """
  targets = sorted(fields.get('target_parameters') or ())
  known = [place.name for place in places.values() if place.parameter]
  nothing = [t for t in targets if not selection.named(known, [t])]
  if nothing:
    raise ValueError(
      f'{function}: LORA with target_parameters={targets!r}: the model'
      f' has no parameter {nothing[0]!r}, as experts have; a model of your own'
      ' has what places={...} says.'
    )
  return selection.named(known, targets)


def nested(chosen: Iterable[str]) -> dict[str, str]:
  """Where peft keeps the adapter of each parameter: by name, a module.

  It wraps the parameter's module once for each, the first one innermost.
  """
  of_module: dict[str, list[str]] = {}
  for name in chosen:
    of_module.setdefault(name.rpartition('.')[0], []).append(name)
  return {
    name: module + '.base_layer' * (len(own) - 1 - i)
    for module, own in of_module.items()
    for i, name in enumerate(own)
  }


def renamed(
  tensors: Mapping[str, np.ndarray], chosen: Iterable[str]
) -> dict[str, np.ndarray]:
  """The tensors, those of parameters by the parameters' own names."""
  own = {
    f'{names.PREFIX}{module}.{suffix}': f'{names.PREFIX}{name}.{suffix}'
    for name, module in nested(chosen).items()
    for suffix in _SUFFIXES
  }
  return {own.get(name, name): tensor for name, tensor in tensors.items()}


def split(suffix: str, tensor: np.ndarray, experts: int) -> np.ndarray:
  """A tensor of all experts as one matrix each.

  Args:
    suffix: What follows the module's name in the tensor's.
    tensor: (experts * rank, inputs), or (outputs, rank * experts).
    experts: Number of experts.

  Returns:
    (experts, inputs, rank), or (experts, rank, outputs).
  """
  if suffix == _SUFFIXES[0]:
    split = tensor.reshape(experts, -1, tensor.shape[1])
    return split.transpose(0, 2, 1)
  return tensor.reshape(tensor.shape[0], -1, experts).transpose(2, 1, 0)


def joined(suffix: str, matrices: np.ndarray) -> np.ndarray:
  """What `split` did, undone."""
  if suffix == _SUFFIXES[0]:
    return matrices.transpose(0, 2, 1).reshape(-1, matrices.shape[1])
  return matrices.transpose(2, 1, 0).reshape(matrices.shape[2], -1)
