"""The patched engine on real cards gives the answers of transformers, on one stage and on two. Minutes each."""

from __future__ import annotations

import pytest

from . import experiments
from .experiments import EXPERIMENTS, Experiment

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def outcome(experiment: Experiment, place: experiments.Place, card_names: list[str]) -> dict:
    if len(card_names) < experiment.stages:
        pytest.skip(
            f"GPU TEST DID NOT RUN: {experiment.name} needs {experiment.stages} cards, there are {len(card_names)}"
        )
    if not (place.checkpoint(experiment) / "config.json").exists():
        made = experiments.make_checkpoint(experiment, place)
        printed = made.communicate()[0]
        assert made.returncode == 0, printed
        assert experiments.check_digest(experiment, printed) is None
    result = experiments.run(experiment, place, ",".join(card_names[: experiment.stages]))
    print(experiments.summary(result))
    return result


@pytest.mark.parametrize("experiment", [e for e in EXPERIMENTS if not e.dummy], ids=lambda e: e.name)
def test_answers_are_those_of_the_reference(experiment, place, card_names):
    result = outcome(experiment, place, card_names)
    assert result["faults"] == []
    if experiment.variant == "mixed":
        assert "HummingLinearKernel" in result["kernels"] and "MarlinLinearKernel" in result["kernels"]


def test_host_kv_is_as_fast_as_the_bars_say_with_full_shapes(place, card_names):
    card = outcome(experiments.BY_NAME["full-1-rates"], place, card_names)
    host = outcome(experiments.BY_NAME["full-1-rates-host"], place, card_names)
    assert card["faults"] == [] and host["faults"] == []


def test_full_shapes_boot_on_two_stages_and_each_stage_holds_only_its_own(place, card_names):
    gated = outcome(experiments.BY_NAME["full-2"], place, card_names)
    ungated = outcome(experiments.BY_NAME["full-2-ungated"], place, card_names)
    assert gated["faults"] == [] and ungated["faults"] == []
    # One of the two vocabulary tables less on each: 248320 * 2560 values, INT8 with a BF16 scale for 128 of them.
    table_gib = 248320 * 2560 * (1 + 2 / 128) / 2**30
    for with_patch, without in zip(gated["weights_gib"], ungated["weights_gib"], strict=True):
        assert without - with_patch == pytest.approx(table_gib, abs=0.06)
