"""Tokenizers read from GGUF files and from Hugging Face directories.

A `Tokenizer` is a `tokenizers.Tokenizer` together with what a model needs
beside it: its chat template and the ids that begin, end and pad a text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import functools
import json
import os
import pathlib
from typing import Any, NoReturn

import gguf
import jinja2
from jinja2 import ext as jinja2_ext
from jinja2 import nodes as jinja2_nodes
from jinja2 import parser as jinja2_parser
from jinja2 import sandbox as jinja2_sandbox
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

from peftlib.models import gguf_files

_CONTROL_TOKEN = gguf.TokenType.CONTROL
_USER_TOKEN = gguf.TokenType.USER_DEFINED

# How words are cut before merges apply is a regular expression that GGUF
# files only name. These are the ones of the models' own tokenizer.json.
_LLAMA3_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r'\p{N}{1,3}', r'\p{N}')


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Text to token ids and back, with the model's chat template.

  Example::

    tokenizer = Tokenizer.from_path('SmolLM2-135M-Instruct.Q4_1.gguf')
    prompt = tokenizer.render(
      [{'role': 'user', 'content': 'Hi!'}], add_generation_prompt=True
    )
    ids = tokenizer.encode(prompt)

  Attributes:
    backend: the `tokenizers` tokenizer that does the work.
    chat_template: jinja2 source of the chat template; None if the model has
      none.
    bos_id: id of the token that begins a text, None if there is none.
    eos_ids: ids that end an answer, the model's own end of sequence first.
    pad_id: id that fills unused places.
    unk_id: id of an unknown token, None if there is none.
  """

  backend: tokenizers.Tokenizer
  chat_template: str | None = None
  bos_id: int | None = None
  eos_ids: tuple[int, ...] = ()
  pad_id: int = 0
  unk_id: int | None = None

  @classmethod
  def from_gguf(cls, path: str | os.PathLike[str]) -> Tokenizer:
    """Reads the tokenizer inside a GGUF file.

    Byte-level BPE only (`tokenizer.ggml.model` = `gpt2`): that is what Llama
    3, Qwen 2, SmolLM and GPT-2 use. An absent `tokenizer.ggml.pre` is read as
    GPT-2's, as `transformers` does.

    Args:
      path: a GGUF file.

    Returns:
      The tokenizer; ids are those of the file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not GGUF, holds no tokenizer, or one of another
        kind.
    """
    path = pathlib.Path(path)
    if not path.is_file():
      raise FileNotFoundError(f'{path}: no such file; expected a GGUF file')
    metadata = gguf_files.read_header(str(path)).metadata

    def field(name: str, default: Any = None) -> Any:
      return metadata.get(f'tokenizer.{name}', default)

    return _from_gguf_fields(str(path), field)

  @classmethod
  def from_directory(cls, directory: str | os.PathLike[str]) -> Tokenizer:
    """Reads the tokenizer files of a Hugging Face model directory.

    `tokenizer.json` is required; `tokenizer_config.json`,
    `special_tokens_map.json`, `chat_template.jinja` and, for its
    end-of-sequence ids, `generation_config.json` are used where there.

    Args:
      directory: the directory.

    Returns:
      The tokenizer.

    Raises:
      FileNotFoundError: `tokenizer.json` is missing.
      ValueError: a file is malformed, or names a token that the vocabulary
        lacks.
    """
    directory = pathlib.Path(directory)
    file = directory / 'tokenizer.json'
    if not file.is_file():
      raise FileNotFoundError(
        f'{file}: no such file; a model directory needs the tokenizer in this'
        ' format (slow tokenizers: save them once with use_fast=True)'
      )
    try:
      backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as e:  # The Rust side raises plain Exception.
      raise ValueError(f'{file}: not a readable tokenizer: {e}') from e
    config_file = directory / 'tokenizer_config.json'
    config = {
      **_read_json(directory / 'special_tokens_map.json'),
      **_read_json(config_file),
    }
    generation = _read_json(directory / 'generation_config.json')

    def token_id(key: str) -> int | None:
      token = config.get(key)
      if isinstance(token, Mapping):
        token = token.get('content')
      if token is None:
        return None
      found = backend.token_to_id(token)
      if found is None:
        raise ValueError(
          f'{config_file}: {key} is {token!r}, which {file} does not have'
        )
      return found

    eos = [] if (own := token_id('eos_token')) is None else [own]
    more = generation.get('eos_token_id')
    if more is not None:
      eos += [more] if isinstance(more, int) else list(more)
    for i in eos:
      if not 0 <= i < backend.get_vocab_size():
        raise ValueError(
          f'{directory / "generation_config.json"}: eos_token_id {i} is not in'
          f' the vocabulary of {backend.get_vocab_size()} tokens'
        )
    pad = token_id('pad_token')
    return cls(
      backend,
      _directory_template(directory, config),
      token_id('bos_token'),
      tuple(dict.fromkeys(eos)),
      pad if pad is not None else (eos[0] if eos else 0),
      token_id('unk_token'),
    )

  @classmethod
  def from_path(cls, path: str | os.PathLike[str]) -> Tokenizer:
    """Reads a tokenizer from a GGUF file or a Hugging Face directory.

    Args:
      path: the file or directory.

    Returns:
      The tokenizer.

    Raises:
      FileNotFoundError: nothing is there.
      ValueError: as `from_gguf` and `from_directory` do.
    """
    if os.path.isdir(path):
      return cls.from_directory(path)
    return cls.from_gguf(path)

  @property
  def vocab_size(self) -> int:
    """Number of token ids, special ones included."""
    return self.backend.get_vocab_size()

  @functools.cached_property
  def special_ids(self) -> frozenset[int]:
    """Ids of all special (control) tokens."""
    added = self.backend.get_added_tokens_decoder()
    return frozenset(i for i, token in added.items() if token.special)

  def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text.

    Special tokens written out in the text become their ids, as in
    `transformers`.

    Args:
      text: the text.
      add_special_tokens: also add those that the tokenizer puts around every
        text (a beginning-of-sequence token, where the model wants one).

    Returns:
      The ids.
    """
    return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

  def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
    """Text of token ids.

    Args:
      ids: token ids.
      skip_special: leave special tokens out.

    Returns:
      The text; bytes that are no valid UTF-8 become U+FFFD.
    """
    return self.backend.decode(
      [int(i) for i in ids], skip_special_tokens=skip_special
    )

  def render(
    self,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool = False,
  ) -> str:
    """Renders a chat with the model's own template.

    The template runs in jinja2's immutable sandbox, with what `transformers`
    gives templates: `raise_exception`, `strftime_now`, `tojson`, loop
    controls, `{% generation %}` and the names of special tokens.

    Args:
      messages: `{'role': ..., 'content': ...}` mappings.
      add_generation_prompt: end with the opening of an assistant turn.

    Returns:
      The text, to be encoded without added special tokens.

    Raises:
      ValueError: there is no template, or it fails on these messages.
    """
    if self.chat_template is None:
      raise ValueError(
        'this tokenizer has no chat template; give prompt/completion or text'
        " rows with template='none'"
      )
    names = {
      'bos_token': self.bos_id,
      'eos_token': self.eos_ids[0] if self.eos_ids else None,
      'pad_token': self.pad_id,
      'unk_token': self.unk_id,
    }
    try:
      return _compile(self.chat_template).render(
        messages=[dict(m) for m in messages],
        add_generation_prompt=add_generation_prompt,
        tools=None,
        documents=None,
        **{
          k: self.backend.id_to_token(i)
          for k, i in names.items()
          if i is not None
        },
      )
    except jinja2.TemplateError as e:
      raise ValueError(f'the chat template fails on these messages: {e}') from e

  def save(self, directory: str | os.PathLike[str]) -> None:
    """Writes tokenizer files that `transformers.AutoTokenizer` loads.

    `tokenizer.json`, `tokenizer_config.json` and, with a template,
    `chat_template.jinja`, each put in place in one piece. End-of-sequence ids
    beyond the first belong to the model's `generation_config.json`, which is
    not written here.

    Args:
      directory: made if missing.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'clean_up_tokenization_spaces': False,
      'model_max_length': int(1e30),
      'added_tokens_decoder': {
        str(i): {
          'content': token.content,
          'lstrip': token.lstrip,
          'normalized': token.normalized,
          'rstrip': token.rstrip,
          'single_word': token.single_word,
          'special': token.special,
        }
        for i, token in self.backend.get_added_tokens_decoder().items()
      },
    }
    for key, i in (
      ('bos_token', self.bos_id),
      ('eos_token', self.eos_ids[0] if self.eos_ids else None),
      ('pad_token', self.pad_id),
      ('unk_token', self.unk_id),
    ):
      if i is not None:
        config[key] = self.backend.id_to_token(i)
    files = {'tokenizer.json': self.backend.to_str(pretty=True)}
    if self.chat_template is not None:
      config['chat_template'] = self.chat_template
      files['chat_template.jinja'] = self.chat_template
    files['tokenizer_config.json'] = json.dumps(
      config, indent=2, ensure_ascii=False
    )
    for name, text in files.items():
      _write_atomically(directory / name, text)


