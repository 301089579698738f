# SPDX-License-Identifier: Apache-2.0
"""Decide which packed INT rows the engine can read: those of the vocabulary tables, and those of linear layers.

From the scheme of a module, its row length, and at load time the width of the tensor in the checkpoint. There are two
ways to put n-bit values into 32-bit words, and for 2, 4 and 8 bits they are the same:

    dense   value i at bits n*i of one bit stream, low bits first: ceil(length * n / 32) words a row
    padded  32 // n values a word, the rest of each word zero:      ceil(length / (32 // n)) words a row

vLLM's linear layers (lm_head is one) read dense rows, its embedding kernel reads padded rows of a length that 32 // n
divides, and the compressed-tensors library up to 0.17 writes padded rows. A row of 2560 6-bit values is 480 words dense
and 512 padded. Rules, in order:

1. An embedding whose rows do not fill whole words, or whose groups do not divide its rows, is refused when the model is
   built.
2. A row of another width than what reads it expects is refused when it is loaded, by name and with both widths;
   upstream's own check is an assertion without a name.
3. Everything else is upstream's: loading, sharding and the kernels.

Only compressed-tensors reaches the vocabulary tables: other formats keep what they had before, no scheme at all.
Errors are ValueError, one line, beginning with `flashnext:`, with the fix at the end.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_embedding import (
    CompressedTensorsEmbeddingWNA16Int,
)

SAME_BOTH_WAYS = (2, 4, 8)


def dense_words(length: int, num_bits: int) -> int:
    """32-bit words in a row of `length` values, one bit stream."""
    return -(-length * num_bits // 32)


def padded_words(length: int, num_bits: int) -> int:
    """32-bit words in a row of `length` values, 32 // num_bits of them in each word."""
    return -(-length // (32 // num_bits))


def scheme_source(quant_config: Any | None) -> Any | None:
    """The quantization config that embed_tokens and lm_head get: compressed-tensors, or None as upstream has it."""
    return quant_config if quant_config is not None and quant_config.get_name() == "compressed-tensors" else None


class NamedEmbeddingWNA16(CompressedTensorsEmbeddingWNA16Int):
    """Upstream's embedding method, which refuses by name what it would misread (rules 1 and 2)."""

    def __init__(self, layer: nn.Module, weight_quant: Any, prefix: str) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        super().__init__(weight_quant)
        self.prefix = prefix
        if isinstance(layer, ParallelLMHead):
            # Upstream lands here when no linear scheme could be made for a head, and fails at the first token.
            raise ValueError(
                f"flashnext: {prefix} has a scheme that vLLM has no linear layer for (INT{self.num_bits}). "
                "Fix: quantize it to symmetric INT4, INT6 or INT8, or leave it in BF16"
            )

    def create_weights(self, layer: nn.Module, input_size_per_partition: int, *args: Any, **kwargs: Any) -> None:
        length = input_size_per_partition
        if length % self.pack_factor:
            raise ValueError(
                f"flashnext: {self.prefix} is quantized to {self.num_bits} bits; its rows of {length} values do not fill "
                f"32-bit words of {self.pack_factor} values, and the embedding kernel reads nothing else. "
                f"Fix: quantize {self.prefix} to 8 or 4 bits, or leave it in BF16"
            )
        if self.is_group and length % self.group_size:
            raise ValueError(
                f"flashnext: {self.prefix}: group size {self.group_size} does not divide its rows of {length} values. "
                f"Fix: quantize {self.prefix} per channel or with a group size that divides {length}"
            )
        kwargs["weight_loader"] = _checked(
            kwargs["weight_loader"], self.prefix, self.num_bits, length, padded_words(length, self.num_bits)
        )
        super().create_weights(layer, input_size_per_partition, *args, **kwargs)


def dense_rows_only(
    weight_loader: Callable[..., Any], num_bits: int, length: int, layer_name: str | None
) -> Callable[..., Any]:
    """`weight_loader` of a packed linear with `length` values a row, with rule 2."""
    return _checked(weight_loader, layer_name or "a linear layer", num_bits, length, dense_words(length, num_bits))


def _checked(
    weight_loader: Callable[..., Any], name: str, num_bits: int, length: int, words: int
) -> Callable[..., Any]:
    @functools.wraps(weight_loader)
    def load(param: torch.Tensor, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # packed_dim is 1 for the codes, 0 for zero points, and not there for scales and shapes.
        if getattr(param, "packed_dim", None) == 1 and loaded_weight.shape[1] != words:
            raise ValueError(
                f"flashnext: {name}: a row of {length} {num_bits}-bit values is {loaded_weight.shape[1]} words in the "
                f"checkpoint ({_layout(length, num_bits, loaded_weight.shape[1])}), and vLLM reads {words} "
                f"({_layout(length, num_bits, words)}). Fix: {_fix(name, num_bits, length, loaded_weight.shape[1], words)}"
            )
        return weight_loader(param, loaded_weight, *args, **kwargs)

    return load


def _layout(length: int, num_bits: int, words: int) -> str:
    if num_bits in SAME_BOTH_WAYS:
        bits, rest = divmod(words * 32, length)
        return f"{bits} bits each" if rest == 0 else "another length"
    names = {padded_words(length, num_bits): "padded words", dense_words(length, num_bits): "a dense bit stream"}
    return names.get(words, "another length or number of bits")


def _fix(name: str, num_bits: int, length: int, found: int, words: int) -> str:
    if found not in (padded_words(length, num_bits), dense_words(length, num_bits)):
        return f"let quantization_config in config.json give {name} the scheme that its tensors were quantized with"
    if words == dense_words(length, num_bits):
        return "pack these rows as one bit stream, or quantize them to 8 bits"
    return f"quantize {name} to 8 bits, or leave it in BF16"
