"""Which weights a rule means: by regular expression, by name, by structure."""

from collections.abc import Callable
import difflib
import re

from peftlib import interception
from peftlib import weight_ops

Pattern = str | tuple[str, ...]

# Sets of weights by what they do in the model, whatever they are called.
PRESETS = ('all-linear', 'attention', 'mlp')


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
    reason
    for path, reason in recording.missed
    if chosen.path(path) and not excluded.path(path)
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


class _Matcher:
  def __init__(
    self,
    op: Callable[[weight_ops.WeightOp], bool],
    path: Callable[[str], bool],
  ) -> None:
    self.op = op
    self.path = path


def _matches(recording: interception.Recording, pattern: Pattern) -> _Matcher:
  if isinstance(pattern, str) and pattern in PRESETS:
    return _preset(recording, pattern)

  def by_path(path: str) -> bool:
    return path_matches(path, pattern)

  def by_op(op: weight_ops.WeightOp) -> bool:
    own = f'{op.module_path}/{op.name}' if op.path else op.name
    return by_path(op.module_path) or by_path(own)

  return _Matcher(by_op, by_path)


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
  tables = [op for op in recording.ops if op.kind == 'embedding']
  vocabularies = {op.weight.rows for op in tables}

  def is_linear(op: weight_ops.WeightOp) -> bool:
    return (
      op.weight.kind == 'linear'
      # The head's outputs are the embedding's rows.
      and op.weight.columns not in vocabularies
    )

  def in_attention(op: weight_ops.WeightOp) -> bool:
    return any(
      path and op.module_path.startswith(f'{path}/')
      for path in recording.attention
    )

  choices = {
    'all-linear': is_linear,
    'attention': lambda op: is_linear(op) and in_attention(op),
    'mlp': lambda op: is_linear(op) and not in_attention(op),
  }
  return _Matcher(choices[preset], lambda path: False)
