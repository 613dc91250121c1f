"""Which weights a rule means: by regular expression, by name, by structure."""

from collections.abc import Callable
import difflib
import itertools
import re
from typing import NamedTuple

from peftlib import interception
from peftlib import weight_ops

Pattern = str | tuple[str, ...]

# Sets of weights by what they do in the model, whatever they are called.
PRESETS = ('all-linear', 'attention', 'mlp')
# Ops of `interception.Recording.missed` that are not linear.
_OTHER = ('gather', 'conv_general_dilated')


def matching(
  recording: interception.Recording, pattern: Pattern, exclude: Pattern = ()
) -> list[weight_ops.WeightOp]:
  """The weights that a rule means.

  Args:
    recording: From `interception.record`.
    pattern: As `Rule.module_path`.
    exclude: As `Rule.exclude`.

  Raises:
    ValueError: If there is none (the text has the nearest paths), or if a
      module that is meant has a weight that no adapter can follow (the text
      has the reason).
  """
  chosen = _matches(recording, pattern)
  excluded = _matches(recording, exclude)
  missed = [
    weight.text
    for weight in recording.missed
    if chosen.missed(weight) and not excluded.missed(weight)
  ]
  if missed:
    raise ValueError(
      f'peftlib: module_path {pattern!r} means weights that no adapter can'
      f' follow: {"; ".join(missed)}. Exclude them.'
    )
  matched = [
    op for op in recording.ops if chosen.op(op) and not excluded.op(op)
  ]
  if matched:
    return matched
  paths = list(dict.fromkeys(op.module_path for op in recording.ops))
  # The words of the pattern, since its operators are in no path.
  words = ' '.join(re.findall(r'\w+', str(pattern)))
  near = difflib.get_close_matches(words, paths, n=5, cutoff=0.2) or paths[:5]
  left = f' that {exclude!r} leaves' if exclude else ''
  raise ValueError(
    f'peftlib: module_path {pattern!r} matches no module with a weight'
    f' that takes part in a contraction{left}. It has to match the whole path;'
    f' nearest: {near}.'
  )


class _Matcher(NamedTuple):
  op: Callable[[weight_ops.WeightOp], bool]
  missed: Callable[[interception.Missed], bool]


def _matches(recording: interception.Recording, pattern: Pattern) -> _Matcher:
  if isinstance(pattern, str) and pattern in PRESETS:
    return _preset(recording, pattern)

  def by_path(module: str, name: str) -> bool:
    own = f'{module}/{name}' if module else name
    return path_matches(module, pattern) or path_matches(own, pattern)

  return _Matcher(
    lambda op: by_path(op.module_path, op.name),
    lambda weight: by_path(weight.path, weight.name),
  )


def path_matches(path: str, pattern: Pattern) -> bool:
  """Whether a path, its parts joined by '/', is meant.

  Args:
    path: E.g. 'layers/self_attn/q_proj'.
    pattern: A regular expression that has to match all of it; or names, of
      which one has to be its end, e.g. 'q_proj' or 'self_attn.q_proj'.
  """
  if isinstance(pattern, str):
    return re.fullmatch(pattern, path) is not None
  names = [name.replace('.', '/') for name in pattern]
  return any(path == name or path.endswith(f'/{name}') for name in names)


def _preset(recording: interception.Recording, preset: str) -> _Matcher:
  heads = _heads(recording)

  def in_attention(path: str) -> bool:
    return any(
      module and f'{path}/'.startswith(f'{module}/')
      for module in recording.attention
    )

  def by_path(path: str) -> bool:
    return preset == 'all-linear' or in_attention(path) == (
      preset == 'attention'
    )

  def by_op(op: weight_ops.WeightOp) -> bool:
    linear = op.weight.kind == 'linear' and op.label not in heads
    return linear and by_path(op.module_path)

  def missed(weight: interception.Missed) -> bool:
    return by_path(weight.path) and weight.op not in _OTHER

  return _Matcher(by_op, missed)


def _heads(recording: interception.Recording) -> set[str]:
  """Labels of the output heads: what comes last, back to the vocabulary.

  An inner layer can have as many outputs as a table has rows (of positions,
  say) by chance; it is followed by others, or leads back to the model's width.
  """
  tables = [op.weight for op in recording.ops if op.kind == 'embedding']
  vocabularies = {table.rows for table in tables}
  vocabularies -= {table.columns for table in tables}
  linear = [op for op in recording.ops if op.weight.kind == 'linear']
  heads = itertools.takewhile(
    lambda op: op.weight.columns in vocabularies, reversed(linear)
  )
  return {op.label for op in heads}
