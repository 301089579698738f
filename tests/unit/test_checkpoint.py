"""Checkpoint facts: the model's numbers, whole and broken files, bytes by category. Fixtures are headers only."""

from __future__ import annotations

import gc
import json
import os
import struct
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entrypoint import checkpoint as checkpoint_
from entrypoint.checkpoint import (
    DENSE,
    INDEX_NAME,
    TextConfig,
    category_of,
    read_checkpoint,
    read_header,
    read_tensors,
    read_text_config,
    weigh,
)
from entrypoint.errors import Exit, Refusal
from tests.support.headers import (
    flashnext_config,
    flashnext_tensors,
    header_of,
    nbytes,
    write_checkpoint,
    write_header_only,
    write_raw,
)

TWO = {"a.weight": ("BF16", (4, 8)), "b.weight": ("F32", (3,))}
SMALL = {"layers": 4, "experts": 2, "table_rows": 1_024, "table_shards": 4}


def small(folder, **changes):
    """A whole checkpoint of four layers and two experts; `changes` go to write_checkpoint."""
    settings = {"shard_bytes": 100_000_000, "generation": {"top_k": 20}, **changes}
    return write_checkpoint(folder, flashnext_tensors(**SMALL), flashnext_config(4, 2), **settings)


def refusal_of(call, *arguments) -> Refusal:
    with pytest.raises(Refusal) as caught:
        call(*arguments)
    assert caught.value.code == Exit.CHECKPOINT
    assert caught.value.fix and "\n" not in caught.value.message + caught.value.fix
    return caught.value


# --- the real size ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("full"), flashnext_tensors(), flashnext_config())


def bytes_read_so_far() -> int:
    with open("/proc/self/io") as io:
        return int(io.readline().split()[1])


def test_a_checkpoint_of_170_gb_is_read_by_its_headers(full):
    size_bytes = sum(path.stat().st_size for path in full.iterdir())
    before, start = bytes_read_so_far(), time.process_time()
    checkpoint = read_checkpoint(full)
    weights = checkpoint.weights
    spent_s, read_bytes = time.process_time() - start, bytes_read_so_far() - before
    assert size_bytes > 171e9
    assert read_bytes < 60e6, read_bytes  # the JSON once
    assert spent_s < 4, spent_s  # 0.6 to 0.9 s; tests/unit/test_lint.py has the bar
    assert gc.isenabled()
    assert len(checkpoint.tensors) == 228_367
    assert checkpoint.total_bytes == sum(nbytes for _, nbytes in checkpoint.tensors.sizes())
    assert len(weights.layers) == 48


