# SPDX-License-Identifier: Apache-2.0
"""Decide how much memory the scores of the sparse-attention indexer get, and hold it from the start.

A prefill step scores its rows against every fourth token of the context: rows x context / 4 x 4 bytes, taken in pieces of
VLLM_SPARSE_INDEXER_MAX_LOGITS_MB at most. Upstream allocates each piece anew, so the allocator's memory grows with the longest
context seen, 60 MiB between 4,096 and 131,072 tokens, long after the engine has measured what it needs (and near 1 GiB without
expandable segments, since no freed piece is large enough for the next). Here one buffer of the largest piece there can be is
made with the model, counts as the model's, and serves all layers: a piece is used up before the next is computed, on one stream.
"""

import weakref
from typing import Any

import torch

_FP32_BYTES = 4
_ALIGNED = 64
"""Columns are rounded up to so many, as upstream rounds them for its top-k kernel."""
_buffers: weakref.WeakValueDictionary[torch.device, torch.Tensor] = weakref.WeakValueDictionary()


def most_bytes(rows: int, context: int, compress_ratio: int, limit_bytes: int) -> int:
    """The largest piece of a step of `rows` rows in a context of `context` tokens, one row at least."""
    row = -(-context // (compress_ratio * _ALIGNED)) * _ALIGNED * _FP32_BYTES
    return max(row, min(rows * row, limit_bytes // row * row))


def reserve(vllm_config: Any, compress_ratio: int) -> torch.Tensor:
    """The buffer of the device that the model is being built on. It lasts as long as somebody keeps what this returns."""
    from vllm import envs

    device = torch.empty(0).device
    buffer = _buffers.get(device)
    nbytes = most_bytes(
        vllm_config.scheduler_config.max_num_batched_tokens,
        vllm_config.model_config.max_model_len,
        compress_ratio,
        envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20,
    )
    if buffer is None or buffer.nbytes < nbytes:
        buffer = torch.empty(nbytes // _FP32_BYTES, dtype=torch.float32, device=device)
        _buffers[device] = buffer
    return buffer


def take(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """float32 [rows, columns], contiguous, not set; good until the next call. Memory of its own where nothing fits."""
    buffer = _buffers.get(device)
    if buffer is None or buffer.numel() < rows * columns:
        return torch.empty((rows, columns), dtype=torch.float32, device=device)
    return buffer[: rows * columns].view(rows, columns)
