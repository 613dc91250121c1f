from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from peftlib import contractions
from peftlib import frozen_ops
from peftlib import methods
from peftlib import slots
from peftlib import weight_ops

LORA = methods.Lora(rank=2, alpha=6.0)


def _random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _op(shape, batch, inputs, outputs, kind='einsum'):
  return weight_ops.WeightOp(
    path=('layer',),
    name='kernel',
    kind=kind,
    shape=shape,
    batch=batch,
    inputs=inputs,
    outputs=outputs,
    dtype=jnp.dtype('float32'),
    route=(),
    exact=True,
  )


def _slot(op, method=LORA, adapter='default'):
  return slots.Slot(adapter, 0, method, op)


def _values(slot, seed=0, gate=None, key=None):
  return slots.Values(
    {
      name: jnp.asarray(_random(*slot.op.variable_shape(spec), seed=seed + i))
      for i, (name, spec) in enumerate(slot.variables.items())
    },
    key,
    None if gate is None else jnp.asarray(gate),
  )


def _contracted(slots_, values, subscripts, x, w):
  x_letters, w_letters, out = subscripts
  y = np.einsum(f'{x_letters},{w_letters}->{out}', x, w)
  return frozen_ops.contracted(
    slots_,
    values,
    contractions.Contraction(*subscripts),
    jnp.asarray(x),
    jnp.asarray(y),
    lambda stored: stored,
    jnp.asarray(w),
    None,
    False,
  )


