"""Decoders to fine-tune: the architecture, its cache and its checkpoints."""

from peftlib.models.cache import Cache
from peftlib.models.cache import init_cache
from peftlib.models.config import DecoderConfig
from peftlib.models.config import RopeScaling
from peftlib.models.decoder import Decoder
from peftlib.models.fingerprinting import fingerprint
from peftlib.models.loading import LoadedModel
from peftlib.models.loading import load
from peftlib.models.loading import open_checkpoint
from peftlib.models.saving import save_directory
from peftlib.models.sharding import partition_rules
from peftlib.models.sharding import partition_specs

__all__ = [
  'Cache',
  'Decoder',
  'DecoderConfig',
  'LoadedModel',
  'RopeScaling',
  'fingerprint',
  'init_cache',
  'load',
  'open_checkpoint',
  'partition_rules',
  'partition_specs',
  'save_directory',
]
