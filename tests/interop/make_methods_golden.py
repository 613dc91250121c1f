"""Makes tests/golden/methods.npz: what HF peft computes for each method.

usage: python tests/interop/make_methods_golden.py OUT_FILE

Needs numpy, torch and peft (0.21), nothing of this repository. Each case is one
torch layer, wrapped by peft, whose trained parameters were moved away from
their start by random numbers. For each case the file has

  <case>/weight         the base's weight before peft came (torch's layout)
  <case>/frozen         the same after it came: what is left over, if anything
  <case>/x, <case>/y    input and output
  <case>/cotangent      c of the loss sum(c * y)
  <case>/x_gradient     gradient of the loss with respect to x (not for ids)
  <case>/start/<name>   parameters and buffers of the adapter at the start
  <case>/v/<name>       the same, moved
  <case>/g/<name>       gradients of those that peft trains
  <case>/merged         the weight after `merge_and_unload`
  <case>/trainable      number of trained parameters
  eva/...               batches, components and singular values
  lora_ga_<direction>_<scale>/weight, gradient, a, b, frozen
  lokr_factors          rows of size, wanted, small, large
"""

import sys
from typing import Any

import numpy as np
import peft
from peft.tuners.lokr.layer import factorization
from peft.tuners.lora.config import LoraGAConfig
from peft.utils.incremental_pca import IncrementalPCA
import torch

_IN, _OUT, _ROWS = 12, 8, 5
_LORA = {'r': 4, 'lora_alpha': 6}


class _Net(torch.nn.Module):
  """One layer under the name that the configurations target."""

  def __init__(self, layer: torch.nn.Module):
    super().__init__()
    self.layer = layer

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    return self.layer(x)


def _lora(**fields: Any) -> peft.LoraConfig:
  return peft.LoraConfig(target_modules=['layer'], **_LORA, **fields)


def _miss(**fields: Any) -> peft.MissConfig:
  return peft.MissConfig(target_modules=['layer'], **fields)


def _oft(**fields: Any) -> peft.OFTConfig:
  fields = {'oft_block_size': 4, **fields}
  return peft.OFTConfig(target_modules=['layer'], **fields)


def _gralora(**fields: Any) -> peft.GraloraConfig:
  return peft.GraloraConfig(
    target_modules=['layer'], r=4, alpha=6, gralora_k=2, **fields
  )


def _lokr(**fields: Any) -> peft.LoKrConfig:
  return peft.LoKrConfig(target_modules=['layer'], alpha=6, **fields)


# By case: what configures peft.
CASES = {
  'lora': _lora(),
  'lora_gaussian': _lora(init_lora_weights='gaussian'),
  'lora_bias': _lora(lora_bias=True),
  'rslora': _lora(use_rslora=True),
  'dora': _lora(use_dora=True),
  'pissa': _lora(init_lora_weights='pissa'),
  'olora': _lora(init_lora_weights='olora'),
  'orthogonal': _lora(init_lora_weights='orthogonal'),
  'hira': peft.HiraConfig(target_modules=['layer'], r=4),
  'shira': peft.ShiraConfig(target_modules=['layer'], r=2, random_seed=3),
  'miss': _miss(r=4),
  'miss_remainder': _miss(r=5),
  'miss_mini': _miss(r=4, init_weights='mini', mini_r=2),
  'miss_bat': _miss(r=4, init_weights='bat'),
  'gralora': _gralora(),
  'gralora_hybrid': _gralora(hybrid_r=3),
  'oft': _oft(),
  'oft_two_terms': _oft(num_cayley_neumann_terms=2),
  'oft_three_terms': _oft(num_cayley_neumann_terms=3),
  'oft_seven_terms': _oft(num_cayley_neumann_terms=7),
  'oft_exact': _oft(use_cayley_neumann=False),
  'oft_shared': _oft(block_share=True),
  'oft_constrained': _oft(coft=True, eps=1.8),
  'ia3': peft.IA3Config(target_modules=['layer'], feedforward_modules=[]),
  'ia3_feedforward': peft.IA3Config(
    target_modules=['layer'], feedforward_modules=['layer']
  ),
  'vera': peft.VeraConfig(target_modules=['layer'], r=4),
  'loha': peft.LoHaConfig(target_modules=['layer'], r=3, alpha=6),
  'lokr': _lokr(r=2),
  'lokr_split': _lokr(r=1, decompose_factor=2),
  'lokr_both': _lokr(r=1, decompose_factor=3, decompose_both=True),
  'lora_embedding': _lora(),
  'dora_embedding': _lora(use_dora=True),
  'trainable_tokens': peft.TrainableTokensConfig(
    target_modules=['layer'], token_indices=[9, 2, 5]
  ),
}
_OF_IDS = ('lora_embedding', 'dora_embedding', 'trainable_tokens')


def _short(name: str) -> str:
  """`base_model.model.layer.lora_A.default.weight` as `lora_A`."""
  parts = name.split('.')
  wanted = [p for p in parts if p.startswith(_PREFIXES)]
  if not wanted:
    return ''
  return wanted[-1] + ('_bias' if parts[-1] == 'bias' else '')


_PREFIXES = (
  *('lora_', 'hira_', 'shira_', 'miss_', 'gralora_', 'oft_', 'ia3_', 'vera_'),
  *('hada_', 'lokr_', 'trainable_tokens_delta'),
)


