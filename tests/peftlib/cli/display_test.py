import io

from absl.testing import absltest
from absl.testing import parameterized
from flax import nnx
import jax
import jax.numpy as jnp
from rich import console as rich_console

import peftlib
from peftlib.cli import display
from peftlib.cli import evaluation
import transforms


class _Net(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(8, 16, rngs=rngs)
    self.down = nnx.Linear(16, 4, use_bias=False, rngs=rngs)
    self.head = nnx.Linear(4, 2, rngs=rngs)

  def __call__(self, x):
    return self.head(self.down(self.up(x)))


def _parts(config, abstract=False):
  make = lambda: _Net(nnx.Rngs(0))
  graphdef, state = nnx.split(nnx.eval_shape(make) if abstract else make())
  if config is not None:
    x = jax.ShapeDtypeStruct((1, 8), jnp.float32)
    key = jax.random.key(0)
    graphdef, state = peftlib.inject(graphdef, state, config, x, key=key)
    if config.weight_qtype is not None:
      graphdef, state = peftlib.quantize_base(graphdef, state, config, x)
  return transforms.partition(state, peftlib.trainable_filter(config), ...)


def _text(thing, width=100):
  console = rich_console.Console(
    file=io.StringIO(), width=width, highlight=False
  )
  console.print(thing)
  return console.file.getvalue()


class ModulesTest(parameterized.TestCase):
  @parameterized.product(abstract=(False, True))
  def test_rows_of_qlora(self, abstract):
    config = peftlib.LoraConfig(
      module_path='up|down', rank=2, weight_qtype='int8', tile_size=4
    )
    rows = display.module_rows(*_parts(config, abstract))
    self.assertEqual(
      rows,
      [
        # a 16 x 2, b 2 x 4; 64 weights of a byte, 4 tiles x 4 scales.
        display.ModuleRow('down', '16 x 4 int8', 40, 64, 40 * 4 + 64 + 16 * 4),
        # a 8 x 2, b 2 x 16; 128 weights, 2 tiles x 16 scales, 16 of the bias.
        display.ModuleRow(
          'up', '8 x 16 int8', 48, 144, 48 * 4 + 128 + 32 * 4 + 16 * 4
        ),
        display.ModuleRow('', '', 0, 10, 40),
      ],
    )

  @parameterized.product(abstract=(False, True))
  def test_four_bits_are_half_a_byte(self, abstract):
    config = peftlib.LoraConfig(module_path='down', rank=1, weight_qtype='nf4')
    down, rest = display.module_rows(*_parts(config, abstract))
    # a 16 x 1, b 1 x 4; 64 weights, and 4 scales.
    self.assertEqual(
      down,
      display.ModuleRow('down', '16 x 4 uint4', 20, 64, 20 * 4 + 32 + 4 * 4),
    )
    self.assertEqual(rest.frozen, 8 * 16 + 16 + 4 * 2 + 2)

  def test_rows_of_the_whole_model(self):
    rows = display.module_rows(*_parts(None))
    self.assertEqual(
      [(r.module, r.trainable, r.frozen) for r in rows],
      [('down', 64, 0), ('head', 10, 0), ('up', 144, 0)],
    )

  def test_table(self):
    text = _text(
      display.module_table(
        [
          display.ModuleRow('a/b', '2 x 3 int8', 1000, 2000, 5_000_000),
          display.ModuleRow('', '', 0, 30, 120),
        ]
      )
    )
    lines = [' '.join(line.split()) for line in text.splitlines()]
    self.assertIn('module weight trainable frozen bytes', lines)
    self.assertIn('a/b 2 x 3 int8 1,000 2,000 5.0 MB', lines)
    self.assertIn('(the rest) 0 30 120 B', lines)
    self.assertIn('all 1,000 2,030 5.0 MB', lines)

  def test_bytes_of_a_tree(self):
    tree = (jnp.ones(3), jax.random.key(0), jnp.ones(4, jnp.int4))
    # A key of threefry is two words.
    self.assertEqual(display.tree_bytes(tree), 12 + 8 + 2)


class TablesTest(parameterized.TestCase):
  def results(self, *given):
    return [
      evaluation.Result('x.jsonl', ['one?', 'two?'], ['1', '2'], list(given))
    ]

  def test_match(self):
    text = _text(
      display.match_table(self.results('0', '2 '), self.results('1', '2'))
    )
    self.assertRegex(text, r'x.jsonl +2 +50.0% +100.0%')
    text = _text(display.match_table(None, self.results('1', '')))
    self.assertRegex(text, r'x.jsonl +2 +- +50.0%')

  def test_examples(self):
    text = _text(
      display.examples_table(
        self.results('[red]a', 'b'), self.results('1', '2'), 1
      )
    )
    lines = [' '.join(line.split()) for line in text.splitlines()]
    self.assertEqual(
      [x for x in lines if x][1:],
      # Not taken for markup.
      ['asked one?', 'before [red]a', 'after 1', 'right 1'],
    )

  def test_evaluation(self):
    record = {'file': 'x', 'rows': 2, 'loss_tokens': 1234, 'loss': 0.5}
    text = _text(
      display.evaluation_table(
        [{**record, 'exact_match': 0.25}, {**record, 'exact_match': None}]
      )
    )
    self.assertRegex(text, r'x +2 +1,234 +0.5000 +25.0%')
    self.assertRegex(text, r'x +2 +1,234 +0.5000 +-')

  @parameterized.parameters(
    ('a\n b', 9, 'a b'),
    ('abcdef', 5, 'ab...'),
    ('abcde', 5, 'abcde'),
    # What a model says must not move the cursor or change colours.
    ('a\x1b[31mb', 20, 'a\ufffd[31mb'),
  )
  def test_shorten(self, text, width, expected):
    self.assertEqual(display.shorten(text, width), expected)

  @parameterized.parameters(
    (0, '0 B'), (999, '999 B'), (1000, '1.0 kB'), (45_600_000, '45.6 MB'),
    (2_345_000_000, '2.35 GB'), (1_500_000_000_000, '1500.00 GB'),
  )  # fmt: skip
  def test_size(self, count, expected):
    self.assertEqual(display.size(count), expected)

  @parameterized.parameters((5, '0:05'), (65.4, '1:05'), (3723, '1:02:03'))
  def test_duration(self, seconds, expected):
    self.assertEqual(display.duration(seconds), expected)


class ProgressTest(parameterized.TestCase):
  def show(self, console, start):
    with display.training_progress(
      console, start=start, steps=9, every=4
    ) as report:
      for step in range(start + 1, 10):
        report(
          {'step': step, 'loss': 1 / step, 'seconds': 2.0,
           'tokens_per_second': 123.4}
        )  # fmt: skip
    return console.file.getvalue()

  def test_lines(self):
    console = rich_console.Console(file=io.StringIO(), width=80)
    self.assertEqual(
      self.show(console, 2).splitlines(),
      [
        'step 3/9  loss 0.3333  123 tokens/s  0:12 left',
        'step 4/9  loss 0.2500  123 tokens/s  0:10 left',
        'step 8/9  loss 0.1250  123 tokens/s  0:02 left',
        'step 9/9  loss 0.1111  123 tokens/s  0:00 left',
      ],
    )

  def test_bar(self):
    console = rich_console.Console(
      file=io.StringIO(), width=80, force_terminal=True, color_system=None
    )
    text = self.show(console, 2)
    for part in ('training', '9/9', 'loss 0.1111', '123 tokens/s'):
      self.assertIn(part, text)

  def test_console(self):
    # Standard output is no terminal here.
    self.assertFalse(display.make_console().is_terminal)


if __name__ == '__main__':
  absltest.main()
