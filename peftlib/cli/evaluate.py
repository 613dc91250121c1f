"""`peftlib evaluate`: loss and exact match of a model on files of rows."""

import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax

from peftlib import data
from peftlib.cli import assembly
from peftlib.cli import display
from peftlib.cli import evaluation
from peftlib.cli import options as options_lib
from peftlib.cli import runs


class _File(NamedTuple):
  """A file, read and encoded."""

  path: str
  pipeline: data.Pipeline
  questions: evaluation.Questions | None


def run(options: options_lib.Evaluate) -> int:
  """Runs the command: prints a table and, with `--json`, writes a file.

  Args:
    options: Checked by `options.check_evaluate`.

  Returns:
    The exit status, 0.

  Raises:
    FileNotFoundError: Model, data or adapter isn't there.
    ValueError: One of them is malformed, or they don't fit one another.
  """
  if options.compilation_cache is not None:
    jax.config.update('jax_compilation_cache_dir', options.compilation_cache)
  console = display.make_console()
  tokenizer = assembly.load_tokenizer(str(options.model))
  files = [_read(path, tokenizer, options) for path in options.data]
  adapted = assembly.load_adapted(
    str(options.model), options.adapter, compute_dtype=options.compute_dtype
  )
  figures = []
  for file in files:
    loss = evaluation.mean_loss(adapted.graphdef, adapted.state, file.pipeline)
    record: dict[str, Any] = {
      'file': file.path,
      'rows': file.pipeline.stats.rows,
      'truncated_rows': file.pipeline.stats.truncated_rows,
      'loss_tokens': file.pipeline.stats.loss_tokens,
      'loss': loss,
      'exact_match': None,
      'answers': [],
    }
    if file.questions is not None:
      result = evaluation.ask(
        adapted.graphdef,
        adapted.state,
        file.questions,
        tokenizer,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.eval_batch_size,
      )
      record['exact_match'] = result.exact_match
      record['answers'] = [
        {'asked': t, 'right': a, 'given': g, 'correct': c}
        for t, a, g, c in zip(
          result.texts,
          result.answers,
          result.given,
          result.correct,
          strict=True,
        )
      ]
    figures.append(record)
  console.print(display.evaluation_table(figures))
  if options.json is not None:
    runs.write_json(
      pathlib.Path(options.json).absolute(),
      {
        'model': options.model,
        'adapter': options.adapter,
        'files': figures,
        'flags': dataclasses.asdict(options),
      },
    )
  return 0


def _read(
  path: str, tokenizer: data.Tokenizer, options: options_lib.Evaluate
) -> _File:
  template = evaluation.template_option(options.template)
  rows = data.read_jsonl(path)[: options.eval_rows]
  pipeline = data.make_pipeline(
    rows,
    tokenizer,
    length=options.length,
    batch_size=options.batch_size,
    num_epochs=1,
    shuffle=False,
    pack=True,
    loss_on=options.loss_on,  # type: ignore[arg-type]
    template=template,
    overlong=options.overlong,  # type: ignore[arg-type]
  )
  # A text has no answer to compare with.
  if all(row.text is not None for row in rows):
    return _File(path, pipeline, None)
  return _File(
    path,
    pipeline,
    evaluation.read_questions(
      path, tokenizer, limit=options.eval_rows, template=template
    ),
  )
