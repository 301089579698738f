"""The repair: a folder of links with corrected small files, the source untouched, the same folder again."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from entrypoint import checkpoint_fix, cli, facts, lint
from entrypoint.checkpoint import read_checkpoint
from entrypoint.errors import Exit, Refusal
from entrypoint.simulate import simulate
from entrypoint.wishes import gather
from tests.support import published_form as form

L = "model.language_model.layers."


def all_linear(tensors, config):
    for group in config["quantization_config"]["config_groups"].values():
        group["targets"] = ["Linear"]


def ready(folder, root):
    return checkpoint_fix.ready(read_checkpoint(folder), root)


def tree(folder):
    return {p.name: (p.lstat().st_size, p.lstat().st_mtime_ns) for p in folder.iterdir()}


def test_right_checkpoint_is_served_as_it_is(tmp_path):
    folder = form.write(tmp_path / "m")
    served, words = ready(folder, tmp_path / "overlay")
    assert (served.path, words) == (str(folder), ())
    assert not (tmp_path / "overlay").exists()


@pytest.mark.parametrize("wrapper", [True, False])
def test_linear_targets_are_rebuilt_from_the_weights(tmp_path, wrapper):
    folder, root = form.write(tmp_path / "m", all_linear, wrapper=wrapper), tmp_path / "overlay"
    before = tree(folder)
    served, words = ready(folder, root)
    assert words == ("config.json: 3 config groups rebuilt from the weights' shapes",)
    assert tree(folder) == before
    made = Path(served.path)
    assert made.parent == root and [p.name for p in root.iterdir()] == [made.name]
    assert {p.name for p in made.iterdir()} == {*before, "flashnext.json"}
    assert sorted(p.name for p in made.iterdir() if not p.is_symlink()) == ["config.json", "flashnext.json"]
    # Read again from the disk, as the engine will: nothing left to say.
    again = read_checkpoint(made)
    assert lint.examine(again).findings == ()
    assert again.quantization_groups["group_1"]["targets"] == [
        r"re:.*\.mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)$"
    ]
    assert again.quantization_groups["group_1"]["weights"]["num_bits"] == 4
    assert len(again.tensors) == len(read_checkpoint(folder).tensors)


def test_same_source_same_folder_and_a_changed_source_another(tmp_path):
    folder, root = form.write(tmp_path / "m", all_linear), tmp_path / "overlay"
    first, _ = ready(folder, root)
    before = tree(Path(first.path))
    assert ready(folder, root)[0].path == first.path
    assert tree(Path(first.path)) == before
    os.utime(folder / "config.json", ns=(1, 1))
    assert ready(folder, root)[0].path != first.path


@pytest.mark.parametrize("damage", ["link", "config", "note"])
def test_a_damaged_copy_is_made_again(tmp_path, damage):
    folder, root = form.write(tmp_path / "m", all_linear), tmp_path / "overlay"
    made = Path(ready(folder, root)[0].path)
    victim = made / {"link": "model.safetensors", "config": "config.json", "note": "flashnext.json"}[damage]
    victim.unlink()
    if damage == "config":
        victim.write_text("{")
    assert Path(ready(folder, root)[0].path) == made
    assert lint.examine(read_checkpoint(made)).findings == ()
    assert [p.name for p in root.iterdir()] == [made.name]


def test_layers_of_different_bits_get_targets_of_their_own(tmp_path):
    def change(tensors, config):
        all_linear(tensors, config)
        for shard, rows in (("in_proj_qkv", 10_240), ("in_proj_z", 6144)):
            tensors[f"{L}1.linear_attn.{shard}.weight_packed"] = ("I32", (rows, 320))
        name = f"{L}2.linear_attn.out_proj"
        for end in ("packed", "scale", "shape"):
            del tensors[f"{name}.weight_{end}"]
        tensors[f"{name}.weight"] = ("BF16", (2560, 6144))

    served, _ = ready(form.write(tmp_path / "m", change), tmp_path / "overlay")
    targets = [t for group in served.quantization_groups.values() for t in group["targets"]]
    assert r"re:.*\.layers\.(1)\.linear_attn\.(in_proj_qkv|in_proj_z)$" in targets
    assert r"re:.*\.layers\.(0|2)\.linear_attn\.(in_proj_qkv|in_proj_z)$" in targets
    assert r"re:.*\.layers\.(0|1)\.linear_attn\.out_proj$" in targets
    assert lint.examine(read_checkpoint(served.path)).findings == ()


def test_an_ignore_that_hides_a_packed_weight_is_dropped_and_others_stay(tmp_path):
    keep, hide = f"{L}0.linear_attn.in_proj_a", f"{L}0.linear_attn.out_proj"

    def change(tensors, config):
        config["quantization_config"]["ignore"] = [keep, hide, "re:.*lm_head", r"re:.*\.mlp\.gate$"]

    served, _ = ready(form.write(tmp_path / "m", change), tmp_path / "overlay")
    assert served.quantization["ignore"][:2] == [keep, r"re:.*\.mlp\.gate$"]
    assert lint.examine(read_checkpoint(served.path)).findings == ()


@pytest.mark.parametrize(
    ("content", "eos"),
    [
        ({"transformers_version": "5"}, [248_044, 248_046]),
        ({"eos_token_id": 248_046, "temperature": 0.6}, [248_046, 248_044]),
    ],
)
def test_generation_defaults_are_restored_and_what_is_set_stays(tmp_path, content, eos):
    folder = form.write(tmp_path / "m", generation_config=content)
    served, words = ready(folder, tmp_path / "overlay")
    found = json.loads((Path(served.path) / "generation_config.json").read_text())
    wanted = {
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "do_sample": True,
    }
    assert found == wanted | content | {"eos_token_id": eos}
    assert words[0].startswith("generation_config.json: do_sample, eos_token_id, min_p")
    assert json.loads((folder / "generation_config.json").read_text()) == content
    assert (Path(served.path) / "config.json").is_symlink()


def test_what_no_copy_mends_is_refused_before_anything_is_written(tmp_path):
    def change(tensors, config):
        all_linear(tensors, config)
        tensors[f"{L}3.self_attn.k_proj.weight_packed"] = ("I32", (512, 320))

    with pytest.raises(Refusal, match="merged shards disagree") as refused:
        ready(form.write(tmp_path / "m", change), tmp_path / "overlay")
    assert refused.value.code == Exit.CHECKPOINT
    assert not (tmp_path / "overlay").exists()


def test_a_volume_that_cannot_be_written(tmp_path):
    folder = form.write(tmp_path / "m", all_linear)
    (tmp_path / "overlay").write_text("a file")
    with pytest.raises(Refusal, match="cannot be written") as refused:
        ready(folder, tmp_path / "overlay")
    assert refused.value.code == Exit.TABLE


def test_prepare_plans_with_the_corrected_copy(tmp_path, monkeypatch):
    folder = form.write(tmp_path / "m", all_linear, whole=True, generation_config={})
    monkeypatch.setattr(facts, "machine", lambda wishes: simulate("3x3090", ram="125GiB", disk="nvme"))
    wishes = gather({"model": str(folder), "data": str(tmp_path / "data")}, {}, tmp_path / ".env")
    made, _, weight_bytes, repaired = cli._ready(wishes, lambda model, table: None)
    served = Path(made.argv[1])
    assert served.parent == tmp_path / "data" / "overlay"
    assert [words.split(":")[0] for words in repaired] == ["config.json", "generation_config.json"]
    assert weight_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert "--override-generation-config" not in made.argv


@pytest.mark.slow
def test_serve_says_what_was_repaired_at_boot_and_in_the_state_that_status_shows(tmp_path, monkeypatch, capfd):
    folder = form.write(tmp_path / "m", all_linear, whole=True)
    engine = tmp_path / "bin" / "vllm"
    engine.parent.mkdir()
    engine.write_text("#!/bin/sh\nexit 3\n")  # what is asked is over before the engine runs
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{engine.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FLASHNEXT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(facts, "machine", lambda wishes: simulate("3x3090", ram="125GiB", disk="nvme"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        "--model",
        str(folder),
        "--data",
        str(tmp_path / "data"),
        "--port",
        str(port),
        "--env-file",
        str(tmp_path / "none"),
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", *words])
    assert ended.value.code == Exit.ENGINE_START
    said = "config.json: 3 config groups rebuilt from the weights' shapes"
    assert f"flashnext: repaired in a copy: {said}\n" in capfd.readouterr().err
    assert json.loads((tmp_path / "state" / "state.json").read_text())["repaired"] == [said]
