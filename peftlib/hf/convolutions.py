"""Adapters of convolutions: HF peft has them as convolutions themselves."""

from typing import Any

import numpy as np

from peftlib import slots as slots_lib


def check(
  function: str, peft_type: str, name: str, module: Any, slot: slots_lib.Slot
) -> None:
  """Raises ValueError where peft computes something else than is done here.

  Args:
    function: The public function that asks.
    peft_type: The kind of adapter, as in `adapter_config.json`.
    name: HF's name of the module.
    module: The module that holds the kernel.
    slot: Its adapter.
  """
  if slot.op.kind != 'conv':
    return
  if peft_type != 'LORA':
    raise ValueError(
      f'{function}: {peft_type} of {name}, a convolution: only LORA is known'
      ' there.'
    )
  if getattr(module, 'feature_group_count', 1) != 1:
    raise ValueError(
      f'{function}: {name} is a convolution in groups, of which peft adapts'
      ' each output by the inputs of all groups; here it is by its own.'
    )


def flattened(suffix: str, tensor: np.ndarray) -> np.ndarray:
  """A tensor of peft as that of a linear layer with the kernel's matrix.

  Args:
    suffix: What follows the module's name in the tensor's.
    tensor: (rank, inputs, *window), (outputs, rank, 1...), or the magnitudes
      (1, outputs, 1...).

  Returns:
    (rank, window * inputs), (outputs, rank), or (outputs,).
  """
  if suffix == 'lora_magnitude_vector':
    return tensor.reshape(-1)
  return np.moveaxis(tensor, 1, -1).reshape(tensor.shape[0], -1)


def unflattened(
  suffix: str, tensor: np.ndarray, inputs: tuple[int, ...]
) -> np.ndarray:
  """What `flattened` did, undone.

  Args:
    suffix: See `flattened`.
    tensor: What it returns.
    inputs: Extents of what the convolution sums over: (*window, inputs).
  """
  ones = (1,) * (len(inputs) - 1)
  if suffix == 'lora_magnitude_vector':
    return tensor.reshape(1, -1, *ones)
  window = inputs[:-1] if suffix == 'lora_A.weight' else ones
  return np.moveaxis(tensor.reshape(tensor.shape[0], *window, -1), -1, 1)
