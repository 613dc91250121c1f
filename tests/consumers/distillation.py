"""Distillation from a larger frozen teacher, data-parallel by hand."""

from flax import nnx
import jax
import numpy as np
import optax

import peftlib
from tests.consumers import models
import transforms

SIZE, CLASSES, DEVICES = 8, 5, 8
CONFIG = peftlib.LoraConfig(module_path='all-linear', rank=4, alpha=8.0)
P = jax.sharding.PartitionSpec


def images(seed: int, count: int = 32) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.normal(size=(count, SIZE, SIZE, 1)).astype(np.float32)


def distance(student_logits, teacher_logits):
  """Of the student's distribution from the teacher's, a mean over rows."""
  return optax.losses.kl_divergence_with_log_targets(
    jax.nn.log_softmax(student_logits), jax.nn.log_softmax(teacher_logits)
  ).mean()


def make_step(mesh, student, teacher, tx):
  def gradients(trainable, frozen, teacher_state, x):
    targets = nnx.merge(teacher, teacher_state, copy=True)(x)

    def loss_fn(trainable):
      model = nnx.merge(student, trainable, frozen, copy=True)
      return distance(model(x), targets)

    # Otherwise jax would see one adapter for all devices, and add up by itself.
    own = jax.lax.pcast(trainable, 'data', to='varying')
    loss, grads = jax.value_and_grad(loss_fn)(own)
    return jax.lax.pmean((loss, grads), 'data')

  sharded = jax.shard_map(
    gradients, mesh=mesh, in_specs=(P(), P(), P(), P('data')), out_specs=P()
  )

  @jax.jit
  def step(trainable, opt_state, frozen, teacher_state, x):
    loss, grads = sharded(trainable, frozen, teacher_state, x)
    updates, opt_state = tx.update(grads, opt_state, trainable)
    trainable = optax.apply_updates(trainable, updates)
    return trainable, opt_state, {'loss': loss, 'grads': grads}

  return step


def run(steps: int = 30):
  mesh = jax.make_mesh(
    (DEVICES,), ('data',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  everywhere = jax.sharding.NamedSharding(mesh, P())
  teacher, teacher_state = nnx.split(
    models.VisionTransformer(SIZE, 16, 3, CLASSES, nnx.Rngs(1))
  )
  base, base_state = nnx.split(
    models.VisionTransformer(SIZE, 8, 1, CLASSES, nnx.Rngs(0))
  )
  x = images(0)
  student, state = peftlib.inject(
    base, base_state, CONFIG, x, key=jax.random.key(0)
  )
  tx = optax.adam(0.02)
  trainable, frozen = transforms.partition(
    state, peftlib.trainable_filter(CONFIG), ...
  )
  start = jax.device_put(trainable, everywhere)
  frozen, teacher_state = jax.device_put((frozen, teacher_state), everywhere)
  opt_state = jax.device_put(tx.init(start), everywhere)
  step = make_step(mesh, student, teacher, tx)
  shards = jax.device_put(x, jax.sharding.NamedSharding(mesh, P('data')))

  trainable, history = start, []
  for _ in range(steps):
    with jax.transfer_guard('disallow'):
      trainable, opt_state, metrics = step(
        trainable, opt_state, frozen, teacher_state, shards
      )
    history.append(metrics)
  return {
    'loss': np.array([m['loss'] for m in history]),
    'first_gradient': history[0]['grads'],
    'start': start,
    'trainable': trainable,
    'frozen': frozen,
    'student': student,
    'base_state': base_state,
    'teacher': (teacher, teacher_state),
    'x': x,
  }
