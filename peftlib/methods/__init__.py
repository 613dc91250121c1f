"""Adapter methods, one a file, in one registry."""

from peftlib.methods.dora import Dora
from peftlib.methods.gralora import Gralora
from peftlib.methods.hira import Hira
from peftlib.methods.ia3 import Ia3
from peftlib.methods.initialization import gaussian
from peftlib.methods.initialization import kaiming
from peftlib.methods.loha import Loha
from peftlib.methods.lokr import Lokr
from peftlib.methods.lora import Lora
from peftlib.methods.lora_fa import LoraFA
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
  'Lokr',
  'Lora',
  'LoraFA',
  'Method',
  'Miss',
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
  'gaussian',
  'kaiming',
  'register',
  'registry',
]
