"""`peftlib export`: an adapter as HF peft reads it."""

import peftlib
from peftlib import hf
from peftlib.cli import assembly
from peftlib.cli import display
from peftlib.cli import options as options_lib


def run(options: options_lib.Export) -> int:
  """Runs the command: writes an adapter directory of HF peft.

  Args:
    options: Checked by `options.check_export`.

  Returns:
    The exit status, 0.

  Raises:
    FileExistsError: Something is at `--output`.
    ValueError: Model and adapter don't fit one another, or peft has no
      configuration for the adapter.
  """
  adapted = assembly.load_adapted(
    str(options.model), options.adapter, compute_dtype='float32'
  )
  graphdef, state = peftlib.dequantize_base(adapted.graphdef, adapted.state)
  hf.save_adapter(
    str(options.output),
    graphdef,
    state,
    train=() if adapted.config is None else adapted.config.train,
  )
  display.say(display.make_console(), f'Wrote {options.output}.')
  return 0
