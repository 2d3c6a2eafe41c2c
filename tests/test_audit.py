"""The audit: equal texts, near-ties and faults, each called what it is, in single and in half precision."""

from __future__ import annotations

import copy
import functools
import json
import math
from unittest import mock

import pytest
import torch
from conftest import VOCAB, build_target
from test_decode import PROMPT, Oracle
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_tree.audit import Yardstick, first_difference, their_text
from eagle_tree.decode import generate
from eagle_tree.noise import Noise
from eagle_tree.policy import Autoregressive, Eagle2
from eagle_tree.target import Target
from eagle_tree.tree import Tree
from eagle_tree.warp import Sampling

PROMPTS = [PROMPT, [20, 21, 22, 9], [5, 5, 6]]
POLICY = Eagle2(8, 2, 3)
LENGTH = 20
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
tiny = functools.cache(lambda dtype: build_target(dtype=dtype))


def test_the_first_difference_is_found_and_an_earlier_end_is_one():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == first_difference([1, 2, 3], [1, 2]) == 2


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0), Sampling(0.8, top_p=0.9), Sampling(1.2, top_k=5)], ids=repr
)
def test_transformers_own_generate_draws_the_same_text_with_the_same_noise(target, sampling):
    ours = generate(target, None, Autoregressive(), PROMPT, LENGTH, sampling=sampling, seed=2, sequence="a").tokens
    assert their_text(target, PROMPT, LENGTH, sampling, Noise(2, "a")) == ours


# --- the yardstick ---


def yardstick(target: Target, sampling: Sampling = Sampling(), rows: int = 9) -> Yardstick:  # noqa: B008
    return Yardstick(target, sampling, rows)


@DTYPES
def test_a_likely_token_in_place_of_the_text_is_real(dtype):
    """The tenth most likely token is no near-tie of the first."""
    target = tiny(dtype)
    text = their_text(target, PROMPT, 12, Sampling(), Noise(0, 0))
    logits = yardstick(target).logits(target.model, torch.tensor([*PROMPT, *text[:7]]), len(PROMPT), 3)
    assert logits.shape == (8, VOCAB)
    assert logits.argmax(-1).tolist() == text[:8] or dtype == torch.bfloat16
    wrong = [*text[:7], int(logits[-1].topk(10).indices[-1]), *text[8:]]
    found = yardstick(target).judge(PROMPT, text, wrong, Noise(0, 0))
    assert (found.index, found.expected, found.got) == (7, text[7], wrong[7])
    assert found.real and found.margin > 2 * found.noise > 0


@DTYPES
def test_a_tie_is_numerical(dtype):
    """Two tokens whose rows of the LM head are equal have equal logits: either may come."""
    target = copy.deepcopy(tiny(dtype))
    text = their_text(target, PROMPT, 12, Sampling(), Noise(0, 0))
    twin = next(token for token in range(VOCAB) if token not in text)
    head = target.model.get_output_embeddings().weight.data
    head[twin] = head[text[6]]
    found = yardstick(target).judge(PROMPT, text, [*text[:6], twin], Noise(0, 0))
    assert not found.real
    assert found.margin == pytest.approx(0, abs=1e-5)


def test_equal_texts_are_no_divergence_and_a_text_that_ends_is_real(target):
    assert yardstick(target).judge(PROMPT, [1, 2], [1, 2], Noise(0, 0)) is None
    found = yardstick(target).judge(PROMPT, [1, 2], [1], Noise(0, 0))
    assert (found.index, found.expected, found.got, found.real) == (1, 2, -1, True)


def test_the_first_token_of_an_answer_is_judged_too(target):
    assert yardstick(target).judge(PROMPT, [3], [4], Noise(0, 0)).index == 0
    assert yardstick(target).judge([7], [3], [4], Noise(0, 0)).index == 0


def test_where_two_tokens_stand_in_a_nucleus_is_by_hand(target):
    """(.5, .3, .2) and top-p .6: tokens 0 and 1 are in, with 0 and .5 before them; token 2, with .8, is out."""
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    place = yardstick(target, Sampling(1.0, top_p=0.6)).place(logits, torch.tensor([1, 2]))
    assert place.allowed.tolist() == [True, False]
    assert place.before.tolist() == pytest.approx([0.5, 0.8])


