"""Starts of LoRA that need inputs, gradients or the quantizer.

Those that need the weight alone are methods: `methods.Pissa`, `methods.Olora`,
`methods.OrthogonalLora`. What is here takes a model as `inject` returned it,
and sets the variables of one of its adapters.
"""

from peftlib.initialization.eva import initialize_eva
from peftlib.initialization.loftq import initialize_loftq
from peftlib.initialization.lora_ga import initialize_lora_ga

__all__ = ['initialize_eva', 'initialize_loftq', 'initialize_lora_ga']
