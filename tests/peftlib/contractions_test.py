import re

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from peftlib import contractions

chex.set_n_cpu_devices(8)

P = jax.sharding.PartitionSpec


def _random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _einsum(subscripts, lhs, rhs):
  """numpy's einsum; axes of extent 1 that have a letter alone are summed."""
  left, right, out = subscripts
  return np.einsum(f'{left},{right}->{out}', lhs, rhs)


class OfDotGeneralTest(parameterized.TestCase):
  @parameterized.parameters(
    (2, 2, (((1,), (0,)), ((), ())), ('ba', 'ac', 'bc')),
    (2, 2, (((0,), (1,)), ((), ())), ('ab', 'ca', 'bc')),
    (3, 3, (((2,), (1,)), ((0,), (0,))), ('acb', 'abd', 'acd')),
    (3, 3, (((1, 2), (0, 1)), ((), ())), ('cab', 'abd', 'cd')),
    (1, 1, (((0,), (0,)), ((), ())), ('a', 'a', '')),
    (2, 1, (((), ()), ((), ())), ('ab', 'c', 'abc')),
  )
  def test_subscripts(self, lhs_ndim, rhs_ndim, numbers, expected):
    self.assertEqual(
      contractions.of_dot_general(lhs_ndim, rhs_ndim, numbers), expected
    )

  @parameterized.parameters(range(20))
  def test_random_shapes_against_numpy(self, seed):
    rng = np.random.default_rng(seed)
    batch, contracted, left, right = rng.integers(0, 3, 4)
    extents = rng.integers(2, 5, batch + contracted).tolist()
    lhs = extents + rng.integers(2, 5, left).tolist()
    rhs = extents + rng.integers(2, 5, right).tolist()
    lhs_order, rhs_order = (rng.permutation(len(s)) for s in (lhs, rhs))
    lhs_at, rhs_at = (
      [int(np.flatnonzero(order == i)[0]) for i in range(len(extents))]
      for order in (lhs_order, rhs_order)
    )
    numbers = (
      (lhs_at[batch:], rhs_at[batch:]),
      (lhs_at[:batch], rhs_at[:batch]),
    )
    x = _random(*(lhs[i] for i in lhs_order))
    w = _random(*(rhs[i] for i in rhs_order), seed=1)
    subscripts = contractions.of_dot_general(x.ndim, w.ndim, numbers)
    np.testing.assert_allclose(
      jax.lax.dot_general(x, w, numbers),
      _einsum(subscripts, x, w),
      rtol=1e-4,
      atol=1e-4,
    )


class OfMatmulTest(parameterized.TestCase):
  @parameterized.parameters(
    ((3, 4), (4, 5), ('XK', 'KY', 'XY')),
    ((4,), (4, 5), ('K', 'KY', 'Y')),
    ((3, 4), (4,), ('XK', 'K', 'X')),
    ((4,), (4,), ('K', 'K', '')),
    ((2, 3, 4), (4, 5), ('aXK', 'KY', 'aXY')),
    ((3, 4), (2, 4, 5), ('XK', 'aKY', 'aXY')),
    ((2, 3, 4), (2, 4, 5), ('aXK', 'aKY', 'aXY')),
    ((2, 3, 4), (1, 4, 5), ('aXK', 'bKY', 'aXY')),
    ((1, 3, 4), (2, 4, 5), ('bXK', 'aKY', 'aXY')),
    ((1, 3, 4), (1, 4, 5), ('aXK', 'aKY', 'aXY')),
    ((6, 1, 3, 4), (2, 4, 5), ('acXK', 'bKY', 'abXY')),
  )
  def test_against_numpy(self, lhs, rhs, expected):
    subscripts = contractions.of_matmul(lhs, rhs)
    self.assertEqual(subscripts, expected)
    x, w = _random(*lhs), _random(*rhs, seed=1)
    np.testing.assert_allclose(
      np.matmul(x, w), _einsum(subscripts, x, w), rtol=1e-4, atol=1e-5
    )


