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
