"""What transformers calls `tvF`; only its enumeration is named at import time."""

from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