class ContractedTest(parameterized.TestCase):
  @parameterized.parameters(
    # Factors of qwix's layout: (*batch, inputs, r) and (*batch, r, outputs),
    # an einsum's axes apart.
    (('bsi', 'io', 'bso'), (), (0,), (1,), 'ir,ro->io'),
    (('bi', 'oi', 'bo'), (), (1,), (0,), 'ir,ro->oi'),
    (('bij', 'ijo', 'bo'), (), (0, 1), (2,), 'ijr,ro->ijo'),
    (('ebi', 'eio', 'ebo'), (0,), (1,), (2,), 'eir,ero->eio'),
    (('bei', 'oie', 'obe'), (2,), (1,), (0,), 'eir,ero->oie'),
    # The op the other way round: what the head is to the table.
    (('bo', 'io', 'bi'), (), (0,), (1,), 'ir,ro->io'),
    (('ebo', 'eio', 'ebi'), (0,), (1,), (2,), 'eir,ero->eio'),
  )
  def test_lora_is_the_op_of_the_updated_weight(
    self, subscripts, batch, inputs, outputs, update
  ):
    extents = dict(zip('bsijoe', (2, 3, 4, 5, 6, 3)))
    shape = lambda letters: tuple(extents[c] for c in letters)
    x_letters, w_letters, out = subscripts
    x, w = _random(*shape(x_letters)), _random(*shape(w_letters), seed=1)
    op = _op(w.shape, batch, inputs, outputs)
    slot = _slot(op)
    values = _values(slot, 2)
    got = _contracted((slot,), [values], subscripts, x, w)
    new = w + 3 * np.einsum(update, *map(np.asarray, values.variables.values()))
    np.testing.assert_allclose(
      got,
      np.einsum(f'{x_letters},{w_letters}->{out}', x, new),
      rtol=1e-4,
      atol=1e-4,
    )

  @parameterized.parameters(
    methods.Dora(rank=2, alpha=6.0),
    methods.Hira(rank=2),
    methods.Loha(rank=2, alpha=6.0),
  )
  def test_any_method_is_the_op_of_the_merged_weight(self, method):
    for subscripts, batch, inputs, outputs in (
      (('bi', 'io', 'bo'), (), (0,), (1,)),
      (('bo', 'io', 'bi'), (), (0,), (1,)),
      (('ebi', 'eio', 'ebo'), (0,), (1,), (2,)),
    ):
      extents = dict(zip('bioe', (2, 4, 6, 3)))
      x_letters, w_letters, out = subscripts
      x = _random(*(extents[c] for c in x_letters))
      w = _random(*(extents[c] for c in w_letters), seed=1)
      slot = _slot(_op(w.shape, batch, inputs, outputs), method)
      values = _values(slot, 2)
      got = _contracted((slot,), [values], subscripts, x, w)
      if batch:
        new = np.stack(
          [
            method.merge(w[i], {k: v[i] for k, v in values.variables.items()})
            for i in range(3)
          ]
        )
      else:
        new = method.merge(w, values.variables)
      np.testing.assert_allclose(
        got,
        np.einsum(f'{x_letters},{w_letters}->{out}', x, new),
        rtol=1e-4,
        atol=1e-4,
      )

  def test_the_second_adapter_sees_the_first_one_s_weight(self):
    op = _op((4, 6), (), (0,), (1,), 'dot_general')
    first = _slot(op)
    second = _slot(op, methods.Ia3(), 'scaled')
    x, w = _random(3, 4), _random(4, 6, seed=1)
    values = [_values(first, 2), _values(second, 5)]
    got = _contracted((first, second), values, ('bi', 'io', 'bo'), x, w)
    a, b = map(np.asarray, values[0].variables.values())
    new = (w + 3 * a @ b) * np.asarray(*values[1].variables.values())
    np.testing.assert_allclose(got, x @ new, rtol=1e-4, atol=1e-4)

  def test_gates(self):
    op = _op((4, 6), (), (0,), (1,), 'dot_general')
    slot = _slot(op)
    x, w = _random(4, 4), _random(4, 6, seed=1)
    base = np.einsum('bi,io->bo', x, w)
    run = lambda gate: np.asarray(
      _contracted((slot,), [_values(slot, gate=gate)], ('bi', 'io', 'bo'), x, w)
    )
    on = run(None)
    np.testing.assert_array_equal(run(True), on)
    np.testing.assert_array_equal(run(False), base)
    rows = np.array([True, False, False, True])
    np.testing.assert_array_equal(run(rows), np.where(rows[:, None], on, base))
    # Batch and length as one axis: two positions of each of two rows.
    two = np.array([True, False])
    np.testing.assert_array_equal(
      run(two), np.where(np.repeat(two, 2)[:, None], on, base)
    )
    with self.assertRaisesRegex(
      ValueError,
      r'layer\.kernel is used on 4 rows, the adapters were assigned to a batch'
      r' of 3; the first axis of the input has to be the batch',
    ):
      run(np.array([True, False, True]))

  @parameterized.parameters(
    ('bi', 'io', 'bo'), ('bsi', 'io', 'bso'), ('bo', 'io', 'bi')
  )
  def test_rows_of_several_adapters_are_one_pair_of_products(self, *subscripts):
    x_letters, w_letters, out = subscripts
    extents = dict(zip('bsio', (4, 3, 5, 6)))
    x = _random(*(extents[c] for c in x_letters))
    w = _random(5, 6, seed=1)
    op = _op(w.shape, (), (0,), (1,), 'dot_general')
    slots_ = (
      _slot(op),
      _slot(op, methods.Lora(rank=3, alpha=1.5, dtype='bfloat16'), 'bf16'),
      _slot(op, methods.RsLora(rank=4, alpha=1.0), 'everywhere'),
      _slot(op, methods.Lora(rank=1, alpha=2.0), 'off'),
      _slot(op, methods.Vera(rank=2), 'vera'),
    )
    gates = (
      [True, False, False, True],
      [False, True, False, False],
      [True] * 4,
      [False] * 4,
      # Each of two rows is two.
      [False, True],
    )
    values = [
      _values(s, 3 * i, g) for i, (s, g) in enumerate(zip(slots_, gates))
    ]
    run = lambda values: _contracted(slots_, values, subscripts, x, w)
    expected = np.einsum(f'{x_letters},{w_letters}->{out}', x, w)
    for slot, value, gate in zip(slots_, values, gates):
      rows = np.repeat(gate, 4 // len(gate))
      change = slot.method.merge(jnp.zeros(w.shape), value.variables)
      every_row = np.einsum(f'{x_letters},{w_letters}->{out}', x, change)
      expected += every_row * rows.reshape(4, *(1,) * (x.ndim - 1))
    np.testing.assert_allclose(run(values), expected, rtol=1e-4, atol=1e-4)
    jaxpr = jax.make_jaxpr(run)(values)
    products = [e for e in jaxpr.eqns if e.primitive.name == 'dot_general']
    self.assertLen(products, 2)

  def test_an_adapter_that_is_off_adds_nothing_even_of_nan(self):
    op = _op((4, 6), (), (0,), (1,), 'dot_general')
    x, w = _random(4, 4), _random(4, 6, seed=1)
    first, second = _slot(op), _slot(op, adapter='diverged')
    diverged = _values(second, gate=False)
    diverged = diverged._replace(
      variables={k: v * np.nan for k, v in diverged.variables.items()}
    )
    values = _values(first, 2, [True, False, True, True])
    for gate in (False, [False] * 4):
      off = diverged._replace(gate=jnp.asarray(gate))
      np.testing.assert_allclose(
        _contracted((first, second), [values, off], ('bi', 'io', 'bo'), x, w),
        _contracted((first,), [values], ('bi', 'io', 'bo'), x, w),
        rtol=1e-6,
        atol=1e-6,
      )

  def test_an_apply_of_a_subclass_is_asked(self):
    class Halved(methods.Lora):
      def apply(self, x, op, v):
        return op(x) + op.low_rank(x, v['lora_a'], v['lora_b']) / 2

    op = _op((4, 6), (), (0,), (1,), 'dot_general')
    x, w = _random(3, 4), _random(4, 6, seed=1)
    slot = _slot(op, Halved(rank=2, alpha=6.0))
    values = _values(slot, 2)
    got = _contracted((slot,), [values], ('bi', 'io', 'bo'), x, w)
    a, b = map(np.asarray, values.variables.values())
    np.testing.assert_allclose(got, x @ w + x @ a @ b / 2, rtol=1e-4, atol=1e-4)

  def test_dropout_of_one_of_two(self):
    op = _op((4, 6), (), (0,), (1,), 'dot_general')
    first = _slot(op)
    second = _slot(op, methods.Lora(rank=2, alpha=6.0, dropout=0.5), 'dropped')
    x, w = np.ones((8, 4), np.float32), _random(4, 6, seed=1)
    key = jax.random.key(3)
    rows = np.arange(8) < 4
    values = [_values(first, 2, rows), _values(second, 4, ~rows, key)]
    got = _contracted((first, second), values, ('bi', 'io', 'bo'), x, w)
    keep = np.asarray(jax.random.bernoulli(key, 0.5, x.shape))
    deltas = [
      3 * (x @ np.asarray(v.variables['lora_a']) @ v.variables['lora_b'])
      for v, x in zip(values, (x, np.where(keep, 2 * x, 0)))
    ]
    np.testing.assert_allclose(
      got, x @ w + np.where(rows[:, None], *deltas), rtol=1e-4, atol=1e-4
    )

  def test_dropout(self):
    op = _op((4, 6), (), (0,), (1,), 'dot_general')
    slot = _slot(op, methods.Lora(rank=2, alpha=6.0, dropout=0.5))
    x, w = np.ones((64, 4), np.float32), _random(4, 6, seed=1)
    key = jax.random.key(3)
    values = _values(slot, key=key)
    got = _contracted((slot,), [values], ('bi', 'io', 'bo'), x, w)
    keep = np.asarray(jax.random.bernoulli(key, 0.5, x.shape))
    self.assertBetween(keep.mean(), 0.4, 0.6)
    a, b = map(np.asarray, values.variables.values())
    np.testing.assert_allclose(
      got, x @ w + 3 * (np.where(keep, 2 * x, 0) @ a @ b), rtol=1e-4, atol=1e-4
    )


class ConvolvedTest(parameterized.TestCase):
  @parameterized.parameters((1, True), (2, False))
  def test_lora_is_the_convolution_with_the_updated_kernel(self, groups, last):
    op = _op((3, 4 // groups, 6), (), (0, 1), (2,), 'conv')
    slot = _slot(op)
    x, w = _random(2, 7, 4), _random(*op.shape, seed=1)

    def convolve(x, w):
      return jax.lax.conv_general_dilated(
        x,
        w,
        (1,),
        'VALID',
        dimension_numbers=('NWC', 'WIO', 'NWC'),
        feature_group_count=groups,
      )

    values = _values(slot, 2)
    got = frozen_ops.convolved(
      (slot,), [values], convolve, last, x, convolve(x, w), lambda s: s, w
    )
    a, b = map(np.asarray, values.variables.values())
    new = w + 3 * np.einsum('kir,ro->kio', a.reshape(3, 4 // groups, 2), b)
    # A convolution in numpy, group by group.
    expected = np.zeros((2, 5, 6))
    width_in, width_out = 4 // groups, 6 // groups
    for g in range(groups):
      ins = slice(g * width_in, (g + 1) * width_in)
      outs = slice(g * width_out, (g + 1) * width_out)
      for t in range(5):
        expected[:, t, outs] = np.einsum(
          'bki,kio->bo', x[:, t : t + 3, ins], new[:, :, outs]
        )
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


class LookedUpTest(absltest.TestCase):
  def test_lora_is_the_lookup_in_the_updated_table(self):
    op = _op((5, 4), (), (0,), (1,), 'embedding')
    slot = _slot(op)
    w, ids = _random(5, 4), np.array([[0, 3], [4, 3]])
    values = _values(slot, 2)
    got = frozen_ops.looked_up(
      (slot,),
      [values],
      lambda table, ids: table[ids],
      jnp.asarray(ids),
      jnp.asarray(w[ids]),
      lambda s: s,
      jnp.asarray(w),
    )
    a, b = map(np.asarray, values.variables.values())
    np.testing.assert_allclose(got, (w + 3 * a @ b)[ids], rtol=1e-4, atol=1e-4)


if __name__ == '__main__':
  absltest.main()
