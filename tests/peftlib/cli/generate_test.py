import contextlib
import io
import pathlib
import sys
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
from flax import nnx
import jax.numpy as jnp

from peftlib import __main__ as command_line
from peftlib import models
from peftlib.cli import errors
from peftlib.cli import generate
from tests.peftlib.cli import tiny

chex.set_n_cpu_devices(8)


def run(*arguments, stdin=''):
  """Returns the exit status, standard output and standard error."""
  out, err = io.StringIO(), io.StringIO()
  with (
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
    mock.patch.object(sys, 'stdin', io.StringIO(stdin)),
  ):
    status = command_line.run(['peftlib', 'generate', *arguments])
  return status, out.getvalue(), err.getvalue()


class EncodeTest(parameterized.TestCase):
  def text(self, *args, template=tiny.TEMPLATE, **kwargs):
    tokenizer = tiny.make_tokenizer(template)
    ids = generate.encode(*args, tokenizer, **kwargs)
    return tokenizer.decode(ids, skip_special=False)

  def test_chat(self):
    turn = '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
    self.assertEqual(self.text('Hi'), turn)
    self.assertEqual(self.text('Hi', chat=True), turn)
    self.assertEqual(
      self.text('Hi', system='Be kind.'),
      f'<|im_start|>system\nBe kind.<|im_end|>\n{turn}',
    )

  def test_raw(self):
    self.assertEqual(self.text('Hi', chat=False), 'Hi')
    self.assertEqual(self.text('Hi', template=None), 'Hi')

  @parameterized.parameters(
    (dict(chat=True), '--chat: the model has no chat template; use --nochat'),
    (dict(system='s'), '--system: the model has no chat template; use --nochat'),
  )  # fmt: skip
  def test_no_template(self, kwargs, message):
    with self.assertRaises(errors.UserError) as caught:
      self.text('Hi', template=None, **kwargs)
    self.assertEqual(str(caught.exception), message)


class DecodeStreamTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    # Every token is a byte, so that characters are cut everywhere.
    self.tokenizer = tiny.make_tokenizer()

  def test_characters_are_whole(self):
    text = 'aé😀 b\n'
    ids = self.tokenizer.encode(text)
    self.assertLen(ids, len(text.encode()))
    pieces = list(generate.decode_stream(iter(ids), self.tokenizer))
    self.assertEqual(pieces, list(text))

  def test_each_piece_comes_with_its_token(self):
    given = []

    def tokens():
      for i in self.tokenizer.encode('abc'):
        given.append(i)
        yield i

    pieces = generate.decode_stream(tokens(), self.tokenizer)
    self.assertEqual(next(pieces), 'a')
    self.assertLen(given, 1)

  def test_half_a_character_at_the_end(self):
    ids = self.tokenizer.encode('aé')[:-1]
    self.assertEqual(
      ''.join(generate.decode_stream(ids, self.tokenizer)), 'a\ufffd'
    )

  def test_special_tokens_are_left_out(self):
    ids = self.tokenizer.encode('a<|im_start|>b')
    self.assertLen(ids, 3)
    self.assertEqual(''.join(generate.decode_stream(ids, self.tokenizer)), 'ab')


class GenerateTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    tiny.prepare(cls)
    folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.model = tiny.write_model(folder / 'model')

  def test_greedy_text_is_the_plain_models(self):
    tokenizer = tiny.make_tokenizer()
    loaded = models.load(self.model)
    model = nnx.merge(loaded.graphdef, loaded.state)
    prompt = tokenizer.encode('Ada')
    ids = list(prompt)
    for _ in range(6):
      ids.append(int(model(jnp.asarray([ids]))[0, -1].argmax()))
    expected = tokenizer.decode(ids[len(prompt) :])
    flags = (f'--model={self.model}', '--nochat', '--max_new_tokens=6')
    self.assertEqual(run(*flags, '--prompt=Ada'), (0, expected + '\n', ''))
    self.assertEqual(run(*flags, stdin='Ada\n'), (0, expected + '\n', ''))

  def test_seed(self):
    flags = [
      f'--model={self.model}',
      '--prompt=Ada',
      '--temperature=2',
      '--top_p=0.99',
      '--max_new_tokens=12',
    ]
    one = run(*flags, '--seed=1')
    self.assertEqual(one[0], 0)
    self.assertEqual(run(*flags, '--seed=1'), one)
    self.assertNotEqual(run(*flags, '--seed=2'), one)

  def test_empty_prompt(self):
    self.assertEqual(
      run(f'--model={self.model}', stdin='\n'),
      (
        2,
        '',
        'peftlib generate: the prompt is empty; give some text by --prompt or'
        ' standard input\n',
      ),
    )


if __name__ == '__main__':
  absltest.main()
