import doctest

from absl.testing import absltest
from absl.testing import parameterized

import peftlib
from peftlib import adapters
from peftlib import combining
from peftlib import config
from peftlib import injection
from peftlib import merging
from peftlib import methods
from peftlib import quantization
from peftlib import stacking
from peftlib import testing
from peftlib import training
import transforms

# What the examples import, so that it is there in a sandbox too.
_IMPORTED = (methods, peftlib, transforms)


class DoctestTest(parameterized.TestCase):
  @parameterized.parameters(
    adapters,
    combining,
    config,
    injection,
    merging,
    quantization,
    stacking,
    testing,
    training,
  )
  def test_examples_of(self, module):
    result = doctest.testmod(module)
    self.assertGreater(result.attempted, 0)
    self.assertEqual(result.failed, 0)


if __name__ == '__main__':
  absltest.main()