class OfTensordotTest(parameterized.TestCase):
  @parameterized.parameters(
    ((3, 4), (4, 5), 1),
    ((2, 3, 4), (3, 4, 5), 2),
    ((2, 3), (4, 5), 0),
    ((3, 4), (5, 4), (1, 1)),
    ((3, 4), (5, 4), (-1, -1)),
    ((2, 3, 4), (4, 5, 3), ((1, 2), (2, 0))),
    ((2, 3, 4), (4, 5, 3), ((-1, -2), (0, -1))),
    ((2, 3, 4), (4, 5, 3), [[1, 2], [2, 0]]),
  )
  def test_against_numpy(self, lhs, rhs, axes):
    x, w = _random(*lhs), _random(*rhs, seed=1)
    np.testing.assert_allclose(
      np.tensordot(x, w, axes),
      _einsum(contractions.of_tensordot(x.ndim, w.ndim, axes), x, w),
      rtol=1e-4,
      atol=1e-5,
    )


class OfEinsumTest(parameterized.TestCase):
  @parameterized.parameters(
    ('bi,io->bo', (2, 3), (3, 4), ('bi', 'io', 'bo')),
    (' b i , i o -> b o ', (2, 3), (3, 4), ('bi', 'io', 'bo')),
    ('bi,io', (2, 3), (3, 4), ('bi', 'io', 'bo')),
    ('zi,ia', (2, 3), (3, 4), ('zi', 'ia', 'az')),
    ('...i,io->...o', (2, 5, 3), (3, 4), ('abi', 'io', 'abo')),
    ('...i,io', (2, 5, 3), (3, 4), ('abi', 'io', 'abo')),
    ('...i,...io->...o', (2, 5, 3), (5, 3, 4), ('abi', 'bio', 'abo')),
    ('a...i,ai...->a...', (2, 5, 3), (2, 3, 5), ('abi', 'aib', 'ab')),
    ('b...d,edf->be...f', (2, 5, 3), (4, 3, 6), ('bad', 'edf', 'beaf')),
    ('...,io->...io', (), (3, 4), ('', 'io', 'io')),
  )
  def test_against_numpy(self, text, lhs, rhs, expected):
    got = contractions.of_einsum(text, len(lhs), len(rhs))
    self.assertEqual(got, expected)
    x, w = _random(*lhs), _random(*rhs, seed=1)
    np.testing.assert_allclose(
      np.einsum(text, x, w), _einsum(got, x, w), rtol=1e-4, atol=1e-5
    )


