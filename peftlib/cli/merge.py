"""`peftlib merge`: a model with the adapter in its weights, as a directory."""

from flax import nnx
import jax.numpy as jnp

import peftlib
from peftlib import models
from peftlib.cli import assembly
from peftlib.cli import display
from peftlib.cli import options as options_lib
import transforms


def run(options: options_lib.Merge) -> int:
  """Runs the command: writes a Hugging Face model directory.

  The weights are those that the adapter was trained on, dequantized if they
  were quantized, so that the merged model answers as base and adapter do.

  Args:
    options: Checked by `options.check_merge`.

  Returns:
    The exit status, 0.

  Raises:
    FileExistsError: Something is at `--output`.
    ValueError: Model and adapter don't fit one another, or the method has no
      merged weights.
  """
  adapted = assembly.load_adapted(
    str(options.model), options.adapter, compute_dtype='float32'
  )
  graphdef, state = peftlib.merge_adapters(
    adapted.graphdef, adapted.state, dtype=jnp.float32
  )
  del adapted
  graphdef, state = peftlib.dequantize_base(graphdef, state)
  config = nnx.merge(graphdef, state).config
  state = transforms.cast(state, jnp.dtype(options.dtype), nnx.Param)
  models.save_directory(
    str(options.output),
    config,
    state,
    tokenizer=assembly.load_tokenizer(str(options.model)),
  )
  display.say(display.make_console(), f'Wrote {options.output}.')
  return 0
