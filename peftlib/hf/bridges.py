"""For each peft type: its fields as a method, its tensors as variables."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from peftlib import methods
from peftlib.hf import selection

Array = np.ndarray

# Say nothing of what an adapter computes.
_NEUTRAL = frozenset(
  {
    'auto_mapping',
    'base_model_name_or_path',
    'inference_mode',
    'peft_type',
    'peft_version',
    'revision',
    'task_type',
    'target_modules',
    'exclude_modules',
    'layers_to_transform',
    'layers_pattern',
    'modules_to_save',
  }
)
# How the start was drawn, of which training left nothing but the tensors.
_STARTS = frozenset({'eva_config'})


class Tensor(NamedTuple):
  """How a tensor of a module and a variable of a method correspond.

  Attributes:
    suffix: What follows the module's name in the tensor's.
    variable: The method's variable.
    load: From the tensor to the variable of one layer.
    save: Back.
  """

  suffix: str
  variable: str
  load: Callable[[Array], Array]
  save: Callable[[Array], Array]


def _same(suffix: str, variable: str) -> Tensor:
  return Tensor(suffix, variable, lambda x: x, lambda x: x)


def _transposed(suffix: str, variable: str) -> Tensor:
  return Tensor(suffix, variable, lambda x: x.T, lambda x: x.T)


class Needs(NamedTuple):
  """A field whose value has to be one of some.

  Attributes:
    values: The values.
    why: What another one would need.
  """

  values: tuple[Any, ...]
  why: str


@dataclasses.dataclass(frozen=True)
class Bridge:
  """One peft type.

  Attributes:
    peft_type: Its name in `adapter_config.json`.
    method: Makes the method of one module from the fields and the module's
      tensors by suffix.
    fields: Fields that say what a method does: makes them from one.
    tensors: The correspondence of its tensors.
    honoured: Fields that `method` reads.
    needs: Fields that have to have certain values.
    patterns: Fields of patterns by module: the field that each one overrides.
    weights: Kinds of weights that it is for.
  """

  peft_type: str
  method: Callable[[Mapping[str, Any], Mapping[str, Array]], methods.Method]
  fields: Callable[[Any], dict[str, Any]]
  tensors: tuple[Tensor, ...]
  honoured: frozenset[str]
  needs: Mapping[str, Needs]
  patterns: Mapping[str, str] = dataclasses.field(default_factory=dict)
  weights: tuple[str, ...] = ('kernel',)

  def of_module(self, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields as they are for one module."""
    own = dict(config)
    for field, overridden in self.patterns.items():
      own[overridden] = selection.by_pattern(
        config.get(field) or {}, name, config.get(overridden)
      )
    return own

  def check(self, config: Mapping[str, Any]) -> None:
    """Raises ValueError naming every field that can't be honoured."""
    refused = []
    for field, value in config.items():
      if (
        field in _NEUTRAL | _STARTS
        or field in self.honoured
        or field in self.patterns
      ):
        continue
      if field in self.needs:
        needed = self.needs[field]
        if value not in needed.values:
          refused.append(f'{field}={value!r}: {needed.why}')
      elif value not in (None, False, [], {}, ''):
        refused.append(f'{field}={value!r}: not a field that is known')
    if config.get('task_type') not in (None, 'CAUSAL_LM'):
      refused.append(
        f'task_type={config["task_type"]!r}: only CAUSAL_LM has a model here'
      )
    if refused:
      raise ValueError(
        f'peftlib.hf.load_adapter: {self.peft_type} with'
        f' {"; ".join(sorted(refused))}.'
      )


_PLAIN = {
  'fan_in_fan_out': Needs(
    (False, None), 'weights of the models here are of Linear layers'
  ),
  'bias': Needs(
    ('none', None),
    'trained biases of the base are not read; train them by modules_to_save',
  ),
}


def _start(*values: Any, why: str = 'it changes the base weights') -> Needs:
  return Needs((True, False, None, *values), why)


