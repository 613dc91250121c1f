import dataclasses
import json
import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import peftlib
from peftlib import checkpoint
from peftlib import methods
from tests.peftlib import toy_models
import transforms
from transforms import testing

chex.set_n_cpu_devices(8)

P = jax.sharding.PartitionSpec
KEY = jax.random.key(0)
CONFIG = peftlib.LoraConfig(module_path='.*(up|down)', rank=2, alpha=4.0)


def _loss(model, batch, rngs):
  del rngs
  return jnp.mean((model(batch) - 1.0) ** 2), {}


def _run(config=CONFIG):
  """A run of two steps: its step function, state and frozen base."""
  x = toy_models.inputs()
  graphdef, state = peftlib.inject(
    *nnx.split(toy_models.LaxScan(nnx.Rngs(0))), config, x, key=KEY
  )
  trainable, frozen = transforms.partition(
    state, peftlib.trainable_filter(config), ...
  )
  tx = optax.adamw(1e-2)
  train_state = peftlib.init_train_state(trainable, tx, key=KEY)
  step = peftlib.make_train_step(graphdef, _loss, tx, donate=False)
  for _ in range(2):
    train_state, _ = step(train_state, frozen, x)
  return step, train_state, frozen


class AdapterTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path) / 'adapter'
    _, train_state, _ = _run()
    self.trainable = train_state.trainable
    self.manifest = checkpoint.make_manifest(self.trainable, CONFIG, 'base-1')

  def _save(self):
    checkpoint.save_adapter(self.directory, self.trainable, self.manifest)

  def test_round_trip_into_abstract_and_concrete_states(self):
    self._save()
    abstract = jax.eval_shape(lambda: self.trainable)
    zeros = jax.tree.map(jnp.zeros_like, self.trainable)
    for like in (abstract, zeros):
      got = checkpoint.restore_adapter(self.directory, like, self.manifest)
      chex.assert_trees_all_equal(got, self.trainable)
      chex.assert_trees_all_equal_structs(got, self.trainable)
      for leaf in jax.tree.leaves(got):
        self.assertIsInstance(leaf, jax.Array)

  @parameterized.product(
    qtype=('nf4', 'int4', 'int8', 'fp8'), double=(False, True)
  )
  def test_quantized_base_comes_back_bit_for_bit(self, qtype, double):
    config = dataclasses.replace(
      CONFIG, weight_qtype=qtype, tile_size=4, double_quantize=double
    )
    _, state = peftlib.quantize_base(
      *nnx.split(toy_models.LaxScan(nnx.Rngs(0))), config, toy_models.inputs()
    )
    manifest = checkpoint.make_manifest(state, config, 'base-1')
    checkpoint.save_adapter(self.directory, state, manifest)
    got = checkpoint.restore_adapter(
      self.directory, jax.eval_shape(lambda: state), manifest
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(got, state)
    for new, old in zip(jax.tree.leaves(got), jax.tree.leaves(state)):
      self.assertEqual(np.asarray(new).tobytes(), np.asarray(old).tobytes())
    # The levels of nf4 are not those of int4, though stored alike.
    if qtype in ('nf4', 'int4'):
      other = {'nf4': 'int4', 'int4': 'nf4'}[qtype]
      config = dataclasses.replace(config, weight_qtype=other)
      _, like = peftlib.quantize_base(
        *nnx.split(toy_models.LaxScan(nnx.Rngs(0))),
        config,
        toy_models.inputs(),
      )
      with self.assertRaisesRegex(ValueError, 'up/kernel/array/qvalue: saved'):
        checkpoint.restore_adapter(
          self.directory, like, checkpoint.make_manifest(like, config, 'base-1')
        )

  def test_manifest(self):
    self._save()
    manifest = checkpoint.read_manifest(self.directory)
    self.assertEqual(manifest, self.manifest)
    self.assertEqual(checkpoint.config_of(manifest), CONFIG)
    self.assertEqual(
      manifest.leaves['layers/up/kernel_lora_a'], ((3, 8, 2), 'float32')
    )
    full = checkpoint.make_manifest(self.trainable, None, 'base-1')
    self.assertIsNone(checkpoint.config_of(full))

  def test_manifest_of_rules(self):
    config = peftlib.AdapterConfig(
      (
        peftlib.Rule(
          ('up',), methods.Dora(rank=2), layers=(0, 2), exclude='x.*'
        ),
        peftlib.Rule(
          'all-linear',
          methods.Vera(rank=3, projection_shape=(16, 16)),
          weight_qtype='nf4',
          tile_size=8,
        ),
        peftlib.Rule('head', None, weight_qtype='int8'),
      ),
      train=('norm',),
    )
    manifest = checkpoint.make_manifest(self.trainable, config, 'base-1')
    checkpoint.save_adapter(self.directory, self.trainable, manifest)
    read = checkpoint.read_manifest(self.directory)
    self.assertEqual(read, manifest)
    self.assertEqual(checkpoint.config_of(read), config)
    other = dataclasses.replace(
      config,
      rules=(
        dataclasses.replace(
          config.rules[0], method=methods.Lora(rank=2), layers=(0, 1)
        ),
        *config.rules[1:],
      ),
      train=(),
    )
    with self.assertRaises(ValueError) as raised:
      checkpoint.restore_adapter(
        self.directory,
        self.trainable,
        checkpoint.make_manifest(self.trainable, other, 'base-2'),
      )
    self.assertEqual(
      str(raised.exception).split('\n')[1:],
      [
        "  base_fingerprint: saved 'base-1', expected 'base-2'",
        '  rules[0].layers: saved [0, 2], expected [0, 1]',
        "  rules[0].method: saved 'dora', expected 'lora'",
        '  rules[0].rank_stabilized: saved False, expected missing',
        "  train: saved ['norm'], expected missing",
      ],
    )

  def test_quantization_and_dropout_may_differ(self):
    rule = peftlib.Rule('up', methods.Hira(rank=2), weight_qtype='nf4')
    manifest = checkpoint.make_manifest(
      self.trainable, peftlib.AdapterConfig((rule,)), 'base-1'
    )
    checkpoint.save_adapter(self.directory, self.trainable, manifest)
    free = dataclasses.replace(
      rule, method=methods.Hira(rank=2, dropout=0.5), weight_qtype=None
    )
    got = checkpoint.restore_adapter(
      self.directory,
      self.trainable,
      checkpoint.make_manifest(
        self.trainable, peftlib.AdapterConfig((free,)), 'base-1'
      ),
    )
    chex.assert_trees_all_equal(got, self.trainable)

  def test_what_both_have_and_the_list_of_what_is_left(self):
    self._save()
    flat = nnx.to_flat_state(self.trainable)
    first, *_, last = (path for path, _ in flat)
    like = []
    for path, variable in flat:
      zeros = variable.replace(jnp.zeros_like(variable.get_value()))
      if path == first:
        zeros = variable.replace(jnp.full((3, 5), 7.0))
      if path != last:
        like.append((path, zeros))
    extra = (*last[:-1], 'extra')
    like.append((extra, nnx.LoRAParam(jnp.ones(2))))
    like = nnx.from_flat_state(like)
    config = dataclasses.replace(CONFIG, rank=5)
    manifest = checkpoint.make_manifest(like, config, 'base-1')
    got, left = checkpoint.restore_adapter(
      self.directory, like, manifest, strict=False
    )
    own = dict(nnx.to_flat_state(got))
    self.assertEqual(own.keys(), dict(nnx.to_flat_state(like)).keys())
    for path, variable in flat:
      if path not in (first, last):
        chex.assert_trees_all_equal(own[path], variable)
    np.testing.assert_array_equal(own[first].get_value(), np.full((3, 5), 7.0))
    np.testing.assert_array_equal(own[extra].get_value(), np.ones(2))
    names = ['/'.join(map(str, path)) for path in (first, extra, last)]
    saved = self.manifest.leaves
    self.assertEqual(
      left,
      sorted(
        [
          f"{names[0]}: saved {saved[names[0]]}, expected ((3, 5), 'float32')",
          f"{names[1]}: saved missing, expected ((2,), 'float32')",
          f'{names[2]}: saved {saved[names[2]]}, expected missing',
          f'rank: saved {CONFIG.rank}, expected 5',
        ]
      ),
    )
    with self.assertRaisesRegex(
      ValueError, f'has nothing for {names[0]}, which is abstract'
    ):
      checkpoint.restore_adapter(
        self.directory,
        jax.eval_shape(lambda: like),
        manifest,
        strict=False,
      )

  def test_restores_onto_a_mesh(self):
    self._save()
    mesh = jax.make_mesh(
      (8,), ('fsdp',), axis_types=(jax.sharding.AxisType.Auto,)
    )
    sharding = jax.NamedSharding(mesh, P())
    like = jax.device_put(self.trainable, sharding)
    got = checkpoint.restore_adapter(self.directory, like, self.manifest)
    for leaf in jax.tree.leaves(got):
      self.assertEqual(leaf.sharding, sharding)
    chex.assert_trees_all_equal(got, self.trainable)

  def test_an_adapter_that_is_there_is_kept_or_replaced_whole(self):
    self._save()
    with self.assertRaisesRegex(FileExistsError, 'adapter exists; give'):
      self._save()
    other = jax.tree.map(lambda v: v + 1, self.trainable)
    checkpoint.save_adapter(
      self.directory, other, self.manifest, overwrite=True
    )
    got = checkpoint.restore_adapter(self.directory, other, self.manifest)
    chex.assert_trees_all_equal(got, other)
    self.assertEqual(os.listdir(self.directory.parent), ['adapter'])

  def test_a_write_that_dies_leaves_nothing_under_the_name(self):
    # What a killed save_adapter leaves behind is a folder of another name.
    stale = self.directory.with_name('.adapter.new')
    stale.mkdir(parents=True)
    (stale / 'manifest.json').write_text('{')
    with self.assertRaisesRegex(FileNotFoundError, 'not an adapter directory'):
      checkpoint.read_manifest(self.directory)
    self._save()
    self.assertFalse(stale.exists())

  @parameterized.parameters(
    (dict(rank=4), 'rank: saved 2, expected 4'),
    (dict(alpha=5.0), 'alpha: saved 4.0, expected 5.0'),
    (
      dict(module_path='.*up'),
      r"module_path: saved '\.\*\(up\|down\)', expected '\.\*up'",
    ),
  )
  def test_another_config(self, change, message):
    self._save()
    other = self.manifest._replace(config={**self.manifest.config, **change})
    with self.assertRaisesRegex(ValueError, message):
      checkpoint.restore_adapter(self.directory, self.trainable, other)

  def test_dropout_and_quantization_may_differ(self):
    self._save()
    other = self.manifest._replace(
      config={**self.manifest.config, 'dropout': 0.1, 'weight_qtype': 'nf4'}
    )
    checkpoint.restore_adapter(self.directory, self.trainable, other)

  def test_another_base(self):
    self._save()
    with self.assertRaisesRegex(
      ValueError, "base_fingerprint: saved 'base-1', expected 'base-2'"
    ):
      checkpoint.restore_adapter(
        self.directory,
        self.trainable,
        self.manifest._replace(base_fingerprint='base-2'),
      )

  def test_another_method(self):
    self._save()
    with self.assertRaisesRegex(
      ValueError, "method: saved 'lora', expected 'full'"
    ):
      checkpoint.restore_adapter(
        self.directory,
        self.trainable,
        self.manifest._replace(config=None),
      )

  def test_missing_extra_and_misshapen_leaves(self):
    self._save()
    flat = dict(nnx.to_flat_state(self.trainable))
    first = flat.pop(('layers', 'up', 'kernel_lora_a'))
    flat[('layers', 'side', 'kernel_lora_a')] = first
    path = ('layers', 'down', 'kernel_lora_b')
    flat[path] = flat[path].replace(jnp.zeros((3, 2, 9)))
    like = nnx.from_flat_state(flat)
    manifest = checkpoint.make_manifest(like, CONFIG, 'base-1')
    with self.assertRaises(ValueError) as caught:
      checkpoint.restore_adapter(self.directory, like, manifest)
    self.assertEqual(
      str(caught.exception).splitlines()[1:],
      [
        "  layers/down/kernel_lora_b: saved ((3, 2, 8), 'float32'),"
        " expected ((3, 2, 9), 'float32')",
        '  layers/side/kernel_lora_a: saved missing, expected ((3, 8, 2),'
        " 'float32')",
        "  layers/up/kernel_lora_a: saved ((3, 8, 2), 'float32'), expected"
        ' missing',
      ],
    )

  def test_arrays_that_lack_a_leaf_of_the_manifest(self):
    self._save()
    # The manifest claims more than the arrays hold, and agrees with the run.
    path = self.directory / 'manifest.json'
    value = json.loads(path.read_text())
    value['leaves']['layers/side/kernel_lora_a'] = [[3, 8, 2], 'float32']
    path.write_text(json.dumps(value))
    flat = dict(nnx.to_flat_state(self.trainable))
    flat[('layers', 'side', 'kernel_lora_a')] = flat[
      ('layers', 'up', 'kernel_lora_a')
    ]
    like = nnx.from_flat_state(flat)
    with self.assertRaisesRegex(
      ValueError,
      'layers/side/kernel_lora_a: saved missing, expected',
    ):
      checkpoint.restore_adapter(
        self.directory, like, checkpoint.make_manifest(like, CONFIG, 'base-1')
      )

  def test_manifest_of_another_state(self):
    manifest = self.manifest._replace(leaves={'x': ((1,), 'float32')})
    with self.assertRaisesRegex(
      ValueError, r"x: saved \(\(1,\), 'float32'\), expected missing"
    ):
      checkpoint.save_adapter(self.directory, self.trainable, manifest)
    self.assertFalse(self.directory.exists())

  def test_module(self):
    with self.assertRaisesRegex(TypeError, 'nnx.split it first'):
      checkpoint.save_adapter(
        self.directory, toy_models.Plain(nnx.Rngs(0)), self.manifest
      )


class RunTest(parameterized.TestCase):
  def test_goes_on_bit_for_bit(self):
    config = peftlib.LoraConfig(
      module_path='.*(up|down)', rank=2, alpha=4.0, dropout=0.3
    )
    x = toy_models.inputs()
    step, train_state, frozen = _run(config)
    manifest = checkpoint.make_manifest(train_state.trainable, config, 'b')
    directory = self.create_tempdir().full_path
    with checkpoint.open_run(directory) as manager:
      checkpoint.save_run(manager, train_state, {'next_index': 5}, manifest)
    expected = []
    for _ in range(3):
      train_state, metrics = step(train_state, frozen, x)
      expected.append(float(metrics['loss']))

    _, fresh, _ = _run(config)
    like = jax.eval_shape(lambda: fresh)
    with checkpoint.open_run(directory) as manager:
      self.assertEqual(manager.latest_step(), 2)
      resumed, data = checkpoint.restore_run(manager, like, manifest)
    self.assertEqual(data, {'next_index': 5})
    compiled = testing.assert_max_compilations(step, 0)
    got = []
    for _ in range(3):
      resumed, metrics = compiled(resumed, frozen, x)
      got.append(float(metrics['loss']))
    self.assertEqual(got, expected)
    chex.assert_trees_all_equal(resumed, train_state)

  def test_newest_are_kept(self):
    step, train_state, frozen = _run()
    manifest = checkpoint.make_manifest(train_state.trainable, CONFIG, 'b')
    with checkpoint.open_run(
      self.create_tempdir().full_path, max_to_keep=2
    ) as manager:
      for _ in range(3):
        train_state, _ = step(train_state, frozen, toy_models.inputs())
        checkpoint.save_run(manager, train_state, {}, manifest)
      manager.wait_until_finished()
      self.assertEqual(list(manager.all_steps()), [4, 5])
      older, _ = checkpoint.restore_run(manager, train_state, manifest, step=4)
      self.assertEqual(int(older.step), 4)

  def test_refuses(self):
    _, train_state, _ = _run()
    manifest = checkpoint.make_manifest(train_state.trainable, CONFIG, 'b')
    with checkpoint.open_run(self.create_tempdir().full_path) as manager:
      with self.assertRaisesRegex(FileNotFoundError, 'has no checkpoint'):
        checkpoint.restore_run(manager, train_state, manifest)
      checkpoint.save_run(manager, train_state, {}, manifest)
      manager.wait_until_finished()
      other = manifest._replace(config={**manifest.config, 'dropout': 0.5})
      with self.assertRaisesRegex(
        ValueError, 'dropout: saved 0.0, expected 0.5'
      ):
        checkpoint.restore_run(manager, train_state, other)
      sgd = train_state._replace(
        opt_state=optax.sgd(0.1, momentum=0.9).init(train_state.trainable)
      )
      with self.assertRaisesRegex(
        ValueError, r'opt_state/0/mu/\S+: saved .* expected missing'
      ):
        checkpoint.restore_run(manager, sgd, manifest)


if __name__ == '__main__':
  absltest.main()
