"""Adapter directories of HF peft as files: two of them, nothing pickled."""

import json
import os
import pathlib
import shutil
from typing import Any

import ml_dtypes  # noqa: F401  Registers bfloat16 with numpy.
import numpy as np
import safetensors
import safetensors.numpy

CONFIG = 'adapter_config.json'
TENSORS = 'adapter_model.safetensors'
_PICKLED = ('adapter_model.bin', 'adapter_model.pt', 'adapter_model.pth')


def read(
  directory: str | os.PathLike[str],
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Reads the configuration and the tensors of an adapter directory.

  Raises:
    FileNotFoundError: If one of the files isn't there.
    ValueError: If a file is malformed, or the tensors are pickled: reading
      them could run any program that somebody put into them.
  """
  root = pathlib.Path(directory)
  config_path, tensors_path = root / CONFIG, root / TENSORS
  if not config_path.is_file():
    raise FileNotFoundError(
      f'peftlib.hf.load_adapter: {config_path} is not there; an adapter'
      f' directory of HF peft has {CONFIG} and {TENSORS}.'
    )
  if not tensors_path.is_file():
    for name in _PICKLED:
      if (root / name).exists():
        raise ValueError(
          f'peftlib.hf.load_adapter: {root / name} is pickled, and unpickling'
          ' can run any program. Save it anew with HF peft and'
          ' safe_serialization=True.'
        )
    raise FileNotFoundError(
      f'peftlib.hf.load_adapter: {tensors_path} is not there.'
    )
  try:
    config = json.loads(config_path.read_text('utf-8'))
  except ValueError as e:
    raise ValueError(f'{config_path}: not valid JSON: {e}.') from e
  if not isinstance(config, dict):
    raise ValueError(f'{config_path}: not a JSON object.')
  try:
    # Its own load_file for numpy knows no bfloat16.
    with safetensors.safe_open(tensors_path, 'np') as file:
      tensors = {name: file.get_tensor(name) for name in file.keys()}
  except (safetensors.SafetensorError, OSError, ValueError, TypeError) as e:
    raise ValueError(f'{tensors_path}: not a safetensors file: {e}.') from e
  return config, tensors


def write(
  directory: str | os.PathLike[str],
  config: dict[str, Any],
  tensors: dict[str, np.ndarray],
  *,
  overwrite: bool,
) -> None:
  """Writes an adapter directory, which appears only when it is complete.

  Raises:
    FileExistsError: If it exists and `overwrite` is False.
  """
  root = pathlib.Path(directory).absolute()
  if root.exists() and not overwrite:
    raise FileExistsError(
      f'peftlib.hf.save_adapter: {root} exists; give another directory, or'
      ' overwrite=True.'
    )
  root.parent.mkdir(parents=True, exist_ok=True)
  fresh = root.with_name(f'.{root.name}.new')
  shutil.rmtree(fresh, ignore_errors=True)
  fresh.mkdir()
  text = json.dumps(config, indent=2, sort_keys=True)
  _write(fresh / CONFIG, text.encode('utf-8'))
  contiguous = {k: np.ascontiguousarray(v) for k, v in tensors.items()}
  _write(
    fresh / TENSORS,
    safetensors.numpy.save(contiguous, metadata={'format': 'pt'}),
  )
  stale = root.with_name(f'.{root.name}.old')
  shutil.rmtree(stale, ignore_errors=True)
  if root.exists():
    root.rename(stale)
  fresh.rename(root)
  shutil.rmtree(stale, ignore_errors=True)


def _write(path: pathlib.Path, content: bytes) -> None:
  with open(path, 'wb') as f:
    f.write(content)
    f.flush()
    os.fsync(f.fileno())
