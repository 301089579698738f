"""`pil_to_tensor` is imported by name in transformers' image utilities."""


def pil_to_tensor(picture):
    raise NotImplementedError("this is a stand-in for torchvision: see tests/support/stubs/torchvision/__init__.py")