def test_bytes_by_category_of_the_published_shapes(full):
    """What follows from the shapes: planner.md's table, the article's hyper-connection and expert figures."""
    checkpoint = read_checkpoint(full)
    weights = checkpoint.weights
    table = weights.layers[1]["table"]
    assert table == weights.of("table") == 102_400_491_520
    assert [at for at, layer in enumerate(weights.layers) if "table" in layer] == [1]
    # 3 matrices of 640 x 2560 in INT4 and a BF16 scale per 128, with an I64 pair each, for 512 experts.
    expert = 3 * (640 * 2560 // 2 + 640 * 2560 // 128 * 2 + 16)
    assert [layer["experts"] for layer in weights.layers] == [512 * expert] * 48
    assert round(weights.of("experts") * 10 / 512 / 1e9, 2) == 1.22
    assert weights.outside["embed"] == weights.outside["head"] == 248_320 * (2560 + 40) + 16
    assert ("attention" in weights.layers[3], "linear_attention" in weights.layers[3]) == (True, False)
    assert ("attention" in weights.layers[0], "linear_attention" in weights.layers[0]) == (False, True)
    # The draft layer is called mtp.layers.0 and must not be charged to decoder layer 0.
    assert weights.layers[0]["experts"] == weights.layers[2]["experts"]
    assert weights.outside["mtp"] > 512 * expert
    assert sum(weights.by_category.values()) == checkpoint.total_bytes
    assert "other" not in weights.by_category
    assert weights.of(*DENSE) == sum(weights.of(name) for name in DENSE) > 2.9e9


def test_hyper_connection_in_bf16_is_the_articles_figure():
    tensors = {}
    for layer in range(48):
        for part in ("attn", "mlp"):
            at = f"model.layers.{layer}.{part}_hyper_connection"
            tensors[f"{at}.input_mix_weight_down.weight"] = ("BF16", (320, 10_240))
            tensors[f"{at}.input_mix_weight_up.weight"] = ("BF16", (10_240, 320))
            tensors[f"{at}.block_inject_weight.weight"] = ("BF16", (4, 10_240))
            tensors[f"{at}.hc_norm.weight"] = ("BF16", (10_240,))
    tensors["model.hyper_connection_mixer.input_mix_weight_down.weight"] = ("BF16", (320, 10_240))
    tensors["model.hyper_connection_mixer.input_mix_weight_up.weight"] = ("BF16", (10_240, 320))
    tensors["model.hyper_connection_mixer.hc_norm.weight"] = ("BF16", (10_240,))
    weights = weigh((name, nbytes(spec)) for name, spec in tensors.items())
    assert round(weights.of("hyper_connection") / 2**30, 3) == 1.193
    assert weights.outside["hyper_connection"] == 13_127_680


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_127.weight", "table"),
        ("model.layers.1.ple.key_proj.weight", "ple"),
        ("model.layers.0.mlp.experts.511.down_proj.weight_packed", "experts"),
        ("model.layers.0.mlp.experts.gate_up_proj", "experts"),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", "shared_experts"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "router"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.layers.3.self_attn.indexer.index_qk_proj.weight", "indexer"),
        ("model.layers.3.self_attn.q_norm.weight", "attention"),
        ("model.layers.0.linear_attn.conv1d.weight", "linear_attention"),
        ("model.layers.0.attn_hyper_connection.hc_norm.weight", "hyper_connection"),
        ("model.language_model.hyper_connection_mixer.input_mix_weight_up.weight", "hyper_connection"),
        ("model.visual.blocks.3.mlp.linear_fc1.weight", "vision"),
        ("mtp.layers.0.mlp.experts.0.up_proj.weight_packed", "mtp"),
        ("model.language_model.embed_tokens.weight_packed", "embed"),
        ("lm_head.weight_scale", "head"),
        ("model.norm.weight", "norms"),
        ("model.layers.0.input_layernorm.weight", "norms"),
        ("something.else", "other"),
    ],
)
def test_categories(name, category):
    assert category_of(name) == category


def test_absurd_layer_numbers_do_not_become_lists():
    name = "model.layers.999999.mlp.up_proj.weight"
    weights = weigh([(name, 7), (f"model.layers.{'9' * 5000}.mlp.up_proj.weight", 5)], layer_count=2)
    assert (len(weights.layers), weights.outside) == (2, {"mlp": 12})


# --- the model's numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapper", [True, False])
def test_every_number_of_the_published_config(tmp_path, wrapper):
    (tmp_path / "config.json").write_text(json.dumps(flashnext_config(wrapper=wrapper)))
    checkpoint = read_checkpoint(tmp_path, headers=False)
    text = checkpoint.text
    assert [name for name, value in vars(text).items() if value is None] == [
        "full_attention_interval",
        "intermediate_size",
    ]
    assert (text.hidden_size, text.hc_count, text.num_hidden_layers, text.num_experts) == (2560, 4, 48, 512)
    assert (text.ngram_vocab_size_base, text.split_ngram_parts, text.ple_layers) == (20_000_000, 128, (1,))
    assert text.attention_layers == tuple(range(3, 48, 4))
    assert len(text.linear_layers) == 36 and not set(text.linear_layers) & set(text.attention_layers)
    assert (text.dtype, text.mamba_ssm_dtype, text.eos_token_id) == ("bfloat16", "float32", (248_044, 248_046))
    assert checkpoint.multimodal is wrapper
    assert checkpoint.architectures == (("Qwen4ExpForConditionalGeneration",) if wrapper else ("Qwen4ExpForCausalLM",))
    assert checkpoint.model_type == ("qwen4_exp" if wrapper else "qwen4_exp_text")
    assert set(checkpoint.quantization_groups) == {"group_0", "group_1"}


