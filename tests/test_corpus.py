"""The corpus: batched sampling says what the target alone would say, and a killed run loses no shard."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from conftest import VOCAB, build_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from eagle_tree import corpus
from eagle_tree.corpus import (
    SCHEMA,
    Sequence,
    Settings,
    build,
    chat_turns,
    digest,
    draw,
    load,
    sample,
    shared_prefix,
    sharing_words,
)
from eagle_tree.target import Target

GREEDY = Settings(rows=3, max_prompt_tokens=12, max_answer_tokens=8, greedy_share=1.0)
PROMPTS = [
    [7, 3, 50, 11, 3, 29, 60, 1, 42, 18, 5, 33],
    [2],
    [7, 3, 50, 11, 8],
    [9, 9, 14, 55, 21, 8, 30],
    [7, 3],
    [41, 12, 4, 6],
    [5, 5, 5, 5, 5, 5, 5, 5, 5],
    [7, 3, 50],
    [60, 0],
]
OPENING, END_OF_TURN, ANSWER = 58, 59, 60


def alone(target: Target, prompt: list[int], count: int = 8) -> list[int]:
    """transformers' own greedy answer."""
    ids = torch.tensor([prompt])
    out = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prompt) :].tolist()


def answers(sequences) -> dict[tuple[int, ...], list[int]]:
    return {tuple(one.prompt_ids): one.answer_ids for one in sequences}


@pytest.fixture(scope="module")
def chatting() -> Target:
    """A tiny target with a chat template: 58 opens a user turn, 59 ends it, 60 opens the answer."""
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB)} | {"?": VOCAB}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    tokenizer.chat_template = (
        "{% for m in messages %}58 {{ m.content }} 59 {% endfor %}{% if add_generation_prompt %}60{% endif %}"
    )
    target = build_target()
    target.tokenizer = tokenizer
    target.model.lm_head.weight.data[END_OF_TURN] *= 2.0  # a turn that hardly ever ends would be thrown away
    return target


# --- batched, ragged and refilled rows ---


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_greedy_answers_are_those_of_each_prompt_alone(kind, rows):
    """Nine prompts of 1 to 12 tokens; fewer rows than prompts are refilled, more rows than prompts idle."""
    target = build_target(kind)
    sequences = list(sample(target, PROMPTS, replace(GREEDY, rows=rows), set(), 0))
    assert len(sequences) == len(PROMPTS)
    assert answers(sequences) == {tuple(prompt): alone(target, prompt) for prompt in PROMPTS}
    assert {one.temperature for one in sequences} == {0.0}


@pytest.mark.parametrize("rows", [1, 4])
def test_answers_end_at_the_end_of_sequence_or_at_the_limit(rows):
    """The end-of-sequence token belongs to the answer; rows end at different times, so refilling is ragged."""
    free = build_target()
    lengths = {}
    texts = [token for prompt in PROMPTS for token in alone(free, prompt)]
    eos = sorted({token for token in texts if 2 <= texts.count(token) <= 12})[:3]
    target = build_target(eos_token_id=eos, pad_token_id=0)
    for one in sample(target, PROMPTS, replace(GREEDY, rows=rows), set(), 0):
        assert one.answer_ids == alone(target, one.prompt_ids)
        assert not set(one.answer_ids[:-1]) & set(eos)
        assert len(one.answer_ids) == 8 or one.answer_ids[-1] in eos
        lengths[tuple(one.prompt_ids)] = len(one.answer_ids)
    assert len(lengths) == len(PROMPTS)
    assert 8 in lengths.values()
    assert min(lengths.values()) < 8


def test_each_prompt_is_answered_once():
    """Repeated prompts in the list, and prompts that the corpus holds already, are dropped."""
    target = build_target()
    seen = {digest(PROMPTS[3]), digest(PROMPTS[5])}
    prompts = [*PROMPTS, PROMPTS[0], PROMPTS[2], PROMPTS[2]]
    sequences = list(sample(target, prompts, GREEDY, seen, 0))
    answered = sorted(tuple(one.prompt_ids) for one in sequences)
    assert answered == sorted(tuple(prompt) for i, prompt in enumerate(PROMPTS) if i not in (3, 5))
    assert seen == {digest(prompt) for prompt in PROMPTS}
    assert list(sample(target, prompts, GREEDY, seen, 0)) == []


def test_sampled_answers_follow_the_seed_and_the_share():
    """Half of the answers greedy, half sampled; the same seed says the same, another seed something else."""
    target = build_target()
    settings = replace(GREEDY, rows=4, greedy_share=0.5, answer_temperature=1.5)
    first, again, other = (list(sample(target, PROMPTS, settings, set(), seed)) for seed in (3, 3, 4))
    assert first == again
    assert answers(first) != answers(other)
    greedy = [one for one in first if one.temperature == 0.0]
    sampled = [one for one in first if one.temperature == 1.5]
    assert len(greedy) + len(sampled) == len(PROMPTS)
    assert greedy
    assert sampled
    assert all(one.answer_ids == alone(target, one.prompt_ids) for one in greedy)
    assert any(one.answer_ids != alone(target, one.prompt_ids) for one in sampled)