def _lora(c: Mapping[str, Any], tensors: Mapping[str, Array]) -> methods.Method:
  kinds: dict[Any, type[methods.Lora]] = {
    'pissa': methods.Pissa,
    'olora': methods.Olora,
  }
  cls = kinds.get(c.get('init_lora_weights'), methods.Lora)
  chosen = [
    name
    for name, on in (
      ('use_dora', c.get('use_dora')),
      # DoRA has a field for it.
      ('use_rslora', c.get('use_rslora') and not c.get('use_dora')),
      (
        f'init_lora_weights={c.get("init_lora_weights")!r}',
        cls is not methods.Lora,
      ),
    )
    if on
  ]
  if len(chosen) > 1:
    raise ValueError(
      f'peftlib.hf.load_adapter: LORA with {" and ".join(chosen)}: no method'
      ' here is both.'
    )
  shared: dict[str, Any] = {
    'rank': c['r'],
    'alpha': float(c['lora_alpha']),
    'dropout': float(c.get('lora_dropout') or 0.0),
    'bias': bool(c.get('lora_bias')),
  }
  if c.get('use_dora'):
    return methods.Dora(**shared, rank_stabilized=bool(c.get('use_rslora')))
  if c.get('use_rslora'):
    cls = methods.RsLora
  return cls(**shared)


def _lora_fields(m: methods.Lora) -> dict[str, Any]:
  starts = {'pissa': 'pissa', 'olora': 'olora'}
  stabilized = isinstance(m, methods.Dora) and m.rank_stabilized
  return {
    'r': m.rank,
    'lora_alpha': m.alpha,
    'lora_dropout': m.dropout,
    'lora_bias': m.bias,
    'use_dora': isinstance(m, methods.Dora),
    'use_rslora': isinstance(m, methods.RsLora) or stabilized,
    'init_lora_weights': starts.get(m.name, True),
  }


def _hira(c: Mapping[str, Any], tensors: Mapping[str, Array]) -> Any:
  # HF peft 0.21 makes all of rank r, whatever rank_pattern says.
  found = tensors.get('hira_A', tensors.get('hira_embedding_A'))
  patterned = c.get('rank_pattern') and found is not None
  return methods.Hira(
    rank=found.shape[0] if patterned and found is not None else c['r'],
    dropout=float(c.get('hira_dropout') or 0.0),
  )


def _miss(c: Mapping[str, Any], tensors: Mapping[str, Array]) -> Any:
  start = c.get('init_weights')
  return methods.Miss(
    rank=c['r'],
    form=start if start in ('bat', 'mini') else 'miss',
    mini_rank=c.get('mini_r', 1) if start == 'mini' else 1,
    dropout=0.0 if start == 'bat' else float(c.get('miss_dropout') or 0.0),
  )


def _miss_fields(m: methods.Miss) -> dict[str, Any]:
  return {
    'r': m.rank,
    'mini_r': m.mini_rank,
    'miss_dropout': m.dropout,
    'init_weights': True if m.form == 'miss' else m.form,
  }


def _oft(c: Mapping[str, Any], tensors: Mapping[str, Array]) -> Any:
  # Peft adjusts a block size that doesn't divide a layer's inputs, layer by
  # layer; how many entries a block has tells what it came to.
  entries = tensors['oft_R.weight'].shape[1]
  return methods.Oft(
    block_size=int((1 + (1 + 8 * entries) ** 0.5) / 2),
    cayley_neumann=bool(c.get('use_cayley_neumann', True)),
    neumann_terms=c.get('num_cayley_neumann_terms', 5),
    constrained=bool(c.get('coft')),
    epsilon=float(c.get('eps', 6e-5)),
    block_share=bool(c.get('block_share')),
  )


def _oft_fields(m: methods.Oft) -> dict[str, Any]:
  return {
    'r': 0,
    'oft_block_size': m.block_size,
    'use_cayley_neumann': m.cayley_neumann,
    'num_cayley_neumann_terms': m.neumann_terms,
    'coft': m.constrained,
    'eps': m.epsilon,
    'block_share': m.block_share,
  }


def _ia3(c: Mapping[str, Any], tensors: Mapping[str, Array]) -> Any:
  return methods.Ia3(feedforward=tensors['ia3_l'].shape[0] == 1)


def _loha(c: Mapping[str, Any], tensors: Mapping[str, Array]) -> Any:
  return methods.Loha(rank=c['r'], alpha=float(c['alpha']))


def _lokr(c: Mapping[str, Any], tensors: Mapping[str, Array]) -> Any:
  return methods.Lokr(
    rank=c['r'],
    alpha=float(c['alpha']),
    decompose_factor=c.get('decompose_factor', -1),
    decompose_both=bool(c.get('decompose_both')),
  )


def _vera(c: Mapping[str, Any], tensors: Mapping[str, Array]) -> Any:
  shape = None
  if 'vera_A' in tensors:
    shape = (tensors['vera_A'].shape[1], tensors['vera_B'].shape[0])
  return methods.Vera(
    rank=c['r'],
    projection_key=c.get('projection_prng_key', 0),
    projection_shape=shape,
    d_initial=float(c.get('d_initial', 0.1)),
    dropout=float(c.get('vera_dropout') or 0.0),
  )


