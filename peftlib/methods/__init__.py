"""Adapter methods, one a file, in one registry."""

from peftlib.methods.dora import Dora
from peftlib.methods.eva_start import Moments
from peftlib.methods.eva_start import eva
from peftlib.methods.eva_start import moments
from peftlib.methods.gralora import Gralora
from peftlib.methods.hira import Hira
from peftlib.methods.ia3 import Ia3
from peftlib.methods.initialization import gaussian
from peftlib.methods.initialization import kaiming
from peftlib.methods.loftq_start import LoftQ
from peftlib.methods.loftq_start import loftq
from peftlib.methods.loha import Loha
from peftlib.methods.lokr import Lokr
from peftlib.methods.lora import Lora
from peftlib.methods.lora_fa import LoraFA
from peftlib.methods.lora_ga_start import lora_ga
from peftlib.methods.lora_plus import loraplus
from peftlib.methods.lora_plus import scale_lora_b
from peftlib.methods.method import INPUTS
from peftlib.methods.method import OUTPUTS
from peftlib.methods.method import FrozenOp
from peftlib.methods.method import Method
from peftlib.methods.method import Variables
from peftlib.methods.method import VariableSpec
from peftlib.methods.method import Weight
from peftlib.methods.method import by_name
from peftlib.methods.method import register
from peftlib.methods.method import registry
from peftlib.methods.miss import Miss
from peftlib.methods.oft import Oft
from peftlib.methods.olora import Olora
from peftlib.methods.orthogonal import OrthogonalLora
from peftlib.methods.pissa import Pissa
from peftlib.methods.rslora import RsLora
from peftlib.methods.shira import Shira
from peftlib.methods.trainable_tokens import TrainableTokens
from peftlib.methods.vera import Vera

__all__ = [
  'Dora',
  'FrozenOp',
  'Gralora',
  'Hira',
  'INPUTS',
  'Ia3',
  'Loha',
  'LoftQ',
  'Lokr',
  'Lora',
  'LoraFA',
  'Method',
  'Miss',
  'Moments',
  'OUTPUTS',
  'Oft',
  'Olora',
  'OrthogonalLora',
  'Pissa',
  'RsLora',
  'Shira',
  'TrainableTokens',
  'VariableSpec',
  'Variables',
  'Vera',
  'Weight',
  'by_name',
  'eva',
  'gaussian',
  'kaiming',
  'loftq',
  'lora_ga',
  'loraplus',
  'moments',
  'register',
  'registry',
  'scale_lora_b',
]