def _adapter(model: torch.nn.Module) -> dict[str, torch.Tensor]:
  """Parameters and buffers of the adapter, each once."""
  found = {}
  for name, value in (*model.named_parameters(), *model.named_buffers()):
    if _short(name) and not name.endswith(('rows', 'cols')):
      found[_short(name)] = value
  layer = model.base_model.model.layer
  if hasattr(layer, 'shira_indices'):
    found['shira_indices'] = layer.shira_indices['default']
  return found


def _frozen_weight(model: torch.nn.Module) -> np.ndarray:
  layer = model.base_model.model.layer
  return layer.base_layer.weight.detach().numpy().copy()


def case(name: str, config: peft.PeftConfig) -> dict[str, np.ndarray]:
  """Runs one case."""
  torch.manual_seed(sum(map(ord, name)))
  if name in _OF_IDS:
    net = _Net(torch.nn.Embedding(_IN, _OUT))
    x = torch.tensor([[9, 0, 2, 2], [11, 5, 5, 1]])
  else:
    with_bias = name == 'lora_bias'
    net = _Net(torch.nn.Linear(_IN, _OUT, bias=with_bias))
    if with_bias:
      torch.nn.init.zeros_(net.layer.bias)
    x = torch.randn(_ROWS, _IN, requires_grad=True)
  out = {'weight': net.layer.weight.detach().numpy().copy()}
  model = peft.get_peft_model(net, config)
  model.train()
  trained = {
    _short(n): p for n, p in model.named_parameters() if p.requires_grad
  }
  start = {n: v.detach().numpy().copy() for n, v in _adapter(model).items()}
  out |= {f'start/{n}': value for n, value in start.items()}
  out['frozen'] = _frozen_weight(model)
  with torch.no_grad():
    for p in trained.values():
      p += 0.3 * torch.randn(p.shape)
    # The constrained form writes what it projects to into its parameter.
    before = {n: v.numpy().copy() for n, v in _adapter(model).items()}
  y = model(x)
  cotangent = torch.randn(y.shape)
  (cotangent * y).sum().backward()
  out |= {
    'x': x.detach().numpy(),
    'y': y.detach().numpy(),
    'cotangent': cotangent.numpy(),
    'trainable': np.array(sum(p.numel() for p in trained.values())),
  }
  if x.requires_grad:
    out['x_gradient'] = x.grad.numpy()
  out |= {f'v/{n}': value for n, value in before.items()}
  out |= {f'g/{n}': p.grad.numpy() for n, p in trained.items()}
  if name != 'lora_bias':
    merged = model.merge_and_unload().layer.weight
    out['merged'] = merged.detach().numpy().copy()
  return {f'{name}/{key}': value for key, value in out.items()}


def eva() -> dict[str, np.ndarray]:
  """The incremental SVD of EVA, over two batches."""
  torch.manual_seed(0)
  spread = 5 * 0.5 ** torch.arange(_IN)
  turn = torch.linalg.qr(torch.randn(_IN, _IN))[0]
  x = (torch.randn(2, 40, _IN) * spread) @ turn + torch.randn(_IN)
  pca = IncrementalPCA(n_components=4)
  for batch in x:
    pca.partial_fit(batch)
  return {
    'eva/x': x.numpy(),
    'eva/components': pca.components_.numpy(),
    'eva/singular_values': pca.singular_values_.numpy(),
  }


def lora_ga(direction: str, scale: str) -> dict[str, np.ndarray]:
  """LoRA-GA's start, from a gradient that is random."""
  torch.manual_seed(0)
  layer = torch.nn.Linear(_IN, _OUT, bias=False)
  layer._peft_loraga_grad = torch.randn(_OUT, _IN)
  out = {
    'weight': layer.weight.detach().numpy().copy(),
    'gradient': layer._peft_loraga_grad.numpy().copy(),
  }
  how = LoraGAConfig(direction=direction, scale=scale, stable_gamma=9)
  model = peft.get_peft_model(
    _Net(layer), _lora(init_lora_weights='lora_ga', lora_ga_config=how)
  )
  start = _adapter(model)
  out |= {
    'a': start['lora_A'].detach().numpy(),
    'b': start['lora_B'].detach().numpy(),
    'frozen': _frozen_weight(model),
  }
  prefix = f'lora_ga_{direction}_{scale}'
  return {f'{prefix}/{key}': value for key, value in out.items()}


def main() -> None:
  arrays = {}
  for name, config in CASES.items():
    arrays |= case(name, config)
  arrays |= eva()
  for direction in ('ArBr', 'A2rBr', 'ArB2r'):
    arrays |= lora_ga(direction, 'stable')
  for scale in ('weight_svd', 'gd_scale', 'unit'):
    arrays |= lora_ga('ArB2r', scale)
  arrays['lokr_factors'] = np.array(
    [
      (size, wanted, *factorization(size, wanted))
      for size in (1, 2, 7, 12, 36, 80, 127, 128, 250, 256, 576, 1536)
      for wanted in (-1, 1, 2, 4, 5, 8, 16, 300)
    ]
  )
  np.savez_compressed(sys.argv[1], **arrays)
  for name in CASES:
    keys = [k for k in arrays if k.startswith(f'{name}/v/')]
    print(name, [(k.split('/')[-1], arrays[k].shape) for k in keys])


if __name__ == '__main__':
  main()