def _gralora(c: Mapping[str, Any], tensors: Mapping[str, Array]) -> Any:
  return methods.Gralora(
    rank=c['r'],
    alpha=float(c['alpha']),
    blocks=c['gralora_k'],
    hybrid_rank=c.get('hybrid_r', 0),
    dropout=float(c.get('gralora_dropout') or 0.0),
  )


_DROPS = 'the weight or the layer would be dropped, not the input'
_LYCORIS = {
  'rank_dropout': Needs((0, 0.0, None), _DROPS),
  'module_dropout': Needs((0, 0.0, None), _DROPS),
  'rank_dropout_scale': Needs((False, None), _DROPS),
  # Differs for convolutions only.
  'use_effective_conv2d': Needs((True, False, None), ''),
  'init_weights': _start('lycoris'),
  'bias': _PLAIN['bias'],
}

BRIDGES: dict[str, Bridge] = {
  b.peft_type: b
  for b in (
    Bridge(
      'LORA',
      _lora,
      _lora_fields,
      (
        _transposed('lora_A.weight', 'lora_a'),
        _transposed('lora_B.weight', 'lora_b'),
        _same('lora_B.bias', 'lora_bias'),
        _same('lora_magnitude_vector', 'lora_magnitude'),
        _transposed('lora_embedding_A', 'lora_a'),
        _transposed('lora_embedding_B', 'lora_b'),
      ),
      frozenset(
        {
          'r',
          'lora_alpha',
          'lora_dropout',
          'lora_bias',
          'use_rslora',
          'use_dora',
          'ensure_weight_tying',
          'trainable_token_indices',
          'target_parameters',
        }
      ),
      {
        **_PLAIN,
        'megatron_core': Needs(('megatron.core', None), 'needs Megatron'),
        # Of QALoRA alone, which has a switch of its own.
        'qalora_group_size': Needs(tuple(range(1, 4097)) + (None,), ''),
        'init_lora_weights': Needs(
          (
            True,
            False,
            None,
            'gaussian',
            'eva',
            'orthogonal',
            'pissa',
            'olora',
          ),
          'it changes the base weights in a way that is not in the file',
        ),
        'layer_replication': Needs(
          (None,), 'the model here has its own layers'
        ),
      },
      {'rank_pattern': 'r', 'alpha_pattern': 'lora_alpha'},
      ('kernel', 'embedding'),
    ),
    Bridge(
      'HIRA',
      _hira,
      lambda m: {'r': m.rank, 'hira_dropout': m.dropout},
      (
        _transposed('hira_A', 'hira_a'),
        _transposed('hira_B', 'hira_b'),
        _transposed('hira_embedding_A', 'hira_a'),
        _transposed('hira_embedding_B', 'hira_b'),
      ),
      frozenset({'r', 'hira_dropout', 'rank_pattern'}),
      {**_PLAIN, 'init_weights': _start('gaussian')},
      weights=('kernel', 'embedding'),
    ),
    Bridge(
      'SHIRA',
      lambda c, tensors: methods.Shira(rank=c['r']),
      lambda m: {'r': m.rank},
      (
        _same('shira_weight', 'shira_weight'),
        Tensor(
          'shira_indices',
          'shira_indices',
          lambda x: x[::-1],
          lambda x: x[::-1],
        ),
      ),
      frozenset({'r'}),
      {
        **_PLAIN,
        'init_weights': _start(),
        # The entries that it chose are among the tensors.
        'mask_type': Needs(('random',), 'only the random mask is known'),
        'random_seed': Needs((None, *range(2**16)), 'too large'),
      },
    ),
    Bridge(
      'MISS',
      _miss,
      _miss_fields,
      (_same('miss_block', 'miss_block'),),
      frozenset({'r', 'mini_r', 'miss_dropout', 'init_weights'}),
      _PLAIN,
    ),
    Bridge(
      'GRALORA',
      _gralora,
      lambda m: {
        'r': m.rank,
        'alpha': m.alpha,
        'gralora_k': m.blocks,
        'hybrid_r': m.hybrid_rank,
        'gralora_dropout': m.dropout,
      },
      (
        _same('gralora_A', 'gralora_a'),
        _same('gralora_B', 'gralora_b'),
        _transposed('gralora_A_general.weight', 'gralora_general_a'),
        _transposed('gralora_B_general.weight', 'gralora_general_b'),
      ),
      frozenset({'r', 'alpha', 'gralora_k', 'hybrid_r', 'gralora_dropout'}),
      {**_PLAIN, 'init_weights': _start()},
    ),
    Bridge(
      'OFT',
      _oft,
      _oft_fields,
      (_same('oft_R.weight', 'oft_r'),),
      frozenset(
        {
          'r',
          'oft_block_size',
          'use_cayley_neumann',
          'num_cayley_neumann_terms',
          'coft',
          'eps',
          'block_share',
        }
      ),
      {
        **_PLAIN,
        'init_weights': _start(),
        'module_dropout': Needs((0, 0.0, None), _DROPS),
      },
    ),
    Bridge(
      'IA3',
      _ia3,
      lambda m: {},
      (
        Tensor(
          'ia3_l', 'ia3_l', lambda x: x.reshape(-1), lambda x: x.reshape(-1)
        ),
      ),
      frozenset({'feedforward_modules'}),
      {**_PLAIN, 'init_ia3_weights': _start()},
    ),
    Bridge(
      'LOHA',
      _loha,
      lambda m: {'r': m.rank, 'alpha': m.alpha},
      tuple(
        _same(name, name)
        for name in ('hada_w1_a', 'hada_w1_b', 'hada_w2_a', 'hada_w2_b')
      ),
      frozenset({'r', 'alpha'}),
      _LYCORIS,
      {'rank_pattern': 'r', 'alpha_pattern': 'alpha'},
    ),
    Bridge(
      'LOKR',
      _lokr,
      lambda m: {
        'r': m.rank,
        'alpha': m.alpha,
        'decompose_factor': m.decompose_factor,
        'decompose_both': m.decompose_both,
      },
      tuple(
        _same(name, name)
        for name in (
          'lokr_w1',
          'lokr_w1_a',
          'lokr_w1_b',
          'lokr_w2',
          'lokr_w2_a',
          'lokr_w2_b',
        )
      ),
      frozenset({'r', 'alpha', 'decompose_factor', 'decompose_both'}),
      _LYCORIS,
      {'rank_pattern': 'r', 'alpha_pattern': 'alpha'},
    ),
    Bridge(
      'VERA',
      _vera,
      lambda m: {
        'r': m.rank,
        'projection_prng_key': m.projection_key,
        'd_initial': m.d_initial,
        'vera_dropout': m.dropout,
        'save_projection': True,
      },
      (
        _same('vera_lambda_b', 'vera_lambda_b'),
        _same('vera_lambda_d', 'vera_lambda_d'),
      ),
      frozenset({'r', 'projection_prng_key', 'd_initial', 'vera_dropout'}),
      {
        **_PLAIN,
        'init_weights': _start(),
        'save_projection': Needs(
          (True,),
          "its projections are torch's random numbers, which are not in the"
          ' file; save it with save_projection=True',
        ),
      },
    ),
    Bridge(
      'LN_TUNING',
      lambda c, tensors: methods.Lora(),
      lambda m: {},
      (),
      frozenset(),
      _PLAIN,
      weights=('kernel', 'embedding', 'scale'),
    ),
  )
}


