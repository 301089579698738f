"""Patch 0007: embed_tokens, lm_head and the vision tower on the stages that use them, nowhere else.

vLLM's own model classes with the real vocabulary (248320 x 2560) and four layers, one build per stage on the `meta`
device, on the untouched and on the patched tree; the loader runs on each stage with the tensors of a checkpoint.
"""

import pytest

PROGRAM = """
import json, os
from pathlib import Path
import torch
import engine_modules as em
import kv_specs
from vllm.model_executor.models.utils import PPMissingLayer, StageMissingLayer

em.with_humming()
SMALL = kv_specs.MODEL | {"num_hidden_layers": 4, "layer_types": kv_specs.MODEL["layer_types"][:4], "num_experts": 16,
                          "ngram_vocab_size_base": 2000}
TEXT = {k: v for k, v in SMALL.items() if k != "architectures"} | {
    "rope_parameters": SMALL["rope_parameters"] | {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}}
VISION = {"deepstack_visual_indexes": [], "depth": 1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 64,
          "in_channels": 3, "intermediate_size": 128, "model_type": "qwen4_exp", "num_heads": 2,
          "num_position_embeddings": 16, "out_hidden_size": 2560, "patch_size": 16, "spatial_merge_size": 2,
          "temporal_patch_size": 2}
WRAPPER = {"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "dtype": "bfloat16",
           "image_token_id": 248045, "video_token_id": 248046, "vision_start_token_id": 248047,
           "vision_end_token_id": 248048, "text_config": TEXT, "tie_word_embeddings": False, "vision_config": VISION}
INT8 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [], "config_groups": {"group_0": {
    "targets": ["re:.*embed_tokens$", "re:.*lm_head$"], "input_activations": None, "format": "pack-quantized",
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "group",
                "group_size": 128}}}}


def there(module):
    return not isinstance(module, (PPMissingLayer, StageMissingLayer))


def stage_of(config, stage):
    model = kv_specs.build_model(config, stage)
    language = getattr(model, "language_model", model)
    path = "model.language_model." if model is not language else "model."
    vocabulary = torch.zeros(1).expand(248320, 2560)
    checkpoint = {path + "embed_tokens.weight": vocabulary, "lm_head.weight": vocabulary,
                  path + "hyper_connection_mixer.hc_norm.weight": torch.zeros(10240)}
    if model is not language:
        checkpoint["model.visual.patch_embed.proj.bias"] = torch.zeros(64)
    quantized = hasattr(language.lm_head, "weight_packed") or hasattr(language.model.embed_tokens, "weight_packed")
    return {
        "embed_tokens": there(language.model.embed_tokens), "lm_head": there(language.lm_head),
        "visual": None if model is language else there(model.visual),
        "loaded": None if quantized else sorted(model.load_weights(checkpoint.items())),
        "vocabulary_bytes": sum(p.numel() * p.element_size() for n, p in model.named_parameters()
                                if "embed_tokens" in n or "lm_head" in n),
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }


CASES = {
    "one stage": dict(stages=1), "two stages": dict(stages=2), "three stages": dict(stages=3),
    "three stages, INT8": dict(stages=3, model=SMALL | {"quantization_config": INT8}),
    "tied": dict(stages=2, model=SMALL | {"tie_word_embeddings": True}),
    "drafts": dict(stages=2, speculative_config={"method": "ngram", "num_speculative_tokens": 2,
                                                 "prompt_lookup_max": 2}),
    "images": dict(stages=2, model=WRAPPER, language_model_only=False),
    "images, text only": dict(stages=2, model=WRAPPER),
}
out = {}
for name, case in CASES.items():
    try:
        config = kv_specs.engine_config(Path(os.getcwd()) / "model", **({"model": SMALL} | case))
        out[name] = [stage_of(config, stage) for stage in range(case["stages"])]
    except Exception as error:
        out[name] = {"refused": type(error).__name__, "message": str(error)}
print(json.dumps(out))
"""

TABLE_BYTES = 248_320 * 2560 * 2
TABLE_INT8_BYTES = 248_320 * (2560 + 20 * 2) + 16  # codes, a BF16 scale for each group of 128, weight_shape


@pytest.fixture(scope="module")
def patched(run_patched):
    return run_patched(PROGRAM, card86=True).value


@pytest.fixture(scope="module")
def pristine(run_pristine):
    return run_pristine(PROGRAM, card86=True).value


def column(case: list[dict], key: str) -> list:
    return [stage[key] for stage in case]


@pytest.mark.parametrize(
    "case, embed_tokens, lm_head",
    [
        ("one stage", [True], [True]),
        ("two stages", [True, False], [False, True]),
        ("three stages", [True, False, False], [False, False, True]),
        ("three stages, INT8", [True, False, False], [False, False, True]),
        ("images", [True, False], [False, True]),
        ("images, text only", [True, False], [False, True]),
        ("tied", [True, True], [True, True]),
        ("drafts", [True, True], [True, True]),
    ],
)
def test_who_has_the_vocabulary(patched, case, embed_tokens, lm_head):
    assert column(patched[case], "embed_tokens") == embed_tokens
    assert column(patched[case], "lm_head") == lm_head


def test_untouched_tree_has_both_everywhere(pristine):
    for case in ("two stages", "three stages", "images", "images, text only"):
        assert all(column(pristine[case], "embed_tokens")), case
        assert all(column(pristine[case], "lm_head")), case


@pytest.mark.parametrize("case", ["one stage", "tied", "drafts"])
def test_same_as_before(patched, pristine, case):
    assert patched[case] == pristine[case]


@pytest.mark.parametrize("case, expected", [("images", [True, False]), ("images, text only", [False, False])])
def test_vision_tower(patched, pristine, case, expected):
    assert column(patched[case], "visual") == expected
    assert column(pristine[case], "visual") == [expected[0]] * 2, "upstream's own flag leaves it out of every stage"


def test_loader_gives_each_stage_what_it_has(patched, pristine):
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    norm = "model.hyper_connection_mixer.hc_norm.weight"
    assert column(patched["three stages"], "loaded") == [[embed], [], [head, norm]]
    assert column(pristine["three stages"], "loaded") == [[head, embed], [head, embed], [head, embed, norm]]
    tower = "visual.patch_embed.proj.bias"
    assert [tower in loaded for loaded in column(patched["images"], "loaded")] == [True, False]


def test_bytes_saved_on_three_stages(patched, pristine):
    saved = [
        before["weight_bytes"] - after["weight_bytes"]
        for before, after in zip(pristine["three stages"], patched["three stages"], strict=True)
    ]
    assert saved == [TABLE_BYTES, 2 * TABLE_BYTES, TABLE_BYTES]
    assert column(patched["three stages, INT8"], "vocabulary_bytes") == [TABLE_INT8_BYTES, 0, TABLE_INT8_BYTES]
