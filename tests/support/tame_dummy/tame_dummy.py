"""Test only: dummy weights that stay finite in a quantized model of full depth.

vLLM fills floating-point parameters with values within 1e-3, which is meant to keep a model finite, and leaves packed integers as
the allocator gave them. For a quantized matrix that 1e-3 is the scale: its values reach 128 times as far, hyper-connections of
48 layers multiply up to infinity, the sampler draws a token that does not exist, and the next step's embedding reads outside its
table. Here a scale is so small that the dequantized values lie within the same 1e-3, and packed words are random.
"""


def register() -> None:
    import torch
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.model_executor.parameter import ChannelQuantScaleParameter, GroupQuantScaleParameter, PackedvLLMParameter

    plain = dummy_loader.initialize_single_dummy_weight

    def tame(param: torch.Tensor, *args, **kwargs) -> None:
        if isinstance(param, (ChannelQuantScaleParameter, GroupQuantScaleParameter)):
            with torch.no_grad():
                param.uniform_(-1e-3 / 128, 1e-3 / 128)
        elif isinstance(param, PackedvLLMParameter):
            with torch.no_grad():
                param.random_(-(2**31), 2**31 - 1)
        else:
            plain(param, *args, **kwargs)

    dummy_loader.initialize_single_dummy_weight = tame
