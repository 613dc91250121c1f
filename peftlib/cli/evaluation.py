"""Judging a model: exact match of its answers, and its loss."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

from flax import nnx
import jax

import peftlib
from peftlib import data
from peftlib import generation
from peftlib import losses

Template = Literal['chat', 'none']


class Questions(NamedTuple):
  """The rows of a file as prompts and the answers that are right."""

  path: str
  prompts: list[list[int]]
  texts: list[str]
  answers: list[str]


@dataclasses.dataclass(frozen=True)
class Result:
  """How a file's questions were answered.

  Attributes:
    path: The file.
    texts: What was asked: the last user turn, or the prompt.
    answers: What is right.
    given: What the model said.
  """

  path: str
  texts: list[str]
  answers: list[str]
  given: list[str]

  @property
  def correct(self) -> list[bool]:
    """Whether each answer is right, white space around it aside."""
    return [
      a.strip() == g.strip()
      for a, g in zip(self.answers, self.given, strict=True)
    ]

  @property
  def exact_match(self) -> float:
    """Share of right answers."""
    return sum(self.correct) / len(self.correct)


def template_option(name: str) -> Template | None:
  """The flag `--template` as the functions of `peftlib.data` take it."""
  return None if name == 'auto' else name  # type: ignore[return-value]


def read_questions(
  path: str,
  tokenizer: data.Tokenizer,
  *,
  limit: int | None,
  template: Template | None,
) -> Questions:
  """Reads a file's rows as questions.

  Args:
    path: A JSON lines file.
    tokenizer: Tokenizer of the model.
    limit: How many rows to take at most, None for all.
    template: See `data.encode_prompt`.

  Raises:
    ValueError: Naming file and line; a row is a text, or ends without an
      assistant's turn.
  """
  rows = data.read_jsonl(path)[:limit]
  encoded = [data.encode_prompt(r, tokenizer, template=template) for r in rows]
  texts = [_asked(row) for row in rows]
  return Questions(
    path, [ids for ids, _ in encoded], texts, [ref for _, ref in encoded]
  )


def _asked(row: data.Row) -> str:
  """What a row asks: its prompt, or the turn before the last."""
  *_, turn, _ = ({'content': ''}, *row.as_messages())
  return turn['content']


def ask(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  questions: Questions,
  tokenizer: data.Tokenizer,
  *,
  max_new_tokens: int,
  batch_size: int,
) -> Result:
  """Answers questions by greedy generation."""
  outputs = generation.generate(
    graphdef,
    state,
    questions.prompts,
    max_new_tokens=max_new_tokens,
    eos_ids=tokenizer.eos_ids,
    pad_id=tokenizer.pad_id,
    batch_size=batch_size,
  )
  return Result(
    questions.path,
    questions.texts,
    questions.answers,
    [tokenizer.decode(ids) for ids in outputs],
  )


def mean_loss(
  graphdef: nnx.GraphDef[Any],
  state: nnx.State[Any, Any],
  pipeline: data.Pipeline,
) -> float:
  """Mean loss over the learnt tokens of one epoch.

  Args:
    graphdef: Graph definition of the model.
    state: Its whole state.
    pipeline: Batches of one epoch.
  """
  step = peftlib.make_eval_step(graphdef, losses.causal_lm_loss)
  empty: nnx.State[Any, Any] = nnx.State({})
  total = tokens = 0.0
  for batch in pipeline.dataset:
    metrics = jax.device_get(step(state, empty, batch))
    total += float(metrics['loss']) * float(metrics['tokens'])
    tokens += float(metrics['tokens'])
  return total / tokens if tokens else math.nan
