"""Training: a resumed run is the same run, and what goes wrong is said."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, build_target
from torch import Tensor

from eagle_tree import features
from eagle_tree.corpus import Sequence
from eagle_tree.drafter.medusa import MedusaConfig, MedusaHeads
from eagle_tree.features import FeatureStore, observe
from eagle_tree.objective import Eagle, Eagle3, Medusa, initial_eagle, initial_eagle3, make_batch
from eagle_tree.target import Target
from eagle_tree.train import Example, Trainer, TrainSettings, batches, drawn, examples, token_counts

DRAFT_TOKENS = torch.arange(0, VOCAB, 3)  # 21 of the 61 tokens


@pytest.fixture(scope="module")
def single() -> Target:
    """The tiny target in fp32, in which heads are trained."""
    return build_target(dtype=torch.float32)


def example(text: list[int], learnt: range, index: int = 0) -> Example:
    return Example(torch.tensor(text), torch.tensor([place in learnt for place in range(len(text))]), index)


# --- data ---


def test_examples_learn_where_the_target_speaks():
    """Prompt of 3, answer of 10: the law after the prompt's last token is the first that is learnt."""
    long = Sequence([1, 2, 3], list(range(10, 20)), 0.0)
    made = examples([long], max_length=100)
    assert made[0].token.tolist() == [1, 2, 3, *range(10, 20)]
    assert made[0].learnt.tolist() == [False, False] + [True] * 11
    cut = examples([long], max_length=12)[0]
    assert cut.token.tolist() == [1, 2, 3, *range(10, 19)]
    assert cut.learnt.shape == cut.token.shape


def test_sequences_with_hardly_any_answer_are_left_out():
    assert examples([Sequence([1] * 20, [2] * 5, 0.0)], max_length=100) == []
    assert examples([Sequence([1] * 20, [2] * 50, 0.0)], max_length=20) == []  # cut before the answer


def test_nothing_is_learnt_after_the_end():
    """The law after an end-of-sequence token is nobody's; after a token that only `max_length` made the last, it is."""
    ended = examples([Sequence([1, 2], [*range(10, 20), 7], 0.0)], 100, ending=frozenset([7]))[0]
    assert ended.learnt.tolist() == [False] + [True] * 11 + [False]
    cut = examples([Sequence([1, 2], [*range(10, 20), 7], 0.0)], 12, ending=frozenset([7]))[0]
    assert cut.learnt.tolist() == [False] + [True] * 11


def test_examples_know_their_place_in_the_corpus():
    sequences = [Sequence([1], [3] * 12, 0.0), Sequence([1], [3], 0.0), Sequence([1], [4] * 12, 0.0)]
    assert [one.index for one in examples(sequences, 100)] == [0, 2]


def test_tokens_are_counted_in_answers_alone():
    """Answers say 5 three times, 9 twice, 2 and 7 once. Prompts do not count."""
    sequences = [Sequence([4, 4, 4, 4], [5, 9, 5], 0.0), Sequence([4], [9, 7, 5, 2], 0.9)]
    assert token_counts(sequences, vocab_size=12).tolist() == [0, 0, 1, 0, 0, 3, 0, 1, 0, 2, 0, 0]


def corpus(count: int = 8) -> list[Example]:
    """Examples of different lengths."""
    texts = [[(7 * i + 3 * i * i + 5 * k) % VOCAB for i in range(12 + 3 * (k % 4))] for k in range(count)]
    return [example(text, range(2, len(text))) for text in texts]


def test_a_share_of_the_learnt_positions_is_drawn_by_the_texts_own_seed():
    """Of 10,000 learnt positions a quarter is 2,500 ± 4 · 43; what is not learnt is never drawn."""
    learnt = torch.arange(12_000) >= 2_000
    quarter = drawn(learnt, 0.25, seed=3)
    assert 2_327 <= int(quarter.sum()) <= 2_673 and not quarter[:2_000].any()
    assert torch.equal(quarter, drawn(learnt, 0.25, seed=3))
    assert not torch.equal(quarter, drawn(learnt, 0.25, seed=4))
    assert torch.equal(drawn(learnt, 1.0, seed=3), learnt)


