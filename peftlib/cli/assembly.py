"""From paths and flags to a model that is ready: loaded, adapted, split."""

import os
from typing import Any, NamedTuple

from flax import nnx
import jax

import peftlib
from peftlib import checkpoint
from peftlib import config as config_lib
from peftlib import data
from peftlib import hf
from peftlib import methods
from peftlib import models
from peftlib.cli import errors
from peftlib.cli import options as options_lib
from peftlib.models import loading
import transforms


class Base(NamedTuple):
  """A pretrained model, or its abstract shape."""

  graphdef: nnx.GraphDef[Any]
  state: nnx.State[Any, Any]


class Assembled(NamedTuple):
  """A model, its trainable variables apart from the frozen ones."""

  graphdef: nnx.GraphDef[Any]
  trainable: nnx.State[Any, Any]
  frozen: nnx.State[Any, Any]


class Adapted(NamedTuple):
  """A model with the values of an adapter directory, if one was given."""

  graphdef: nnx.GraphDef[Any]
  state: nnx.State[Any, Any]
  config: config_lib.Config | None


def load_base(
  path: str,
  *,
  compute_dtype: str,
  remat: str = 'dots',
  config: config_lib.Config | None = None,
) -> tuple[Base, str]:
  """Loads a model, in float32, and its fingerprint.

  Args:
    path: A GGUF file or a Hugging Face directory.
    compute_dtype: Name of the dtype to compute in.
    remat: See `peftlib.models.load`.
    config: What it's loaded for: weights that this quantizes are quantized as
      they are read, unless a method needs them in floating point.

  Returns:
    The model and `peftlib.models.fingerprint` of it, unquantized.
  """
  loaded = models.load(
    path,
    dtype=compute_dtype,
    param_dtype='float32',
    remat=remat,
    quantize=config if _is_quantized_first(config) else None,
  )
  return Base(loaded.graphdef, loaded.state), loaded.fingerprint


def _is_quantized_first(config: config_lib.Config | None) -> bool:
  return (
    config is not None
    and any(rule.weight_qtype for rule in config.rules)
    and not any(rule.method and rule.method.residual for rule in config.rules)
  )


def _is_quantized(state: nnx.State[Any, Any]) -> bool:
  return any(path[-1] == 'qvalue' for path, _ in nnx.to_flat_state(state))


def abstract_base(path: str, *, compute_dtype: str) -> Base:
  """The model of a path as shapes and dtypes; no tensor is read."""
  config = loading.open_checkpoint(path).config(
    dtype=compute_dtype, param_dtype='float32'
  )
  model = nnx.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0)))
  return Base(*nnx.split(model))


def load_tokenizer(path: str) -> data.Tokenizer:
  """Loads the tokenizer of a model and checks that they fit one another.

  Args:
    path: A GGUF file or a Hugging Face directory.

  Raises:
    errors.UserError: The tokenizer has more tokens than the model.
  """
  tokenizer = data.Tokenizer.from_path(path)
  size = loading.open_checkpoint(path).config().vocab_size
  if tokenizer.vocab_size > size:
    raise errors.UserError(
      f'--model={path}: its tokenizer has {tokenizer.vocab_size} tokens, more'
      f' than the model, {size}; expected files of one model'
    )
  return tokenizer


def make_config(options: options_lib.Method) -> config_lib.Config | None:
  """What the flags of a command say of adapters; None for the whole model."""
  fields = options_lib.adapter_fields(options)
  if fields is None:
    return None
  quantized = {name: fields[name] for name in ('weight_qtype', 'tile_size')}
  if fields['method'] == 'lora':
    return peftlib.LoraConfig(
      module_path=fields['module_path'], **fields['fields'], **quantized
    )
  method = methods.by_name(fields['method'])(**fields['fields'])
  return peftlib.AdapterConfig(
    (peftlib.Rule(fields['module_path'], method, **quantized),)
  )


def assemble(
  base: Base, config: config_lib.Config | None, *, key: jax.Array
) -> Assembled:
  """Adds adapters, quantizes what they sit on, and splits off what is trained.

  Args:
    base: The model as `load_base` gives it for this config, or an abstract one.
      Callers that have no more use for its weights should not keep it.
    config: None for the whole model to be trained.
    key: PRNG key of the adapters.

  Raises:
    ValueError: The config doesn't fit the model.
  """
  graphdef, state = base
  del base
  if config is not None:
    tokens = jax.ShapeDtypeStruct((1, 8), 'int32')
    first = _is_quantized_first(config)
    if first and not _is_quantized(state):
      graphdef, state = peftlib.quantize_base(graphdef, state, config, tokens)
    graphdef, state = peftlib.inject(graphdef, state, config, tokens, key=key)
    if not first and any(rule.weight_qtype for rule in config.rules):
      graphdef, state = peftlib.quantize_base(graphdef, state, config, tokens)
  trainable, frozen = transforms.partition(
    state, peftlib.trainable_filter(config), ...
  )
  return Assembled(graphdef, trainable, frozen)


def load_adapted(
  path: str, adapter: str | None, *, compute_dtype: str
) -> Adapted:
  """Loads a model and, where given, puts a trained adapter into it.

  Args:
    path: A GGUF file or a Hugging Face directory.
    adapter: A directory that `checkpoint.save_adapter` or HF peft wrote, or
      None.
    compute_dtype: Name of the dtype to compute in.

  Raises:
    FileNotFoundError: The directory isn't an adapter's.
    ValueError: The adapter was trained on another model; naming both.
  """
  if adapter is None:
    base, _ = load_base(path, compute_dtype=compute_dtype)
    return Adapted(base.graphdef, base.state, None)
  if os.path.isfile(os.path.join(adapter, hf.CONFIG)):
    base, _ = load_base(path, compute_dtype=compute_dtype)
    loaded = hf.load_adapter(adapter, base.graphdef, base.state)
    return Adapted(loaded.graphdef, loaded.state, loaded.config)
  config = checkpoint.config_of(checkpoint.read_manifest(adapter))
  base, fingerprint = load_base(
    path, compute_dtype=compute_dtype, config=config
  )
  graphdef, trainable, frozen = assemble(base, config, key=jax.random.key(0))
  del base
  state = transforms.merge(trainable, frozen)
  del trainable, frozen
  own, rest = transforms.partition(state, peftlib.saved_filter(config), ...)
  own = checkpoint.restore_adapter(
    adapter, own, checkpoint.make_manifest(own, config, fingerprint)
  )
  return Adapted(graphdef, transforms.merge(own, rest), config)
