"""Adapter directories of HF peft, both ways."""

from peftlib.hf.directories import CONFIG
from peftlib.hf.loading import Loaded
from peftlib.hf.loading import load_adapter
from peftlib.hf.names import Place
from peftlib.hf.projections import fused_projections
from peftlib.hf.saving import save_adapter

__all__ = [
  'CONFIG',
  'Loaded',
  'Place',
  'fused_projections',
  'load_adapter',
  'save_adapter',
]
