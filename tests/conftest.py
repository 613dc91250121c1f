"""Settings that hold for every test process."""

from absl import flags
import chex

# Before the backend starts: afterwards it is too late. Files that need several
# devices say so themselves too, because Bazel runs them without pytest.
chex.set_n_cpu_devices(8)

# `absltest.main` would parse them; pytest does not, and reading a flag that
# was never parsed raises.
if not flags.FLAGS.is_parsed():
  flags.FLAGS(['pytest'])
