import datetime
import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized
import gguf
import tokenizers
from tokenizers import models
from tokenizers import pre_tokenizers

from peftlib.data import tokenizer as tokenizer_lib
from peftlib.demo import assets

_GOLDEN = pathlib.Path(__file__).parents[2] / 'golden' / 'smollm2.json'
_SPECIAL = ('<s>', '</s>', '<eot>', '<user>')
_USER = [{'role': 'user', 'content': 'hi'}]


def _alphabet() -> list[str]:
  return sorted(pre_tokenizers.ByteLevel.alphabet())


def _write_gguf(path: pathlib.Path, **changes) -> pathlib.Path:
  """A GGUF file of a byte tokenizer; changes replace or (None) remove keys."""
  normal = gguf.TokenType.NORMAL
  control = gguf.TokenType.CONTROL
  tokens = [*_SPECIAL, *_alphabet(), 'ab', 'Ġa']
  fields = {
    'ggml.model': 'gpt2',
    'ggml.pre': 'smollm',
    'ggml.tokens': tokens,
    'ggml.token_type': [int(control)] * 3
    + [int(gguf.TokenType.USER_DEFINED)]
    + [int(normal)] * (len(tokens) - 4),
    'ggml.merges': ['a b', 'Ġ a'],
    'ggml.bos_token_id': 0,
    'ggml.eos_token_id': 1,
    'ggml.eot_token_id': 2,
    'chat_template': 'T',
    **changes,
  }
  writer = gguf.GGUFWriter(path, 'llama')
  for key, value in fields.items():
    key = f'tokenizer.{key}'
    if isinstance(value, bool):
      writer.add_bool(key, value)
    elif isinstance(value, str):
      writer.add_string(key, value)
    elif isinstance(value, int):
      writer.add_uint32(key, value)
    elif value is not None:
      writer.add_array(key, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def _with_template(template: str | None) -> tokenizer_lib.Tokenizer:
  vocab = {token: i for i, token in enumerate((*_SPECIAL, *_alphabet()))}
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
  return tokenizer_lib.Tokenizer(backend, template, bos_id=0, eos_ids=(1,))


class SmolLM2Test(parameterized.TestCase):
  """Golden facts are of `transformers`, from the same GGUF file."""

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tokenizer = tokenizer_lib.Tokenizer.from_path(assets.model_path())
    cls.golden = json.loads(_GOLDEN.read_text())

  def _check_golden(self, tokenizer):
    self.assertLen(self.golden['texts'], 10)
    for entry in self.golden['texts']:
      self.assertEqual(tokenizer.encode(entry['text']), entry['ids'])
      self.assertEqual(
        tokenizer.decode(entry['ids'], skip_special=False), entry['decoded']
      )
    self.assertLen(self.golden['chats'], 2)
    for entry in self.golden['chats']:
      text = tokenizer.render(entry['messages'], add_generation_prompt=True)
      self.assertEqual(text, entry['rendered'])
      self.assertEqual(tokenizer.encode(text), entry['ids'])

  def test_equals_transformers(self):
    self._check_golden(self.tokenizer)

  def test_special_ids(self):
    self.assertEqual(self.tokenizer.vocab_size, 49152)
    self.assertEqual(self.tokenizer.bos_id, 1)
    self.assertEqual(self.tokenizer.eos_ids, (2,))
    self.assertEqual(self.tokenizer.pad_id, 2)
    self.assertEqual(self.tokenizer.unk_id, 0)
    self.assertEqual(self.tokenizer.special_ids, frozenset(range(17)))
    self.assertEqual(self.tokenizer.decode([1, 504, 2]), 'The')

  def test_saved_files_give_the_same_tokenizer(self):
    directory = pathlib.Path(self.create_tempdir().full_path) / 'new'
    self.tokenizer.save(directory)
    self.assertCountEqual(
      [p.name for p in directory.iterdir()],
      ['tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'],
    )
    again = tokenizer_lib.Tokenizer.from_path(directory)
    self._check_golden(again)
    for name in ('bos_id', 'eos_ids', 'pad_id', 'unk_id', 'chat_template'):
      self.assertEqual(getattr(again, name), getattr(self.tokenizer, name))
    config = json.loads((directory / 'tokenizer_config.json').read_text())
    self.assertEqual(config['tokenizer_class'], 'PreTrainedTokenizerFast')
    self.assertEqual(config['bos_token'], '<|im_start|>')
    self.assertEqual(config['eos_token'], '<|im_end|>')
    self.assertEqual(config['pad_token'], '<|im_end|>')
    self.assertFalse(config['clean_up_tokenization_spaces'])


class FromGgufTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.path = pathlib.Path(self.create_tempdir().full_path) / 'm.gguf'

  def test_merges_and_ids(self):
    tokenizer = tokenizer_lib.Tokenizer.from_path(_write_gguf(self.path))
    size = 4 + 256 + 2
    self.assertEqual(tokenizer.vocab_size, size)
    self.assertEqual(tokenizer.encode('ab a'), [size - 2, size - 1])
    self.assertEqual(tokenizer.encode('<s>ab<user>'), [0, size - 2, 3])
    self.assertEqual(tokenizer.decode([0, 3, size - 2]), '<user>ab')
    self.assertEqual(tokenizer.special_ids, frozenset({0, 1, 2}))
    self.assertEqual(tokenizer.eos_ids, (1, 2))
    self.assertEqual(tokenizer.pad_id, 1)
    self.assertIsNone(tokenizer.unk_id)
    self.assertEqual(tokenizer.chat_template, 'T')

  def test_bos_is_added_only_if_the_file_says_so(self):
    plain = tokenizer_lib.Tokenizer.from_gguf(_write_gguf(self.path))
    self.assertEqual(
      plain.encode('ab', add_special_tokens=True), plain.encode('ab')
    )
    adding = tokenizer_lib.Tokenizer.from_gguf(
      _write_gguf(self.path, **{'ggml.add_bos_token': True})
    )
    self.assertEqual(
      adding.encode('ab', add_special_tokens=True), [0, *plain.encode('ab')]
    )
    self.assertEqual(adding.encode('ab'), plain.encode('ab'))

  # What the models' own regular expressions say, worked out by hand.
  @parameterized.parameters(
    ('gpt-2', "I'LL 12345\n\nx", ['I', "'", 'LL', ' 12345', '\n', '\n', 'x']),
    (None, "I'll 12345", ['I', "'ll", ' 12345']),
    ('smollm', 'a 123', ['a', ' ', '1', '2', '3']),
    (
      'llama-bpe',
      "I'LL 12345\n\nx",
      ['I', "'LL", ' ', '123', '45', '\n\n', 'x'],
    ),
    ('qwen2', "I'LL 123\n\nx", ['I', "'LL", ' ', '1', '2', '3', '\n\n', 'x']),
  )
  def test_cuts_words_as(self, name, text, words):
    path = _write_gguf(self.path, **{'ggml.pre': name})
    backend = tokenizer_lib.Tokenizer.from_gguf(path).backend
    found = backend.pre_tokenizer.pre_tokenize_str(text)
    self.assertEqual([text[a:b] for _, (a, b) in found], words)

  @parameterized.parameters(
    (
      {'ggml.model': 'llama'},
      "tokenizer.ggml.model is 'llama'; only byte-level BPE",
    ),
    ({'ggml.model': None}, 'holds no tokenizer'),
    (
      {'ggml.pre': 'tekken'},
      "tokenizer.ggml.pre is 'tekken'; supported are 'default', 'gpt-2',",
    ),
    ({'ggml.merges': None}, 'needs tokenizer.ggml.tokens and'),
    ({'ggml.token_type': [1, 1]}, '262 tokens, but 2 token types'),
    (
      {'ggml.eos_token_id': 999},
      'eos_token_id is 999, but there are 262 tokens',
    ),
  )
  def test_bad_metadata(self, changes, message):
    path = _write_gguf(self.path, **changes)
    with self.assertRaisesRegex(ValueError, f'm.gguf: .*{message}'):
      tokenizer_lib.Tokenizer.from_gguf(path)

  def test_no_gguf_file(self):
    self.path.write_bytes(b'nothing of the kind')
    with self.assertRaisesRegex(ValueError, 'm.gguf: not a GGUF file'):
      tokenizer_lib.Tokenizer.from_path(self.path)

  def test_missing(self):
    with self.assertRaisesRegex(FileNotFoundError, 'm.gguf: no such file'):
      tokenizer_lib.Tokenizer.from_path(self.path)


class FromDirectoryTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.directory = pathlib.Path(self.create_tempdir().full_path)
    _with_template(None).backend.save(str(self.directory / 'tokenizer.json'))

  def _write(self, name, value):
    (self.directory / name).write_text(json.dumps(value))

  def test_reads_special_tokens_and_template(self):
    self._write(
      'tokenizer_config.json',
      {
        'bos_token': {'content': '<s>', 'special': True},
        'eos_token': '</s>',
        'chat_template': [
          {'name': 'tools', 'template': 'A'},
          {'name': 'default', 'template': 'B'},
        ],
      },
    )
    self._write('generation_config.json', {'eos_token_id': [2, 1]})
    tokenizer = tokenizer_lib.Tokenizer.from_path(self.directory)
    self.assertEqual(tokenizer.bos_id, 0)
    self.assertEqual(tokenizer.eos_ids, (1, 2))
    self.assertEqual(tokenizer.pad_id, 1)
    self.assertEqual(tokenizer.chat_template, 'B')
    (self.directory / 'chat_template.jinja').write_text('C')
    tokenizer = tokenizer_lib.Tokenizer.from_path(self.directory)
    self.assertEqual(tokenizer.chat_template, 'C')

  def test_without_config(self):
    tokenizer = tokenizer_lib.Tokenizer.from_path(self.directory)
    self.assertIsNone(tokenizer.chat_template)
    self.assertIsNone(tokenizer.bos_id)
    self.assertEqual(tokenizer.eos_ids, ())

  @parameterized.parameters(
    (
      'tokenizer_config.json',
      {'eos_token': '<end>'},
      "eos_token is '<end>', which .*tokenizer.json does not have",
    ),
    (
      'tokenizer_config.json',
      {'chat_template': [{'name': 'tools', 'template': 'A'}]},
      'none of them named "default"',
    ),
    ('tokenizer_config.json', [1], 'expected a JSON object'),
    (
      'generation_config.json',
      {'eos_token_id': 260},
      'eos_token_id 260 is not in the vocabulary of 260 tokens',
    ),
  )
  def test_bad_config(self, name, value, message):
    self._write(name, value)
    with self.assertRaisesRegex(ValueError, f'{name}: .*{message}'):
      tokenizer_lib.Tokenizer.from_directory(self.directory)

  @parameterized.parameters('tokenizer.json', 'tokenizer_config.json')
  def test_malformed_file(self, name):
    (self.directory / name).write_text('{')
    with self.assertRaisesRegex(ValueError, f'{name}: not '):
      tokenizer_lib.Tokenizer.from_directory(self.directory)

  def test_missing_tokenizer(self):
    (self.directory / 'tokenizer.json').unlink()
    with self.assertRaisesRegex(
      FileNotFoundError, 'tokenizer.json: no such file; a model directory needs'
    ):
      tokenizer_lib.Tokenizer.from_directory(self.directory)


class RenderTest(parameterized.TestCase):
  @parameterized.parameters(
    ('{{ bos_token }}{{ messages[0].content }}{{ eos_token }}', '<s>hi</s>'),
    ('{{ messages | tojson }}', '[{"role": "user", "content": "hi"}]'),
    ("{{ '<é>' | tojson }}", '"<é>"'),
    ("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}", '{\n "b": 1,\n "a": 2\n}'),
    ('{% for i in range(9) %}{% break %}{% endfor %}x', 'x'),
    ('{% generation %}{{ 1 + 1 }}{% endgeneration %}', '2'),
    ('  {% if true %}\ny{% endif %}\n', 'y'),
    ('{% if tools is none %}n{% endif %}', 'n'),
    ('{{ add_generation_prompt }}', 'False'),
  )
  def test_offers_what_transformers_does(self, template, expected):
    self.assertEqual(_with_template(template).render(_USER), expected)

  def test_strftime_now(self):
    year = datetime.datetime.now().year
    rendered = _with_template("{{ strftime_now('%Y') }}").render(_USER)
    self.assertIn(rendered, (str(year), str(year + 1)))

  @parameterized.parameters(
    ("{{ raise_exception('no system turn') }}", 'no system turn'),
    ("{{ ''.__class__.__mro__ }}", 'unsafe'),
    ('{{ messages.append(1) }}', 'unsafe'),
    ('{% if %}', 'Expected an expression'),
  )
  def test_failing_template(self, template, message):
    with self.assertRaisesRegex(
      ValueError, f'chat template fails on these messages: .*{message}'
    ):
      _with_template(template).render(_USER)

  def test_no_template(self):
    with self.assertRaisesRegex(ValueError, 'has no chat template'):
      _with_template(None).render(_USER)


if __name__ == '__main__':
  absltest.main()
