from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers

from peftlib.data import chat
from peftlib.data import reading
from peftlib.data import tokenizer as tokenizer_lib

_CHATML = (
  "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
_TURNS = (
  {'role': 'system', 'content': 'S'},
  {'role': 'user', 'content': 'U'},
  {'role': 'assistant', 'content': 'A1'},
  {'role': 'user', 'content': 'V'},
  {'role': 'assistant', 'content': 'A2 '},
)


def _tokenizer(
  template: str | None = _CHATML, eos_ids: tuple[int, ...] = (1,)
) -> tokenizer_lib.Tokenizer:
  """One token a byte, but for `<s>`, `</s>` and two line feeds."""
  tokens = ['<s>', '</s>', *sorted(pre_tokenizers.ByteLevel.alphabet()), 'ĊĊ']
  backend = tokenizers.Tokenizer(
    models.BPE(
      vocab={token: i for i, token in enumerate(tokens)}, merges=[('Ċ', 'Ċ')]
    )
  )
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(['<s>', '</s>'])
  return tokenizer_lib.Tokenizer(backend, template, 0, eos_ids, 1)


def _learnt(encoded: chat.Encoded, tokenizer: tokenizer_lib.Tokenizer) -> list:
  """The texts of the runs of tokens that are learnt."""
  bounds = np.flatnonzero(np.diff(encoded.loss_mask, prepend=0, append=0))
  return [
    tokenizer.decode(encoded.tokens[a:b], skip_special=False)
    for a, b in bounds.reshape(-1, 2)
  ]


class EncodeRowTest(parameterized.TestCase):
  def test_loss_is_on_assistant_turns_and_their_ends(self):
    tokenizer = _tokenizer()
    row = reading.Row(messages=_TURNS, source='f:7')
    encoded = chat.encode_row(row, tokenizer)
    text = (
      '<s>system\nS</s>\n<s>user\nU</s>\n<s>assistant\nA1</s>\n'
      '<s>user\nV</s>\n<s>assistant\nA2 </s>'
    )
    self.assertEqual(encoded.tokens.tolist(), tokenizer.encode(text))
    self.assertEqual(encoded.tokens.dtype, np.int32)
    self.assertEqual(encoded.loss_mask.dtype, np.bool_)
    self.assertEqual(_learnt(encoded, tokenizer), ['A1</s>', 'A2 </s>'])
    self.assertEqual(encoded.completion_start, len(encoded) - 4)
    self.assertEqual(encoded.source, 'f:7')

  def test_turns_after_the_last_answer_are_left_out(self):
    tokenizer = _tokenizer()
    row = reading.Row(messages=_TURNS[:4])
    encoded = chat.encode_row(row, tokenizer)
    self.assertEqual(
      tokenizer.decode(encoded.tokens, skip_special=False),
      '<s>system\nS</s>\n<s>user\nU</s>\n<s>assistant\nA1</s>',
    )

  def test_loss_on_all(self):
    encoded = chat.encode_row(
      reading.Row(messages=_TURNS), _tokenizer(), loss_on='all'
    )
    self.assertFalse(encoded.loss_mask[0])
    self.assertTrue(encoded.loss_mask[1:].all())

  def test_prompt_and_completion_is_a_chat(self):
    tokenizer = _tokenizer()
    row = reading.Row(prompt='P', completion='C')
    encoded = chat.encode_row(row, tokenizer)
    self.assertEqual(
      tokenizer.decode(encoded.tokens, skip_special=False),
      '<s>user\nP</s>\n<s>assistant\nC</s>',
    )
    self.assertEqual(_learnt(encoded, tokenizer), ['C</s>'])

  @parameterized.parameters((None, None), (_CHATML, 'none'))
  def test_prompt_and_completion_as_they_are(self, source, template):
    tokenizer = _tokenizer(source)
    row = reading.Row(prompt='P: ', completion='C')
    encoded = chat.encode_row(row, tokenizer, template=template)
    self.assertEqual(
      tokenizer.decode(encoded.tokens, skip_special=False), 'P: C</s>'
    )
    self.assertEqual(_learnt(encoded, tokenizer), ['C</s>'])
    self.assertEqual(encoded.completion_start, 3)

  def test_text_is_learnt_whole(self):
    tokenizer = _tokenizer()
    encoded = chat.encode_row(reading.Row(text='abc'), tokenizer)
    self.assertEqual(
      tokenizer.decode(encoded.tokens, skip_special=False), 'abc</s>'
    )
    self.assertEqual(encoded.loss_mask.tolist(), [False, True, True, True])
    self.assertEqual(encoded.completion_start, 0)

  def test_prompt_ids_are_those_of_generation(self):
    # The prompt ends in a line feed, the answer begins with one; encoded at
    # once the two would be a token that generation can never be given.
    tokenizer = _tokenizer()
    row = reading.Row(prompt='P', completion='\nC')
    encoded = chat.encode_row(row, tokenizer)
    prompt, reference = chat.encode_prompt(row, tokenizer)
    self.assertEqual(reference, '\nC')
    self.assertEqual(encoded.tokens[: len(prompt)].tolist(), prompt)
    self.assertEqual(_learnt(encoded, tokenizer), ['\nC</s>'])
    joined = tokenizer.encode('<s>user\nP</s>\n<s>assistant\n\nC</s>')
    self.assertLen(joined, len(encoded) - 1)

  def test_template_without_end_token_gets_one(self):
    tokenizer = _tokenizer(
      '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}'
      '{% if add_generation_prompt %}assistant: {% endif %}'
    )
    row = reading.Row(prompt='P', completion='C')
    encoded = chat.encode_row(row, tokenizer)
    self.assertEqual(
      tokenizer.decode(encoded.tokens, skip_special=False),
      'user: P\nassistant: C\n</s>',
    )
    self.assertEqual(_learnt(encoded, tokenizer), ['C\n</s>'])

  def test_other_special_token_ends_a_turn_too(self):
    tokenizer = _tokenizer(eos_ids=())
    row = reading.Row(prompt='P', completion='C')
    encoded = chat.encode_row(row, tokenizer)
    self.assertEqual(_learnt(encoded, tokenizer), ['C</s>'])

  def test_unstable_template(self):
    # Like those that take the reasoning out of all answers but the last.
    tokenizer = _tokenizer(
      '{% for m in messages %}<s>{{ m.content if loop.last else "-" }}</s>'
      '{% endfor %}'
    )
    with self.assertRaisesRegex(
      ValueError, r'^f:3: the chat template renders earlier turns otherwise'
    ):
      chat.encode_row(reading.Row(messages=_TURNS, source='f:3'), tokenizer)

  @parameterized.parameters(
    ({'loss_on': 'user'}, "loss_on is 'user'; expected one of"),
    ({'template': 'raw'}, "template is 'raw'; expected one of"),
  )
  def test_bad_option(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      chat.encode_row(reading.Row(text='a'), _tokenizer(), **options)

  def test_nothing_to_learn(self):
    tokenizer = _tokenizer(eos_ids=())
    with self.assertRaisesRegex(ValueError, r'^f:1: the row is 1 token'):
      chat.encode_row(reading.Row(text='a', source='f:1'), tokenizer)

  def test_chat_without_template(self):
    with self.assertRaisesRegex(ValueError, '^f:1: .*has no chat template'):
      chat.encode_row(
        reading.Row(messages=_TURNS, source='f:1'), _tokenizer(None)
      )


class EncodePromptTest(parameterized.TestCase):
  def test_chat(self):
    tokenizer = _tokenizer()
    ids, reference = chat.encode_prompt(reading.Row(messages=_TURNS), tokenizer)
    self.assertEqual(reference, 'A2 ')
    self.assertEqual(
      tokenizer.decode(ids, skip_special=False),
      '<s>system\nS</s>\n<s>user\nU</s>\n<s>assistant\nA1</s>\n'
      '<s>user\nV</s>\n<s>assistant\n',
    )

  def test_as_it_is(self):
    tokenizer = _tokenizer(None)
    row = reading.Row(prompt='ab', completion='c')
    self.assertEqual(
      chat.encode_prompt(row, tokenizer), (tokenizer.encode('ab'), 'c')
    )

  @parameterized.parameters(
    ({'text': 'a'}, 'a text row is no chat'),
    ({'messages': _TURNS[:4]}, "the last turn is 'user'; expected 'assistant'"),
  )
  def test_no_answer(self, fields, message):
    row = reading.Row(source='f:2', **fields)
    with self.assertRaisesRegex(ValueError, f'^f:2: {message}'):
      chat.encode_prompt(row, _tokenizer())


if __name__ == '__main__':
  absltest.main()
