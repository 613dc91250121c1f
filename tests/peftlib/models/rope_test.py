from absl.testing import absltest
import jax.numpy as jnp
import numpy as np

from peftlib.models import config as config_lib
from peftlib.models import rope
from tests.peftlib.models import golden


class RopeTest(absltest.TestCase):
  def test_frequencies(self):
    config = golden.tiny_config(head_dim=4, rope_theta=100.0)
    np.testing.assert_allclose(
      rope.inverse_frequencies(config), [1.0, 0.1], rtol=1e-6
    )

  def test_linear_scaling_divides(self):
    config = golden.tiny_config(
      head_dim=4,
      rope_theta=100.0,
      rope_scaling=config_lib.RopeScaling(rope_type='linear', factor=4.0),
    )
    np.testing.assert_allclose(
      rope.inverse_frequencies(config), [0.25, 0.025], rtol=1e-6
    )

  def test_llama3_scaling(self):
    # Wavelengths 6.28, 62.8 and 628 against the bounds 100/4 and 100/1.
    config = golden.tiny_config(
      head_dim=6,
      rope_theta=1000.0,
      rope_scaling=config_lib.RopeScaling(
        rope_type='llama3',
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=100,
      ),
    )
    smooth = (100 / (2 * np.pi / 0.1) - 1) / 3
    middle = (1 - smooth) * 0.1 / 8 + smooth * 0.1
    np.testing.assert_allclose(
      rope.inverse_frequencies(config), [1.0, middle, 0.01 / 8], rtol=1e-5
    )

  def test_rotates_pairs_like_complex_numbers(self):
    config = golden.tiny_config(head_dim=4, rope_theta=100.0)
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 4)).astype(np.float32)
    positions = jnp.asarray([[0, 5, 11]])
    rotated = np.asarray(
      rope.rotate(jnp.asarray(x), *rope.angles(positions, config))
    )
    z = x[..., :2] + 1j * x[..., 2:]
    angle = np.asarray(positions)[..., None, None] * np.array([1.0, 0.1])
    z = z * np.exp(1j * angle)
    np.testing.assert_allclose(
      rotated, np.concatenate([z.real, z.imag], -1), atol=1e-5
    )

  def test_dtype_is_that_of_the_computation(self):
    config = golden.tiny_config(dtype='bfloat16')
    cos, sin = rope.angles(jnp.arange(3)[None], config)
    self.assertEqual((cos.dtype, sin.dtype), (jnp.bfloat16, jnp.bfloat16))
    self.assertEqual(cos.shape, (1, 3, 1, 3))


if __name__ == '__main__':
  absltest.main()