def test_shared_prefix_counts_leading_tokens_and_leaves_one_to_feed():
    assert shared_prefix([1, 2, 3, 9], [1, 2, 3, 4]) == 3
    assert shared_prefix([1, 2, 3], [5]) == 0
    assert shared_prefix([1, 2, 3, 4], [1, 2, 3]) == 2  # the last token must be fed, its logits are wanted
    assert shared_prefix([], [1, 2]) == 0


# --- the target's own prompts ---


def test_the_template_is_taken_apart_around_the_users_words(chatting):
    assert chat_turns(chatting) == ([OPENING], [END_OF_TURN, ANSWER], END_OF_TURN)


def test_own_prompts_need_a_template(target):
    with pytest.raises(ValueError, match="the empty user turn needs a tokenizer with a chat template"):
        next(sample(target, [], GREEDY, set(), 0))


def test_the_target_writes_prompts_and_answers_them(chatting):
    """Each prompt is the template around sampled words, is new, and is answered as it would be alone."""
    seen: set[bytes] = set()
    settings = replace(GREEDY, rows=4, prompt_temperature=1.0)
    sequences = list(itertools.islice(sample(chatting, [], settings, seen, 0), 20))
    prompts = [tuple(one.prompt_ids) for one in sequences]
    assert len(set(prompts)) == 20
    assert {digest(prompt) for prompt in prompts} <= seen
    for one in sequences:
        assert one.prompt_ids[0] == OPENING
        assert one.prompt_ids[-2:] == [END_OF_TURN, ANSWER]
        words = one.prompt_ids[1:-2]
        assert END_OF_TURN not in words
        assert len(words) <= 12
        assert one.answer_ids == alone(chatting, one.prompt_ids)


def test_a_prompt_that_comes_again_is_thrown_away(chatting):
    settings = replace(GREEDY, rows=4)
    first = [tuple(one.prompt_ids) for one in itertools.islice(sample(chatting, [], settings, set(), 0), 5)]
    seen = {digest(prompt) for prompt in first[:2]}
    again = [tuple(one.prompt_ids) for one in itertools.islice(sample(chatting, [], settings, seen, 0), 5)]
    assert not set(first[:2]) & set(again)


# --- drawing ---


def test_at_temperature_0_the_draw_is_the_argmax():
    """Row by row: greedy and sampled rows may share a batch."""
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 40.0, 1.0], [5.0, 3.0, 1.0]])
    generator = torch.Generator().manual_seed(0)
    assert draw(logits, torch.tensor([0.0, 1.0, 0.0]), generator).tolist() == [1, 1, 0]
    state = generator.get_state()
    draw(logits, torch.zeros(3), generator)
    assert torch.equal(generator.get_state(), state)  # greedy rows use no randomness


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_draws_follow_the_law(temperature):
    """Chi-square over 20,000 draws from five tokens: below the 99.9th percentile of 4 degrees of freedom, 18.47."""
    logits, n = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5]), 20_000
    drawn = draw(logits.expand(n, 5), torch.full((n,), temperature), torch.Generator().manual_seed(1))
    expected = (logits / temperature).softmax(-1) * n
    observed = torch.bincount(drawn, minlength=5)
    assert ((observed - expected) ** 2 / expected).sum().item() < 18.47


