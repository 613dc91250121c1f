"""What every adapter method is held to, for the tests of each."""

import functools
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np

from peftlib.methods import method as method_lib
from tests.peftlib.methods import linear_op

# Many small functions that run once: their compilation is what takes time.
jit = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)

_GOLDEN = pathlib.Path(__file__).parents[2] / 'golden' / 'methods.npz'


@functools.cache
def golden(case):
  """What HF peft computed, by name; see interop/make_methods_golden.py."""
  with np.load(_GOLDEN) as file:
    prefix = f'{case}/'
    names = [name for name in file.files if name.startswith(prefix)]
    return {name.removeprefix(prefix): file[name] for name in names}


@functools.cache
def golden_table(name):
  """An array of the golden file that belongs to no case."""
  with np.load(_GOLDEN) as file:
    return file[name]


def weight_of(rows=12, columns=8, kind='linear'):
  """A weight's description and a value of it."""
  weight = method_lib.Weight((rows,), (columns,), kind, 'layers/q_proj.kernel')
  rng = np.random.default_rng(rows * columns)
  return weight, rng.normal(size=(rows, columns)).astype(np.float32)


def moved(variables, specs, seed=0, by=0.3):
  """Variables away from their start: the trained ones, by random numbers."""
  rng = np.random.default_rng(seed)
  return {
    name: value + by * rng.normal(size=value.shape).astype(np.float32)
    if specs[name].trainable
    else value
    for name, value in variables.items()
  }


