"""Settings that hold for every test process."""

from absl import flags
import chex
import jax
import pytest

# Before the backend starts: afterwards it is too late. Files that need several
# devices say so themselves too, because Bazel runs them without pytest.
chex.set_n_cpu_devices(8)

# `absltest.main` would parse them; pytest does not, and reading a flag that
# was never parsed raises.
if not flags.FLAGS.is_parsed():
  flags.FLAGS(['pytest'])

# Their programs take longer to optimize than to run.
_UNOPTIMIZED = ('adapters', 'injection', 'merging', 'rules', 'training')


@pytest.fixture(autouse=True)
def _compile_fast(request):
  path = request.path
  if path.parent.name != 'peftlib' or path.stem not in {
    f'{name}_test' for name in _UNOPTIMIZED
  }:
    yield
    return
  name = 'jax_disable_most_optimizations'
  before = jax.config.values[name]
  jax.config.update(name, True)
  yield
  jax.config.update(name, before)
