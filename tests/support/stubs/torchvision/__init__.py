"""A stand-in for torchvision that can be imported and does nothing.

vLLM's Qwen3-VL code, which the text model's classes sit beside, imports transformers' Qwen2-VL image processor, and that
imports `torchvision.transforms.v2.functional` without asking whether it is there. There is no torchvision wheel that goes
with the CPU build of torch 2.13 on the package index that the tests may use, and no test looks at an image. Names that
imports ask for exist; calling anything fails.
"""

__version__ = "0.0.0"
