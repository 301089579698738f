"""The KV cache specs of the real 48-layer model on every stage of a pipeline, taken from vLLM's own model classes.

Import this in a process whose path has tests/support, card86 and (where there is no torchvision) stubs, so that vLLM
believes in an 8.6 card; the `run_*` fixtures of tests/engine do that with `card86=True`. The model is built on the
`meta` device once per stage, so nothing is allocated; each layer registers its caches itself, in its own order, and
vLLM's platform code picks the block size. One build of 48 layers takes seconds; `specs_of_stages` does one per stage.

    config = engine_config(folder, stages=3, kv_cache_bytes=400_000_000, max_model_len=1_048_576)
    stages = specs_of_stages(config)                          # [{layer name: KVCacheSpec}, ...]
    plans = kv_cache_configs(config, stages, 400_000_000)     # [KVCacheConfig, ...], vLLM's get_kv_cache_configs
    allocate(config, plans[0])                                # vLLM's allocate_kv_cache on `meta`

The config is made for one stage and the number of stages is set afterwards, because a tree without the series refuses
any pipeline when the config is made; what a pipeline changes in it (`world_size`) is set with it.
"""

import contextlib
import json
import tempfile
from pathlib import Path

MODEL = {
    "architectures": ["Qwen4ExpForCausalLM"],
    "model_type": "qwen4_exp_text",
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "intermediate_size": 640,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "indexer_head_dim": 128,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "vocab_size": 248_320,
    "max_position_embeddings": 1_048_576,
    "hc_count": 4,
    "hc_lowrank": 320,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": 248_044,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "attn_output_gate": True,
    "output_gate_type": "sigmoid",
    "mamba_ssm_dtype": "float32",
}


def engine_config(
    folder: Path,
    *,
    stages: int = 1,
    kv_cache_bytes: int | None = None,
    max_model_len: int = 262_144,
    max_num_seqs: int = 4,
    model: dict | None = None,
    **engine_args,
):
    """vLLM's VllmConfig for the 48-layer model (or `model`), whose config.json is written to `folder`."""
    from vllm.engine.arg_utils import EngineArgs

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model or MODEL), encoding="utf-8")
    settings = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        "language_model_only": True,
        "kv_cache_memory_bytes": kv_cache_bytes,
        "engram_config": {"cpu_offload": False},  # else 95 GiB of pinned memory is asked for, which is not `meta`
    }
    args = EngineArgs(
        model=str(folder), max_model_len=max_model_len, max_num_seqs=max_num_seqs, **(settings | engine_args)
    )
    config = args.create_engine_config()
    set_stages(config, stages)
    return config


def set_stages(config, stages: int) -> None:
    """Make `config` one of a pipeline of `stages`; it can be used again for another number of them."""
    config.parallel_config.pipeline_parallel_size = stages
    config.parallel_config.world_size = stages * config.parallel_config.tensor_parallel_size


@contextlib.contextmanager
def _as_stage(stage: int, stages: int):
    """vLLM's process groups of one process, whose pipeline group says it is number `stage` of `stages`."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
    group = parallel_state.get_pp_group()
    was = group.ranks, group.world_size, group.rank, group.rank_in_group
    group.ranks, group.world_size, group.rank, group.rank_in_group = list(range(stages)), stages, stage, stage
    try:
        yield
    finally:
        group.ranks, group.world_size, group.rank, group.rank_in_group = was


def build_model(config, stage: int):
    """The real model class of one stage on the `meta` device; its layers register themselves in `config`."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config.compilation_config.static_forward_context.clear()
    with (
        set_current_vllm_config(config),
        _as_stage(stage, config.parallel_config.pipeline_parallel_size),
        set_default_torch_dtype(torch.bfloat16),
        torch.device("meta"),
    ):
        return initialize_model(config)


def specs_of_stages(config) -> list[dict]:
    """[{layer name: KVCacheSpec} for each stage], with the block size that each stage's worker would settle on.

    Also settles the KV cache layout in `config`, as EngineCore does from what the workers report.
    """
    from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    cache = config.cache_config
    asked = cache.block_size if cache.user_specified_block_size else cache.DEFAULT_BLOCK_SIZE
    stages, layouts = [], []
    for stage in range(config.parallel_config.pipeline_parallel_size):
        cache.block_size, cache.mamba_page_size_padded = asked, None  # each worker starts from the settings
        build_model(config, stage)
        with set_current_vllm_config(config):
            current_platform.update_block_size_for_backend(config)
            stages.append(get_kv_cache_spec(config))
            layers = get_layers_from_vllm_config(config, AttentionLayerBase)
            backends = [layer.get_attn_backend() for layer in layers.values()]
            layouts.append([layout.name for layout in get_supported_kv_cache_layouts(backends)])
    resolve_kv_cache_layout(config, layouts, [spec for specs in stages for spec in specs.values()])
    return stages


def with_host_rows(specs: dict) -> dict:
    """The same specs with 2 bytes per token left of each K/V row, as when K/V live in host memory."""
    from dataclasses import replace

    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return {
        name: replace(spec, num_head_slots=1, state_content_bytes=2) if type(spec) is FullAttentionSpec else spec
        for name, spec in specs.items()
    }


def kv_cache_configs(config, stages: list[dict], available_bytes: int) -> list:
    """vLLM's plan for each stage, as EngineCore makes it from `available_bytes` per stage."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(config)
    # The planner edits what it is given (a group's specs can be widened), so each call gets its own.
    return get_kv_cache_configs(config, [dict(specs) for specs in stages], [available_bytes] * len(stages))


def allocate(config, plan) -> dict:
    """{layer name: tensor on `meta`}: vLLM's allocate_kv_cache for one stage's plan."""
    import torch
    from vllm.v1.worker.utils import allocate_kv_cache

    return allocate_kv_cache(plan, torch.device("meta"), config.cache_config.get_resolved_kv_cache_layout())
