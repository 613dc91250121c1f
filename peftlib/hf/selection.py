"""Which modules a configuration of HF peft means, by peft's own rules."""

from collections.abc import Iterable, Mapping
import re
from typing import Any


def modules(
  config: Mapping[str, Any],
  linear: Iterable[str],
  others: Iterable[str],
  head: Iterable[str],
) -> list[str]:
  """The modules that `target_modules` and its companions choose.

  Args:
    config: The configuration's fields.
    linear: Names of the linear layers.
    others: Names of other modules that can be adapted: embeddings, norms.
    head: Names of output heads, which 'all-linear' leaves out.

  Returns:
    Names in the order given.
  """
  target = config.get('target_modules')
  linear, others = list(linear), list(others)
  if target is None:
    return []
  if target == 'all-linear':
    chosen = [name for name in linear if name not in set(head)]
  else:
    chosen = [
      n
      for n in (*linear, *others)
      if _means(target, n) and _in_layers(config, target, n)
    ]
  excluded = config.get('exclude_modules')
  if excluded:
    chosen = [n for n in chosen if not _means(excluded, n)]
  # What is trained whole gets no adapter.
  whole = config.get('modules_to_save') or ()
  return [
    n
    for n in chosen
    if not any(re.match(rf'(^|.*\.){name}($|\..*)', n) for name in whole)
  ]


def whole(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
  """The modules that `modules_to_save` means: whatever ends with one of it.

  'norm' means 'input_layernorm' too, and a block means all that is in it.
  """
  ends = tuple(config.get('modules_to_save') or ())
  return [n for n in names if any(a.endswith(ends) for a in _ancestors(n))]


def targets(chosen: list[str], names: Iterable[str]) -> list[str]:
  """Short names where they mean exactly these modules, else whole ones."""
  names = list(names)
  out: list[str] = []
  for short in dict.fromkeys(name.rpartition('.')[2] for name in chosen):
    all_of_it = [n for n in names if n == short or n.endswith(f'.{short}')]
    own = [n for n in chosen if n in all_of_it]
    out.extend([short] if set(all_of_it) == set(own) else own)
  return out


def named(names: Iterable[str], ends: Iterable[str]) -> list[str]:
  """The names that are one of `ends`, or end with one after a dot."""
  ends = list(ends)
  return [n for n in names if any(n == e or n.endswith(f'.{e}') for e in ends)]


def by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
  """The value of the first pattern that matches the end of a module's name."""
  for pattern, value in patterns.items():
    if re.match(rf'(.*\.)?({pattern})$', name):
      return value
  return default


def _ancestors(name: str) -> list[str]:
  parts = name.split('.')
  return ['.'.join(parts[: i + 1]) for i in range(len(parts))]


def _means(target: Any, name: str) -> bool:
  if isinstance(target, str):
    return re.fullmatch(target, name) is not None
  return any(name == t or name.endswith(f'.{t}') for t in target)


def _in_layers(config: Mapping[str, Any], target: Any, name: str) -> bool:
  layers = config.get('layers_to_transform')
  if layers is None or layers == [] or isinstance(target, str):
    return True
  if name in target:
    return True  # Named in full.
  match = None
  patterns = config.get('layers_pattern')
  if not patterns:
    match = re.match(r'.*?\.[^.]*\.(\d+)\.', name)
  else:
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
      match = re.match(rf'(?:^|.*?\.){pattern}\.(\d+)\.', name)
      if match:
        break
  wanted = [layers] if isinstance(layers, int) else layers
  return match is not None and int(match.group(1)) in wanted