def test_a_missing_number_is_none_and_refused_by_name_where_it_is_needed():
    config = flashnext_config()
    del config["text_config"]["indexer_head_dim"]
    text = read_text_config(config)
    assert text.indexer_head_dim is None and text.need("head_dim") == 256
    assert "'indexer_head_dim'" in refusal_of(text.need, "indexer_head_dim").message


def test_keys_that_stand_outside_the_text_config():
    config = flashnext_config()
    del (
        config["text_config"]["split_ngram_parts"],
        config["text_config"]["eos_token_id"],
        config["text_config"]["torch_dtype"],
    )
    config |= {"split_ngram_parts": 512, "eos_token_id": 7, "dtype": "float16", "hidden_size": 1}
    text = read_text_config(config)
    assert (text.split_ngram_parts, text.eos_token_id, text.dtype, text.hidden_size) == (512, (7,), "float16", 2560)


def test_layers_from_the_interval():
    text = read_text_config({"num_hidden_layers": 8, "full_attention_interval": 4})
    assert (text.attention_layers, text.linear_layers) == ((3, 7), (0, 1, 2, 4, 5, 6))
    assert TextConfig(num_hidden_layers=8).attention_layers is None


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("hidden_size", "2560", "not a whole number"),
        ("hidden_size", 2560.0, "not a whole number"),
        ("num_experts", True, "not a whole number"),
        ("num_experts", -1, "not a whole number"),
        ("ngram_vocab_size_base", 1 << 40, "not a whole number"),
        ("num_hidden_layers", 10_001, "num_hidden_layers is 10,001"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0"),
        ("num_hidden_layers", 47, "names 48 layer_types"),
        ("layer_types", ["linear_attention", 3], "not a list of texts"),
        ("layer_types", {"a": 1}, "not a list of texts"),
        ("ple_layer_ids", [49], "ple_layer_ids names layer 49 of 48"),
        ("ple_layer_ids", [0], "ple_layer_ids names layer 0"),
        ("mamba_ssm_dtype", 32, "not a text"),
        ("tie_word_embeddings", "no", "not true or false"),
    ],
)
def test_numbers_of_the_wrong_kind_are_refused_by_name(key, value, word):
    config = flashnext_config()
    config["text_config"][key] = value
    message = refusal_of(read_text_config, config).message
    assert word in message and key in message and "config.json" in message


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"", "is empty"),
        (b"\0" * 500, "filled with zeros"),
        (b"[]", "is not a JSON object"),
        (b'{"hidden_size": NaN}', "NaN"),
        (b'{"hidden_size": 2560', "not valid JSON"),
        (b"\xff\xfe{\0}\0", "not valid JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"text_config": 3}', "text_config"),
        (b'{"architectures": "Qwen"}', "architectures"),
        (b'{"quantization_config": []}', None),
        (b'{"quantization_config": [1]}', "quantization_config"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1234567\n",
            "git-lfs pointer instead of its 1,234,567",
        ),
    ],
)
def test_config_json_that_is_none(tmp_path, text, word):
    (tmp_path / "config.json").write_bytes(text)
    if word is None:
        assert read_checkpoint(tmp_path, headers=False).quantization is None
    else:
        assert word in refusal_of(read_checkpoint, tmp_path, False).message


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_whole_checkpoint(tmp_path):
    checkpoint = read_checkpoint(small(tmp_path))
    assert (checkpoint.local, checkpoint.tokenizer, checkpoint.chat_template) == (True, True, True)
    assert checkpoint.generation == {"top_k": 20}
    assert len(checkpoint.shards) > 2 and checkpoint.unlisted == ()
    name = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight"
    tensor = checkpoint.tensors[name]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("BF16", (256, 160), 81_920)
    shard = next(shard for shard in checkpoint.shards if shard.name == tensor.file)
    assert shard.header_bytes <= tensor.offset <= shard.size_bytes - tensor.nbytes


