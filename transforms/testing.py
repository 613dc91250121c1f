"""Assertions on States, graphs and compiled steps, for tests and for loops.

They read like those of chex: each raises AssertionError with the paths and
values in question, and what would be right. What can't be checked at all, such
as a filter that matches nothing, is a TypeError or a ValueError instead.

The package doesn't import this module by itself: write
`from transforms import testing`.
"""

from collections.abc import Callable, Sequence
import functools
import threading
from typing import Any, NamedTuple

from flax import nnx
import jax

from transforms import _checks
from transforms import _leaves
from transforms import filtering
from transforms import inspecting
from transforms import mapping
from transforms import metadata
from transforms import partitioning

__all__ = [
  'assert_bytes_at_most',
  'assert_max_compilations',
  'assert_no_abstract_leaves',
  'assert_only_changed',
  'assert_same_graph',
  'assert_specs_match',
  'assert_states_share',
]

_SHOWN_CHARACTERS = 80

# Reported by jax through its public `jax.monitoring`, once for each program
# that XLA compiles, or that the persistent cache holds.
_COMPILE_EVENT = '/jax/core/compile/backend_compile_duration'

# What a step may never change without compiling again.
_STRUCTURE = ('missing', 'type', 'structure', 'shape', 'dtype')
# What nnx and jax keep beside the arrays.
_GRAPH = ('missing', 'type', 'structure', 'metadata', 'spec')


class _Word(str):
  """What is said in place of a value, without the quotes of one."""

  def __repr__(self) -> str:
    return str(self)


_MISSING = _Word('missing')


def assert_states_share(a: nnx.State[Any, Any], b: nnx.State[Any, Any]) -> None:
  """Asserts that two States hold the very same arrays at the same paths.

  Copies and casts are other arrays, equal ones too: what passes takes no
  memory for the second State. The Variables around the arrays, and their
  metadata, may differ.

  Example:
    >>> w = jax.numpy.ones((2, 3))
    >>> one = nnx.State({'w': nnx.Param(w)})
    >>> two = nnx.State({'w': nnx.Param(w)})
    >>> copied = nnx.State({'w': nnx.Param(w + 0)})
    >>> assert_states_share(one, two)
    >>> assert_states_share(one, copied)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: ...: w of shape (2,3) is another array in b. ...

  Args:
    a: A State with leaves of any kind.
    b: Another one, of the same paths. `transforms.select` picks a part.

  Raises:
    AssertionError: An array isn't the same object, or a path is in one alone.
    TypeError: An argument is no State.
  """
  _checks.check_state('assert_states_share', a)
  _checks.check_state('assert_states_share', b)
  left, right = _flat(a), _flat(b)
  wrong = []
  paths = list(dict.fromkeys((*left, *right)))
  for path in paths:
    text = _checks.path_text(path)
    if path not in right:
      wrong.append(f'{text} is in a alone')
    elif path not in left:
      wrong.append(f'{text} is in b alone')
    else:
      ours, theirs = _stored(left[path]), _stored(right[path])
      if len(ours) != len(theirs) or any(
        one is not two for one, two in zip(ours, theirs, strict=True)
      ):
        wrong.append(
          f'{text}{_leaves.describe(left[path])} is another array in b'
        )
  if wrong:
    raise AssertionError(
      f'assert_states_share: {len(wrong)} of {len(paths)} leaves are not '
      f'shared: {_checks.listed(wrong)}. Each has to be the same object in '
      'both.'
    )