def test_tokens_without_mass_are_never_drawn():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]).expand(2000, 5)
    drawn = draw(logits, torch.ones(2000), torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {1, 3}


# --- shards ---


def shards(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture()
def small_shards(monkeypatch):
    monkeypatch.setattr(corpus, "SHARD_SEQUENCES", 2)


def test_a_corpus_is_built_in_shards(tmp_path, target, small_shards):
    """Nine prompts with eight answer tokens each, two sequences a shard."""
    counted = []
    result = build(tmp_path / "corpus", target, PROMPTS, GREEDY, counted.append)
    assert result == (9, 72, 72)
    assert shards(tmp_path / "corpus") == [f"shard-{i:05d}.parquet" for i in range(5)]
    assert sum(counted) == 72
    loaded = load(tmp_path / "corpus", target.fingerprint)
    assert answers(loaded) == {tuple(prompt): alone(target, prompt) for prompt in PROMPTS}
    assert pq.read_schema(tmp_path / "corpus" / "shard-00000.parquet").equals(SCHEMA)


def test_building_stops_at_the_wanted_number_of_answer_tokens(tmp_path, target, small_shards):
    """20 tokens are reached by the third answer of 8; the rest is not sampled, and more is added by asking for more."""
    few = replace(GREEDY, answer_tokens=20)
    assert build(tmp_path / "corpus", target, PROMPTS, few) == (3, 24, 24)
    assert build(tmp_path / "corpus", target, PROMPTS, few) == (3, 24, 0)
    assert build(tmp_path / "corpus", target, PROMPTS, replace(few, answer_tokens=40)) == (5, 40, 16)
    assert len(answers(load(tmp_path / "corpus"))) == 5


def test_a_killed_build_goes_on_from_its_shards(tmp_path, target, small_shards):
    """Killed after its first shard, with a half-written second one: nothing is lost, nothing is answered twice."""
    whole = tmp_path / "whole"
    build(whole, target, PROMPTS, GREEDY)
    folder = tmp_path / "killed"

    class Killed(Exception):
        pass

    done = []

    def kill(tokens):
        done.append(tokens)
        if len(done) == 4:  # the call at the start, then three answers: one shard of two is written
            raise Killed

    with pytest.raises(Killed):
        build(folder, target, PROMPTS, GREEDY, kill)
    assert shards(folder) == ["shard-00000.parquet"]
    (folder / "shard-00001.tmp").write_bytes(b"half a shard")

    sequences, tokens, new = build(folder, target, PROMPTS, GREEDY)
    assert (sequences, tokens, new) == (9, 72, 56)
    assert len(load(folder)) == 9
    assert answers(load(folder)) == answers(load(whole))


def test_own_prompts_of_a_resumed_run_are_new(tmp_path, chatting, small_shards):
    settings = replace(GREEDY, rows=2, answer_tokens=40)
    build(tmp_path, chatting, [], settings)
    build(tmp_path, chatting, [], replace(settings, answer_tokens=100))
    prompts = [tuple(one.prompt_ids) for one in load(tmp_path)]
    assert len(prompts) > 10
    assert len(set(prompts)) == len(prompts)


def test_a_corpus_is_of_one_target(tmp_path, target):
    build(tmp_path, target, PROMPTS[:2], GREEDY)
    other = build_target(seed=7)
    before = shards(tmp_path)
    complaint = f"shard-00000.parquet was made with target {target.fingerprint}, not {other.fingerprint}"
    with pytest.raises(ValueError, match=complaint):
        build(tmp_path, other, PROMPTS, GREEDY)
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path, other.fingerprint)
    assert shards(tmp_path) == before
    assert len(load(tmp_path)) == 2  # without a fingerprint nothing is compared


def test_a_shard_of_unknown_origin_is_refused(tmp_path, target):
    build(tmp_path, target, PROMPTS[:2], GREEDY)
    path = tmp_path / "shard-00000.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    with pytest.raises(ValueError, match="was made with target unknown"):
        load(tmp_path, target.fingerprint)


def test_a_shard_without_sequences_is_named(tmp_path, target):
    corpus.write_shard(tmp_path / "shard-00000.parquet", [Sequence([1], [2], 0.0)], target.fingerprint)
    corpus.write_shard(tmp_path / "shard-00001.parquet", [], target.fingerprint)
    with pytest.raises(ValueError, match=r"shard-00001\.parquet holds no sequences"):
        load(tmp_path, target.fingerprint)


def test_a_folder_without_shards_is_named(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=r"no corpus shards \(shard-\*\.parquet\) in"):
            load(folder)


def test_what_is_loaded_is_what_was_written(tmp_path):
    written = [Sequence([1, 2], [3], 0.0), Sequence([4], [5, 6, 7], 0.5)]
    corpus.write_shard(tmp_path / "shard-00000.parquet", written, "abc")
    assert load(tmp_path, "abc") == written
    assert shards(tmp_path) == ["shard-00000.parquet"]


# --- settings ---


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (dict(answer_tokens=0), "answer_tokens=0 must be an integer >= 1"),
        (dict(rows=0), "rows=0 must be an integer >= 1"),
        (dict(max_prompt_tokens=0), "max_prompt_tokens=0 must be an integer >= 1"),
        (dict(max_answer_tokens=-1), "max_answer_tokens=-1 must be an integer >= 1"),
        (dict(prompt_temperature=0.0), "prompt_temperature=0.0 must be above 0"),
        (dict(answer_temperature=-0.5), "answer_temperature=-0.5 must be above 0"),
        (dict(greedy_share=1.5), "greedy_share=1.5 is outside 0…1"),
        (dict(greedy_share=float("nan")), "greedy_share=nan is outside 0…1"),
    ],
)
def test_settings_name_what_is_wrong(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        Settings(**fields)


# --- held-out prompts ---


def test_prompts_that_share_words_with_held_out_ones_are_found():
    """5 6 7 is in the first prompt, not in the second (5 6, then 6 7); the third holds the whole of (9, 8)."""
    prompts = [[1, 5, 6, 7, 2], [5, 6, 3, 6, 7, 1], [9, 8], [1, 2, 3]]
    sequences = [Sequence(prompt, [4], 0.0) for prompt in prompts]
    held_out = [[4, 5, 6, 7], [9, 8], []]
    assert sharing_words(sequences, held_out, run=3) == [True, False, True, False]
    assert sharing_words(sequences, [], run=3) == [False] * 4