def bridge_of(config: Mapping[str, Any]) -> Bridge:
  """The bridge of a configuration, whose fields are checked.

  Raises:
    ValueError: If the type, or a field's value, isn't known.
  """
  peft_type = config.get('peft_type')
  if peft_type not in BRIDGES:
    raise ValueError(
      f'peftlib.hf.load_adapter: peft_type={peft_type!r}; known are'
      f' {sorted([*BRIDGES, "PREFIX_TUNING", "PROMPT_TUNING"])}.'
    )
  bridge = BRIDGES[str(peft_type)]
  bridge.check(config)
  return bridge


def common(
  function: str,
  bridge: Bridge,
  own: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
  """Fields of most modules, and patterns for the others.

  Args:
    function: The public function that asks.
    bridge: The peft type.
    own: The fields of each module.

  Raises:
    ValueError: If a field differs that peft has no pattern for.
  """
  out: dict[str, Any] = {}
  pattern_of = {field: name for name, field in bridge.patterns.items()}
  for field in next(iter(own.values())):
    values = [fields[field] for fields in own.values()]
    usual = max(values, key=values.count)
    out[field] = usual
    others = {
      name.replace('.', r'\.'): fields[field]
      for name, fields in own.items()
      if fields[field] != usual
    }
    if not others:
      continue
    if field in pattern_of:
      out[pattern_of[field]] = others
    elif not (bridge.peft_type == 'OFT' and field == 'oft_block_size'):
      raise ValueError(
        f'{function}: {field} differs from module to module:'
        f' {sorted(map(str, set(values)))}; peft has one for all.'
      )
  return out
