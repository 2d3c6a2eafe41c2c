"""What all verbs refuse alike: a calibration of another drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_evaluate import guided

from eagle_tree import calibration

CALIBRATED = ["policy=calibrated", "policy.path=fit.json"]
BY_VERB = {
    "bench": [*CALIBRATED, "compare=[]"],
    "audit": CALIBRATED,
    "generate": ["7 3 50", *CALIBRATED],
    "evaluate": ["policies=[{policy:calibrated,path:fit.json}]"],
    "trace": [*CALIBRATED, "compare=[]", "folder=other"],
    "replay": [*CALIBRATED, "compare=[]"],
}


def fitted_on(drafter: str) -> None:
    """A calibration of a drafter's confidences, in `fit.json`."""
    calibration.save(calibration.Temperatures((1.0,), greedy=True, drafter=drafter), "fit.json")


@pytest.mark.parametrize("verb", BY_VERB)
def test_a_calibration_fitted_on_another_drafter_is_refused(verbs, target, verb: str):
    if verb == "replay":
        assert verbs("trace", "policy=chain", "compare=[]")[0] == 0
    fitted_on("0123456789abcdef")
    status, _, errors = verbs(verb, *BY_VERB[verb])
    here = guided(target).fingerprint
    assert status == 1
    assert f"the calibration is of drafter 0123456789abcdef; here it is {here}: fit one on a run of this" in errors
    assert not list(Path("runs").glob("*")) and not Path("other").exists()


def test_a_calibration_of_the_drafter_itself_is_used(verbs, target):
    fitted_on(guided(target).fingerprint)
    status, _, errors = verbs("bench", *BY_VERB["bench"], "max_new_tokens=4")
    assert status == 0, errors
