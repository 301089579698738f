"""Every argument that a plan emits, read by vLLM 0.30.0's real parser: names, values, and that no abbreviation is used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]

PARSE = r"""
import json, sys
from types import SimpleNamespace
from flashnext.mapped_table import setting_of
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.launchers.cli_args import make_arg_parser
parser = make_arg_parser(FlexibleArgumentParser())
known = {s for a in parser._actions for s in a.option_strings}
out = []
for argv in json.loads(sys.argv[1]):
    flags = [w for w in argv if w.startswith("--")]
    unknown = [w for w in flags if w not in known]
    got = vars(parser.parse_args(argv[2:] + ["--model", argv[1]]))
    out.append({"unknown": unknown, "got": {k: got[k] for k in (
        "pipeline_parallel_size", "tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching",
        "kv_cache_memory_bytes", "gpu_memory_utilization", "language_model_only", "async_scheduling", "reasoning_parser", "enable_auto_tool_choice",
        "tool_call_parser", "shutdown_timeout", "additional_config", "override_generation_config", "host", "port",
        "safetensors_load_strategy")},
        "table": setting_of(SimpleNamespace(additional_config=got["additional_config"])),
        "compilation": str(got["compilation_config"]), "sizes": got["compilation_config"].cudagraph_capture_sizes})
print("JSON" + json.dumps(out))
"""

WISHES = [
    {"EXTRA_ARGS": "--max-log-len 100 --compilation-config.pass_config.fuse_norm_quant false"},
    {"MODEL_NAME": "a b", "P2P": "on"},
]


def plans() -> list[list[str]]:
    """argv of every plan of tests/unit/boxes.yaml, and of the first one with WISHES, made by the kit in a process of its own."""
    script = (
        "import json, sys; from entrypoint import plan as p; from entrypoint.simulate import simulate; from entrypoint.wishes import gather\n"
        "print(json.dumps([p.make_plan(simulate(r['cards'], **{k: r[k] for k in ('ram', 'cgroup', 'disk', 'wsl') if k in r}), p.published(),"
        " gather({}, {'FLASHNEXT_' + k: v for k, v in r.get('wish', {}).items()}, None)).argv for r in json.load(sys.stdin)]))"
    )
    rows = [row for row in yaml.safe_load((ROOT / "tests/unit/boxes.yaml").read_text()) if "plan" in row]
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(rows + [{**rows[0], "wish": wish} for wish in WISHES]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return json.loads(done.stdout)


def test_the_real_parser_takes_every_plan(run_pristine):
    argvs = plans()
    assert len(argvs) >= 50
    done = run_pristine(f"import sys; sys.path.insert(0, {str(ROOT / 'patches')!r})\n{PARSE}", json.dumps(argvs))
    results = json.loads(done.stdout.split("JSON")[-1])
    tables = [result["table"] for result in results]
    assert {json.dumps(table) for table in tables} == {
        '{"backing": "checkpoint"}',
        '{"path": "/t/rows"}',
        '{"path": "/var/lib/flashnext/table/rows"}',
        "null",
    }
    assert {result["got"]["safetensors_load_strategy"] for result in results} == {None, "lazy"}
    for argv, result in zip(argvs, results, strict=True):
        got = result["got"]
        assert result["unknown"] == [], argv
        assert got["kv_cache_memory_bytes"] == int(argv[argv.index("--kv-cache-memory-bytes") + 1])
        assert got["max_model_len"] == int(argv[argv.index("--max-model-len") + 1])
        assert got["max_num_batched_tokens"] == int(argv[argv.index("--max-num-batched-tokens") + 1])
        assert got["max_num_seqs"] == int(argv[argv.index("--max-num-seqs") + 1])
        assert result["sizes"] == json.loads(argv[argv.index("--compilation-config") + 1])["cudagraph_capture_sizes"]
        assert result["sizes"][0] == 1 and result["sizes"][-1] == got["max_num_seqs"]
        assert got["pipeline_parallel_size"] == int(argv[argv.index("--pipeline-parallel-size") + 1])
        assert (
            got["tensor_parallel_size"],
            got["enable_prefix_caching"],
            got["language_model_only"],
            got["async_scheduling"],
        ) == (1, False, True, True)
        assert (got["reasoning_parser"], got["tool_call_parser"], got["enable_auto_tool_choice"]) == (
            "qwen3",
            "qwen3_coder",
            True,
        )
        assert "flashnext" in got["additional_config"] and got["override_generation_config"]["top_k"] == 20
        assert "FULL_DECODE_ONLY" in result["compilation"]
