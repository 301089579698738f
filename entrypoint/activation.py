"""The peak of one step on a card, from the rows of the step (max_num_batched_tokens) and the longest context. No decision here.

Lines, each a buffer that is alive at the same time as the others in a long prefill:
- rows: the residual streams (all `hc_count` of them, three copies: before, mixed, after) and the widest of what one layer makes of
  them: recurrent attention (projections, convolved copy, chunk buffers and chunk states of the FLA kernels), experts
  (Marlin's two buffers of every chosen expert) or sparse attention (queries, gates, output).
- indexer logits: rows x context / ratio x 4 B, cut at VLLM_SPARSE_INDEXER_MAX_LOGITS_MB.
- selected rows: what the indexer chose, as blocks and as tokens, and with the host pool their sorted copy and what sorting takes.
- with the host pool: the arena (whole blocks of K/V) and the running softmax of a section (accumulator, maximum, sum in float32).
  These and the sorting are section_prefill.buffer_bytes (patches/flashnext), to the byte.
- fixed: what of the article's measured 0.53 GiB the lines above do not explain at its settings (rules.yaml).

vLLM's own profile run sees rows and fixed only, because it skips sparse attention: that is why its figure was half of the peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from .budget import BF16_BYTES, FP32_BYTES, Shapes, cdiv

_COPIES = 3
_CHUNK = 64  # rows of a chunk in the FLA kernels of linear attention
_INT32_BYTES, _INT64_BYTES = 4, 8
_SORT_ROWS, _FLAG_BYTES = 128, 1 << 16  # section prefill sorts so many rows at a time, and has so many flags


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step's peak depends on. `rows` and `context` in tokens; `arena_bytes` 0 where K/V stay on the cards."""

    rows: int
    context: int
    logits_limit_bytes: int
    arena_bytes: int = 0


def row_bytes(s: Shapes) -> int:
    """Bytes of one row of a step: residual streams, and the widest layer."""
    residual = _COPIES * s.hidden * s.hc_count * BF16_BYTES
    value = s.linear_num_value_heads * s.linear_value_head_dim
    convolved = 2 * s.linear_num_key_heads * s.linear_key_head_dim + value
    linear = (
        (2 * convolved + value) * BF16_BYTES  # q, k, v before and after the convolution, z
        + 4 * value * BF16_BYTES  # w, u, new values, output
        + s.linear_num_value_heads * _CHUNK * (FP32_BYTES + BF16_BYTES)  # the chunk's matrix and its inverse
        + value * s.linear_key_head_dim * BF16_BYTES // _CHUNK  # the state at each chunk's start
    )
    inner, chosen = s.moe_inner, s.experts_per_token
    experts = chosen * (max(2 * inner, s.hidden) + inner) * BF16_BYTES + s.experts * FP32_BYTES
    attention = 4 * s.attention_heads * s.head_dim * BF16_BYTES
    return residual + max(linear, experts, attention)


def logits_bytes(s: Shapes, step: Step) -> int:
    """Indexer scores of the step's rows, cut at the limit, one row at least."""
    row = cdiv(step.context, s.indexer_compress_ratio) * FP32_BYTES
    return max(row, min(step.rows * row, step.logits_limit_bytes))


def lines(s: Shapes, step: Step, fixed_bytes: int) -> dict[str, int]:
    """Bytes by line, in the order of the module's docstring."""
    width = s.indexer_budget + s.indexer_compress_ratio - 1
    chosen = step.rows * (s.indexer_budget // s.indexer_compress_ratio + width + 1) * _INT32_BYTES
    out = {
        "rows of a step": step.rows * row_bytes(s),
        "indexer logits": logits_bytes(s, step),
        "selected rows": chosen,
    }
    if step.arena_bytes:
        sorting = min(step.rows, _SORT_ROWS) * width * (_INT32_BYTES + _INT64_BYTES)
        out["selected rows"] += step.rows * width * _INT32_BYTES + sorting + _FLAG_BYTES
        out["section arena"] = step.arena_bytes
        out["section state"] = step.rows * s.attention_heads * (s.head_dim + 2) * FP32_BYTES
    out["workspaces of kernels and sampler"] = fixed_bytes
    return out


def peak_bytes(s: Shapes, step: Step, fixed_bytes: int) -> int:
    return sum(lines(s, step, fixed_bytes).values())
