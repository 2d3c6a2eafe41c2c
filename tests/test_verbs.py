"""What all verbs refuse alike: a calibration of another drafter, a folder that holds an earlier run."""

from __future__ import annotations

import math
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


@pytest.mark.parametrize(("rule", "by_what_happened"), [("match", False), ("sequential", False), ("coupled", True)])
def test_coupled_drafts_are_calibrated_by_what_happened(verbs, monkeypatch, rule: str, by_what_happened: bool):
    """The noise that chose a coupled child decides whether it is accepted; the target's probability of it does not."""
    options = ["run=nodes", "temperature=1", f"accept={rule}", "policy.budget=4", "policy.top_k=2", "compare=[]"]
    status, _, errors = verbs("bench", *options)
    assert status == 0, errors
    fitted = []
    monkeypatch.setattr(
        "eagle_tree.apps.calibrate.fit_isotonic",
        lambda nodes, greedy: fitted.append(nodes) or calibration.fit_isotonic(nodes, greedy),
    )
    status, _, errors = verbs("calibrate", "nodes=nodes")
    assert status == 0, errors
    labels = fitted[0].target_log_prob.dropna()
    assert labels.isin([0.0, -math.inf]).all() == by_what_happened


@pytest.mark.parametrize(
    ("verb", "left"),
    [
        ("bench", "run.json"),
        ("bench", "parts"),
        ("audit", "audit.json"),
        ("evaluate", "evaluation.json"),
        ("replay", "run.json"),
    ],
)
def test_a_folder_that_holds_an_earlier_run_is_refused_before_any_work(verbs, monkeypatch, verb: str, left: str):
    monkeypatch.setattr("eagle_tree.apps.common.build_target", lambda config: pytest.fail("no model is needed"))
    Path("here").mkdir()
    (Path("here") / left).touch()
    status, _, errors = verbs(verb, "run=here")
    assert status == 1
    assert f"run=here already holds {left}, of an earlier run; name another folder" in errors
