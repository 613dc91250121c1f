"""Placing the values of a State on a mesh, and entering that mesh."""

from collections.abc import Iterator
import contextlib

import jax


@contextlib.contextmanager
def mesh_context(mesh: jax.sharding.Mesh | None) -> Iterator[None]:
  """Makes `mesh` the surrounding mesh; can be used while tracing too.

  Outside of tracing this is `jax.set_mesh`. `jax.set_mesh` raises under any jax
  transformation; this function leaves the surrounding mesh as it is there if
  it's the same one, so that one piece of code can run eagerly and jitted.
  Contexts nest, each thread has its own, and the mesh from before is restored
  also after an exception.

  Example:
    >>> mesh = jax.make_mesh((1,), ('data',))
    >>> with mesh_context(mesh):
    ...   print(jax.sharding.get_abstract_mesh().axis_names)
    ('data',)

  Args:
    mesh: The mesh to enter; None changes nothing.

  Yields:
    Nothing.

  Raises:
    TypeError: `mesh` is no `jax.sharding.Mesh`.
    ValueError: While tracing, the surrounding mesh differs from `mesh`.
  """
  if mesh is None:
    yield
    return
  if not isinstance(mesh, jax.sharding.Mesh):
    raise TypeError(
      f'mesh_context: expected a jax.sharding.Mesh, got {type(mesh).__name__}.'
    )
  if not _tracing():
    with jax.set_mesh(mesh):
      yield
    return
  surrounding = jax.sharding.get_abstract_mesh()
  if not _same_mesh(surrounding, mesh.abstract_mesh):
    raise ValueError(
      f'mesh_context: tracing with the surrounding mesh {_text(surrounding)}, '
      f'which differs from {_text(mesh.abstract_mesh)}; a mesh can be entered '
      'only outside of jax.jit, so put the mesh_context around the call of the '
      'traced function.'
    )
  yield


def _tracing() -> bool:
  # jax has no public query for this, but get_mesh is public, free of effects,
  # and documented to raise under a transformation and only there.
  try:
    jax.sharding.get_mesh()
  except ValueError:
    return True
  return False


def _same_mesh(
  surrounding: jax.sharding.AbstractMesh, wanted: jax.sharding.AbstractMesh
) -> bool:
  if (
    surrounding.axis_names != wanted.axis_names
    or surrounding.axis_sizes != wanted.axis_sizes
  ):
    return False
  # shard_map makes axes Manual within its body: still the same mesh.
  manual = jax.sharding.AxisType.Manual
  return all(
    have is manual or have is want
    for have, want in zip(
      surrounding.axis_types, wanted.axis_types, strict=True
    )
  )


def _text(mesh: jax.sharding.AbstractMesh) -> str:
  if not mesh.axis_names:
    return '(none)'
  axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
  return (
    '('
    + ', '.join(f'{name}={size} {kind.name}' for name, size, kind in axes)
    + ')'
  )