def test_batches_are_a_function_of_seed_and_step():
    data, settings = corpus(), TrainSettings(steps=10, sequences_per_step=2)
    whole = list(batches(data, settings, 0))
    assert len(whole) == 10
    resumed = list(batches(data, settings, 6))
    assert [[id(one) for one in batch] for batch in resumed] == [[id(one) for one in batch] for batch in whole[6:]]
    for epoch in (whole[:4], whole[4:8]):  # eight examples, two a step
        assert sorted(id(one) for batch in epoch for one in batch) == sorted(map(id, data))
    assert [id(one) for batch in whole[:4] for one in batch] != [id(one) for batch in whole[4:8] for one in batch]
    other = list(batches(data, replace(settings, seed=1), 0))
    assert [id(one) for batch in whole for one in batch] != [id(one) for batch in other for one in batch]


def test_batches_hold_texts_of_like_length():
    """A stretch of 16 batches, sorted: of 32 texts of four lengths, eight each, no batch of two mixes lengths."""
    data = corpus(32)
    for batch in batches(data, TrainSettings(steps=16, sequences_per_step=2), 0):
        assert len({one.token.shape[0] for one in batch}) == 1


# --- the loop ---

SETTINGS = TrainSettings(steps=12, max_length=32, warmup_steps=2, learning_rate=1e-2, precision="float32")


def new_objective(single: Target, kind: str = "eagle3"):
    if kind == "eagle3":
        return Eagle3(single, initial_eagle3(single, DRAFT_TOKENS, (2, 2, 1)), draft_steps=3)
    if kind == "eagle":
        return Eagle(single, initial_eagle(single))
    return Medusa(single, MedusaHeads(MedusaConfig(32, VOCAB, 3)))


def new_trainer(
    single: Target, settings: TrainSettings = SETTINGS, kind: str = "eagle3", folder: Path | None = None
) -> Trainer:
    objective = new_objective(single, kind)
    return Trainer(single, objective, settings, FeatureStore(single, objective.taps, folder))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.head.state_dict().items()}


