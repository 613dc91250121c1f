import contextlib
import dataclasses
import os
import pathlib
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized

from peftlib import config
from peftlib import methods
from peftlib.cli import errors
from peftlib.cli import flags
from peftlib.cli import options
from tests.peftlib.models import golden


class OptionsTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir().full_path)
    self.file = str(self.folder / 'rows.jsonl')
    pathlib.Path(self.file).touch()

  def finetune(self, *arguments):
    paths = [
      f'--model={self.folder}',
      f'--data={self.file}',
      f'--eval_data={self.file}',
    ]
    return options.check_finetune(
      *flags.parse(options.Finetune, [*paths, *arguments])
    )

  def test_weight_qtypes_are_those_of_the_config(self):
    self.assertEqual(
      sorted(options.WEIGHT_QTYPES), sorted([*config.WEIGHT_QTYPES, 'none'])
    )

  def test_remats_are_those_of_the_decoder(self):
    for remat in options.REMATS:
      golden.tiny_config(remat=remat)
    self.assertEqual(options.Finetune().remat, golden.tiny_config().remat)

  def test_free_flags_are_flags(self):
    fields = {f.name for f in dataclasses.fields(options.Finetune)}
    self.assertEqual(options.FREE_ON_RESUME - fields, set())

  @parameterized.named_parameters(
    ('default', [], ('nf4', 64)),
    ('channelwise', ['--tile_size=0'], ('nf4', 0)),
    ('int8', ['--weight_qtype=int8'], ('int8', 64)),
    ('none', ['--weight_qtype=none'], ('none', 0)),
    ('full', ['--method=full'], ('none', 0)),
  )
  def test_quantization(self, arguments, expected):
    found = self.finetune(*arguments)
    self.assertEqual((found.weight_qtype, found.tile_size), expected)

  @parameterized.named_parameters(
    ('lora', 'lora', {'rank': 16, 'alpha': 32.0, 'dropout': 0.0}),
    ('rslora', 'rslora', {'rank': 16, 'alpha': 8.0, 'dropout': 0.0}),
    ('vera', 'vera', {'rank': 256, 'dropout': 0.0}),
    ('oft', 'oft', {}),
  )
  def test_a_method_has_fields_of_its_own(self, method, fields):
    found = options.adapter_fields(
      self.finetune(f'--method={method}', '--tile_size=0')
    )
    self.assertEqual(
      found,
      {
        'method': method,
        'fields': fields,
        'module_path': '.*_proj',
        'weight_qtype': 'nf4',
        'tile_size': None,
      },
    )
    made = methods.by_name(method)(**found['fields'])
    self.assertEqual({name: getattr(made, name) for name in fields}, fields)

  def test_given_values_are_the_method_s(self):
    found = options.adapter_fields(
      self.finetune('--method=hira', '--rank=4', '--dropout=0.1')
    )
    self.assertEqual(found['fields'], {'rank': 4, 'dropout': 0.1})
    self.assertIsNone(options.adapter_fields(self.finetune('--method=full')))

  def test_every_method_is_registered_and_takes_its_fields(self):
    for name, usual in options.METHODS.items():
      own = {f.name for f in dataclasses.fields(methods.by_name(name))}
      takes = {field for field, value in usual.items() if value is not None}
      self.assertLessEqual(takes, own, name)

  def test_epochs_take_the_place_of_steps(self):
    found = self.finetune('--epochs=0.5')
    self.assertEqual((found.steps, found.epochs), (None, 0.5))

  @parameterized.parameters(
    (['--epochs=1', '--steps=3'], '--steps=3: cannot be together with --epochs=1.0; give one of them'),
    (['--resume', '--overwrite'], '--overwrite: cannot be together with --resume; give one of them'),
    (['--warmup_steps=151'], '--warmup_steps=151: must be at most the number of steps, 100'),
    (['--accumulate=200'], '--accumulate=200: must be at most the number of steps, 100'),
    (['--module_path=(a'], '--module_path=(a: must be a regular expression: missing ), unterminated subpattern at position 0'),
    (['--method=full', '--rank=8'], '--rank=8: --method=full has no adapters; leave it out, or use --method=lora'),
    (['--method=full', '--weight_qtype=int4'], '--weight_qtype=int4: quantized weights cannot be trained; must be none with --method=full'),
    (['--weight_qtype=none', '--tile_size=4'], '--tile_size=4: there is nothing to tile with --weight_qtype=none; leave it out'),
    (['--restore_adapter=no/where'], '--restore_adapter=no/where: no such file or directory; expected a folder of an adapter'),
    (['--model=no/where'], '--model=no/where: no such file or directory; expected a GGUF file or a Hugging Face directory'),
    (['--data=no/where'], '--data=no/where: no such file; expected a file of JSON lines'),
    (['--eval_data=no/where'], '--eval_data=no/where: no such file; expected a file of JSON lines'),
    (['--mesh=fsdp=4', '--batch_size=6'], '--batch_size=6: must be a multiple of 4, the devices of --mesh=fsdp=4'),
    (['--mesh=tensor=4'], "--mesh=tensor=4: 'tensor=4' is no axis; must be fsdp=N, data=N or both, e.g. 'fsdp=4,data=2'"),
    (['--mesh=data=2,data=2'], "--mesh=data=2,data=2: 'data=2' is no axis; must be fsdp=N, data=N or both, e.g. 'fsdp=4,data=2'"),
    (['--mesh=fsdp=0'], "--mesh=fsdp=0: 'fsdp=0' is no axis; must be fsdp=N, data=N or both, e.g. 'fsdp=4,data=2'"),
    (['--rank=0'], '--rank=0: must be an integer >= 1'),
    (['--alpha=0'], '--alpha=0: must be a number > 0'),
    (['--dropout=1'], '--dropout=1: must be a number >= 0 and < 1'),
    (['--weight_qtype=nf5'], '--weight_qtype=nf5: must be one of none, nf4, int8, int4, fp8; did you mean nf4?'),
    (['--seed=4294967296'], '--seed=4294967296: must be an integer from 0 to 4294967295'),
    (['--length=1'], '--length=1: must be an integer >= 2'),
  )  # fmt: skip
  def test_finetune_error(self, arguments, message):
    with self.assertRaises(errors.UserError) as caught:
      self.finetune(*arguments)
    self.assertEqual(str(caught.exception), message)

  def test_output_is_a_file(self):
    with self.assertRaises(errors.UserError) as caught:
      self.finetune(f'--output={self.file}')
    self.assertEqual(
      str(caught.exception),
      f'--output={self.file}: is a file; expected a folder',
    )

  def test_data_is_a_folder(self):
    with self.assertRaises(errors.UserError) as caught:
      self.finetune(f'--data={self.folder}')
    self.assertEqual(
      str(caught.exception),
      f'--data={self.folder}: is a folder; expected a file of JSON lines',
    )

  def test_demo_that_is_not_made_yet(self):
    self.enter_context(contextlib.chdir(self.folder))
    default = options.Finetune().data
    with self.assertRaises(errors.UserError) as caught:
      self.finetune(f'--data={default}')
    self.assertEqual(
      str(caught.exception),
      f'--data={default}: no such file; expected a file of JSON lines; the'
      " demo's files are made by: python -m peftlib.demo.orders"
      f' --output={pathlib.Path(default).parent}',
    )

  def test_demo_model_that_is_not_there(self):
    self.enter_context(
      mock.patch.dict(os.environ, {'PEFTLIB_CACHE': str(self.folder)})
    )
    parsed, given = flags.parse(options.Generate, ['--prompt=Hello'])
    with self.assertRaises(errors.UserError) as caught:
      options.check_generate(parsed, given)
    self.assertStartsWith(
      str(caught.exception),
      '--model: The demo model is not here; run: make assets (looked for'
      f' {self.folder}',
    )

  @parameterized.parameters(
    (options.Evaluate, options.check_evaluate, ['--adapter=no/where'], '--adapter=no/where: no such file or directory; expected a folder of an adapter'),
    (options.Evaluate, options.check_evaluate, ['--data='], '--data=: must be at least one file'),
    (options.Generate, options.check_generate, ['--adapter=no/where'], '--adapter=no/where: no such file or directory; expected a folder of an adapter'),
    (options.Generate, options.check_generate, ['--nochat', '--system=Hi'], '--system=Hi: needs a chat; leave out --nochat'),
    (options.Generate, options.check_generate, ['--top_p=0.9'], '--top_p=0.9: needs a --temperature above 0'),
    (options.Generate, options.check_generate, ['--top_p=0'], '--top_p=0: must be a number > 0 and <= 1'),
    (options.Generate, options.check_generate, ['--temperature=-1'], '--temperature=-1: must be a number >= 0'),
    (options.Inspect, options.check_inspect, ['--adapter=.', '--rank=3'], '--rank=3: cannot be together with --adapter, which says it itself'),
    (options.Inspect, options.check_inspect, ['--method=full', '--alpha=3'], '--alpha=3.0: --method=full has no adapters; leave it out, or use --method=lora'),
  )  # fmt: skip
  def test_error(self, cls, check, arguments, message):
    with self.assertRaises(errors.UserError) as caught:
      check(*flags.parse(cls, [f'--model={self.folder}', *arguments]))
    self.assertEqual(str(caught.exception), message)

  def test_mesh(self):
    self.assertEqual(
      options.parse_mesh('fsdp=4, data=2'), {'fsdp': 4, 'data': 2}
    )


if __name__ == '__main__':
  absltest.main()