def assert_only_changed(
  before: nnx.State[Any, Any],
  after: nnx.State[Any, Any],
  filters: filtering.Filter,
) -> None:
  """Asserts that values and metadata changed where a filter says, and only so.

  At least one of the leaves that match has to have changed, so that a step that
  does nothing doesn't pass. The filter `None` says that nothing may change at
  all. Paths, types, shapes and dtypes have to be the same everywhere.

  Example:
    >>> base, adapter = nnx.Param(1.0), nnx.LoRAParam(2.0)
    >>> before = nnx.State({'w': base, 'a': adapter})
    >>> after = nnx.State({'w': base, 'a': adapter.replace(3.0)})
    >>> assert_only_changed(before, after, nnx.LoRAParam)
    >>> assert_only_changed(before, after, None)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: ... a: values 2.0 at [] != 3.0 (1 of 1 differ).

  Args:
    before: A State of concrete arrays. A step that donates it deletes them;
      `jax.tree.map(jax.numpy.copy, state)` keeps some to compare with.
    after: What became of it.
    filters: An nnx filter, as for `transforms.select`; it sees the leaves of
      `before`.

  Raises:
    AssertionError: Something changed that may not, or nothing did.
    TypeError: An argument is no State, the filter is no filter, or a leaf is
      abstract and has no value to compare.
    ValueError: An array was deleted, or the filter matches no leaf.
  """
  function = 'assert_only_changed'
  for name, state in (('before', before), ('after', after)):
    _checks.check_state(function, state)
    _check_values(function, name, state)
  predicate = filtering.to_predicate(function, filters)
  matching = {
    _checks.path_text(path)
    for path, leaf in nnx.to_flat_state(before)
    if predicate(path, leaf)
  }
  nothing = filters is None or filters is False
  if not matching and not nothing:
    raise ValueError(
      f'{function}: no leaf matches the filter {_text(filters)}; give None if '
      'nothing may change.'
    )
  differences = inspecting.diff(before, after)
  rebuilt = [str(item) for item in differences if item.what in _STRUCTURE]
  if rebuilt:
    raise AssertionError(
      f'{function}: {_count(rebuilt, "change")} of structure: '
      f'{_checks.listed(rebuilt)}. Paths, types, shapes and dtypes have to '
      'stay.'
    )
  outside = [str(item) for item in differences if item.path not in matching]
  if outside:
    raise AssertionError(
      f'{function}: {_count(outside, "change")} outside of the filter '
      f'{_text(filters)}: {_checks.listed(outside)}.'
    )
  if not differences and not nothing:
    raise AssertionError(
      f'{function}: nothing changed, also none of what matches '
      f'{_text(filters)}: {_checks.listed(sorted(matching))}.'
    )


def assert_specs_match(
  state: nnx.State[Any, Any],
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
) -> None:
  """Asserts that the sharding metadata fits the values that it is about.

  A spec may have no more entries than its value has dimensions. With a mesh,
  its names have to be axes there, none twice, and have to divide the extents. A
  `NamedSharding` is checked on its own mesh if none is given.

  Example:
    >>> w = nnx.Param(jax.numpy.ones((4, 3))).replace(out_sharding=('x', 'y'))
    >>> state = nnx.State({'w': w})
    >>> mesh = jax.sharding.AbstractMesh((2,), ('x',))
    >>> assert_specs_match(state)
    >>> assert_specs_match(state, mesh)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: ... 'y' is no axis of the mesh (x: 2).

  Args:
    state: A State of arrays, abstract ones too. Leaves that are no Variables
      have no specs.
    mesh: Where the arrays are to be. Logical names are no axes of it:
      `transforms.named_shardings` resolves those, and makes the same checks.

  Raises:
    AssertionError: A spec doesn't fit.
    TypeError: `state` is no State, or one of shardings.
  """
  _checks.check_state('assert_specs_match', state)
  wrong = []
  for path, leaf in nnx.to_flat_state(state):
    parts = _leaves.parts(_leaves.raw_value(leaf))
    if any(map(_leaves.is_sharding, parts)):
      raise TypeError(
        f'assert_specs_match: {_checks.path_text(path)} is a sharding; '
        'expected a State of arrays.'
      )
    if not parts or not _leaves.is_variable(leaf):
      continue
    where = f'{_checks.path_text(path)}{_leaves.describe(leaf)}'
    for key, spec in metadata.sharding_specs(leaf.get_metadata()).items():
      wrong += [
        f'{where}: {key} {spec!r}: {problem}'
        for problem in _spec_problems(spec, parts, mesh)
      ]
  if wrong:
    fit = "doesn't fit" if len(wrong) == 1 else "don't fit"
    raise AssertionError(
      f'assert_specs_match: {_count(wrong, "spec")} {fit}: '
      f'{_checks.listed(wrong)}.'
    )


def assert_no_abstract_leaves(state: nnx.State[Any, Any]) -> None:
  """Asserts that every leaf holds arrays: nothing was left to be loaded.

  Tracers are arrays, so this can be used in a jitted function too.

  Example:
    >>> shape = jax.ShapeDtypeStruct((2, 3), 'float32')
    >>> state = nnx.State({'w': nnx.Param(shape)})
    >>> assert_no_abstract_leaves(state)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: ...: w of shape (2,3) has a ShapeDtypeStruct.

  Args:
    state: A State with leaves of any kind.

  Raises:
    AssertionError: A leaf holds an abstract value or a sharding.
    TypeError: `state` is no State.
  """
  _checks.check_state('assert_no_abstract_leaves', state)
  wrong = []
  leaves = nnx.to_flat_state(state)
  for path, leaf in leaves:
    for part in _leaves.parts(_leaves.raw_value(leaf)):
      if _is_abstract(part):
        where = f'{_checks.path_text(path)}{_leaves.describe(leaf)}'
        wrong.append(f'{where} has a {type(part).__name__}')
        break
  if wrong:
    raise AssertionError(
      f'assert_no_abstract_leaves: {len(wrong)} of {len(leaves)} leaves hold '
      f'no array: {_checks.listed(wrong)}.'
    )