def assert_same_weights(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize(
    ("kind", "precision", "stored"),
    [
        ("eagle3", "float32", False),
        ("eagle3", "float32", True),
        ("eagle3", "bfloat16", False),
        ("eagle", "float32", True),
        ("medusa", "float32", False),
    ],
)
def test_a_killed_and_resumed_run_is_the_uninterrupted_one(single, tmp_path, kind, precision, stored):
    """Saved at step 3, killed at 5, resumed over three epochs: the same weights, bit for bit."""
    data, settings = corpus(), replace(SETTINGS, precision=precision)
    folders = [tmp_path / name if stored else None for name in ("whole", "killed")]
    whole = new_trainer(single, settings, kind, folders[0])
    whole_losses = [whole.train_step(batch).loss for batch in batches(data, settings, 0)]

    killed = new_trainer(single, settings, kind, folders[1])
    for batch in batches(data, settings, 0):
        killed.train_step(batch)
        if killed.step == 3:
            killed.save(tmp_path / "run" / "state.pt")
        if killed.step == 5:
            break
    resumed = new_trainer(single, settings, kind, folders[1])
    resumed.load(tmp_path / "run" / "state.pt")
    assert resumed.step == 3
    losses = [resumed.train_step(batch).loss for batch in batches(data, settings, resumed.step)]
    assert resumed.step == whole.step == 12
    assert losses == whole_losses[3:]
    assert_same_weights(weights(resumed), weights(whole))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["state.pt"]


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa"])
def test_training_lowers_the_loss(single, kind):
    """Forty steps on four examples, seen twenty times over."""
    data = corpus(4)
    trainer = new_trainer(single, replace(SETTINGS, steps=40), kind)
    losses = [trainer.train_step(batch).loss for batch in batches(data, trainer.settings, 0)]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_a_step_reports_means_over_positions(single):
    """By hand from the objective's own sums: the loss by depth weights, agreement and acceptance by depth."""
    data, trainer = corpus(2), new_trainer(single)
    seen = [trainer.store.read(one.token) for one in data]
    batch = make_batch([one.token for one in data], [one.learnt for one in data], seen, [0, 1])
    with torch.no_grad():
        sums = trainer.objective(batch)
    step = trainer.train_step(data)
    means = sums.loss / sums.count
    assert step.loss == pytest.approx((means[0] + 0.8 * means[1] + 0.64 * means[2]).item())
    assert step.agreement == pytest.approx((sums.agreed / sums.count).tolist())
    assert step.acceptance == pytest.approx((sums.overlap / sums.count).tolist())
    assert step.row(7) == {
        "step": 7,
        "loss": step.loss,
        **{f"agreement_{depth}": step.agreement[depth] for depth in range(3)},
        **{f"acceptance_{depth}": step.acceptance[depth] for depth in range(3)},
    }


def test_a_step_learns_the_share_that_it_draws(single):
    """Those that seed 0 draws: the loss is that of a text in which only they are learnt."""
    (text, *_) = corpus(1)
    share = new_trainer(single, replace(SETTINGS, learnt_share=0.5)).train_step([text])
    marked = replace(text, learnt=drawn(text.learnt, 0.5, seed=0))
    assert 0 < int(marked.learnt.sum()) < int(text.learnt.sum())
    assert share == new_trainer(single).train_step([marked])


def test_a_nan_loss_is_raised_with_its_batch_and_leaves_the_weights(single):
    """And the next sound step is the one that would have been taken without the broken one."""
    data = [replace(one, index=10 + place) for place, one in enumerate(corpus(4))]
    trainer, undisturbed = new_trainer(single), new_trainer(single)
    for each in (trainer, undisturbed):
        each.train_step(data[:2])
    before = weights(trainer)
    honest = trainer.store.read

    def broken(token: Tensor):
        seen = honest(token)
        return replace(seen, feature=seen.feature * math.nan)

    trainer.store.read = broken
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1, on corpus sequences 12, 13"):
        trainer.train_step(data[2:])
    assert_same_weights(weights(trainer), before)
    assert trainer.step == 1
    trainer.store.read = honest
    for each in (trainer, undisturbed):
        each.train_step(data[2:])
    assert_same_weights(weights(trainer), weights(undisturbed))


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa"])
def test_the_target_is_not_trained(single, kind):
    before = single.fingerprint
    trainer = new_trainer(single, kind=kind)
    trainer.train_step(corpus(2))
    assert single.fingerprint == before
    assert all(parameter.grad is None for parameter in single.model.parameters())
    assert all(parameter.requires_grad for parameter in trainer.head.parameters())
    ours = sum(parameter.numel() for parameter in trainer.objective.parameters())
    assert ours == sum(parameter.numel() for parameter in trainer.head.parameters())


# --- what the target said, kept ---


def test_the_target_is_asked_once_per_text(single, monkeypatch, tmp_path):
    """Later epochs, and later runs, read what it said from the folder; without one it is asked again."""
    asked = []
    monkeypatch.setattr(features, "observe", lambda *arguments: asked.append(1) or observe(*arguments))
    data = corpus(4)
    for folder, expected in ((None, 12), (tmp_path, 4), (tmp_path, 0)):
        asked.clear()
        trainer = new_trainer(single, folder=folder)
        for batch in batches(data, replace(SETTINGS, steps=6), 0):  # three epochs of two steps
            trainer.train_step(batch)
        assert len(asked) == expected


def test_what_is_read_back_is_what_was_said(single, tmp_path):
    text = corpus(1)[0].token
    for taps in ((2, 2, 1), (4,)):
        store, said = FeatureStore(single, taps, tmp_path), observe(single, text, taps)
        for _ in range(2):
            seen = store.read(text)
            for name in ("feature", "hidden", "log_z"):
                assert torch.equal(getattr(seen, name), getattr(said, name))


def test_heads_of_different_taps_share_what_the_target_said(single, monkeypatch, tmp_path):
    """Taps 2, 1, then the last state alone, then 1 and 3, then 3, 2, 1: the target is asked for the first and third."""
    asked = []
    monkeypatch.setattr(features, "observe", lambda *arguments: asked.append(arguments[-1]) or observe(*arguments))
    text = corpus(1)[0].token
    for taps in ((2, 2, 1), (4,), (1, 3), (3, 2, 1)):
        assert torch.equal(FeatureStore(single, taps, tmp_path).read(text).feature, observe(single, text, taps).feature)
    assert asked == [(2, 2, 1), (1, 3)]


def test_a_damaged_feature_file_is_made_again(single, tmp_path):
    text = corpus(1)[0].token
    store = FeatureStore(single, (4,), tmp_path)
    said = store.read(text)
    (path,) = store.folder.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert torch.equal(store.read(text).hidden, said.hidden)
    assert torch.equal(store.read(text).hidden, said.hidden)


def test_other_targets_and_dtypes_have_other_features(single, tmp_path):
    text = corpus(1)[0].token
    targets = (single, build_target(dtype=torch.float32, seed=1), build_target(dtype=torch.bfloat16))
    hidden = [FeatureStore(each, (4,), tmp_path).read(text).hidden for each in targets]
    assert not torch.equal(hidden[0], hidden[1])
    assert hidden[2].dtype == torch.bfloat16


# --- resuming ---


def test_a_run_with_other_settings_is_not_resumed(single, tmp_path):
    """Named: what differs. The number of steps may: a run can be prolonged."""
    trainer, path = new_trainer(single), tmp_path / "state.pt"
    trainer.save(path, {"head": "one"})
    new_trainer(single, replace(SETTINGS, steps=99)).load(path, {"head": "one"})
    with pytest.raises(ValueError, match=r"learning_rate: 0.01 then, 0.1 now"):
        new_trainer(single, replace(SETTINGS, learning_rate=0.1)).load(path, {"head": "one"})
    with pytest.raises(ValueError, match=r"head: one then, two now.*name another folder"):
        new_trainer(single).load(path, {"head": "two"})


def test_a_damaged_state_is_said_so(single, tmp_path):
    trainer, path = new_trainer(single), tmp_path / "state.pt"
    trainer.save(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="is not a training state"):
        trainer.load(path)


# --- settings ---


def test_the_learning_rate_warms_up_and_decays_to_two_percent():
    """Warm-up over 10 steps, then half a cosine over 100: full, half way, end."""
    settings = TrainSettings(steps=110, warmup_steps=10, learning_rate=1.0)
    assert settings.rate(0) == pytest.approx(0.1)
    assert settings.rate(4) == pytest.approx(0.5)
    assert settings.rate(9) == pytest.approx(1.0)
    assert settings.rate(10) == pytest.approx(1.0)
    assert settings.rate(60) == pytest.approx(0.02 + 0.98 / 2)
    assert settings.rate(110) == pytest.approx(0.02)
    assert settings.rate(500) == pytest.approx(0.02)
    assert TrainSettings(steps=10, warmup_steps=0, learning_rate=1.0).rate(0) == pytest.approx(1.0)


def test_each_step_runs_at_its_rate(single):
    trainer = new_trainer(single)
    for batch in list(batches(corpus(), SETTINGS, 0))[:4]:
        expected = SETTINGS.rate(trainer.step)
        trainer.train_step(batch)
        assert {group["lr"] for group in trainer.optimizer.param_groups} == {expected}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (dict(steps=0), "steps=0 must be an integer >= 1"),
        (dict(sequences_per_step=0), "sequences_per_step=0 must be an integer >= 1"),
        (dict(max_length=0), "max_length=0 must be an integer >= 1"),
        (dict(precision="half"), "precision='half' is not one of auto, float32, bfloat16"),
        (dict(learnt_share=0.0), r"learnt_share=0.0 is outside 0…1 \(0 excluded\)"),
        (dict(learning_rate=0.0), "learning_rate=0.0 must be above 0"),
        (dict(learning_rate=math.nan), "learning_rate=nan must be above 0"),
    ],
)
def test_settings_name_what_is_wrong(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        TrainSettings(**fields)


def test_texts_too_short_for_the_objective_are_refused(single):
    with pytest.raises(ValueError, match=r"max_length=11 must exceed the objective's depths \+ 8 = 11"):
        new_trainer(single, replace(SETTINGS, max_length=11))
