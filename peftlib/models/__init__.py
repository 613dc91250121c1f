"""Decoders to fine-tune: the architecture, its cache and its checkpoints."""

from peftlib.models.cache import Cache
from peftlib.models.cache import init_cache
from peftlib.models.config import DecoderConfig
from peftlib.models.config import RopeScaling
from peftlib.models.decoder import Decoder
from peftlib.models.loading import LoadedModel
from peftlib.models.loading import load

__all__ = [
  'Cache',
  'Decoder',
  'DecoderConfig',
  'LoadedModel',
  'RopeScaling',
  'init_cache',
  'load',
]