class MethodTestCase(chex.TestCase):
  """Checks of one method with some hyperparameters."""

  def check_laws(self, method, *, rows=12, columns=8, kind='linear'):
    """Shapes, dtypes, start, `apply` against `merge`; mapped and abstract."""
    weight, value = weight_of(rows, columns, kind)
    specs = method.variables(weight)
    method.check(weight)
    init = jit(lambda key, value: method.init(key, weight, value))
    start = init(jax.random.key(0), value)
    self.assertEqual(set(start), set(specs))
    for name, spec in specs.items():
      self.assertEqual(start[name].shape, spec.shape(weight), name)
      self.assertEqual(start[name].dtype, spec.dtype or jnp.float32, name)
    abstract = jax.eval_shape(init, jax.random.key(0), value)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, start)

    op_class = linear_op.LinearOp
    x = np.random.default_rng(1).normal(size=(2, 3, rows)).astype(np.float32)
    if kind == 'embedding':
      op_class, x = linear_op.LookupOp, np.array([[0, 3, 1], [3, 2, rows - 1]])
    x = jnp.asarray(x)

    @jit
    def everything(x, w, v):
      merged = method.merge(w, v)
      return (
        method.apply(x, op_class(w), v),
        merged,
        op_class(merged)(x),
      )

    @jit
    def stack_of(keys, w, v):
      """A stack of layers is mapped over."""
      init = lambda key: method.init(key, weight, jnp.asarray(value))
      run = lambda v: method.apply(x, op_class(w), v)
      stacked = jax.vmap(init)(keys)
      both = jax.tree.map(lambda a, b: jnp.stack([a, b]), v, start)
      return stacked, jax.vmap(run)(both)

    frozen = value
    if method.residual:
      frozen = value - (method.merge(value, start) - value)
    base = np.asarray(op_class(value)(x))
    at_start, *_ = everything(x, frozen, start)
    np.testing.assert_allclose(at_start, base, rtol=1e-5, atol=1e-5)

    v = moved(start, specs)
    out, merged, of_merged = everything(x, frozen, v)
    self.assertEqual((out.dtype, merged.dtype), (jnp.float32,) * 2)
    np.testing.assert_allclose(
      out, of_merged, rtol=1e-5, atol=1e-5 * np.abs(out).max()
    )
    # Variables that do nothing would pass all of the above.
    self.assertGreater(np.abs(out - base).max(), 1e-2)

    keys = jax.random.split(jax.random.key(0), 2)
    stacked, outs = stack_of(keys, frozen, v)
    for name, spec in specs.items():
      self.assertEqual(stacked[name].shape, (2, *spec.shape(weight)), name)
    np.testing.assert_allclose(outs[0], out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outs[1], at_start, rtol=1e-4, atol=1e-5)

    low = jnp.bfloat16
    x16 = x if kind == 'embedding' else x.astype(low)
    got, merged, _ = everything(x16, jnp.asarray(frozen, low), v)
    self.assertEqual((got.dtype, merged.dtype), (low, low))
    error = np.abs(got.astype(jnp.float32) - out)
    self.assertLess(error.max(), 0.05 * np.abs(out).max())
    chex.assert_trees_all_equal_shapes_and_dtypes(
      jax.eval_shape(everything, x16, jnp.asarray(frozen, low), v)[0], got
    )

  def check_formula(
    self, method, formula, *, rows=12, columns=8, constants=(), by=0.3
  ):
    """Output and gradients against float64 numpy.

    Args:
      method: The method.
      formula: `(x, w, v, fixed) -> y` of the paper; `fixed` are the variables
        as constants, for what the gradient doesn't pass.
      rows: Inputs.
      columns: Outputs.
      constants: Names of variables that are not differentiated.
      by: How far the variables are from their start.
    """
    weight, value = weight_of(rows, columns)
    specs = method.variables(weight)
    start = jit(lambda key: method.init(key, weight, value))(jax.random.key(2))
    v = moved(start, specs, seed=3, by=by)
    x = np.random.default_rng(4).normal(size=(5, rows)).astype(np.float32)
    c = np.random.default_rng(5).normal(size=(5, columns))

    wide = lambda a: np.asarray(
      a, np.float64 if np.issubdtype(a.dtype, np.floating) else a.dtype
    )
    v64 = {name: wide(value) for name, value in v.items()}
    x64, w64 = wide(x), wide(value)
    out = method.apply(jnp.asarray(x), linear_op.LinearOp(value), v)
    np.testing.assert_allclose(
      out, formula(x64, w64, v64, v64), rtol=1e-4, atol=1e-5
    )

    trained = [name for name in v if name not in constants]

    def loss(x, some):
      y = method.apply(x, linear_op.LinearOp(value), {**v, **some})
      return jnp.sum(y * c)

    got_x, got = jit(jax.grad(loss, argnums=(0, 1)))(
      jnp.asarray(x), {name: jnp.asarray(v[name]) for name in trained}
    )
    for name in trained:
      wanted = _numeric_gradient(
        lambda leaf, name=name: np.sum(
          c * formula(x64, w64, {**v64, name: leaf}, v64)
        ),
        v64[name],
      )
      np.testing.assert_allclose(
        got[name], wanted, rtol=1e-3, atol=1e-4, err_msg=name
      )
    wanted = _numeric_gradient(
      lambda x: np.sum(c * formula(x, w64, v64, v64)), x64
    )
    np.testing.assert_allclose(got_x, wanted, rtol=1e-3, atol=1e-4)

  def check_golden(self, case, method, from_peft, *, kind='linear'):
    """Output, gradients, merged weight and size against HF peft.

    Args:
      case: Name in the golden file.
      method: The method.
      from_peft: Takes peft's tensors (of variables or gradients) by name and
        returns ours; it may be given trained ones alone.
      kind: 'linear' or 'embedding'.
    """
    data = golden(case)
    w = data['frozen'] if kind == 'embedding' else data['frozen'].T
    weight = method_lib.Weight((w.shape[0],), (w.shape[1],), kind)
    specs = method.variables(weight)
    method.check(weight)
    of = lambda prefix: {
      name.removeprefix(prefix): value
      for name, value in data.items()
      if name.startswith(prefix)
    }
    v = {n: jnp.asarray(a) for n, a in from_peft(of('v/')).items()}
    self.assertEqual(set(v), set(specs))
    for name, spec in specs.items():
      self.assertEqual(v[name].shape, spec.shape(weight), name)
    trained = {name for name, spec in specs.items() if spec.trainable}
    self.assertEqual(
      sum(v[name].size for name in trained), int(data['trainable'])
    )

    op_class = linear_op.LinearOp
    if kind == 'embedding':
      op_class = linear_op.LookupOp

    def loss(x, some):
      y = method.apply(x, op_class(w), {**v, **some})
      return jnp.sum(y * data['cotangent']), y

    x = jnp.asarray(data['x'])
    if kind == 'embedding':
      grad = jit(jax.grad(loss, argnums=1, has_aux=True))
      got, y = grad(x, {name: v[name] for name in trained})
    else:
      grad = jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
      (got_x, got), y = grad(x, {name: v[name] for name in trained})
      np.testing.assert_allclose(
        got_x, data['x_gradient'], rtol=1e-4, atol=1e-5
      )
    np.testing.assert_allclose(y, data['y'], rtol=1e-4, atol=1e-5)
    wanted = from_peft(of('g/'))
    self.assertEqual(set(wanted), trained)
    for name, gradient in wanted.items():
      np.testing.assert_allclose(
        got[name], gradient, rtol=1e-4, atol=2e-5, err_msg=name
      )
    if 'merged' in data:
      merged = data['merged'] if kind == 'embedding' else data['merged'].T
      np.testing.assert_allclose(
        method.merge(jnp.asarray(w), v), merged, rtol=1e-4, atol=1e-5
      )


def transposed(*pairs):
  """A `from_peft` that renames and transposes: (theirs, ours)."""
  return lambda tensors: {
    ours: tensors[theirs].T for theirs, ours in pairs if theirs in tensors
  }


def renamed(*pairs):
  """A `from_peft` that renames: (theirs, ours)."""
  return lambda tensors: {
    ours: tensors[theirs] for theirs, ours in pairs if theirs in tensors
  }


def _numeric_gradient(function, at, step=1e-6):
  out = np.zeros_like(at)
  for index in np.ndindex(at.shape):
    there = [at.copy(), at.copy()]
    there[0][index] += step
    there[1][index] -= step
    out[index] = (function(there[0]) - function(there[1])) / (2 * step)
  return out