class ContractionTest(parameterized.TestCase):
  def test_letters(self):
    c = contractions.Contraction('ebsi', 'eioz', 'ebo')
    self.assertEqual(
      (c.batch, c.contracted, c.remaining, c.dropped, c.leading, c.summed),
      ('e', 'i', 'oz', 'z', 'b', 's'),
    )
    self.assertEqual(c.axes('oi'), (2, 1))

  @parameterized.parameters(
    ('bi', 'io', 'bo'),
    ('bi', 'oi', 'bo'),
    ('bi', 'io', 'ob'),
    ('bsij', 'ijop', 'bsop'),
    ('jbi', 'ipoj', 'obp'),
    ('ebi', 'eio', 'ebo'),
    ('bei', 'oie', 'obe'),
    ('efbi', 'ioef', 'bofe'),
    ('b', 'io', 'bio'),
    ('bi', 'i', 'b'),
    ('i', 'io', 'o'),
    ('bis', 'io', 'ob'),
    ('bi', 'zio', 'bo'),
    ('ibe', 'ezoi', 'boe'),
  )
  def test_is_the_matrix_product_of_its_matrices(self, x, weight, out):
    extents = dict(zip('bseofpijz', (2, 3, 4, 5, 2, 3, 4, 3, 1)))
    shape = lambda letters: [extents[c] for c in letters]
    c = contractions.Contraction(x, weight, out)
    x_value = _random(*shape(x))
    w_value = _random(*shape(weight), seed=1)
    expected = np.einsum(f'{x},{weight}->{out}', x_value, w_value)
    matrix = np.einsum(
      f'{weight}->{c.batch}{c.contracted}{c.remaining}', w_value
    ).reshape(
      *shape(c.batch),
      int(np.prod(shape(c.contracted))),
      int(np.prod(shape(c.remaining))),
    )
    rows = c.x_matrix(jnp.asarray(x_value))
    chex.assert_shape(
      rows,
      (
        *shape(c.batch),
        *shape(c.leading),
        int(np.prod(shape(c.contracted))),
      ),
    )
    for _ in range(len(c.leading) - 1):
      matrix = np.expand_dims(matrix, len(c.batch))
    flat = not c.leading
    y = np.matmul(np.asarray(rows)[..., None, :] if flat else rows, matrix)
    y = y[..., 0, :] if flat else y
    np.testing.assert_allclose(
      c.y_matrix(jnp.asarray(expected)), y, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(
      c.y_from_matrix(c.y_matrix(jnp.asarray(expected)), w_value.shape),
      expected,
    )

  def test_permuted(self):
    c = contractions.Contraction('bi', 'io', 'bo')
    self.assertEqual(
      c.permuted((1, 0)), contractions.Contraction('bi', 'oi', 'bo')
    )
    three = contractions.Contraction('bi', 'ipo', 'bpo')
    # The weight's axis 0 is axis 2 of the variable, and so on.
    w = _random(3, 4, 5)
    stored = np.transpose(w, (1, 2, 0))
    turned = three.permuted((2, 0, 1))
    self.assertEqual(turned.weight, 'poi')
    x = _random(2, 3, seed=1)
    np.testing.assert_allclose(
      _einsum((turned.x, turned.weight, turned.out), x, stored),
      _einsum((three.x, three.weight, three.out), x, w),
      rtol=1e-5,
    )


class DotTest(parameterized.TestCase):
  @parameterized.parameters((), (3,), (2, 3), (2, 3, 4))
  def test_against_numpy(self, *lead):
    x, w = _random(*lead, 5), _random(5, 6, seed=1)
    got = contractions.dot(jnp.asarray(x), jnp.asarray(w))
    np.testing.assert_allclose(got, x @ w, rtol=1e-5, atol=1e-5)

  def test_dtype_is_the_activation_s(self):
    got = contractions.dot(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4)))
    chex.assert_type(got, jnp.bfloat16)

  def test_one_plain_product_in_the_backward_pass(self):
    loss = lambda w, x: contractions.dot(x, w).sum()
    jaxpr = jax.make_jaxpr(jax.grad(loss))(
      jnp.ones((5, 6)), jnp.ones((2, 3, 5))
    )
    numbers = [
      e.params['dimension_numbers']
      for e in jaxpr.jaxpr.eqns
      if e.primitive.name == 'dot_general'
    ]
    self.assertNotEmpty(numbers)
    for (lhs, _), _ in numbers:
      self.assertLen(lhs, 1)

  def test_sharded_leading_axes_on_an_explicit_mesh(self):
    mesh = jax.make_mesh(
      (2, 2), ('a', 'b'), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    x, w = _random(2, 4, 5), _random(5, 6, seed=1)
    with jax.set_mesh(mesh):
      placed = jax.device_put(x, jax.NamedSharding(mesh, P('a', 'b', None)))
      got = contractions.dot(placed, jnp.asarray(w))
    self.assertEqual(got.sharding.spec, P('a', 'b', None))
    np.testing.assert_allclose(got, x @ w, rtol=1e-5, atol=1e-5)


class DotNarrowTest(parameterized.TestCase):
  @parameterized.product(lead=[(), (3,), (2, 3)], shape=[(6, 2), (2, 6)])
  def test_values_and_gradients_against_numpy(self, lead, shape):
    x, w = _random(*lead, shape[0]), _random(*shape, seed=1)
    dy = _random(*lead, shape[1], seed=2)
    got, vjp = jax.vjp(contractions.dot_narrow, x, w)
    np.testing.assert_allclose(got, x @ w, rtol=1e-5, atol=1e-5)
    dx, dw = vjp(jnp.asarray(dy))
    np.testing.assert_allclose(dx, dy @ w.T, rtol=1e-5, atol=1e-5)
    expected = x.reshape(-1, shape[0]).T @ dy.reshape(-1, shape[1])
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-5)

  @parameterized.parameters(1, 3)
  def test_the_gradient_is_made_the_other_way_round_on_cpu(self, count):
    loss = lambda w, x: (contractions.dot_narrow(x, w) ** 2).sum()
    grad = jax.vmap(jax.grad(loss))
    args = jnp.ones((count, 64, 4)), jnp.ones((count, 32, 64))
    text = jax.jit(grad).lower(*args).compile().as_text()
    shapes = re.findall(r'= f32\[([\d,]+)\]\S* dot\(', text)
    stack = f'{count},' if count > 1 else ''
    self.assertIn(f'{stack}4,64', shapes)
    self.assertNotIn(f'{stack}64,4', shapes)


if __name__ == '__main__':
  absltest.main()
