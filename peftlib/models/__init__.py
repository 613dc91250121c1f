"""Decoders to fine-tune: the architecture, its cache and its checkpoints."""

from peftlib.models.cache import Cache, init_cache
from peftlib.models.config import DecoderConfig, RopeScaling
from peftlib.models.decoder import Decoder
from peftlib.models.fingerprinting import fingerprint
from peftlib.models.loading import LoadedModel, load, open_checkpoint
from peftlib.models.saving import save_directory
from peftlib.models.sharding import partition_rules, partition_specs

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
