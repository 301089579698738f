# SPDX-License-Identifier: Apache-2.0
"""Decides whether a pipeline partition may carry the N-gram table, from the layer ids and vLLM's own partition.

Only the first stage gets the raw token ids that the table is looked up with, so every layer that reads the table must
live there. vLLM 0.30.0 refuses any pipeline instead, in two places; both ask here now. Rule order:
1. No table layer, or one stage: allowed.
2. Every table layer on the first stage: allowed.
3. Otherwise refused, naming the first layer that is elsewhere, its stage, and a partition that would do.

`ple_layer_ids` count layers from 1; everything else here counts layers from 0 and stages from 0.
"""

from collections.abc import Sequence
from typing import Any


def why_table_cannot_be_split(text_config: Any, parallel_config: Any) -> str | None:
    """None if allowed, else one or two sentences for the user.

    Reads `ple_layer_ids` and `num_hidden_layers`, and `pipeline_parallel_size`. The partition comes from vLLM, so
    VLLM_PP_LAYER_PARTITION counts; raises vLLM's ValueError when that does not fit the model.
    """
    stages = parallel_config.pipeline_parallel_size
    if not text_config.ple_layer_ids or stages == 1:
        return None
    # vllm.distributed imports much of vllm; by the time a model is checked, all of that is loaded.
    from vllm.distributed.utils import get_pp_indices

    ranges = [get_pp_indices(text_config.num_hidden_layers, stage, stages) for stage in range(stages)]
    return why_not(text_config.ple_layer_ids, ranges)


def why_not(table_layer_ids: Sequence[int], stage_ranges: Sequence[tuple[int, int]]) -> str | None:
    """None if every table layer (ids from 1) lies in the first of `stage_ranges` ([begin, end), from 0)."""
    begin, end = stage_ranges[0]
    outside = [layer_id for layer_id in sorted(table_layer_ids) if not begin <= layer_id - 1 < end]
    if not outside:
        return None
    stage = next(k for k, (b, e) in enumerate(stage_ranges) if b <= outside[0] - 1 < e)
    reason = (
        f"The table is read by layer {outside[0]} (counted from 1), which is on stage {stage + 1} of "
        f"{len(stage_ranges)}; the first stage has layers {begin + 1}-{end} only."
        if end > begin
        else f"The table is read by layer {outside[0]} (counted from 1), and the first stage has no layers."
    )
    fit = partition_with_first(max(table_layer_ids), [e - b for b, e in stage_ranges])
    if fit is None:
        return f"{reason} No partition into {len(stage_ranges)} stages holds layer {max(table_layer_ids)} on the first."
    return f"{reason} VLLM_PP_LAYER_PARTITION={','.join(map(str, fit))} would do."


def partition_with_first(first: int, sizes: Sequence[int]) -> list[int] | None:
    """Stage sizes like `sizes`, but with `first` layers on the first stage and the rest spread evenly; None if a
    stage would be left without a layer. Of the other stages the earlier ones get the layers that do not divide."""
    rest, others = sum(sizes) - first, len(sizes) - 1
    if rest < others:
        return None
    return [first, *(rest // others + (stage < rest % others) for stage in range(others))]