def test_offsets_point_at_the_data(tmp_path):
    start, data_bytes = header_of(TWO)
    (tmp_path / "m.safetensors").write_bytes(start + bytes(range(data_bytes)))
    _, tensors = read_header(tmp_path / "m.safetensors")
    with open(tmp_path / "m.safetensors", "rb") as file:
        file.seek(tensors["b.weight"].offset)
        assert file.read(tensors["b.weight"].nbytes) == bytes(range(64, 76))


def test_small_files_may_be_missing(tmp_path):
    checkpoint = read_checkpoint(small(tmp_path, tokenizer=False, chat_template=None, generation=None))
    assert (checkpoint.tokenizer, checkpoint.chat_template, checkpoint.generation) == (False, False, None)


def test_a_chat_template_inside_the_tokenizer_config(tmp_path):
    small(tmp_path, chat_template=None)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert read_checkpoint(tmp_path).chat_template


def test_a_tokenizer_that_is_a_pointer_is_refused(tmp_path):
    (small(tmp_path) / "tokenizer.json").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
    )
    assert "tokenizer.json" in refusal_of(read_checkpoint, tmp_path).message


def test_a_hub_id_is_not_local():
    checkpoint = read_checkpoint("Minachist/Qwen3.8-Flash-Next-INT4-Mixed-AutoRound")
    assert (checkpoint.local, checkpoint.shards, checkpoint.text) == (False, (), TextConfig())


@pytest.mark.parametrize(
    "path", ["/no/such/folder", "./nothing", "nothing", "a/b/c", "~nobody-here/x", "x\0y", "a/b\n"]
)
def test_paths_that_lead_nowhere(path):
    assert "does not exist" in refusal_of(read_checkpoint, path).message


def test_what_is_no_checkpoint_folder(tmp_path):
    assert "is empty" in refusal_of(read_checkpoint, tmp_path).message
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "has no config.json" in refusal_of(read_checkpoint, tmp_path).message
    assert "is not a folder" in refusal_of(read_checkpoint, tmp_path / "model.gguf").message
    (tmp_path / "config.json").write_text("{}")
    assert "holds no *.safetensors (only .gguf)" in refusal_of(read_checkpoint, tmp_path).message


def test_a_folder_that_may_not_be_read(tmp_path):
    small(tmp_path / "m")
    (tmp_path / "m").chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65_534)  # root reads everything
    try:
        assert "Permission denied" in refusal_of(read_checkpoint, tmp_path / "m").message
    finally:
        os.seteuid(user)
        (tmp_path / "m").chmod(0o755)


# --- the index --------------------------------------------------------------------------------------------------------


def index_of(folder) -> dict:
    return json.loads((folder / INDEX_NAME).read_text())


def test_missing_shards_are_counted_and_named(tmp_path):
    folder = small(tmp_path)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    (folder / files[1]).unlink()
    message = refusal_of(read_checkpoint, folder).message
    assert f"1 of {len(files)} files" in message and files[1] in message


def test_a_link_without_its_target_counts_as_missing(tmp_path):
    folder = small(tmp_path)
    shard = next(folder.glob("*-00001-*"))
    shard.unlink()
    shard.symlink_to("../blobs/0123")
    assert shard.name in refusal_of(read_checkpoint, folder).message


def test_a_tensor_of_the_index_that_its_file_lacks(tmp_path):
    folder = small(tmp_path)
    index = index_of(folder)
    name = "model.language_model.hyper_connection_mixer.hc_norm.weight"
    home = index["weight_map"][name]
    assert list(index["weight_map"].values()).count(home) > 1  # the file stays one of the checkpoint's
    other = next(file for file in index["weight_map"].values() if file != home)
    index["weight_map"][name] = other
    (folder / INDEX_NAME).write_text(json.dumps(index))
    assert f"checkpoint file {other}: lacks the tensor '{name}'" in refusal_of(read_checkpoint, folder).message
    index["weight_map"] |= {name: home, "no.such.weight": home}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    assert f"checkpoint file {home}: lacks the tensor 'no.such.weight'" in refusal_of(read_checkpoint, folder).message