def assert_same_graph(a: Any, b: Any) -> None:
  """Asserts that two models are built alike, whatever their values are.

  Modules, their static attributes, what is shared, types of Variables and
  their metadata have to be equal: a function that was compiled for one is not
  compiled again for the other, if the shapes and dtypes agree too.

  Example:
    >>> one = nnx.graphdef(nnx.Dropout(0.1))
    >>> assert_same_graph(one, nnx.graphdef(nnx.Dropout(0.1)))
    >>> assert_same_graph(one, nnx.graphdef(nnx.Dropout(0.2)))
    Traceback (most recent call last):
    AssertionError: assert_same_graph: 1 difference: rate: attribute 0.1 != 0.2.

  Args:
    a: An `nnx.GraphDef`, or `(graphdef, state)` as `nnx.split` returns them.
    b: Another one of the same kind.

  Raises:
    AssertionError: They differ.
    TypeError: An argument is neither, or they are of different kinds.
  """
  (graphdef, state), (other, other_state) = map(_split_pair, (a, b))
  if (state is None) != (other_state is None):
    raise TypeError(
      'assert_same_graph: give two graphdefs or two pairs, not one of each.'
    )
  differences: list[tuple[str, str]] = []
  if graphdef != other:
    differences = _graph_differences(graphdef, other)
  found = [text for _, text in differences]
  if state is not None and other_state is not None:
    found += [
      str(item)
      for item in inspecting.diff(_abstract(state), _abstract(other_state))
      # Where the graphs differ, their States say it again.
      if item.what in _GRAPH and item.path not in dict(differences)
    ]
  if found:
    raise AssertionError(
      f'assert_same_graph: {_count(found, "difference")}: '
      f'{_checks.listed(found)}.'
    )


def assert_max_compilations[**P, R](
  fn: Callable[P, R], n: int
) -> Callable[P, R]:
  """Returns a jitted function that fails once it has been compiled too often.

  In contrast to `chex.assert_max_traces`, which goes inside of `jax.jit`, this
  goes around it, and sees what compiles without being traced again: other
  shardings, devices, or settings of jax. It counts what `jax.monitoring`
  reports during the calls of the function that is returned, in their thread, of
  programs by the name of `fn`. What was compiled before isn't counted, also by
  another `jax.jit` of the same function; what is loaded from a persistent cache
  is.

  Example:
    >>> step = assert_max_compilations(jax.jit(lambda x: x + 1), 1)
    >>> for _ in range(3):
    ...   _ = step(jax.numpy.ones(3))
    >>> step(jax.numpy.ones(4))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: ...: argument 0 was float32[3] and is float32[4].

  Args:
    fn: A function made by `jax.jit` or `nnx.jit`.
    n: How often it may be compiled, over all calls.

  Returns:
    A function that calls `fn`, of which `__wrapped__` is `fn`. It raises
    AssertionError after the call that is compiled for the (n + 1)th time, and
    after each later one that compiles.

  Raises:
    TypeError: `fn` isn't jitted, or `n` is no int.
    ValueError: `n` is negative.
    RuntimeError: This version of jax doesn't report compilations.
  """
  function = 'assert_max_compilations'
  if not isinstance(fn, jax.stages.Wrapped):
    raise TypeError(
      f'{function}: expected a jitted function, got {_text(fn)}; jax.jit it '
      'first.'
    )
  _check_limit(function, 'n', n)
  _check_reported()
  name = getattr(fn, '__name__', type(fn).__name__)
  seen: list[_Signature] = []

  # Those of nnx.jit have attributes of their own, which aren't for a wrapper.
  @functools.wraps(fn, updated=())
  def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
    compiled: list[str] = []
    with _Compilations(compiled):
      result = fn(*args, **kwargs)
    count = sum(program.endswith(f'({name})') for program in compiled)
    if not count:
      return result
    before = seen[-1] if seen else None
    # Shapes, dtypes and shardings outlive the donation of the arrays.
    signature = _signature(args, kwargs)
    seen.extend([signature] * count)
    if len(seen) > n:
      times = 'once' if len(seen) == 1 else f'{len(seen)} times'
      raise AssertionError(
        f'{function}: {name} was compiled {times}, at most {n} is allowed.'
        + _changed_arguments(before, signature)
      )
    return result

  return wrapped


