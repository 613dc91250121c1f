"""Layers stacked and unstacked, by a project that has no adapters."""

import sys

from absl.testing import absltest
import chex
from flax import nnx
import jax.numpy as jnp

import transforms


class TransformsTest(absltest.TestCase):
  def test_stacks_layers_and_selects_a_part(self):
    layers = [
      nnx.State(
        {
          'kernel': nnx.Param(jnp.full((2, 3), float(i))),
          'count': nnx.Variable(jnp.array(i)),
        }
      )
      for i in range(4)
    ]
    stacked = transforms.stack_layers(layers)
    chex.assert_shape(stacked['kernel'][...], (4, 2, 3))
    params = transforms.select(stacked, nnx.Param)
    self.assertEqual(list(params), ['kernel'])
    chex.assert_trees_all_equal(transforms.unstack_layers(stacked), layers)

  def test_needs_neither_peftlib_nor_qwix(self):
    found = {name.partition('.')[0] for name in sys.modules}
    self.assertEqual(found & {'peftlib', 'qwix'}, set())

  def test_comes_from_the_dependency(self):
    self.assertIn('.runfiles/', transforms.__file__)


if __name__ == '__main__':
  absltest.main()
