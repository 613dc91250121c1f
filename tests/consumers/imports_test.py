"""The loops are written from outside: with public names alone, and shortly."""

import ast
import importlib
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from tests.consumers import distillation
from tests.consumers import dpo
from tests.consumers import federated
from tests.consumers import grpo
from tests.consumers import own_step
from tests.consumers import population

_FOLDER = pathlib.Path(__file__).resolve().parent
_LOOPS = sorted(
  path.stem
  for path in _FOLDER.glob('*.py')
  if not path.stem.endswith('_test') and path.stem not in ('harness', 'models')
)
# Imported for what they import: names are looked up in all of that.
_IMPORTED = (distillation, dpo, federated, grpo, own_step, population)
_ALLOWED = {
  'jax', 'flax', 'optax', 'numpy', 'peftlib', 'transforms', 'tests',
  'functools', 'pathlib', 'tempfile', 'typing', 'math', 'time',
}  # fmt: skip
_OURS = ('peftlib', 'transforms')


def imports(source: str) -> dict[str, str]:
  """What each name that a file imports stands for, dotted."""
  found = {}
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      for alias in node.names:
        name = alias.name if alias.asname else alias.name.partition('.')[0]
        found[alias.asname or name] = name
    elif isinstance(node, ast.ImportFrom):
      for alias in node.names:
        dotted = f'{node.module}.{alias.name}'
        found[alias.asname or alias.name] = dotted
  return found


def uses(source: str) -> set[str]:
  """Names of our packages that a file uses, dotted, by what they mean."""
  known = imports(source)
  found = set(known.values())
  for node in ast.walk(ast.parse(source)):
    parts = []
    while isinstance(node, ast.Attribute):
      parts.append(node.attr)
      node = node.value
    if parts and isinstance(node, ast.Name) and node.id in known:
      found.add('.'.join([known[node.id], *reversed(parts)]))
  return {name for name in found if name.partition('.')[0] in _OURS}


def private(source: str) -> list[str]:
  """Names with an underscore in front that a file imports or reads."""
  names = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Attribute):
      names.append(node.attr)
    elif isinstance(node, ast.Name):
      names.append(node.id)
    elif isinstance(node, ast.Import | ast.ImportFrom):
      names += (getattr(node, 'module', None) or '').split('.')
      names += [part for a in node.names for part in a.name.split('.')]
  return sorted({n for n in names if n.startswith('_') and n != '_'})


def unexported(name: str) -> str | None:
  """Why a dotted name is not public; None if it is."""
  module = importlib.import_module(name.partition('.')[0])
  for part in name.split('.')[1:]:
    exported = getattr(module, '__all__', None)
    if exported is None:
      # An attribute of what a package exports, such as a class.
      return None if hasattr(module, part) else f'{name}: there is no {part}'
    if part not in exported:
      try:
        module = importlib.import_module(f'{module.__name__}.{part}')
      except ModuleNotFoundError:
        return f'{name}: {part} is not in __all__ of {module.__name__}'
      if not hasattr(module, '__all__'):
        return f'{name}: {part} says by no __all__ what is public'
    else:
      module = getattr(module, part)
  return None


class ImportsTest(parameterized.TestCase):
  def test_every_loop_is_looked_at(self):
    names = [loop.__name__.rpartition('.')[2] for loop in _IMPORTED]
    self.assertEqual(names, _LOOPS)

  @parameterized.parameters(*[(n,) for n in (*_LOOPS, 'models')])
  def test_only_public_names(self, name):
    source = (_FOLDER / f'{name}.py').read_text()
    self.assertEqual(private(source), [])
    self.assertEqual([u for n in uses(source) if (u := unexported(n))], [])
    modules = set(imports(source).values())
    self.assertContainsSubset({m.partition('.')[0] for m in modules}, _ALLOWED)
    of_tests = {m for m in modules if m.startswith('tests')}
    self.assertContainsSubset(of_tests, {'tests.consumers.models'})

  @parameterized.parameters(*[(n,) for n in _LOOPS])
  def test_a_loop_is_short_and_guards_its_step(self, name):
    source = (_FOLDER / f'{name}.py').read_text()
    self.assertLess(len(source.splitlines()), 120)
    self.assertIn("with jax.transfer_guard('disallow'):", source)
    self.assertContainsSubset(_OURS, imports(source))
    self.assertTrue((_FOLDER / f'{name}_test.py').exists())

  def test_private_names_are_found(self):
    source = 'from peftlib import _checks\nimport a._b\nx._c.d(_e)\n'
    self.assertEqual(private(source), ['_b', '_c', '_checks', '_e'])

  @parameterized.parameters(
    ('peftlib.inject', None),
    ('peftlib.methods.Lora', None),
    ('peftlib.inject.__name__', None),
    ('peftlib.no', 'peftlib.no: no is not in __all__ of peftlib'),
    (
      'peftlib.slots',
      'peftlib.slots: slots says by no __all__ what is public',
    ),
    (
      'peftlib.methods.INPUT',
      'peftlib.methods.INPUT: INPUT is not in __all__ of peftlib.methods',
    ),
  )
  def test_names_are_resolved(self, name, expected):
    self.assertEqual(unexported(name), expected)

  def test_uses_by_whatever_name(self):
    source = (
      'import transforms as t\nfrom peftlib import hf\n'
      'import jax\njax.jit(t.select)(hf.save_adapter.x)\n'
    )
    self.assertEqual(
      uses(source),
      {
        'transforms', 'transforms.select', 'peftlib.hf',
        'peftlib.hf.save_adapter', 'peftlib.hf.save_adapter.x',
      },
    )  # fmt: skip


if __name__ == '__main__':
  absltest.main()
