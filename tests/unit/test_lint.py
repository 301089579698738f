"""The lint of a checkpoint: one mistake each, made in a header-only checkpoint that is right but for it."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from entrypoint import architecture, lint, terminal
from entrypoint.checkpoint import TextConfig, read_checkpoint, without_gc
from entrypoint.errors import Exit, Refusal
from tests.support import published_form as form

L = "model.language_model.layers."


def examined(folder, deep=None):
    return lint.examine(read_checkpoint(folder), deep)


def messages(report):
    return [f"{f.verdict} {f.check}: {f.message}" for f in report.findings]


@pytest.mark.parametrize("wrapper", [True, False])
def test_right_checkpoint_has_no_findings(tmp_path, wrapper):
    report = examined(form.write(tmp_path / "m", wrapper=wrapper))
    assert messages(report) == []
    rows = {(row.name, row.form): (row.count, row.config) for row in report.rows}
    where = "language_model." if wrapper else ""
    assert rows["model." + where + "layers.*.mlp.experts.*.gate_proj", "INT4 g128"] == (32, "INT4 g128")
    assert rows["lm_head", "INT8 g128"] == (1, "INT8 g128")


def test_table_of_the_published_model_follows_from_its_numbers():
    text = TextConfig(
        ngram_size=3,
        heads_per_ngram=8,
        ngram_vocab_size_base=20_000_000,
        make_ngram_vocab_size_divisible_by=128,
        ple_embed_dim=2560,
    )
    assert architecture.table_shape(text) == (320_001_536, 160)


def _drop(*names):
    def change(tensors, config):
        for name in names:
            del tensors[name]

    return change


def _set(name, dtype, shape):
    def change(tensors, config):
        tensors[name] = (dtype, shape)

    return change


def _targets(group, targets):
    def change(tensors, config):
        config["quantization_config"]["config_groups"][group]["targets"] = targets

    return change


def _weights(group, **args):
    def change(tensors, config):
        config["quantization_config"]["config_groups"][group]["weights"].update(args)

    return change


def _all_linear(tensors, config):
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = ["Linear"]


def _k_proj_int4(tensors, config):
    for layer in (3,):
        tensors[f"{L}{layer}.self_attn.k_proj.weight_packed"] = ("I32", (512, 320))


def _two_groups_of_320(tensors, config):
    tensors[f"{L}0.attn_hyper_connection.input_mix_weight_up.weight_scale"] = ("BF16", (10_240, 3))


def _experts_in_one(tensors, config, shape=(8, 1280, 2560), keep_group=False):
    """The experts of each decoder layer as transformers may save them: two 3-D tensors, not quantized."""
    for name in [n for n in tensors if ".experts." in n and n.startswith(L)]:
        del tensors[name]
    for layer in range(4):
        tensors[f"{L}{layer}.mlp.experts.gate_up_proj"] = ("BF16", shape)
        tensors[f"{L}{layer}.mlp.experts.down_proj"] = ("BF16", (8, 2560, 640))
    if not keep_group:
        del config["quantization_config"]["config_groups"]["group_0"]


WRONG = {
    "a weight is missing": (
        _drop(f"{L}2.mlp.gate.weight"),
        r"ERROR names: weights are missing: model\.language_model\.layers\.2\.mlp\.gate$",
    ),
    "an expert is missing": (
        _drop(*(f"{L}1.mlp.experts.7.up_proj.weight_{end}" for end in ("packed", "scale", "shape"))),
        r"ERROR names: weights are missing: .*layers\.1\.mlp\.experts\.7\.up_proj",
    ),
    "a scale is missing": (
        _drop(f"{L}1.mlp.experts.7.up_proj.weight_scale"),
        r"ERROR names: packed weights lack their weight_scale: .*experts\.7\.up_proj",
    ),
    "a table shard is missing": (
        _drop(f"{L}1.ple.ple_embedding.ngram_embedding.shard_77.weight"),
        r"ERROR table: shards of the n-gram table are missing: .*shard_77",
    ),
    "a table shard is short": (
        _set(f"{L}1.ple.ple_embedding.ngram_embedding.shard_77.weight", "BF16", (131, 160)),
        r"ERROR shapes: of shape \[131, 160\] where config\.json gives \[132, 160\]: .*shard_77",
    ),
    "another model's shape": (
        _set(f"{L}0.linear_attn.norm.weight", "BF16", (64,)),
        r"ERROR shapes: of shape \[64\] where config\.json gives \[128\]",
    ),
    "8-bit floats": (
        _set(f"{L}0.mlp.gate.weight", "F8_E4M3", (8, 2560)),
        r"ERROR dtypes: stored as F8_E4M3, neither a float nor packed integers: .*mlp\.gate",
    ),
    "a tensor too many": (
        _set(f"{L}0.mlp.mystery.weight", "BF16", (8, 8)),
        r"WARN names: tensors that the architecture does not have: .*mystery",
    ),
    "a width that no packing gives": (
        _set(f"{L}0.linear_attn.out_proj.weight_packed", "I32", (2560, 1000)),
        r"ERROR packing: packed as I32 \[2560, 1000\], which no width of \[2560, 6144\] gives",
    ),
    "6 bits in whole words": (
        _set(f"{L}0.linear_attn.out_proj.weight_packed", "I32", (2560, 1229)),
        r"ERROR packing: 6-bit rows in whole words .*out_proj",
    ),
    "groups that do not divide": (
        _two_groups_of_320,
        r"ERROR group size: 3 scales for 320 inputs: the group size does not divide the row",
    ),
    "zero points": (
        _set(f"{L}0.linear_attn.out_proj.weight_zero_point", "I32", (320, 48)),
        r"ERROR config groups: stored INT8 g128, zero points, but the engine would take it for INT8 g128",
    ),
    "activation order": (
        _set(f"{L}0.linear_attn.out_proj.weight_g_idx", "I32", (6144,)),
        r"ERROR packing: weights in activation order",
    ),
    "merged shards disagree": (
        _k_proj_int4,
        r"ERROR fused shards: merged shards disagree, q_proj INT8 g128, k_proj INT4 g128, v_proj INT8 g128: .*layers\.3\.self_attn$",
    ),
    "one expert in 8 bits": (
        _set(f"{L}0.mlp.experts.3.down_proj.weight_packed", "I32", (2560, 160)),
        r"ERROR fused shards: experts of one layer disagree, 23 x INT4 g128, 1 x INT8 g128: .*layers\.0\.mlp\.experts$",
    ),
    "all groups say Linear": (
        _all_linear,
        r"ERROR config groups: stored INT4 g128, but the engine would take it for INT8 per channel \(group_2\): .* and 93 more",
    ),
    "wrong bits in a group": (
        _weights("group_1", num_bits=6),
        r"ERROR config groups: stored INT8 g128, but the engine would take it for INT6 g128 \(group_1\)",
    ),
    "a target without $ takes more": (
        _targets("group_2", [r"re:.*\.input_mix_weight_", r"re:.*in_proj_b"]),
        r"ERROR config groups: stored BF16, but the engine would take it for INT8 per channel \(group_2\): .*in_proj_b",
    ),
    "targets that overlap": (
        _targets("group_2", [r"re:.*\.input_mix_weight_up$", r"re:.*\.self_attn\.[qk]_proj$"]),
        r"WARN targets: group_1 \(INT8 g128\) and group_2 \(INT8 per channel\) both match, the engine takes the first: "
        r"language_model\.model\.layers\.3\.self_attn\.q_proj, \S*k_proj$",
    ),
    "names that the engine does not have": (
        _targets("group_0", [r"re:model\.language_model\..*experts.*"]),
        r"ERROR config groups: stored INT4 g128, but the engine would take it for not quantized: .*experts\.0\.gate_proj",
    ),
    "a target by layer and expert": (
        _targets("group_0", [r"re:.*\.experts\.[0-6]\..*"]),
        r"ERROR config groups: stored INT4 g128, .* not quantized: \S*experts\.7\.gate_proj, .* and 9 more",
    ),
    "lm_head without re:": (
        _targets("group_1", ["lm_head", *form.quantization()["config_groups"]["group_1"]["targets"][:-1]]),
        r"ERROR config groups: stored INT8 g128, but the engine would take it for not quantized: lm_head$",
    ),
    "packed and not": (
        _set(f"{L}0.linear_attn.out_proj.weight", "BF16", (2560, 6144)),
        r"ERROR names: weights are there twice, packed and not: .*out_proj",
    ),
    "a weight of the draft head is missing": (
        _drop("mtp.fc_hidden.weight"),
        r"WARN names: weights are missing, of a part that text serving does not load: mtp\.fc_hidden$",
    ),
    "a draft head of another form": (
        _set("mtp.fc.weight", "BF16", (2560, 5120)),
        r"WARN names: tensors that the architecture does not have: mtp\.fc\.weight$",
    ),
    "a weight of the vision tower of another shape": (
        _set("model.visual.blocks.26.mlp.linear_fc2.weight", "BF16", (1152, 4303)),
        r"WARN shapes: of shape \[1152, 4303\] where config\.json gives \[1152, 4304\], of a part that text serving "
        r"does not load: model\.visual\.blocks\.26\.mlp\.linear_fc2$",
    ),
    "a bias of the vision tower is missing": (
        _drop("model.visual.merger.norm.bias"),
        r"WARN names: weights are missing, of a part that text serving does not load: model\.visual\.merger\.norm\.bias",
    ),
    "a vision tower without its numbers": (
        lambda tensors, config: config.update(vision_config={"depth": 27}),
        r"WARN names: vision_config does not say 'hidden_size', so that the vision tower's weights cannot be checked",
    ),
    "experts in one tensor, of the other orientation": (
        lambda tensors, config: _experts_in_one(tensors, config, shape=(8, 2560, 1280)),
        r"ERROR shapes: experts in one tensor: of shape \[8, 2560, 1280\] where config\.json gives \[8, 1280, 2560\]: "
        r".*layers\.0\.mlp\.experts\.gate_up_proj",
    ),
    "experts in one tensor, one of the two missing": (
        lambda tensors, config: (_experts_in_one(tensors, config), tensors.pop(f"{L}2.mlp.experts.down_proj")),
        r"ERROR names: experts in one tensor: weights are missing: .*layers\.2\.mlp\.experts\.down_proj$",
    ),
    "experts in one tensor and one by one": (
        lambda tensors, config: (
            _experts_in_one(tensors, config),
            tensors.update({f"{L}0.mlp.experts.0.up_proj.weight": ("BF16", (640, 2560))}),
        ),
        r"WARN names: tensors that the architecture does not have: .*layers\.0\.mlp\.experts\.0\.up_proj\.weight$",
    ),
    "experts in one tensor where the config says INT4": (
        lambda tensors, config: _experts_in_one(tensors, config, keep_group=True),
        r"ERROR config groups: stored BF16, but the engine would take it for INT4 g128 \(group_0\)",
    ),
    "a target that is no expression": (
        _targets("group_2", ["re:("]),
        r"ERROR targets: 're:\(' is no regular expression",
    ),
    "a group that is a list": (
        lambda tensors, config: config["quantization_config"]["config_groups"].update(group_9=[1]),
        r"ERROR config groups: 'group_9' is no group with weights and targets",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_mistake_is_named(tmp_path, name):
    change, expected = WRONG[name]
    found = messages(examined(form.write(tmp_path / "m", change)))
    assert any(re.match(expected, message) for message in found), found


def test_experts_in_one_tensor_are_read(tmp_path):
    report = examined(form.write(tmp_path / "m", _experts_in_one))
    assert messages(report) == []
    rows = {row.name: (row.count, row.shape, row.form) for row in report.rows}
    assert rows["model.language_model.layers.*.mlp.experts.*.up_proj"] == (32, (640, 2560), "BF16")


def test_parts_that_are_not_loaded_may_be_absent_and_extras_that_the_engine_drops_present(tmp_path):
    def change(tensors, config):
        for name in [n for n in tensors if n.startswith(("mtp.", "model.visual."))]:
            del tensors[name]
        tensors["model.language_model.hyper_connection_mixer.block_inject_weight.weight"] = ("BF16", (4, 10_240))

    assert messages(examined(form.write(tmp_path / "m", change))) == []


def test_conflicting_targets_are_one_finding_each(tmp_path):
    found = messages(examined(form.write(tmp_path / "m", _all_linear)))
    assert (
        "ERROR targets: group_0 (INT4 g128) and group_1 (INT8 g128) both target 'Linear': the engine keeps the last only"
        in found
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, ["EOS ids", "sampling"]),
        ({"eos_token_id": 248_044}, ["EOS ids", "sampling"]),
        ({**form.generation(), "eos_token_id": [248_044]}, ["EOS ids"]),
        ({**form.generation(), "top_k": None}, ["sampling"]),
    ],
)
def test_generation_defaults(tmp_path, content, expected):
    report = examined(form.write(tmp_path / "m", generation_config=content))
    assert [f.check for f in report.findings] == expected
    assert {f.verdict for f in report.findings} == {"WARN"} and {f.repair for f in report.findings} == {"generation"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{}", "ERROR tokenizer: tokenizer.json holds no vocabulary"),
        ("not JSON", "ERROR tokenizer: checkpoint file tokenizer.json: it is not valid JSON"),
        (
            '{"model": {"vocab": {"a": 300000}}}',
            "ERROR tokenizer: tokenizer.json has the token 300,000, the model 248,320 rows",
        ),
        ('{"model": {"vocab": {"a": 0}}}', "WARN EOS ids: the tokenizer has no token [248044, 248046]"),
    ],
)
def test_tokenizer(tmp_path, content, expected):
    folder = form.write(tmp_path / "m")
    (folder / "tokenizer.json").write_text(content)
    assert any(message.startswith(expected) for message in messages(examined(folder)))


@pytest.mark.parametrize(
    "key", ["num_experts", "hc_lowrank", "split_ngram_parts", "linear_num_value_heads", "ngram_vocab_size_base"]
)
def test_config_without_a_number_is_refused_by_name(tmp_path, key):
    folder = form.write(tmp_path / "m", lambda tensors, config: config["text_config"].pop(key))
    with pytest.raises(Refusal, match=key) as refused:
        examined(folder)
    assert refused.value.code == Exit.CHECKPOINT


@pytest.mark.parametrize("key", ["num_experts", "split_ngram_parts", "ngram_size", "ngram_vocab_size_base"])
def test_absurd_numbers_are_refused_at_once(tmp_path, key):
    folder = form.write(tmp_path / "m", lambda tensors, config: config["text_config"].update({key: 1 << 39}))
    begun = time.monotonic()
    with pytest.raises(Refusal, match=key):
        examined(folder)
    assert time.monotonic() - begun < 2


@pytest.mark.slow
def test_deep_hashes_and_weight_shapes(tmp_path):
    folder = form.write(tmp_path / "m", shard_bytes=500_000_000)
    shapes = {}
    for part in architecture.parts(read_checkpoint(folder).text, "model.language_model."):
        shapes |= dict.fromkeys(part.names(), part.shape)
    form.fill_weight_shapes(folder, lambda name: shapes.get(name, (0, 0)))
    seen = []
    report = examined(folder, lint.hasher(lambda done, total: seen.append((done, total))))
    assert messages(report) == []
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert seen[-1] == (total, total) and len(report.hashes) == len(list(folder.glob("*.safetensors"))) > 3
    victim = sorted(report.hashes)[0]
    notes = folder / ".cache/huggingface/download"
    notes.mkdir(parents=True)
    (notes / f"{victim}.metadata").write_text(f"{'c' * 40}\n{'0' * 64}\n1.0\n")
    shapes[f"{L}0.linear_attn.out_proj"] = (2560, 6145)
    form.fill_weight_shapes(folder, lambda name: shapes.get(name, (0, 0)))
    report = examined(folder, lint.hasher(lambda done, total: None))
    assert report.revision == "c" * 40
    assert messages(report) == [
        f"ERROR hash: {victim} is not what the hub lists (000000000000...)",
        f"ERROR packing: weight_shape says [2560, 6145] for [2560, 6144]: {L}0.linear_attn.out_proj",
    ]


def test_revision_from_the_hub_cache_path(tmp_path):
    folder = form.write(tmp_path / "snapshots" / ("0123456789abcdef" * 3)[:40])
    assert examined(folder).revision == ("0123456789abcdef" * 3)[:40]


def _spent_s(who: int = resource.RUSAGE_SELF) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_whole_model_costs_little_more_than_parsing_its_json(tmp_path):
    """165 GB by their headers, with an index and a vocabulary of the published size; the command with its start.

    The bar for any machine is what that one takes just before to parse the same JSON and do nothing with it, in processor
    seconds, at best of a few turns: its speed may change from one to the next. The check took 1.2 times as long, the command
    1.6 times.
    """
    folder = form.write_published(tmp_path / "m")
    report = examined(folder)
    assert messages(report) == []
    assert report.total_bytes > 165e9

    texts = [(folder / name).read_bytes() for name in ("tokenizer.json", "model.safetensors.index.json")]
    for shard in folder.glob("*.safetensors"):
        with shard.open("rb") as file:
            texts.append(file.read(int.from_bytes(file.read(8), "little")))

    def parse():
        with without_gc():
            for text in texts:
                json.loads(text)

    def command():
        root = str(Path(__file__).resolve().parents[2])
        env = {**os.environ, "PYTHONPATH": root, "PYTHONPYCACHEPREFIX": str(tmp_path / "compiled")}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        words = [sys.executable, "-m", "entrypoint", "checkpoint", "--json", "--model", str(folder)]
        subprocess.run(words, cwd=tmp_path, env=env, check=True, stdout=subprocess.DEVNULL)

    command()  # compiles
    turns = {
        "parsing": (parse, resource.RUSAGE_SELF),
        "check": (lambda: examined(folder), resource.RUSAGE_SELF),
        "command": (command, resource.RUSAGE_CHILDREN),
    }
    spent = []
    for _ in range(4):
        turn = {}
        for name, (work, who) in turns.items():
            before = _spent_s(who)
            work()
            turn[name] = _spent_s(who) - before
        spent.append(turn)
    assert min(turn["check"] / turn["parsing"] for turn in spent) < 1.6, spent
    assert min(turn["command"] / turn["parsing"] for turn in spent) < 2.1, spent


NO_TEMPLATE = "WARN chat template: there is no chat template, without which the engine answers no chat request"


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ({}, True),
        ({"chat_template.jinja": "{{ messages }}"}, False),
        ({"chat_template.jinja": " \n"}, True),
        ({"chat_template.json": '{"chat_template": "{{ messages }}"}'}, False),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, False),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "default", "template": "{{ messages }}"}]}'}, False),
        ({"tokenizer_config.json": '{"chat_template": ""}'}, True),
        ({"tokenizer_config.json": '{"chat_template": null}'}, True),
        ({"tokenizer_config.json": "{}"}, True),
        ({"chat_template.jinja": "", "tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, False),
    ],
)
def test_a_missing_chat_template_is_a_warning(tmp_path, capsys, files, missing):
    folder = form.write(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    for name, content in files.items():
        (folder / name).write_text(content)
    report = examined(folder)
    assert messages(report) == ([NO_TEMPLATE] if missing else [])
    assert [f.fix for f in report.findings] == ["download chat_template.jinja of the same repository"] * missing
    assert [f.repair for f in report.findings] == [None] * missing  # nothing that a corrected copy could make up
    lint.refuse(report)  # an engine without one still completes plain prompts
    lint.show(report, terminal.console())
    said = capsys.readouterr().out
    assert (f"{NO_TEMPLATE}\n  Fix: download chat_template.jinja of the same repository\n" in said) is missing
    assert f"0 errors, {int(missing)} warnings" in said


def test_json_of_a_report(tmp_path):
    report = examined(form.write(tmp_path / "m", _all_linear))
    again = json.loads(json.dumps(report.as_dict()))
    assert {f["repair"] for f in again["findings"]} == {"config"}


@pytest.mark.parametrize(("change", "code"), [(None, 0), (_all_linear, 4)])
def test_the_command_ends_with_the_documented_code(tmp_path, change, code):
    folder = form.write(tmp_path / "m", change)
    done = subprocess.run(
        [sys.executable, "-m", "entrypoint", "checkpoint", "--json", "--model", str(folder)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["path"] == str(folder)


def test_progress_of_long_work_says_rate_and_time_left(monkeypatch, capsys):
    clock = iter([0.0, 5.0, 20.0])
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with terminal.byte_progress("hashing") as progress:
        progress(1 << 30, 10 << 30)
        progress(2 << 30, 10 << 30)
    assert capsys.readouterr().err == "hashing: 2.00 GiB of 10.00 GiB, 107 MB/s, 80 s left\n"
