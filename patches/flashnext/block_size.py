# SPDX-License-Identifier: Apache-2.0
"""Decide the block size while K/V of the QSA layers live in host memory, from the model's config and the partition.

vLLM aligns the attention block of a hybrid model so that one layer's K/V page is as large as a state page, and asks the backend
of the first attention layer, with a probe of one token, what a token takes. Here that backend is the one of QSA's index caches.
What a token really takes on the card then is 2 bytes for its slot in the block tables and its share of a pooled key, once per
QSA layer; the layers of a stage lie side by side in a block. So the answer to the probe is that sum, for the stage with most QSA
layers, because all stages share one pool of block ids. vLLM's own rule makes the block of it: the smallest multiple of 16 tokens
whose page is at least a state page. 16,16,16 layers of the published model: 4 x 66 bytes, 12,160 tokens, a page of 3,210,240.

Rules of `state_backend`: no host K/V, upstream's class; else a subclass that differs in the answer to that probe only.
"""

import functools
from typing import Any

SLOT_BYTES = 2  # of the placeholder that keeps the block tables: one bf16
MULTIPLE = 16  # vLLM's default block; the block of a hybrid model is a multiple of it


def qsa_layers(vllm_config: Any) -> list[int]:
    """Number of QSA layers on each stage; VLLM_PP_LAYER_PARTITION counts."""
    from vllm.distributed.utils import get_pp_indices

    kinds = vllm_config.model_config.hf_text_config.layer_types
    stages = vllm_config.parallel_config.pipeline_parallel_size
    bounds = [get_pp_indices(len(kinds), stage, stages) for stage in range(stages)]
    return [kinds[begin:end].count("full_attention") for begin, end in bounds]


def card_bytes(vllm_config: Any) -> int:
    """Bytes per token and QSA layer that stay on the card: the slot and the token's share of a pooled key."""
    text = vllm_config.model_config.hf_text_config
    item = 1 if vllm_config.attention_config.resolve_indexer_kv_dtype("bf16") == "fp8" else 2
    return SLOT_BYTES + -(-text.indexer_head_dim * item // text.indexer_compress_ratio)


def state_page_bytes(vllm_config: Any) -> int:
    """Bytes of the largest state that a layer keeps per request, as vLLM's alignment takes it."""
    from vllm.model_executor.models import ModelRegistry

    model = vllm_config.model_config
    cls, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    return max(spec.page_size_bytes for spec in cls.get_mamba_specs_from_config(vllm_config))


def computed(vllm_config: Any) -> int:
    """Tokens of a block with host K/V."""
    token = max(qsa_layers(vllm_config)) * card_bytes(vllm_config)
    return MULTIPLE * -(-state_page_bytes(vllm_config) // (MULTIPLE * token))


def state_backend(vllm_config: Any, stock: type, host_rows: bool) -> type:
    """The backend class of QSA's index caches."""
    return _probed(stock, max(qsa_layers(vllm_config)) * card_bytes(vllm_config)) if host_rows else stock


@functools.cache
def _probed(stock: type, token_bytes: int) -> type:
    from dataclasses import replace

    from vllm.v1.kv_cache_interface import FullAttentionSpec

    class HostRowsStateBackend(stock):
        @classmethod
        def customize_spec(cls, spec):
            # The caches themselves have specs of other types, and no layer has a block of one token.
            if type(spec) is FullAttentionSpec and spec.block_size == 1:
                return replace(spec, num_head_slots=1, state_content_bytes=token_bytes)
            return super().customize_spec(spec)

    return HostRowsStateBackend
