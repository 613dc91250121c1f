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

_OPTIMIZED = (
  # Counts what is left after optimizations.
  'tests/benchmarks/guard_test.py',
  # Runs longer than it compiles.
  'tests/integration/qlora_test.py',
  # Compares bit for bit with programs that are compiled in another way.
  'tests/peftlib/foreign_models_test.py',
)


@pytest.fixture(autouse=True, scope='module')
def _compile_fast(request):
  """Most programs here take longer to optimize than to run."""
  path = request.path.relative_to(request.config.rootpath).as_posix()
  if path in _OPTIMIZED:
    yield
    return
  name = 'jax_disable_most_optimizations'
  with pytest.MonkeyPatch.context() as patch:
    # For the processes that a test starts.
    patch.setenv(name.upper(), '1')
    before = jax.config.values[name]
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)