def test_one_tensor_in_two_files(tmp_path):
    write_header_only(tmp_path / "a.safetensors", TWO)
    write_header_only(tmp_path / "b.safetensors", {"b.weight": ("F32", (3,))})
    message = refusal_of(read_tensors, tmp_path).message
    assert "b.safetensors" in message and "'b.weight'" in message and "a.safetensors" in message


def test_files_that_the_index_leaves_out_are_a_fact(tmp_path):
    folder = small(tmp_path)
    write_header_only(folder / "consolidated.safetensors", TWO)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.unlisted == ("consolidated.safetensors",) and "a.weight" not in checkpoint.tensors


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "", "..", 7, None, ["x"], "a\0b", "a\ud800"])
def test_an_index_may_only_name_files_of_its_folder(tmp_path, name):
    folder = small(tmp_path)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    assert INDEX_NAME in refusal_of(read_checkpoint, folder).message


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "{", ""])
def test_an_index_that_is_none(tmp_path, text):
    folder = small(tmp_path)
    (folder / INDEX_NAME).write_text(text)
    assert INDEX_NAME in refusal_of(read_checkpoint, folder).message


def test_without_an_index_the_names_count_the_parts(tmp_path):
    folder = small(tmp_path, index=False)
    whole = read_checkpoint(folder)
    next(folder.glob("*-00002-*")).unlink()
    count = len(whole.shards)
    assert f"only {count - 1} of {count} parts of model" in refusal_of(read_checkpoint, folder).message


# --- headers ----------------------------------------------------------------------------------------------------------


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def test_a_good_header(tmp_path):
    path = tmp_path / "m.safetensors"
    size = write_header_only(path, {**TWO, "empty": ("F32", (0, 5)), "scalar": ("F64", ())}, {"format": "pt"})
    shard, tensors = read_header(path)
    assert (shard.name, shard.size_bytes, shard.tensor_count) == ("m.safetensors", size, 4)
    assert shard.header_bytes + 64 + 12 + 0 + 8 == size
    assert tensors["a.weight"][:4] == ("BF16", (4, 8), 64, "m.safetensors")
    assert (tensors["empty"].nbytes, tensors["scalar"].nbytes, tensors["scalar"].shape) == (0, 8, ())


