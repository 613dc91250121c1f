"""`peftlib inspect`: what would be trained, without reading a weight."""

import jax

from peftlib import checkpoint
from peftlib.cli import assembly
from peftlib.cli import display
from peftlib.cli import options as options_lib


def run(options: options_lib.Inspect) -> int:
  """Runs the command: prints the table that `finetune` begins with.

  The model is made of shapes and dtypes alone, so that this takes seconds and
  no memory for a model of any size.

  Args:
    options: Checked by `options.check_inspect`.

  Returns:
    The exit status, 0.

  Raises:
    ValueError: `--module_path` matches nothing (the text has the nearest
      paths), or the tile size fits a layer not.
  """
  if options.adapter is not None:
    config = checkpoint.config_of(checkpoint.read_manifest(options.adapter))
  else:
    config = assembly.make_config(options)
  base = assembly.abstract_base(
    str(options.model), compute_dtype=options.compute_dtype
  )
  assembled = assembly.assemble(base, config, key=jax.random.key(0))
  rows = display.module_rows(assembled.trainable, assembled.frozen)
  display.make_console().print(display.module_table(rows))
  return 0
