"""Adapter methods, one a file, in one registry."""

from peftlib.methods.lora import Lora
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

__all__ = [
  'INPUTS',
  'OUTPUTS',
  'FrozenOp',
  'Lora',
  'Method',
  'VariableSpec',
  'Variables',
  'Weight',
  'by_name',
  'register',
  'registry',
]