def _from_gguf_fields(path: str, field: Any) -> Tokenizer:
  """Builds the tokenizer of a GGUF file from its metadata."""
  kind = field('ggml.model')
  if kind is None:
    raise ValueError(f'{path}: holds no tokenizer (no tokenizer.ggml.model)')
  if kind != 'gpt2':
    raise ValueError(
      f'{path}: tokenizer.ggml.model is {kind!r}; only byte-level BPE'
      " ('gpt2') is supported in GGUF files. Use the model's Hugging Face"
      ' directory, whose tokenizer.json can be of any kind'
    )
  tokens = field('ggml.tokens')
  merges = field('ggml.merges')
  if not tokens or merges is None:
    raise ValueError(
      f'{path}: byte-level BPE needs tokenizer.ggml.tokens and'
      ' tokenizer.ggml.merges'
    )
  pre = field('ggml.pre', 'default')
  backend = tokenizers.Tokenizer(
    models.BPE(
      vocab={token: i for i, token in enumerate(tokens)},
      merges=[tuple(merge.split(' ', 1)) for merge in merges],
      fuse_unk=False,
      byte_fallback=False,
      ignore_merges=pre == 'llama-bpe',
    )
  )
  backend.pre_tokenizer = _pre_tokenizer(path, pre)
  backend.decoder = decoders.ByteLevel()
  if pre == 'qwen2':
    backend.normalizer = normalizers.NFC()
  kinds = field('ggml.token_type', [gguf.TokenType.NORMAL] * len(tokens))
  if len(kinds) != len(tokens):
    raise ValueError(
      f'{path}: {len(tokens)} tokens, but {len(kinds)} token types'
    )
  # Order matters: added tokens that are in the vocabulary keep its ids.
  backend.add_tokens(
    [
      tokenizers.AddedToken(
        token, special=kind == _CONTROL_TOKEN, normalized=False
      )
      for token, kind in zip(tokens, kinds, strict=True)
      if kind in (_CONTROL_TOKEN, _USER_TOKEN)
    ]
  )

  def token_id(name: str) -> int | None:
    i = field(f'ggml.{name}_token_id')
    if i is not None and not 0 <= i < len(tokens):
      raise ValueError(
        f'{path}: tokenizer.ggml.{name}_token_id is {i}, but there are'
        f' {len(tokens)} tokens'
      )
    return i

  bos = token_id('bos')
  eos = [i for n in ('eos', 'eot', 'eom') if (i := token_id(n)) is not None]
  pad = token_id('padding')
  if field('ggml.add_bos_token', False) and bos is not None:
    backend.post_processor = processors.Sequence(
      [
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(
          single=f'{tokens[bos]} $A',
          pair=f'{tokens[bos]} $A {tokens[bos]} $B',
          special_tokens=[(tokens[bos], bos)],
        ),
      ]
    )
  return Tokenizer(
    backend,
    field('chat_template'),
    bos,
    tuple(dict.fromkeys(eos)),
    pad if pad is not None else (eos[0] if eos else 0),
    token_id('unknown'),
  )


