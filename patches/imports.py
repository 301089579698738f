#!/usr/bin/env python3
"""Import what the series changed, as far as this machine's hardware lets it: python3 imports.py (with the patched vLLM's Python).

Reads targets.toml of the installed vLLM's version. The modules of the model itself import Triton and choose kernels, so where
Triton is missing (the CPU base) they are compiled but not imported, and that is printed. Exit 1 if anything else fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import py_compile
import sys
import tempfile

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

HERE = pathlib.Path(__file__).resolve().parent
NEEDS_TRITON = ("vllm.models.qwen4_exp.nvidia.",)


def main() -> int:
    tree = pathlib.Path(importlib.util.find_spec("vllm").submodule_search_locations[0]).parent
    series = next(p for p in sorted(HERE.glob("vllm-*")) if (p / "targets.toml").is_file())
    targets = tomllib.loads((series / "targets.toml").read_text())["files"]
    triton = importlib.util.find_spec("triton") is not None
    failed = False
    for path in sorted(targets):
        module = path.removesuffix(".py").replace("/", ".")
        with tempfile.TemporaryDirectory() as scratch:
            py_compile.compile(str(tree / path), cfile=f"{scratch}/x.pyc", doraise=True)
        if module.startswith(NEEDS_TRITON) and not triton:
            print(f"compiled  {module} (not imported: this base has no Triton)")
            continue
        try:
            importlib.import_module(module)
            print(f"imported  {module}")
        except Exception as e:
            failed = True
            print(f"FAILED    {module}: {type(e).__name__}: {e}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
