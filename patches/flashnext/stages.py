# SPDX-License-Identifier: Apache-2.0
"""Decide which pipeline stage builds embed_tokens, lm_head and the vision tower.

From the stage's place and from what else may want these modules. Upstream builds all three on every stage of this
architecture, and only the first stage ever looks a token up or sees an image, and only the last makes logits. Each of
the two tables is vocab_size * hidden_size values (248320 * 2560: 1.18 GiB in BF16, 0.61 GiB in INT8 g128). Rules:

1. Speculative decoding: everything everywhere, as upstream; a draft head on the last stage shares the target's
   embeddings and head.
2. Tied word embeddings: embed_tokens and lm_head everywhere, as upstream; each is a copy of the other.
3. Otherwise embed_tokens and the vision tower on the first stage, lm_head on the last.

A stage without a module gets vLLM's placeholder for it, which the weight loader skips. The vision tower is also left
out of every stage by `--language-model-only`, which is upstream's own rule and stays.
"""

from typing import Any

from vllm.distributed import get_pp_group
from vllm.model_executor.models.utils import PPMissingLayer

__all__ = ["PPMissingLayer", "has_embed_tokens", "has_lm_head", "has_vision_tower"]


def _is_everywhere(vllm_config: Any) -> bool:
    tied = getattr(vllm_config.model_config.hf_text_config, "tie_word_embeddings", False)
    return vllm_config.speculative_config is not None or bool(tied)


def has_embed_tokens(vllm_config: Any) -> bool:
    """Whether this stage builds the token embeddings."""
    return get_pp_group().is_first_rank or _is_everywhere(vllm_config)


def has_lm_head(vllm_config: Any) -> bool:
    """Whether this stage builds the head."""
    return get_pp_group().is_last_rank or _is_everywhere(vllm_config)


def has_vision_tower(vllm_config: Any) -> bool:
    """Whether this stage builds the vision tower (unless --language-model-only leaves it out altogether)."""
    return get_pp_group().is_first_rank or vllm_config.speculative_config is not None
