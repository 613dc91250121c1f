import json
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax.numpy as jnp
import numpy as np
import optax

from peftlib import data
from peftlib import models
from peftlib.cli import evaluation
from tests.peftlib.cli import tiny

chex.set_n_cpu_devices(8)


class QuestionsTest(parameterized.TestCase):
  def write(self, *rows):
    text = ''.join(json.dumps(row) + '\n' for row in rows)
    return self.create_tempfile(content=text).full_path

  def test_questions(self):
    path = self.write(
      {'prompt': 'p', 'completion': 'c'},
      {
        'messages': [
          {'role': 'system', 'content': 's'},
          {'role': 'user', 'content': 'u'},
          {'role': 'assistant', 'content': 'a'},
        ]
      },
      {'messages': [{'role': 'assistant', 'content': 'alone'}]},
      {'prompt': 'left', 'completion': 'out'},
    )
    tokenizer = tiny.make_tokenizer()
    found = evaluation.read_questions(path, tokenizer, limit=3, template=None)
    self.assertEqual(found.path, path)
    self.assertEqual(found.texts, ['p', 'u', ''])
    self.assertEqual(found.answers, ['c', 'a', 'alone'])
    self.assertEqual(
      [tokenizer.decode(ids, skip_special=False) for ids in found.prompts],
      [
        '<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n',
        '<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n'
        '<|im_start|>assistant\n',
        '<|im_start|>assistant\n',
      ],
    )

  def test_without_template(self):
    path = self.write({'prompt': 'p', 'completion': 'c'})
    tokenizer = tiny.make_tokenizer()
    found = evaluation.read_questions(
      path, tokenizer, limit=None, template='none'
    )
    self.assertEqual(tokenizer.decode(found.prompts[0]), 'p')

  def test_a_text_is_no_question(self):
    path = self.write({'prompt': 'p', 'completion': 'c'}, {'text': 't'})
    with self.assertRaisesRegex(ValueError, f'{path}:2: a text row is no chat'):
      evaluation.read_questions(
        path, tiny.make_tokenizer(), limit=None, template=None
      )

  @parameterized.parameters(('auto', None), ('chat', 'chat'), ('none', 'none'))
  def test_template(self, flag, expected):
    self.assertEqual(evaluation.template_option(flag), expected)

  def test_result(self):
    result = evaluation.Result(
      'x', ['', '', '', ''], ['a', 'b', 'c', 'd '], ['a\n', 'B', ' c', 'd']
    )
    self.assertEqual(result.correct, [True, False, True, True])
    self.assertEqual(result.exact_match, 0.75)


class ModelTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    tiny.prepare(cls)
    folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    loaded = models.load(tiny.write_model(folder / 'model'))
    cls.graphdef, cls.state = loaded.graphdef, loaded.state
    cls.rows = data.read_jsonl(tiny.write_rows(folder / 'rows.jsonl', 5))
    cls.tokenizer = tiny.make_tokenizer()

  def test_loss_is_the_mean_over_all_learnt_tokens(self):
    pipeline = data.make_pipeline(
      self.rows,
      self.tokenizer,
      length=64,
      batch_size=2,
      num_epochs=1,
      shuffle=False,
    )
    model = nnx.merge(self.graphdef, self.state)
    losses = []
    # One row after the other, without packing, padding or gathering.
    for row in self.rows:
      encoded = data.encode_row(row, self.tokenizer)
      tokens = jnp.asarray(encoded.tokens)
      each = optax.losses.softmax_cross_entropy_with_integer_labels(
        model(tokens[None])[0, :-1], tokens[1:]
      )
      losses += np.asarray(each)[encoded.loss_mask[1:]].tolist()
    self.assertAlmostEqual(
      evaluation.mean_loss(self.graphdef, self.state, pipeline),
      float(np.mean(losses)),
      places=5,
    )

  def test_answers_are_those_of_the_plain_model(self):
    prompt = self.tokenizer.encode('Ada')
    model = nnx.merge(self.graphdef, self.state)
    ids = list(prompt)
    for _ in range(4):
      ids.append(int(model(jnp.asarray([ids]))[0, -1].argmax()))
    result = evaluation.ask(
      self.graphdef,
      self.state,
      evaluation.Questions('x', [prompt], ['Ada'], ['ada']),
      self.tokenizer,
      max_new_tokens=4,
      batch_size=3,
    )
    self.assertNotIn(self.tokenizer.eos_ids[0], ids)
    self.assertEqual(
      result,
      evaluation.Result(
        'x', ['Ada'], ['ada'], [self.tokenizer.decode(ids[len(prompt) :])]
      ),
    )


if __name__ == '__main__':
  absltest.main()