def assert_bytes_at_most(
  state: nnx.State[Any, Any], limit: int, filters: filtering.Filter = ...
) -> None:
  """Asserts that the selected leaves take no more memory than a limit.

  Bytes are counted as by `transforms.param_bytes`: as stored, and once for an
  array that is replicated.

  Example:
    >>> state = nnx.State({'w': nnx.Param(jax.numpy.ones((2, 3)))})
    >>> assert_bytes_at_most(state, 24)
    >>> assert_bytes_at_most(state, 12)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: ...: 24 bytes are more than 12; the largest: w of shape ...

  Args:
    state: A State of arrays, abstract ones too.
    limit: The most bytes that they may take.
    filters: An nnx filter for the leaves to count, as for `transforms.select`.

  Raises:
    AssertionError: They take more.
    TypeError: `state` is no State, or one of shardings; the filter is no
      filter; or `limit` is no int.
    ValueError: `limit` is negative, or the filter matches no leaf.
  """
  function = 'assert_bytes_at_most'
  _checks.check_state(function, state)
  _check_limit(function, 'limit', limit)
  predicate = filtering.to_predicate(function, filters)
  sizes = []
  for path, leaf in nnx.to_flat_state(state):
    if not predicate(path, leaf):
      continue
    parts = _leaves.parts(_leaves.raw_value(leaf))
    text = _checks.path_text(path)
    if any(map(_leaves.is_sharding, parts)):
      raise TypeError(
        f'{function}: {text} is a sharding; expected a State of arrays.'
      )
    size = sum(map(mapping.array_bytes, parts))
    sizes.append((size, f'{text}{_leaves.describe(leaf)}'))
  if not sizes:
    raise ValueError(
      f'{function}: no leaf matches the filter {_text(filters)}.'
    )
  total = sum(size for size, _ in sizes)
  if total > limit:
    # Stable, so that equal ones stay in the order of their paths.
    sizes.sort(key=lambda item: -item[0])
    listed = _checks.listed([f'{text}: {size:,} bytes' for size, text in sizes])
    raise AssertionError(
      f'{function}: {total:,} bytes are more than {limit:,}; the largest: '
      f'{listed}.'
    )


class _Compilations:
  """Collects the names of programs that this thread compiles meanwhile."""

  def __init__(self, names: list[str]) -> None:
    self._names = names
    self._thread = threading.get_ident()

  def __enter__(self) -> None:
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def __exit__(self, *error: object) -> None:
    jax.monitoring.unregister_event_duration_listener(self._listen)

  def _listen(self, event: str, duration_secs: float, **found: Any) -> None:
    del duration_secs
    if event == _COMPILE_EVENT and threading.get_ident() == self._thread:
      self._names.append(str(found.get('fun_name', '')))


@functools.cache
def _check_reported() -> None:
  # The names of events aren't promised: without them nothing would ever fail.
  def probe() -> int:
    return 0

  compiled: list[str] = []
  with _Compilations(compiled):
    jax.jit(probe).lower().compile()
  if not any(program.endswith('(probe)') for program in compiled):
    raise RuntimeError(
      f'assert_max_compilations: jax {jax.__version__} does not report the '
      f'event {_COMPILE_EVENT} with the name of the program, so that '
      'compilations cannot be counted.'
    )


class _Signature(NamedTuple):
  """What a call gave to a jitted function: a text for each leaf."""

  leaves: dict[str, str]
  structure: Any


def _signature(args: Any, kwargs: Any) -> _Signature:
  leaves, structure = jax.tree.flatten_with_path((args, kwargs))
  found = {}
  for (first, *path), leaf in leaves:
    key = jax.tree_util.keystr(tuple(path), simple=True, separator='/')
    positional = first == jax.tree_util.SequenceKey(0)
    found[f'argument {key}' if positional else key] = _argument_text(leaf)
  return _Signature(found, structure)


def _argument_text(leaf: Any) -> str:
  try:
    text = str(jax.typeof(leaf))
  except TypeError:
    return _text(leaf)
  # Where an array is counts only if it was put there on purpose.
  if getattr(leaf, 'committed', False):
    text += f' on {_text(leaf.sharding)}'
  return text


