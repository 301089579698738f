# SPDX-License-Identifier: Apache-2.0
"""What the patched vLLM calls: every decision of ours that runs inside the engine.

The diffs under patches/vllm-X.Y.Z/ only call into this package; `patches/apply.py` installs it beside vllm under the
name `flashnext`. Modules import torch, triton, numpy and vllm only. They are imported by the patched lines themselves,
so a module must not import at top level what would load vLLM's model code again.
"""