@pytest.mark.parametrize(
    ("header", "data_bytes", "word"),
    [
        ({"a": entry()}, 7, "1 bytes short (cut off)"),
        ({"a": entry()}, 9, "1 bytes after its last tensor"),
        ({}, 4, "4 bytes after its last tensor"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, 20, "a gap at byte"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, 12, "overlapping tensors at byte"),
        ({"a": entry(offsets=(4, 12))}, 12, "a gap at byte"),
        ({"a": entry(dtype="F33")}, 8, "unknown dtype 'F33'"),
        ({"a": entry(dtype=32)}, 8, "without dtype, shape and data_offsets"),
        ({"a": entry(dtype=["F32"])}, 8, "without dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "without dtype, shape and data_offsets"),
        ({"a": entry(offsets=(0, 4, 8))}, 8, "without dtype, shape and data_offsets"),
        ({"a": [1, 2]}, 8, "without dtype, shape and data_offsets"),
        ({"a": None}, 8, "without dtype, shape and data_offsets"),
        ({"a": entry(shape=(3,))}, 8, "shape does not give its bytes"),
        ({"a": entry(shape=(-2,))}, 8, "shape does not give its bytes"),
        ({"a": entry(shape=(2.0,))}, 8, "shape does not give its bytes"),
        ({"a": entry(shape=(True, 2))}, 8, "shape does not give its bytes"),
        ({"a": entry(shape=(1,) * 33)}, 8, "shape does not give its bytes"),
        ({"a": entry(shape=(1 << 62, 1 << 62))}, 8, "shape does not give its bytes"),
        ({"a": {**entry(), "shape": 2}}, 8, "shape does not give its bytes"),
        ({"a": {**entry(), "shape": "2"}}, 8, "shape does not give its bytes"),
        ({"a": entry(offsets=(8, 0))}, 8, "shape does not give its bytes"),
        ({"a": entry(offsets=(-8, 0))}, 8, "shape does not give its bytes"),
        ({"a": entry(offsets=("0", "8"))}, 8, "shape does not give its bytes"),
        ({"a": entry(dtype="F4", shape=(3,), offsets=(0, 1))}, 1, "shape does not give its bytes"),
        (b"[1, 2]", 0, "no JSON object as its header"),
        (b"\0" * 64, 0, "header of zeros"),
        (b'{"a": ', 0, "not valid JSON"),
        (b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', 8, "NaN"),
        (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}', 8, "not valid JSON"),
        (b'{"\xff": 1}', 0, "not valid JSON"),
        (b'{"a":' + b"[" * 200_000, 0, "nested too deeply"),
    ],
)
def test_headers_that_are_wrong(tmp_path, header, data_bytes, word):
    path = write_raw(tmp_path / "model-00007-of-00048.safetensors", header, data_bytes)
    message = refusal_of(read_header, path).message
    assert message.startswith("checkpoint file model-00007-of-00048.safetensors: ") and word in message


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "is empty"),
        (b"\x10\0\0", "has 3 bytes"),
        (b"\0" * 8, "filled with zeros"),
        (b"\0" * 4096, "filled with zeros"),
        (struct.pack("<Q", 0) + b"{}", "has no header"),
        (struct.pack("<Q", 100_000_001) + b"{", "header of 100,000,001 bytes"),
        (struct.pack("<Q", (1 << 64) - 1) + b"{", "18,446,744,073,709,551,615"),
        (struct.pack("<Q", 1000) + b'{"a": 1', "ends inside its header (15 of at least 1,008 bytes)"),
        (b"GGUF\x03\0\0\0" + b"\0" * 64, "not safetensors"),
        (b"PK\x03\x04" + b"\x14\0\0\0\x08\0" * 9, "not safetensors"),
        (b"<!DOCTYPE html><html>404</html>", "not safetensors"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4999999\n",
            "pointer instead of its 4,999,999 bytes",
        ),
    ],
)
def test_files_that_are_no_safetensors(tmp_path, content, word):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    assert word in refusal_of(read_header, path).message


def test_a_reserved_file_of_zeros_is_found_without_reading_it(tmp_path):
    path = tmp_path / "m.safetensors"
    path.touch()
    os.truncate(path, 5_000_000_000)
    assert "filled with zeros" in refusal_of(read_header, path).message


def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening it would wait for ever
    assert "not a regular file" in refusal_of(read_header, tmp_path / "pipe.safetensors").message
    (tmp_path / "folder.safetensors").mkdir()
    assert "not a regular file" in refusal_of(read_header, tmp_path / "folder.safetensors").message
    (tmp_path / "link.safetensors").symlink_to("nowhere")
    assert "nowhere" in refusal_of(read_header, tmp_path / "link.safetensors").message
    assert "is missing" in refusal_of(read_header, tmp_path / "none.safetensors").message


def test_every_cut_of_a_good_file_is_found(tmp_path):
    start, data_bytes = header_of(TWO)
    whole = start + bytes(data_bytes)
    path = tmp_path / "m.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refusal_of(read_header, path)
    path.write_bytes(whole)
    assert len(read_header(path)[1]) == 2


A, B = (f'"{name}":{{"dtype":"F32","shape":[2],"data_offsets":[{at},{at + 8}]}}' for name, at in (("a", 0), ("b", 8)))


