from absl.testing import absltest
from flax import nnx

from peftlib import models
from peftlib.hf import names

CONFIG = models.DecoderConfig(
  vocab_size=16,
  hidden_size=8,
  intermediate_size=16,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  tie_embeddings=False,
  attention_bias=True,
)


class NamesTest(absltest.TestCase):
  def test_places_of_a_decoder(self):
    model = nnx.eval_shape(lambda: models.Decoder(CONFIG, rngs=nnx.Rngs(0)))
    places = names.places_of(model)
    self.assertEqual(
      places['model.layers.1.self_attn.q_proj'],
      names.Place(
        'model.layers.1.self_attn.q_proj',
        ('layers', 'self_attn', 'q_proj'),
        'kernel',
        1,
        True,
        True,
      ),
    )
    self.assertEqual(
      places['model.embed_tokens'],
      names.Place(
        'model.embed_tokens', ('embed_tokens',), 'embedding', None, False
      ),
    )
    self.assertEqual(names.heads(places), ['lm_head'])
    self.assertLen(names.linear(places), 2 * 7 + 1)
    self.assertEqual(
      names.others(places)[:2],
      ['model.embed_tokens', 'model.layers.0.input_layernorm'],
    )

  def test_another_model(self):
    with self.assertRaisesRegex(TypeError, 'this is a Linear. Give places='):
      names.places_of(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


if __name__ == '__main__':
  absltest.main()