def test_how_far_two_tokens_are_from_the_edge_of_top_k_is_by_hand(target):
    """Logits 4, 3, 1 and top-k 2: token 1 is 2 above the first one left out, token 2 is 2 below the last one kept."""
    judge = yardstick(target, Sampling(1.0, top_k=2))
    logits = torch.tensor([4.0, 3.0, 1.0], dtype=torch.float64)
    assert judge.place(logits, torch.tensor([0, 1])).rank_distance == 2
    assert judge.place(logits, torch.tensor([0, 2])).rank_distance == 2
    assert judge.place(logits, torch.tensor([0, 2])).allowed.tolist() == [True, False]


# --- whole runs, sound and with a fault ---


def divergences(dtype: torch.dtype, temperature: float) -> list:
    """Of a tree policy whose drafts are mostly accepted, against autoregressive decoding."""
    target, sampling, found = tiny(dtype), Sampling(temperature), []
    for sequence, prompt in enumerate(PROMPTS):
        alone = their_text(target, prompt, LENGTH, sampling, Noise(0, sequence))
        run = generate(
            target, Oracle(target), POLICY, prompt, LENGTH, temperature, sequence=sequence, record_nodes=False
        )  # fmt: skip
        found.append(yardstick(target, sampling).judge(prompt, alone, run.tokens, Noise(0, sequence)))
    return [one for one in found if one]


@DTYPES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sound_run_has_no_real_divergence(dtype, temperature):
    assert [one for one in divergences(dtype, temperature) if one.real] == []


@DTYPES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_fault_is_real(dtype, temperature, fault):
    assert any(one.real for one in divergences(dtype, temperature))


# --- the verb ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target with a tokenizer, and a file of prompts."""
    folder = tmp_path_factory.mktemp("audit")
    build_target(dtype=torch.float32).model.save_pretrained(folder / "target")
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder / "target")
    (folder / "prompts.txt").write_text("w7 w3 w50 w11\n\nw20 w21 w22 w9\n")
    return folder


def call(eagle_tree, folder, run: str, *overrides: str):
    where = [f"target.name_or_path={folder}/target", f"data.path={folder}/prompts.txt", f"run={folder}/{run}"]
    options = ["target=huggingface", "target.dtype=float32", "target.device=cpu", "drafter=random", "data=text"]
    return eagle_tree("audit", *options, *where, "max_new_tokens=12", *overrides)


def test_the_verb_passes_a_sound_configuration(eagle_tree, folder):
    status, out, errors = call(eagle_tree, folder, "sound", "temperature=1", "accept=coupled")
    assert status == 0, errors
    result = json.loads(out.strip().splitlines()[-1])
    assert result["passed"] and result["tokens"] == 24
    assert "nothing real in 24 tokens" in out
    assert json.loads((folder / "sound" / "audit.json").read_text())["passed"]
    assert (folder / "sound" / "divergences.parquet").exists()


def test_the_verb_fails_where_the_engine_is_wrong(eagle_tree, folder):
    """All positions are one too far: autoregressive decoding is wrong as well, and transformers says so."""
    with mock.patch.object(Tree, "position_offset", property(lambda tree: tree.depth + 1)):
        status, out, _ = call(eagle_tree, folder, "wrong")
    assert status == 1
    result = json.loads(out.strip().splitlines()[-1])
    assert not result["passed"]
    assert result["counts"]["transformers' generate"]["real"] > 0
    assert "REAL" in out


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["accept=typical"], "accept=Typical is lossy"),
        (["accept=hybrid", "policy=specinfer", "temperature=1"], "accept=Hybrid draws another text of the same law"),
        (["temperature=-1"], "temperature=-1"),
        (["run=sound"], "already holds audit.json, of an earlier run; name another folder"),
    ],
)
def test_what_cannot_be_audited_is_named(eagle_tree, folder, overrides, complaint):
    if overrides[0].startswith("run="):
        (folder / "held").mkdir(exist_ok=True)
        (folder / "held" / "audit.json").write_text("{}")
        overrides = []
    status, _, errors = call(eagle_tree, folder, "held", *overrides)
    assert status == 1
    assert complaint in errors and "Traceback" not in errors


def test_margins_are_infinite_only_where_a_token_is_excluded(target):
    """Top-k 1 leaves one token; any other is excluded, and its logit is far below."""
    sampling = Sampling(1.0, top_k=1)
    text = their_text(target, PROMPT, 4, sampling, Noise(0, 0))
    other = (text[2] + 1) % VOCAB
    found = yardstick(target, sampling).judge(PROMPT, text, [*text[:2], other], Noise(0, 0))
    assert math.isinf(found.margin) and found.real