def _pre_tokenizer(path: str, name: str) -> pre_tokenizers.PreTokenizer:
  """The cutting into words that `tokenizer.ggml.pre` names."""
  gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

  def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
      [
        pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
      ]
    )

  known = {
    'default': gpt2,
    'gpt-2': gpt2,
    'gpt2': gpt2,
    'llama-bpe': split(_LLAMA3_SPLIT),
    'qwen2': split(_QWEN2_SPLIT),
    'smollm': pre_tokenizers.Sequence(
      [pre_tokenizers.Digits(individual_digits=True), gpt2]
    ),
  }
  if name not in known:
    raise ValueError(
      f'{path}: tokenizer.ggml.pre is {name!r}; supported are'
      f" {', '.join(map(repr, sorted(known)))}. Use the model's Hugging Face"
      ' directory instead'
    )
  return known[name]


def _directory_template(
  directory: pathlib.Path, config: Mapping[str, Any]
) -> str | None:
  """The chat template of a model directory, None if it has none."""
  file = directory / 'chat_template.jinja'
  if file.is_file():
    return file.read_text(encoding='utf-8')
  template = config.get('chat_template')
  if isinstance(template, list):  # Named templates: the default one.
    named = {t['name']: t['template'] for t in template}
    if 'default' not in named:
      raise ValueError(
        f'{directory / "tokenizer_config.json"}: several chat templates'
        f' ({", ".join(sorted(named))}), none of them named "default"'
      )
    return named['default']
  return template


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  """The JSON object in a file; empty if there is no such file."""
  if not path.is_file():
    return {}
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as e:
    raise ValueError(f'{path}: not valid JSON: {e}') from e
  if not isinstance(value, dict):
    raise ValueError(f'{path}: expected a JSON object, got {type(value)}')
  return value


def _write_atomically(path: pathlib.Path, text: str) -> None:
  temporary = path.with_name(f'.{path.name}.{os.getpid()}')
  try:
    with open(temporary, 'w', encoding='utf-8', newline='') as f:
      f.write(text)
      f.flush()
      os.fsync(f.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


class _Generation(jinja2_ext.Extension):
  """`{% generation %}...{% endgeneration %}` of templates: only its body.

  `transformers` marks assistant text with it; loss masks here are found from
  the rendering instead.
  """

  tags = {'generation'}

  def parse(self, parser: jinja2_parser.Parser) -> list[jinja2_nodes.Node]:
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


def _tojson(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  # jinja2's own filter escapes for HTML, which templates don't expect.
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
  environment = jinja2_sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, 'jinja2.ext.loopcontrols'],
  )
  environment.filters['tojson'] = _tojson
  environment.globals['raise_exception'] = _raise_exception
  environment.globals['strftime_now'] = _strftime_now
  return environment.from_string(source)