@pytest.mark.parametrize(
    ("text", "at_once"),
    [
        (f"{{{A},{B}}}", True),
        (f"{{{A},{B}}}  ", True),
        (f'{{"__metadata__":{{"format":"pt"}},{A},{B}}}', True),
        (f'{{"__metadata__":{{}},{A},{B}}}', True),
        (f'{{"__metadata__":{{"format":pt}},{A},{B}}}', False),
        (f'{{{A},"__metadata__":{{"format":"pt"}},{B}}}', False),
        (f"{{{A},{B}}}".replace(":", ": "), False),
        (f"{{{B},{A}}}", False),
        (f"{{{A}{B}}}", False),
        (f"{{{A},{B},}}", False),
        (f"{{{A},{B}", False),
        (f"{{{A}}}{B}}}", False),
        (f"{{{A},,{B}}}", False),
        (f"{{,{A},{B}}}", False),
        (f"{{{A},{B}}}}}", False),
        (f"{{{A},{B.replace('b', 'a')}}}", False),
        (f"{{{A},{B.replace('b', '__metadata__')}}}", False),
        (f"{{{A},{B.replace('b', chr(9))}}}", False),
        (f"{{{A},{B.replace('b', 'é')}}}", False),
        (f"{{{A},{B.replace('b', chr(92) + 'n')}}}", False),
        (f"{{{A},{B.replace('[8', '[08')}}}", False),
        (f"{{{A},{B.replace('[2]', '[02]')}}}", False),
        (f"{{{A},{B.replace('[2]', '[2.0]')}}}", False),
        (f"{{{A},{B.replace('[2]', '[1,2]')}}}", True),
        (f"{{{A},{B.replace('[2]', '[true,2]')}}}", False),
        (f"{{{A},{B.replace('F32', 'F33')}}}", False),
        (f"{{{A},{B.replace('[2]', '2')}}}", False),
    ],
)
def test_a_header_is_read_alike_at_once_and_entry_by_entry(tmp_path, text, at_once):
    content = text.encode()
    path = write_raw(tmp_path / "m.safetensors", content, 16)
    start = 8 + len(content)
    assert (checkpoint_._whole_at_once(content, start, start + 16) is not None) is at_once
    assert checkpoint_._whole_at_once(content, start, start + 17) is None
    clean(path)


# --- any bytes --------------------------------------------------------------------------------------------------------

FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F4", "X", ""]) | JSON,
        "shape": st.lists(st.integers(-2, 9), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-2, 80), min_size=2, max_size=2) | JSON,
    },
)


def ended(path):
    try:
        shard, tensors = read_header(path)
    except Refusal as refusal:
        assert refusal.code == Exit.CHECKPOINT and path.name in refusal.message and len(refusal.message) < 600
        return refusal.message
    assert sum(tensor.nbytes for tensor in tensors.values()) == shard.size_bytes - shard.header_bytes
    return shard, dict(tensors)


def clean(path) -> None:
    """The header is read, and then truly covers the file, or it is refused with the file's name; both ways of reading
    it end alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_, "_whole_at_once", lambda *arguments: None)
        slow = ended(path)
    assert ended(path) == slow


@FUZZ
@given(st.binary(max_size=400))
def test_any_file(tmp_path, content):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    clean(path)


@FUZZ
@given(text=st.binary(max_size=400), data=st.integers(0, 64))
def test_any_header_text(tmp_path, text, data):
    clean(write_raw(tmp_path / "m.safetensors", b"{" + text, data))


@FUZZ
@given(header=st.dictionaries(st.text(max_size=8), ENTRY | JSON, max_size=4), data=st.integers(0, 100))
def test_any_json_header(tmp_path, header, data):
    clean(write_raw(tmp_path / "m.safetensors", header, data))


@FUZZ
@given(place=st.integers(0, 10_000), value=st.integers(0, 255))
def test_one_byte_changed(tmp_path, place, value):
    start, data_bytes = header_of({**TWO, "c": ("F32", (2, 3))})
    content = bytearray(start + bytes(data_bytes))
    content[place % len(start)] = value
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    clean(path)


@FUZZ
@given(config=JSON | st.dictionaries(st.sampled_from([*vars(TextConfig()), "text_config", "architectures"]), JSON))
def test_any_config(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        text = read_checkpoint(tmp_path, headers=False).text
    except Refusal as refusal:
        assert refusal.code == Exit.CHECKPOINT and "config.json" in refusal.message
    else:
        assert text.attention_layers is None or len(text.attention_layers) <= 10_000
