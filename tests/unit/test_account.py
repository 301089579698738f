"""The note that saves a plan from reading a quarter of a million headers again: the same plan, and never for files that changed."""

import json
import os
import time

import pytest

from entrypoint import account, checkpoint, cli
from entrypoint.checkpoint import read_checkpoint
from entrypoint.errors import Refusal
from tests.support import published_form as form


@pytest.fixture
def folder(tmp_path):
    return form.write(tmp_path / "m")


@pytest.fixture
def reads(monkeypatch):
    """How often the headers were read."""
    done = []
    real = checkpoint.read_tensors
    monkeypatch.setattr(checkpoint, "read_tensors", lambda folder: done.append(folder) or real(folder))
    return done


def test_the_second_time_no_header_is_read_and_the_count_is_the_same(folder, tmp_path, reads):
    first, second = (account.counted(folder, tmp_path / "notes") for _ in range(2))
    assert len(reads) == 1
    assert second.has_weights and not second.tensors
    assert second.weights == first.weights == read_checkpoint(folder).weights
    assert (second.text, second.tokenizer, second.generation) == (first.text, first.tokenizer, first.generation)


def _rewrite(folder):
    shard = next(folder.glob("*.safetensors"))
    before = shard.stat()
    content = shard.read_bytes()
    shard.write_bytes(content)
    os.utime(
        shard, ns=(before.st_atime_ns, before.st_mtime_ns)
    )  # times of writing can be set, that of the last change cannot


def _replace(folder):
    shard = next(folder.glob("*.safetensors"))
    other = shard.with_suffix(".new")
    other.write_bytes(shard.read_bytes())
    os.replace(other, shard)


def _config(folder):
    path = folder / "config.json"
    path.write_text(path.read_text() + "\n")


@pytest.mark.parametrize("change", [_rewrite, _replace, _config])
def test_files_that_changed_are_read(folder, tmp_path, reads, change):
    account.counted(folder, tmp_path / "notes")
    time.sleep(0.02)  # a clock tick of the file system
    change(folder)
    account.counted(folder, tmp_path / "notes")
    assert len(reads) == 2


def test_a_file_that_became_bad_is_still_refused(folder, tmp_path):
    account.counted(folder, tmp_path / "notes")
    shard = next(folder.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(Refusal, match="short"):
        account.counted(folder, tmp_path / "notes")


def test_other_code_counts_anew(folder, tmp_path, reads, monkeypatch):
    account.counted(folder, tmp_path / "notes")
    code = tmp_path / "checkpoint.py"
    code.write_text("another rule")
    monkeypatch.setattr(checkpoint, "__file__", str(code))
    account.counted(folder, tmp_path / "notes")
    assert len(reads) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda note: note.write_text("{"),
        lambda note: note.write_text("[" * 100_000),
        lambda note: note.write_bytes(b"\xff\xfe"),
        lambda note: note.write_text("[]"),
        lambda note: note.write_text(json.dumps({**json.loads(note.read_text()), "layers": []})),
        lambda note: note.write_text(json.dumps({**json.loads(note.read_text()), "outside": {"embed": -1}})),
        lambda note: note.write_text(json.dumps({**json.loads(note.read_text()), "layers": [{"experts": "many"}]})),
        lambda note: note.unlink(),
    ],
)
def test_a_note_that_is_none_is_ignored(folder, tmp_path, reads, damage):
    wanted = account.counted(folder, tmp_path / "notes").weights
    damage(next((tmp_path / "notes").iterdir()))
    assert account.counted(folder, tmp_path / "notes").weights == wanted
    assert len(reads) == 2


def test_without_a_place_for_notes(folder, tmp_path, reads):
    (tmp_path / "notes").write_text("a file where the folder should be")
    for notes in (None, tmp_path / "notes"):
        assert account.counted(folder, notes).has_weights
    assert len(reads) == 2


def test_plan_takes_it_and_checkpoint_does_not(folder, tmp_path, reads, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = []
    for _ in range(2):
        with pytest.raises(SystemExit):
            cli.main(["plan", "--simulate", "3x3090", "--ram", "125GiB", "--model", str(folder), "--json"])
        texts.append(capsys.readouterr())
    assert texts[0] == texts[1] and len(reads) == 1
    with pytest.raises(SystemExit):
        cli.main(["checkpoint", "--model", str(folder), "--json"])
    assert len(reads) == 2