def _changed_arguments(before: _Signature | None, now: _Signature) -> str:
  if before is None:
    return ''
  one, two = before.leaves, now.leaves
  changed = [
    f'{key} was {one.get(key, _MISSING)} and is {two.get(key, _MISSING)}'
    for key in dict.fromkeys((*one, *two))
    if one.get(key) != two.get(key)
  ]
  if changed:
    return f' Since the last time: {_checks.listed(changed)}.'
  if before.structure != now.structure:
    return (
      ' Since the last time, what is static in the arguments differs: their '
      'structure, or the metadata of Variables.'
    )
  return (
    ' The arguments are like those of the last time: a setting of jax differs, '
    'or what was compiled is kept no longer.'
  )


def _spec_problems(spec: Any, parts: list[Any], mesh: Any) -> list[str]:
  try:
    entries = metadata.spec_entries(spec)
  except TypeError as error:
    return [str(error).removesuffix('.')]
  whole = partitioning.whole_shape(parts)
  if len(entries) > len(whole):
    return [f'{len(entries)} entries for {len(whole)} dimensions']
  if mesh is None:
    if not isinstance(spec, jax.sharding.NamedSharding):
      return []
    mesh = spec.mesh
  names = [
    name
    for entry in entries
    for name in (entry if isinstance(entry, tuple) else (entry,))
    if isinstance(name, str)
  ]
  unknown = [name for name in names if name not in mesh.axis_names]
  if unknown:
    axes = ', '.join(f'{name}: {size}' for name, size in mesh.shape.items())
    return [f'{name!r} is no axis of the mesh ({axes})' for name in unknown]
  twice = {name: None for name in names if names.count(name) > 1}
  if twice:
    return [f'{name!r} comes up more than once' for name in twice]
  found: dict[str, None] = {}
  for part in parts:
    # The dimensions of smaller parts, such as a scale, have no counterpart.
    if len(_leaves.shape(part)) == len(whole):
      _, bad = partitioning.divisible_spec(
        jax.sharding.PartitionSpec(*entries),
        _leaves.shape(part),
        mesh,
        whole=whole,
      )
      found.update(dict.fromkeys(bad))
  return list(found)


def _split_pair(item: Any) -> tuple[Any, nnx.State | None]:
  if isinstance(item, nnx.GraphDef):
    return item, None
  if isinstance(item, tuple) and len(item) == 2:
    graphdef, state = item
    if isinstance(graphdef, nnx.GraphDef) and isinstance(state, nnx.State):
      return graphdef, state
  hint = '; nnx.split it first' if isinstance(item, nnx.Module) else ''
  raise TypeError(
    'assert_same_graph: expected an nnx.GraphDef or a pair (graphdef, state), '
    f'got {type(item).__name__}{hint}.'
  )


