"""`peftlib generate`: an answer to a prompt, shown as it comes."""

from collections.abc import Iterable, Iterator
import sys

import jax
from tokenizers import decoders

from peftlib import data
from peftlib import generation
from peftlib.cli import assembly
from peftlib.cli import errors
from peftlib.cli import options as options_lib


def run(options: options_lib.Generate) -> int:
  """Runs the command: writes the new text to standard output.

  Args:
    options: Checked by `options.check_generate`.

  Returns:
    The exit status, 0.

  Raises:
    errors.UserError: The prompt is empty, or a chat is asked for without a
      template.
    ValueError: Model and adapter don't fit one another.
  """
  if options.compilation_cache is not None:
    jax.config.update('jax_compilation_cache_dir', options.compilation_cache)
  tokenizer = assembly.load_tokenizer(str(options.model))
  prompt = options.prompt
  if prompt is None:
    # The line feed that ends what was typed is no part of it.
    prompt = sys.stdin.read().removesuffix('\n')
  ids = encode(prompt, tokenizer, chat=options.chat, system=options.system)
  adapted = assembly.load_adapted(
    str(options.model), options.adapter, compute_dtype=options.compute_dtype
  )
  tokens = generation.stream(
    adapted.graphdef,
    adapted.state,
    ids,
    max_new_tokens=options.max_new_tokens,
    eos_ids=tokenizer.eos_ids,
    temperature=options.temperature,
    top_p=options.top_p,
    key=jax.random.key(options.seed),
  )
  for piece in decode_stream(tokens, tokenizer):
    sys.stdout.write(piece)
    sys.stdout.flush()
  sys.stdout.write('\n')
  sys.stdout.flush()
  return 0


def encode(
  prompt: str,
  tokenizer: data.Tokenizer,
  *,
  chat: bool | None = None,
  system: str | None = None,
) -> list[int]:
  """Token ids of a prompt.

  Args:
    prompt: What the user says, or a text to continue.
    tokenizer: The model's tokenizer.
    chat: Whether it is rendered as a turn of a chat; by default if the model
      has a template.
    system: System message of the chat.

  Raises:
    errors.UserError: The prompt is empty, or there is no template.
  """
  if not prompt.strip():
    raise errors.UserError(
      'the prompt is empty; give some text by --prompt or standard input'
    )
  has_template = tokenizer.chat_template is not None
  if not has_template and (chat or system is not None):
    raise errors.UserError(
      f'{"--chat" if chat else "--system"}: the model has no chat template;'
      ' use --nochat'
    )
  if not has_template or chat is False:
    return tokenizer.encode(prompt, add_special_tokens=True)
  messages = [{'role': 'user', 'content': prompt}]
  if system is not None:
    messages.insert(0, {'role': 'system', 'content': system})
  return tokenizer.encode(
    tokenizer.render(messages, add_generation_prompt=True)
  )


def decode_stream(
  tokens: Iterable[int], tokenizer: data.Tokenizer
) -> Iterator[str]:
  """Text of tokens as they come.

  A character of several tokens is given with its last one.

  Args:
    tokens: Token ids.
    tokenizer: Their tokenizer.

  Yields:
    Pieces of text; joined they are the text of all tokens.
  """
  stream = decoders.DecodeStream(skip_special_tokens=True)
  ids: list[int] = []
  shown = ''
  for token in tokens:
    ids.append(token)
    piece = stream.step(tokenizer.backend, token)
    if piece:
      shown += piece
      yield piece
  # What is left is half a character, or none.
  rest = tokenizer.decode(ids)[len(shown) :]
  if rest:
    yield rest
