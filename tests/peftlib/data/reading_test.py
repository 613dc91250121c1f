import json
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from peftlib.data import reading

_CHAT = [
  {'role': 'user', 'content': 'Hi'},
  {'role': 'assistant', 'content': 'Hello'},
]
_FORMS = (
  '{"messages": [{"role": ..., "content": ...}, ...]},'
  ' {"prompt": ..., "completion": ...}, {"text": ...}'
)


class ReadJsonlTest(parameterized.TestCase):
  def _file(self, content: str | bytes) -> pathlib.Path:
    path = pathlib.Path(self.create_tempdir().full_path) / 'rows.jsonl'
    if isinstance(content, str):
      content = content.encode()
    path.write_bytes(content)
    return path

  def test_reads_the_three_forms(self):
    path = self._file(
      '\ufeff'
      + json.dumps({'messages': _CHAT})
      + '\r\n\n'
      + json.dumps({'prompt': 'a', 'completion': 'ä'}, ensure_ascii=False)
      + '\n'
      + json.dumps({'text': 'c'})
    )
    rows = reading.read_jsonl(path)
    self.assertEqual(
      rows,
      [
        reading.Row(messages=tuple(_CHAT), source=f'{path}:1'),
        reading.Row(prompt='a', completion='ä', source=f'{path}:3'),
        reading.Row(text='c', source=f'{path}:4'),
      ],
    )
    self.assertEqual(rows[0].as_messages(), tuple(_CHAT))
    self.assertEqual(
      rows[1].as_messages(),
      (
        {'role': 'user', 'content': 'a'},
        {'role': 'assistant', 'content': 'ä'},
      ),
    )

  @parameterized.named_parameters(
    (
      'bad_json',
      '{"text": "a"',
      "not valid JSON: Expecting ',' delimiter at column 13; expected one JSON"
      ' object a line',
    ),
    (
      'no_object',
      '["a"]',
      f'a JSON list; expected an object, one of {_FORMS}',
    ),
    (
      'null',
      'null',
      f'a JSON null; expected an object, one of {_FORMS}',
    ),
    (
      'unknown_field',
      '{"prompt": "a", "completions": "b"}',
      "fields ['completions', 'prompt']; expected one of"
      f" {_FORMS} and no other field; 'completions': did you mean"
      " 'completion'?",
    ),
    (
      'two_forms',
      '{"text": "a", "prompt": "b", "completion": "c"}',
      "fields ['completion', 'prompt', 'text']; expected one of"
      f' {_FORMS} and no other field',
    ),
    (
      'number_as_text',
      '{"text": 3}',
      'text is a JSON number; expected text',
    ),
    (
      'boolean_as_completion',
      '{"prompt": "a", "completion": true}',
      'completion is a JSON boolean; expected text',
    ),
    ('empty_text', '{"text": " "}', 'text is empty; expected some text'),
    (
      'empty_messages',
      '{"messages": []}',
      'messages is empty; expected a list of at least one {"role", "content"}'
      ' object',
    ),
    (
      'messages_no_list',
      '{"messages": {"role": "user"}}',
      'messages is a JSON object; expected a list of at least one {"role",'
      ' "content"} object',
    ),
    (
      'message_no_object',
      '{"messages": ["hi"]}',
      'messages[0] is a JSON string; expected an object of "role" and'
      ' "content"',
    ),
    (
      'message_without_content',
      '{"messages": [{"role": "user"}]}',
      'messages[0] has fields [\'role\']; expected an object of "role" and'
      ' "content"',
    ),
    (
      'wrong_role',
      '{"messages": [{"role": "asistant", "content": "x"}]}',
      "messages[0].role is 'asistant'; expected one of system, user,"
      " assistant; did you mean 'assistant'?",
    ),
    (
      'role_no_text',
      '{"messages": [{"role": 1, "content": "x"}]}',
      'messages[0].role is 1; expected one of system, user, assistant',
    ),
    (
      'empty_content',
      '{"messages": [{"role": "user", "content": ""}]}',
      'messages[0].content is empty; expected some text',
    ),
    (
      'no_assistant',
      '{"messages": [{"role": "user", "content": "x"}]}',
      'messages has no assistant turn, so there is nothing to learn; expected'
      ' at least one with role "assistant"',
    ),
  )
  def test_names_file_line_and_what_is_wrong(self, line, message):
    path = self._file('{"text": "fine"}\n' + line + '\n')
    with self.assertRaises(ValueError) as caught:
      reading.read_jsonl(path)
    self.assertEqual(str(caught.exception), f'{path}:2: {message}')

  def test_not_utf8(self):
    path = self._file(b'{"text": "fine"}\n{"text": "\xff"}\n')
    with self.assertRaises(ValueError) as caught:
      reading.read_jsonl(path)
    self.assertEqual(
      str(caught.exception),
      f'{path}:2: not UTF-8 (byte 0xff at column 11); save the file as UTF-8',
    )

  @parameterized.parameters('', '\n \n')
  def test_empty_file(self, content):
    path = self._file(content)
    with self.assertRaises(ValueError) as caught:
      reading.read_jsonl(path)
    self.assertEqual(
      str(caught.exception),
      f'{path}:1: the file has no rows; expected one of {_FORMS} a line',
    )

  def test_missing_file(self):
    with self.assertRaisesRegex(FileNotFoundError, 'none.jsonl: no such file'):
      reading.read_jsonl('none.jsonl')


class RowTest(parameterized.TestCase):
  @parameterized.parameters(
    {},
    {'prompt': 'a'},
    {'completion': 'a'},
    {'text': 'a', 'prompt': 'b'},
    {'text': 'a', 'messages': ()},
  )
  def test_is_of_exactly_one_form(self, **fields):
    with self.assertRaisesRegex(ValueError, '^f:1: a row is one of'):
      reading.Row(source='f:1', **fields)

  def test_text_is_no_chat(self):
    with self.assertRaisesRegex(ValueError, '^f:1: a text row is no chat'):
      reading.Row(text='a', source='f:1').as_messages()


if __name__ == '__main__':
  absltest.main()
