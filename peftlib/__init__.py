from peftlib.config import LoraConfig
from peftlib.injection import inject, with_dropout
from peftlib.quantization import quantize_base, dequantize_base
