"""Section prefill on a real card: right answers, and no memory beyond its buffers. A minute; the numbers are printed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_section_prefill_is_right_and_allocates_nothing(place, card_names):
    program = pathlib.Path(__file__).with_name("sections.py")
    done = subprocess.run(
        [sys.executable, str(program), "--site", str(place.site), "--quick"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": card_names[0], "PYTHONPATH": str(place.site)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