def _abstract(state: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
  def abstract(part: Any) -> Any:
    if _leaves.is_sharding(part):
      return part
    return jax.ShapeDtypeStruct(_leaves.shape(part), _leaves.dtype(part))

  def convert(leaf: Any) -> Any:
    value = _leaves.map_parts(abstract, _leaves.raw_value(leaf))
    return (
      _leaves.with_value(leaf, value) if _leaves.is_variable(leaf) else value
    )

  result: nnx.State[Any, Any] = _leaves.map_leaves(
    'assert_same_graph', convert, state
  )
  return result


def _graph_differences(a: Any, b: Any) -> list[tuple[str, str]]:
  """Returns the path and the text of each difference."""
  modes = [hasattr(graphdef.nodes[0], 'treedef') for graphdef in (a, b)]
  if modes[0] != modes[1]:
    text = f'made by nnx.split with graph={not modes[0]} != {not modes[1]}'
    return [('', text)]
  left, right = _graph_items(a), _graph_items(b)
  found: list[tuple[str, str]] = []
  # A part that is missing or of another type is told without what is in it.
  cut: list[_checks.Path] = []
  for key in dict.fromkeys((*left, *right)):
    path, what = key
    if any(path[: len(top)] == top for top in cut):
      continue
    one, two = left.get(key, _MISSING), right.get(key, _MISSING)
    if _equal(one, two):
      continue
    if what == 'type':
      cut.append(path)
    place = _checks.path_text(path)
    texts = _text(one), _text(two)
    if texts[0] == texts[1]:
      text = f'two unequal objects {texts[0]}'
    else:
      text = f'{texts[0]} != {texts[1]}'
    found.append((place, f'{place or "the root"}: {what} {text}'))
  # In a graph of `graph=False` the attributes are within one opaque treedef.
  rest = 'static attributes of modules' if modes[0] else 'references'
  return found or [('', f'{rest}, of which flax does not tell the place')]


def _graph_items(graphdef: Any) -> dict[tuple[_checks.Path, str], Any]:
  """Returns all that a graph is made of, by path and by what it is."""
  items: dict[tuple[_checks.Path, str], Any] = {}
  if hasattr(graphdef.nodes[0], 'treedef'):
    tree = graphdef.nodes[0]
    items[(), 'type'] = tree.type
    paths = [path for path, _ in tree.path_index]
    for node in graphdef.nodes[1:]:
      _add_variable(items, paths[node.index], node)
    return items
  nodes, attributes = iter(graphdef.nodes), iter(graphdef.attributes)
  places: dict[int, str] = {}

  def walk(path: _checks.Path) -> None:
    node = next(nodes)
    kind = getattr(node, 'type', None)
    if kind is None and node.index in places:
      items[path, 'type'] = _Word(f'reference to {places[node.index]}')
      return
    if node.index is not None:
      places[node.index] = _checks.path_text(path) or 'the root'
    if not hasattr(node, 'num_attributes'):
      _add_variable(items, path, node)
      ref = getattr(node, 'array_refdef', None)
      if ref is not None:
        # A mutable reference, that other Variables may hold too.
        place = places.setdefault(ref.index, _checks.path_text(path))
        items[path, 'value'] = _Word(f'Ref of {place}')
      return
    items[path, 'type'] = kind
    for _ in range(node.num_attributes):
      name, attribute = next(attributes)
      below = (*path, name)
      if hasattr(attribute, 'value'):
        items[below, 'attribute'] = attribute.value
      elif type(attribute).__name__ == 'LeafAttr':
        items[below, 'type'] = _Word('array')
      else:
        walk(below)
    items[path, 'metadata'] = node.metadata

  walk(())
  return items


def _add_variable(
  items: dict[tuple[_checks.Path, str], Any], path: _checks.Path, node: Any
) -> None:
  items[path, 'type'] = getattr(node, 'type', _Word('Ref'))
  for key, value in getattr(node, 'metadata', {}).items():
    items[path, f'metadata {key!r}'] = value


def _equal(one: Any, two: Any) -> bool:
  # A tuple and an equal list or spec are different pytrees.
  return one is two or (type(one) is type(two) and bool(one == two))


def _check_values(function: str, name: str, state: nnx.State[Any, Any]) -> None:
  for path, leaf in nnx.to_flat_state(state):
    for part in _leaves.parts(_leaves.raw_value(leaf)):
      where = f'{function}: {name}: {_checks.path_text(path)}'
      if _is_abstract(part) or isinstance(part, jax.core.Tracer):
        raise TypeError(
          f'{where} has a {type(part).__name__}, whose values are not there to '
          'be compared; give concrete arrays.'
        )
      if isinstance(part, jax.Array) and part.is_deleted():
        raise ValueError(
          f'{where} was deleted, as by donation to a step; compare with a '
          'copy: jax.tree.map(jax.numpy.copy, state).'
        )


def _check_limit(function: str, name: str, value: Any) -> None:
  if not isinstance(value, int) or isinstance(value, bool):
    raise TypeError(
      f'{function}: {name} is the {type(value).__name__} {_text(value)}; it '
      'must be an int.'
    )
  if value < 0:
    raise ValueError(f'{function}: {name} is {value}; it must not be negative.')


def _is_abstract(part: Any) -> bool:
  abstract = (jax.ShapeDtypeStruct, jax.core.AbstractValue)
  return isinstance(part, abstract) or _leaves.is_sharding(part)


def _stored(leaf: Any) -> list[Any]:
  value = leaf.get_raw_value() if _leaves.is_variable(leaf) else leaf
  # Reading a mutable reference makes a new array.
  return [value] if isinstance(value, jax.Ref) else _leaves.parts(value)


def _flat(state: nnx.State[Any, Any]) -> dict[_checks.Path, Any]:
  return dict(nnx.to_flat_state(state))


def _text(value: Any) -> str:
  text = getattr(value, '__qualname__', None) or repr(value)
  if len(text) > _SHOWN_CHARACTERS:
    text = f'{text[:_SHOWN_CHARACTERS]}...'
  return ' '.join(text.split())


def _count(found: Sequence[str], noun: str) -> str:
  return f'{len(found)} {noun}' + ('' if len(found) == 1 else 's')
