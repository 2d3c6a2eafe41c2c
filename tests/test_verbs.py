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


@pytest.mark.parametrize(
    ("verb", "argument", "named"),
    [
        ("trace", "folder=5", "folder=5 must be the path of a file or folder, as text"),
        ("trace", "extend=[a]", "extend=['a'] must be the path"),
        ("trace", "texts=5", "texts=5 must be the path"),
        ("trace", "data.path=5", "path=5 must be the path"),
        ("trace", "trace=null", "trace=None must be the fields target_prob, positions and budget"),
        ("trace", "draw=null", "draw=None must be the fields kind, temperature and error_scale"),
        ("trace", "compare=chain", "compare='chain' must be a list of policies, such as compare=[chain]"),
        ("trace", "draw.kind=with_replacement temperature=1", "drawn anew by every pass"),
        ("replay", "trace=null", "trace=None must be the path"),
        ("replay", "run=5", "run=5 must be the path"),
        ("replay", "output=null", "output=None must be the path"),
        ("replay", "compare=null", "compare=None must be a list of policies"),
        ("replay", "regret=3", "regret=3 must be true or false"),
        ("replay", "cost=null", "cost=null must be one of h100_70b, h100_8b, measured"),
        ("replay", "policy=eagle2 policy.value=no", "Eagle2: value='no' must be true or false"),
        ("replay", "policy=sequoia policy.other_machine=no", "sequoia: other_machine='no' must be true or false"),
        ("replay", "policy=eagle2 policy.rerank=0", "Eagle2: rerank=0 must be true or false"),
        ("replay", "policy=calibrated policy.path=5", "path=5 must be the path"),
        ("replay", "policy=medusa policy.accuracy=5", "accuracy=5 must be the path"),
        ("replay", "policy=rate_optimal policy.cost=5", "folder=5 must be the path"),
        ("replay", "resume=true sweep=s", "resume=True is of a sweep, which -m asks for"),
        ("replay", "sweep=s", "sweep=s is of a sweep, which -m asks for"),
        ("report", "runs=here", "runs='here' must be a list of folders, such as runs=[here]"),
        ("report", "runs=[5]", "runs=5 must be the path"),
        ("calibrate", "nodes=5", "nodes=5 must be the path"),
        ("calibrate", "folder=5", "folder=5 must be the path"),
        ("calibrate", "positions=[4,8]", "positions=[4, 8] must hold 1: decoding without a tree verifies one"),
        ("calibrate", "widths=[16]", "widths=[16] must hold 1: the root's step expands one"),
        ("explore", "run=5", "run=5 must be the path"),
        ("explore", "run=here page=5", "page=5 must be the path"),
        ("evaluate", "policies=chain", "policies='chain' must be a list of policies"),
        ("evaluate", "texts=5", "texts=5 must be the path"),
        ("bench", "record_nodes=no", "record_nodes='no' must be true or false"),
        ("bench", "drafter=null", "drafter=null must be one of bundled, checkpoint"),
        *[(verb, "seed=a", "seed='a' must be an integer >= 0") for verb in ("bench", "audit", "trace", "evaluate")],
        *[
            (verb, "max_new_tokens=0", "max_new_tokens=0 must be an integer >= ")
            for verb in ("bench", "audit", "trace")
        ],
    ],
)
def test_a_value_of_another_kind_is_named_before_a_model_is_loaded(verbs, monkeypatch, verb, argument, named):
    monkeypatch.setattr("eagle_tree.apps.common.build_target", lambda config: pytest.fail("no model is needed"))
    status, _, errors = verbs(verb, *argument.split())
    assert status == 1 and named in errors and "Traceback" not in errors
    assert [path.name for path in Path().iterdir()] == ["prompts.txt"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "nodes=here has no run.json, which says what was decoded: the run was interrupted"),
        ("{", "here/run.json is truncated or damaged"),
        ("[]", "here/run.json holds no object"),
        ("{}", "here/run.json holds no object with config"),
    ],
)
def test_a_damaged_run_is_named(verbs, content: str | None, named: str):
    options = ["run=here", "policy=eagle2", "policy.budget=4", "policy.top_k=2", "compare=[]", "max_new_tokens=4"]
    assert verbs("bench", *options)[0] == 0
    path = Path("here/run.json")
    path.unlink() if content is None else path.write_text(content)
    status, _, errors = verbs("calibrate", "nodes=here")
    assert status == 1 and named in errors and "Traceback" not in errors
    if content in ("{", "[]"):
        status, _, errors = verbs("explore", "here", "tokenizer=null")
        assert status == 1 and named in errors and "Traceback" not in errors
