"""Compile Triton kernels for an sm_86 card that is not there, by the very calls that would launch them.

`recording()` puts a driver in place that says "sm_86" (for the rest of the process: there is none to go back to), and turns every launch into a compilation with the launch's own
arguments: what is compiled is what a 3090 would compile for these tensors. Tensors are on the CPU and stay as they are.

    with recording() as found:
        some_wrapper(tensors)
    table(found)     [{"kernel", "constants", "warps", "registers", "spill_store", "spill_load", "shared", "loads"}, ...]

Registers and spills are what Triton's own ptxas says with -v, shared memory is what the launch would ask for, and
"loads" lists the 16-byte moves in the PTX.
"""

import contextlib
import re
import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

_USED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.DOTALL)

_MOVES = re.compile(r"(?:ld|st)\.global\.v4\.b32|cp\.async\.cg\.shared\.global")


class _Driver:
    """What Triton asks of a driver before it launches anything."""

    def get_current_target(self):
        return GPUTarget("cuda", 86, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@contextlib.contextmanager
def recording():
    found: dict[str, tuple] = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.setdefault(kernel.hash, (self.fn.__name__, kernel, kwargs))
        return kernel

    triton.runtime.driver.set_active(_Driver())
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run


def table(found: dict) -> list[dict]:
    rows = []
    for name, kernel, kwargs in found.values():
        with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as ptx:
            ptx.write(kernel.asm["ptx"])
            ptx.flush()
            tool = triton.knobs.nvidia.ptxas.path
            said = subprocess.run(
                [tool, "-v", "-arch=sm_86", ptx.name, "-o", "/dev/null"], capture_output=True, text=True, check=True
            ).stderr
        store, load, registers = map(int, _USED.search(said).groups())
        rows.append({
            "kernel": name,
            "constants": {k: v for k, v in kwargs.items() if k.startswith(("BLOCK", "TILE", "NUM_SPLITS", "TOKENS"))},
            "warps": kernel.metadata.num_warps,
            "registers": registers,
            "spill_store": store,
            "spill_load": load,
            "shared": kernel.metadata.shared,
            "loads": _MOVES.findall(kernel.asm["ptx"]),
        })  # fmt: skip
    return rows
