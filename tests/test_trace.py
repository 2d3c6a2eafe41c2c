"""A trace: the union of what policies ask, asked once, the same for everyone, and whole or refused on disk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import build_drafter, build_target
from hypothesis import given, settings
from hypothesis import strategies as st
from test_evaluate import PROMPT, SAMPLED
from tree_models import FINE, FakeDrafter, PathModel, every_policy, models, path_of

from eagle_tree.decode import generate, grow
from eagle_tree.drafter.base import Drafter
from eagle_tree.evaluate import Reading, Text, read
from eagle_tree.noise import PassNoise
from eagle_tree.policy import Autoregressive, Chain, Eagle2, Policy, RateOptimal
from eagle_tree.trace import (
    ABSENT,
    EXPANSION_SCHEMA,
    Memo,
    Part,
    Recorder,
    Remembered,
    Trace,
    continued,
    draw_of,
    lacking,
    levels,
    part_path,
    read_parts,
    recorded,
    size_on_disk,
    trace_settings,
)
from eagle_tree.tree import TOP_K, Draft, Draw, Frontier, GrowingTree
from eagle_tree.warp import Sampling

SETTINGS = {"temperature": 0.0, "seed": 0, "max_length": 99, "drafter": "d", "drafter_vocabulary": 6}
SETTINGS |= {"drafter_depth": None}


class Walking(FakeDrafter):
    """A `PathModel` at every position of a text: paths begin with the position."""

    def start(self, prompt_ids, features, pending):
        self.position = 0

    def advance(self, tokens, features):
        self.position += len(tokens)

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        moved = replace(growing, token=torch.cat([torch.tensor([100 + self.position]), growing.token[1:]]))
        return super().expand(moved, frontier, noise)


class Table(Drafter):
    """Candidates by hand: the tokens below the root to probabilities of tokens 0, 1, …; the same at every position."""

    vocab_size = 2

    def __init__(self, table: dict[tuple[int, ...], list[float]]):
        self.table, self.asked = table, []

    def start(self, prompt_ids, features, pending):
        pass

    def advance(self, tokens, features):
        pass

    def expand(self, growing: GrowingTree, frontier: Frontier, noise: PassNoise | None) -> Draft:
        paths = [path_of(growing, node)[1:] for node in frontier.node.tolist()]
        self.asked += paths
        log_prob = torch.tensor([self.table.get(path, [0.5, 0.5]) for path in paths]).log()
        log_conf, token = log_prob.topk(frontier.n_candidates)
        return Draft(token, log_conf, torch.zeros(len(paths)))


def text_of(answer: list[int], name: str = "a") -> Text:
    return Text(name, "test", [1, 2], answer)


def reading_of(answer: list[int], name: str = "a", ahead: list[int] = ()) -> Reading:
    """A text nobody decoded, after a prompt of two tokens."""
    prompt, tokens, behind = (torch.tensor(ids, dtype=torch.int64) for ids in ([1, 2], answer, list(ahead)))
    return Reading(text_of(answer, name), prompt, tokens, None, None, behind)


def part_of(answer: list[int], name: str = "a", index: int = 0, **changes) -> Part:
    return Part(index, text_of(answer, name), [], {**SETTINGS, **changes})


def memo_of(part: Part) -> Memo:
    return Memo.of([part])


def same_pool(ours: GrowingTree, theirs: GrowingTree) -> bool:
    return ours.levels == theirs.levels and all(
        torch.equal(getattr(ours, name), getattr(theirs, name)) for name in ("token", "parent", "log_conf", "score")
    )


# --- what is asked ---


@settings(max_examples=60, deadline=None)
@given(models, st.lists(every_policy, min_size=1, max_size=3), st.lists(st.integers(0, 5), min_size=2, max_size=6))
def test_every_policy_grows_from_a_trace_what_it_grows_from_the_drafter(model, policies: list[Policy], answer):
    part = recorded(part_of(answer), Walking(model), dict(enumerate(policies)), reading_of(answer))
    assert part.expansions.schema == EXPANSION_SCHEMA
    real, remembered = Walking(model), Remembered(memo_of(part), SETTINGS)
    for drafter in (real, remembered):
        drafter.start(None, None, None)
    for position in range(len(answer) - 1):
        pending = torch.tensor(answer[position : position + 1])
        for policy in policies:
            assert same_pool(grow(remembered, policy, pending), grow(real, policy, pending))
        for drafter in (real, remembered):
            drafter.advance(pending, None)
    assert remembered.uncovered == 0


#   0.6 a, 0.4 b; a goes on with ten tokens of 0.1, b with 0.5 0.5: two nodes wide, level 2 expands b's children
#   (0.2 each), and one node wide a's first (0.06): the wider beam does not hold what the narrower one asks.
NESTLESS = {(): [0.6, 0.4], (0,): [0.1, 0.1], (1,): [0.5, 0.5]}
WIDE, NARROW = Eagle2(6, 2, 2), Chain(3)


def test_levels_are_counted_along_the_paths():
    part = recorded(part_of([0, 1]), Table(NESTLESS), {"wide": WIDE}, reading_of([0, 1]))
    assert levels(part.expansions) == 3 and levels(EXPANSION_SCHEMA.empty_table()) == 0


def test_beams_do_not_nest_and_what_is_lacking_is_counted_and_added():
    answer = [0, 1, 0]
    part = recorded(part_of(answer), Table(NESTLESS), {"wide": WIDE}, reading_of(answer))
    assert part.expansions.num_rows == 2 * (1 + 2 + 2)  # both positions: the root, a and b, b's children
    drafter = Remembered(memo_of(part), SETTINGS)
    growing = grow(drafter, NARROW, torch.tensor([0]))
    assert drafter.uncovered == 1  # a's first child
    assert growing.token.tolist() == [0, 0, 0, ABSENT] and growing.log_conf[-1] == -torch.inf
    table = Table(NESTLESS)
    wider = recorded(part, table, {"wide": WIDE, "narrow": NARROW}, reading_of(answer))
    assert wider.expansions.num_rows == part.expansions.num_rows + 2
    assert wider.expansions.filter(np.arange(12) < 10).equals(part.expansions)
    assert table.asked == 2 * [(), (0,), (0, 0)]  # the drafter catches up with what was known, and nothing else
    drafter = Remembered(memo_of(wider), SETTINGS)
    assert grow(drafter, NARROW, torch.tensor([0])).token.tolist() == [0, 0, 0, 0]
    assert drafter.uncovered == 0


def test_what_is_known_is_not_asked_again():
    answer = [0, 1, 0]
    part = recorded(part_of(answer), Table(NESTLESS), {"wide": WIDE}, reading_of(answer))
    assert lacking(part, {"the same": Eagle2(6, 2, 2), "autoregressive": Autoregressive()}) == {}
    assert list(part.requests.values()) == ["wide"]
    table = Table(NESTLESS)
    again = recorded(part, table, {"smaller": Eagle2(3, 2, 1)}, reading_of(answer))
    assert table.asked == [] and again.expansions.equals(part.expansions)
    assert list(again.requests.values()) == ["wide", "smaller"]


def test_a_policy_that_learns_is_recorded_with_all_it_may_ever_ask():
    from test_policy_rate import costs

    policy = RateOptimal(costs([1.0] * 61), budget=4, top_k=2, depth=2)
    model, answer = PathModel(3, FINE), [1, 2, 3]
    part = recorded(part_of(answer), Walking(model), {"rate": policy}, reading_of(answer))
    assert part.expansions.num_rows == 2 * (1 + 2)
    assert not lacking(part, {"after many passes": policy})


def test_more_candidates_come_behind_those_that_are_known():
    """A second look may round otherwise; the first answer stands, its children keep their ranks."""

    class Rounding(Walking):
        def expand(self, growing, frontier, noise):
            draft = super().expand(growing, frontier, noise)
            return Draft(draft.token.flip(1), draft.log_conf - 1e-3, draft.entropy)

    model, answer = PathModel(5, FINE), [1, 2]
    narrow = recorded(part_of(answer), Walking(model), {"two": Eagle2(4, 2, 1)}, reading_of(answer))
    wide = recorded(narrow, Rounding(model), {"four": Eagle2(4, 4, 1)}, reading_of(answer))
    before, after = (part.expansions["token"].to_pylist() for part in (narrow, wide))
    assert [len(row) for row in after] == [4] * 5
    assert [row[:2] for row in after[:3]] == before
    assert all(len(set(row)) == 4 for row in after)
    assert [row[:2] for row in wide.expansions["log_conf"].to_pylist()[:3]] == narrow.expansions["log_conf"].to_pylist()


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_a_head_is_caught_up_with_what_the_memo_answered(kind: str):
    """The second policy's deeper levels need the head's states of levels that were recorded for the first."""
    target = build_target()
    run = generate(target, None, Autoregressive(), PROMPT, 6)
    text = Text("a", "", PROMPT, run.tokens)
    reading = read(target, build_drafter(target, kind).taps, text, Sampling())
    first, second = {"shallow": Eagle2(8, 3, 1)}, {"deep": Eagle2(8, 3, 3)}
    part = replace(part_of([]), text=text)
    split = recorded(recorded(part, build_drafter(target, kind), first, reading), build_drafter(target, kind),
                     second, reading)  # fmt: skip
    whole = recorded(part, build_drafter(target, kind), second, reading)

    def paths(part):
        """(position, tokens below the root) of every expansion to its candidates and confidences."""
        known, found = {}, {}
        for row, one in enumerate(part.expansions.to_pylist()):
            above, tokens = known.get(one["parent"], ((), None))
            known[row] = (above if one["parent"] < 0 else (*above, tokens[one["rank"]]), one["token"])
            found[one["position"], known[row][0]] = one["token"], one["log_conf"]
        return found

    ours, theirs = paths(split), paths(whole)
    assert ours.keys() == theirs.keys()
    for key, (token, log_conf) in ours.items():
        assert token == theirs[key][0]
        assert log_conf == pytest.approx(theirs[key][1], abs=1e-6)


def test_candidates_that_were_drawn_at_random_are_refused_and_so_is_nan():
    class Drawn(Walking):
        def expand(self, growing, frontier, noise):
            return replace(super().expand(growing, frontier, noise), log_q=torch.ones(1, 6) / 6)

    class Broken(Walking):
        def expand(self, growing, frontier, noise):
            draft = super().expand(growing, frontier, noise)
            return replace(draft, log_conf=draft.log_conf * torch.nan)

    model, reading = PathModel(3, FINE), reading_of([1, 2])
    with pytest.raises(ValueError, match=r"Drawn draws its candidates at random, and draw.kind=top_k does not"):
        recorded(part_of([1, 2]), Drawn(model), {"chain": Chain(1)}, reading)
    with pytest.raises(ArithmeticError, match="NaN at answer position 0"):
        recorded(part_of([1, 2]), Broken(model), {"chain": Chain(1)}, reading)


# --- the text goes on behind its end ---


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["T=0", "T=1"])
def test_a_text_goes_on_as_a_longer_one_would(sampling):
    target = build_target()
    options = dict(sampling=sampling, seed=3, sequence="a")
    short, long = (generate(target, None, Autoregressive(), PROMPT, count, **options).tokens for count in (9, 14))
    text = Text("a", "", PROMPT, short)
    assert continued(target, text, 5, sampling, 3, target.new_cache()) == long[9:]


def test_a_text_goes_on_behind_its_end_of_sequence_and_stops_at_the_end_of_the_context():
    free = generate(build_target(), None, Autoregressive(), PROMPT, 20).tokens
    ending = build_target(eos_token_id=[free[5], free[8]], pad_token_id=0)
    short = generate(ending, None, Autoregressive(), PROMPT, 20).tokens
    assert short[-1] in (free[5], free[8]) and len(short) < 9
    text = Text("a", "", PROMPT, short)
    assert short + continued(ending, text, 20 - len(short), Sampling(), 0, ending.new_cache()) == free
    small = build_target(max_position_embeddings=24)
    text = Text("a", "", PROMPT, generate(small, None, Autoregressive(), PROMPT, 10).tokens)
    assert len(continued(small, text, 16, Sampling(), 0, small.new_cache())) == 24 - 11 - 10


# --- on disk ---


def written(folder, answer=(0, 1, 0, 1), name: str = "a", index: int = 0, **changes) -> Part:
    part = part_of(list(answer), name, index, **changes)
    part = recorded(part, Walking(PathModel(7, FINE)), {"eagle2": Eagle2(6, 3, 2)}, reading_of(list(answer)))
    part.write(folder)
    return part


def test_what_is_written_is_read_in_the_prompts_order(tmp_path):
    parts = [written(tmp_path, name=name, index=index) for index, name in ((2, "a"), (0, "x/y?"), (1, "ü"))]
    again = read_parts(tmp_path)
    assert [part.text.prompt_id for part in again] == ["x/y?", "ü", "a"]
    assert again == [parts[1], parts[2], parts[0]]
    assert size_on_disk(tmp_path) == sum(path.stat().st_size for path in tmp_path.iterdir())
    trace = Trace.read(tmp_path)
    assert trace.positions == [3, 3, 3] and trace.first == [0, 3, 6]
    assert trace.context.tolist() == [2, 3, 4] * 3
    assert trace.windows(3).tolist()[:3] == [[0, 1, 0], [1, 0, 1], [0, 1, -1]]
    assert trace.memo.root.tolist() == [0, 7, 14, 21, 28, 35, 42, 49, 56]


def test_a_part_cut_at_any_byte_is_refused_by_name(tmp_path):
    written(tmp_path)
    path = part_path(tmp_path, "a")
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"prompt-\w+.parquet is truncated or damaged"):
            Part.read(path)
    path.write_bytes(whole)
    Part.read(path)


def test_a_changed_byte_is_not_read_as_another_expansion(tmp_path):
    """Pages carry checksums: a byte that rotted is an error or changes nothing."""
    part = written(tmp_path)
    path = part_path(tmp_path, "a")
    whole = path.read_bytes()
    for place in range(4, len(whole) - 8, 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            again = Part.read(path)
        except ValueError as error:
            assert "damaged" in str(error)
        else:
            assert again.expansions.equals(part.expansions)


@pytest.mark.parametrize(("key", "value"), [("drafter", "e"), ("temperature", 1.0), ("seed", 4)])
def test_parts_of_different_settings_are_not_read_together(tmp_path, key, value):
    written(tmp_path)
    written(tmp_path, name="b", **{key: value})
    with pytest.raises(ValueError, match=rf"was recorded with {key} \S+ \(not \S+\), unlike"):
        Trace.read(tmp_path)


def test_a_folder_without_a_trace_and_an_empty_trace_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds none; record one with `eagle-tree trace folder="):
        Trace.read(tmp_path / "nowhere")
    part_of([3]).write(tmp_path)
    with pytest.raises(ValueError, match="is empty: every answer ended with its first token"):
        Trace.read(tmp_path)
    pq.write_table(pa.table({"x": [1]}), part_path(tmp_path, "a"))
    with pytest.raises(ValueError, match="truncated or damaged"):
        Trace.read(tmp_path)


def test_a_prompt_of_one_token_is_no_obstacle_beside_others(tmp_path):
    part_of([3], "short", 1).write(tmp_path)
    written(tmp_path)
    trace = Trace.read(tmp_path)
    assert trace.positions == [3, 0] and trace.memo.root.shape == (3,)


def test_settings_name_target_and_drafter():
    target = build_target()
    ours = trace_settings(target, build_drafter(target), Sampling(), 9, 0)
    assert ours == trace_settings(target, build_drafter(target), Sampling(), 9, 0)
    others = [
        trace_settings(build_target(seed=5), build_drafter(target), Sampling(), 9, 0),
        trace_settings(target, build_drafter(target, seed=2), Sampling(), 9, 0),
        trace_settings(target, build_drafter(target, "eagle"), Sampling(), 9, 0),
        trace_settings(target, build_drafter(target, draft_vocab=41), Sampling(), 9, 0),
    ]
    assert all(other != ours for other in others)


def test_settings_name_a_draw_that_expansions_depend_on():
    """The most likely candidates do not depend on it, and coupled ones at temperature 0 are these."""
    target = build_target()
    rest = target, build_drafter(target)
    for draw in (Draw("top_k", 0.5), Draw("coupled")):
        assert trace_settings(*rest, Sampling(), 9, 0, draw) == trace_settings(*rest, Sampling(), 9, 0)
    coupled = trace_settings(*rest, Sampling(0.7), 9, 0, Draw("coupled", error_scale=2.0))
    assert coupled["draw"] == {"kind": "coupled", "temperature": 0.7, "error_scale": 2.0}
    assert draw_of(coupled) == Draw("coupled", 0.7, 2.0) and draw_of(SETTINGS) == TOP_K
    with pytest.raises(ValueError, match=r"draw.kind=hybrid are drawn anew by every pass"):
        trace_settings(*rest, Sampling(0.7), 9, 0, Draw("hybrid"))


def test_a_recorder_says_what_it_records():
    """The seam's attributes are the drafter's, so that growth ends where the drafter's depth does."""
    drafter = Walking(PathModel(3, FINE), max_depth=2)
    recorder = Recorder(drafter)
    recorder.start(None, None, None)
    growing = grow(recorder, Chain(5), torch.tensor([3]))
    assert recorder.vocab_size == 6 and len(growing.levels) == 2
