"""Six models as people write them; none knows of adapters."""

from flax import nnx
import jax
import jax.numpy as jnp


def stacked(make, layers: int, rngs: nnx.Rngs):
  """Layers of one kind, their weights stacked on a first axis."""
  split = nnx.split_rngs(splits=layers)
  return split(nnx.vmap(make, in_axes=0, out_axes=0))(rngs)


class ExpertLM(nnx.Module):
  """Language model: a causal mean, then the two likeliest of some experts."""

  def __init__(self, vocab: int, width: int, experts: int, rngs: nnx.Rngs):
    init = nnx.initializers.lecun_normal(batch_axis=0)
    self.embed = nnx.Embed(vocab, width, rngs=rngs)
    self.router = nnx.Linear(width, experts, use_bias=False, rngs=rngs)
    self.up = nnx.Param(init(rngs.params(), (experts, width, 2 * width)))
    self.down = nnx.Param(init(rngs.params(), (experts, 2 * width, width)))
    self.head = nnx.Linear(width, vocab, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = self.embed(tokens)
    x += jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
    scores = self.router(x)
    second = jax.lax.top_k(scores, 2)[0][..., 1:]
    gates = jax.nn.softmax(jnp.where(scores < second, -1e9, scores))
    hidden = jax.nn.silu(jnp.einsum('bsd,edh->bseh', x, self.up[...]))
    out = jnp.einsum('bseh,ehd->bsed', hidden, self.down[...])
    return self.head(x + jnp.einsum('bse,bsed->bsd', gates, out))


class Block(nnx.Module):
  """Attention and a feed-forward layer, each before a sum."""

  def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
    self.norm = nnx.LayerNorm(width, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(
      heads, width, decode=False, use_bias=False, rngs=rngs
    )
    self.up = nnx.Linear(width, 2 * width, rngs=rngs)
    self.down = nnx.Linear(2 * width, width, rngs=rngs)

  def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    x += self.attention(self.norm(x), mask=mask)
    return x + self.down(jax.nn.gelu(self.up(x)))


class Transformer(nnx.Module):
  """Language model whose blocks are stacked, under `nnx.scan`."""

  def __init__(self, vocab: int, width: int, layers: int, rngs: nnx.Rngs):
    self.embed = nnx.Embed(vocab, width, rngs=rngs)
    self.blocks = stacked(lambda r: Block(width, 2, r), layers, rngs)
    self.head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    mask = nnx.make_causal_mask(tokens)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def through(x: jax.Array, block: Block) -> jax.Array:
      return block(x, mask)

    return self.head(through(self.embed(tokens), self.blocks))


class Noisy(nnx.Module):
  """Classifier with dropout, batch statistics, and a record of activations."""

  def __init__(self, inputs: int, width: int, classes: int, rngs: nnx.Rngs):
    self.first = nnx.Linear(inputs, width, rngs=rngs)
    self.norm = nnx.BatchNorm(width, momentum=0.8, rngs=rngs)
    self.dropout = nnx.Dropout(0.2, rngs=rngs)
    self.last = nnx.Linear(width, classes, rngs=rngs)
    self.seen = nnx.metrics.Average('magnitude')

  def __call__(self, x: jax.Array) -> jax.Array:
    x = nnx.relu(self.norm(self.first(x)))
    self.sow(nnx.Intermediate, 'hidden', x)
    self.seen.update(magnitude=jnp.abs(x).mean())
    return self.last(self.dropout(x))


class Convolutions(nnx.Module):
  """Classifier of small images."""

  def __init__(self, channels: int, classes: int, rngs: nnx.Rngs):
    self.first = nnx.Conv(1, channels, (3, 3), rngs=rngs)
    self.second = nnx.Conv(channels, channels, (3, 3), strides=2, rngs=rngs)
    self.norm = nnx.GroupNorm(channels, num_groups=2, rngs=rngs)
    self.last = nnx.Linear(channels, classes, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    x = nnx.relu(self.first(images))
    x = nnx.relu(self.norm(self.second(x)))
    return self.last(x.mean(axis=(1, 2)))


class VisionTransformer(nnx.Module):
  """Classifier that cuts an image into patches; blocks in a Python loop."""

  def __init__(
    self, size: int, width: int, layers: int, classes: int, rngs: nnx.Rngs
  ):
    self.patch = nnx.Conv(1, width, (4, 4), strides=4, rngs=rngs)
    places = ((size // 4) ** 2, width)
    self.place = nnx.Param(0.1 * jax.random.normal(rngs.params(), places))
    self.blocks = nnx.List([Block(width, 2, rngs) for _ in range(layers)])
    self.head = nnx.Linear(width, classes, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    x = self.patch(images)
    x = x.reshape(len(x), -1, x.shape[-1]) + self.place[...]
    for block in self.blocks:
      x = block(x)
    return self.head(x.mean(axis=1))


class DecoderLayer(nnx.Module):
  """Attention over a memory of keys and values, and a feed-forward layer."""

  def __init__(self, width: int, rngs: nnx.Rngs):
    linear = lambda n, m: nnx.Linear(n, m, use_bias=False, rngs=rngs)
    self.norm = nnx.RMSNorm(width, rngs=rngs)
    self.qkv, self.out = linear(width, 3 * width), linear(width, width)
    self.up, self.down = linear(width, 2 * width), linear(2 * width, width)

  def __call__(self, x: jax.Array, memory: jax.Array, at: jax.Array | int):
    q, k, v = jnp.split(self.qkv(self.norm(x)), 3, axis=-1)
    memory = jax.lax.dynamic_update_slice(
      memory, jnp.stack([k, v]), (0, 0, at, 0)
    )
    places = at + jnp.arange(x.shape[1])
    seen = jnp.arange(memory.shape[2]) <= places[:, None]
    heads = lambda y: y.reshape(*y.shape[:2], 2, -1)
    y = jax.nn.dot_product_attention(
      heads(q), heads(memory[0]), heads(memory[1]), mask=seen[None, None]
    )
    x += self.out(y.reshape(x.shape))
    return x + self.down(jax.nn.silu(self.up(x))), memory


class Decoder(nnx.Module):
  """Language model with a cache, under `lax.scan` over a split State."""

  def __init__(
    self,
    vocab: int,
    width: int,
    layers: int,
    rngs: nnx.Rngs,
    *,
    cache: tuple[int, int],
  ):
    self.embed = nnx.Embed(vocab, width, rngs=rngs)
    self.layers = stacked(lambda r: DecoderLayer(width, r), layers, rngs)
    self.head = nnx.Linear(width, vocab, use_bias=False, rngs=rngs)
    self.memory = nnx.Cache(jnp.zeros((layers, 2, *cache, width)))

  def __call__(
    self, tokens: jax.Array, at: jax.Array | int | None = None
  ) -> jax.Array:
    """Logits; with `at` the tokens go on from there, by the cache."""
    memory = self.memory.get_value()
    if at is None:
      memory = jnp.zeros((*memory.shape[:2], *tokens.shape, memory.shape[-1]))
    graphdef, state = nnx.split(self.layers)

    def through(x, layer):
      state, memory = layer
      return nnx.merge(graphdef, state, copy=True)(
        x, memory, 0 if at is None else at
      )

    x, memory = jax.lax.scan(through, self.embed(tokens), (state, memory))
    if at is not None:
      self.memory.set_value(memory)
    return self.head(x)
