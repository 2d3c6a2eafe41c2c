"""EAGLE heads: drafts depend on the prefix alone, siblings do not mix, positions are depths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, build_drafter, build_target
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

from eagle_tree.drafter.eagle import EagleConfig, EagleDrafter, EagleHead, check_fits, published_taps
from eagle_tree.policy import Chain, Eagle2
from eagle_tree.tree import Draft, Frontier, GrowingTree

TOLERANCE = 1e-10
TEXT = [7, 3, 50, 11, 3, 29, 60, 1, 42, 18, 5, 33, 2, 9]
EVERY_THIRD = torch.arange(0, VOCAB, 3)  # a draft vocabulary of 21 of the target's 61 tokens
HEADS = ["eagle", "eagle3", "eagle3-draft-vocabulary"]
every_head = pytest.mark.parametrize("kind", HEADS)
few_examples = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture(scope="module", autouse=True)
def fp64_throughout():
    """transformers rounds RMS norms to fp32 in a model of any dtype; here they stay in fp64, exact to 1e-10."""

    def exact_norm(self, state):
        return self.weight * state * (state.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama.LlamaRMSNorm, "forward", exact_norm)
        yield


def make_drafter(target, kind: str) -> EagleDrafter:
    """A random head, larger in scale than its initialisation so that drafts differ clearly."""
    kind, *restricted = kind.split("-", 1)
    drafter = build_drafter(target, kind, len(EVERY_THIRD) if restricted else None)
    generator = torch.Generator().manual_seed(5)
    for parameter in drafter.head.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3, generator=generator)
    if restricted:
        drafter.head.set_draft_vocab(EVERY_THIRD)
        drafter = EagleDrafter(drafter.head, drafter.embedding, drafter.borrowed_head)
    return drafter


@pytest.fixture(scope="module")
def setups(target):
    """Per kind of head: two drafters of one head, and the target's features of the text."""
    made = {}
    for kind in HEADS:
        drafter = make_drafter(target, kind)
        features = target.prefill(torch.tensor(TEXT), target.new_cache(), drafter.taps).features
        made[kind] = drafter, fresh(drafter), features
    return made


def start(drafter: EagleDrafter, features: Tensor, length: int) -> None:
    """A prompt of `length` tokens of the text; the next one is pending."""
    drafter.start(torch.tensor(TEXT[:length]), features[:length], torch.tensor(TEXT[length : length + 1]))


def advance(drafter: EagleDrafter, features: Tensor, before: int, after: int) -> None:
    """From a prefix of `before` rows to one of `after`."""
    drafter.advance(torch.tensor(TEXT[before + 1 : after + 1]), features[before:after])


def grow(drafter: EagleDrafter, policy, length: int) -> GrowingTree:
    """The candidate pool of a policy at a prefix of `length` rows, as `decode.grow` builds it."""
    growing, draft = GrowingTree.from_root(torch.tensor(TEXT[length : length + 1])), None
    while (frontier := policy.frontier(growing, draft)) is not None:
        draft = drafter.expand(growing, frontier, None)
        growing = growing.append(frontier, draft)
    return growing


def assert_same_draft(ours: Draft | GrowingTree, theirs: Draft | GrowingTree) -> None:
    assert torch.equal(ours.token, theirs.token)
    assert (ours.log_conf.double() - theirs.log_conf.double()).abs().max().item() <= TOLERANCE


def fresh(drafter: EagleDrafter) -> EagleDrafter:
    """Another drafter with the same head."""
    return EagleDrafter(drafter.head, drafter.embedding, drafter.borrowed_head)


def collect_logits(drafter: EagleDrafter) -> list[Tensor]:
    """A list that fills with the raw draft logits of every expansion to come (`log_conf` itself is fp32)."""
    collected = []
    run = drafter._run

    def spy(*arguments):
        state, logits = run(*arguments)
        collected.append(logits)
        return state, logits

    drafter._run = spy
    return collected


# --- the state is a function of the prefix tokens ---


@st.composite
def ways(draw) -> list[tuple[int, object]]:
    """A way to a prefix of 12 rows: stops on it, at each of which some tree is grown, or none (deferred)."""
    stops = sorted(draw(st.sets(st.integers(1, 11), min_size=1, max_size=6)))
    policies = st.sampled_from([None, Chain(1), Chain(4), Eagle2(5, 2, 2), Eagle2(20, 4, 1), Eagle2(9, 3, 3)])
    return [(stop, draw(policies)) for stop in stops]


@every_head
@few_examples
@given(way=ways())
def test_any_two_ways_of_reaching_a_position_draft_the_same(setups, kind, way):
    """Token by token, by leaps, after trees of any shape, without drafting for a while: same tokens and confidences."""
    drafter, straight, features = setups[kind]
    here = way[0][0]
    start(drafter, features, here)
    for stop, policy in way:
        if stop > here:
            advance(drafter, features, here, stop)
            here = stop
        if policy is not None:
            grow(drafter, policy, here)
    advance(drafter, features, here, 12)
    start(straight, features, 12)
    ours, theirs = (grow(each, Eagle2(20, 4, 3), 12) for each in (drafter, straight))
    assert_same_draft(ours, theirs)


@every_head
def test_token_by_token_equals_all_at_once_to_1e10_in_the_logits(setups, kind):
    """The same statement on the raw fp64 logits: confidences are rounded to fp32, logits are not."""
    drafter, straight, features = fresh(setups[kind][0]), fresh(setups[kind][0]), setups[kind][2]
    start(drafter, features, 1)
    for here in range(1, 12):
        grow(drafter, Eagle2(9, 3, 2), here)
        advance(drafter, features, here, here + 1)
    start(straight, features, 12)
    collected = collect_logits(drafter), collect_logits(straight)
    for each in (drafter, straight):
        grow(each, Eagle2(20, 4, 3), 12)
    assert len(collected[0]) == len(collected[1]) == 4
    for ours, theirs in zip(*collected):
        assert ours.dtype == torch.float64
        assert (ours - theirs).abs().max().item() <= TOLERANCE


@every_head
def test_drafting_twice_at_one_position_changes_nothing(setups, kind):
    drafter, _, features = setups[kind]
    start(drafter, features, 8)
    first = grow(drafter, Eagle2(20, 4, 2), 8)
    grow(drafter, Chain(6), 8)
    assert_same_draft(first, grow(drafter, Eagle2(20, 4, 2), 8))


@every_head
def test_a_new_sequence_forgets_the_last_one(setups, kind):
    drafter, fresh, features = setups[kind]
    start(drafter, features, 11)
    grow(drafter, Eagle2(20, 4, 2), 11)
    advance(drafter, features, 11, 13)  # left waiting, and must not leak into what follows
    for each in (drafter, fresh):
        start(each, features, 4)
    assert_same_draft(grow(drafter, Eagle2(20, 4, 2), 4), grow(fresh, Eagle2(20, 4, 2), 4))


# --- a frontier in one forward ---


def paths_of(growing: GrowingTree, nodes: list[int]) -> list[list[int]]:
    """Node indices from the root's child to each node."""
    paths = []
    for node in nodes:
        path = []
        while node > 0:
            path.insert(0, node)
            node = growing.parent[node].item()
        paths.append(path)
    return paths


def along(drafter: EagleDrafter, tokens: list[int], length: int) -> Tensor:
    """Raw logits of the last token of a chain that is grown from the prefix alone, token by token."""
    chain = GrowingTree.from_root(torch.tensor(TEXT[length : length + 1]))
    collected = collect_logits(drafter)
    drafter.expand(chain, Frontier(torch.tensor([0]), 1), None)
    for node, token in enumerate(tokens):
        given_token = Draft(torch.tensor([[token]]), torch.tensor([[-1.0]]), torch.zeros(1))
        chain = chain.append(Frontier(torch.tensor([node]), 1), given_token)
        drafter.expand(chain, Frontier(torch.tensor([node + 1]), 1), None)
    return collected[-1][-1]


@every_head
@pytest.mark.parametrize("policy", [Eagle2(99, 2, 4), Eagle2(99, 5, 2), Eagle2(99, 4, 3, value=False), Chain(5)])
def test_expanding_a_frontier_equals_expanding_each_path_alone(setups, kind, policy):
    """Every expanded node drafts as the end of a chain of its own: siblings and cousins do not mix."""
    head, _, features = setups[kind]
    length = 9
    whole = fresh(head)
    start(whole, features, length)
    collected = collect_logits(whole)
    growing, draft, expanded = GrowingTree.from_root(torch.tensor(TEXT[length : length + 1])), None, []
    while (frontier := policy.frontier(growing, draft)) is not None:
        expanded.append(frontier.node.tolist())
        draft = whole.expand(growing, frontier, None)
        growing = growing.append(frontier, draft)
    for nodes, logits in zip(expanded[1:], collected[1:]):
        for path, row in zip(paths_of(growing, nodes), logits, strict=True):
            alone = fresh(head)
            start(alone, features, length)
            assert (row - along(alone, growing.token[path].tolist(), length)).abs().max().item() <= TOLERANCE


# --- positions and the order of inputs, recomputed from the published description ---


def rotate(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary embedding of `x [heads, T, d]`, halves paired as in Llama; angles in fp32 as transformers has them."""
    half = x.shape[-1] // 2
    frequency = 1.0 / theta ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
    angle = position[:, None].float() * frequency
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_head(drafter: EagleDrafter, tokens: list[int], features: Tensor, n_committed: int) -> Tensor:
    """Draft logits `[n, V]` of a head over a plain causal sequence, written out from the papers.

    Row j stands at position j, pairs token j+1 with feature j while there are features (the committed rows), and
    with the output of row j-1 from then on.
    """
    head, w = drafter.head, dict(drafter.head.named_parameters())
    eps, outputs = head.config.layer.rms_norm_eps, []
    xs, states = [], []
    for j, token in enumerate(tokens[1:]):
        embedding = drafter.embedding[token]
        if head.config.kind == "eagle3":
            state = w["fc.weight"] @ features[j] if j < n_committed else outputs[-1]
            fused = [norm(embedding, w["midlayer.input_layernorm.weight"], eps)]
            fused += [norm(state, w["midlayer.hidden_norm.weight"], eps)]
            x = torch.cat(fused)
        else:
            x = state = w["fc.weight"] @ torch.cat([embedding, features[j] if j < n_committed else outputs[-1]])
        xs.append(x)
        states.append(state)
        rows = torch.stack(xs)
        position = torch.arange(j + 1)
        q, k, v = ((rows @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(j + 1, -1, 8) for name in "qkv")
        q, k = rotate(q.transpose(0, 1), position), rotate(k.transpose(0, 1), position)
        k, v = k.repeat_interleave(2, 0), v.transpose(0, 1).repeat_interleave(2, 0)  # 4 heads share 2 keys
        weight = (q[:, -1:] @ k.transpose(1, 2) / 8**0.5).softmax(-1)
        state = state + w["midlayer.self_attn.o_proj.weight"] @ (weight @ v).flatten()
        y = norm(state, w["midlayer.post_attention_layernorm.weight"], eps)
        gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        outputs.append(state + down @ (F.silu(gate @ y) * (up @ y)))
    if head.config.kind == "eagle3":
        return torch.stack([w["lm_head.weight"] @ norm(out, w["norm.weight"], eps) for out in outputs])
    return torch.stack([drafter.borrowed_head(out) for out in outputs])


@every_head
def test_a_head_equals_an_independent_recomputation_over_a_plain_sequence(setups, kind):
    """A node of depth d behind n prefix rows stands at rotary position n - 1 + d; the root at n - 1."""
    drafter, _, features = setups[kind]
    length, drafted = 6, [20, 4, 33, 48]
    expected = plain_head(drafter, TEXT[: length + 1] + drafted, features, length)
    for count in range(len(drafted) + 1):
        again = fresh(drafter)
        start(again, features, length)
        row = along(again, drafted[:count], length)
        assert (row - expected[length - 1 + count]).abs().max().item() <= TOLERANCE


# --- what an expansion returns ---


@every_head
def test_a_draft_is_the_top_of_the_heads_law(setups, kind):
    """Tokens, log confidences and entropy, against a sort of the whole law."""
    drafter, features = fresh(setups[kind][0]), setups[kind][2]
    start(drafter, features, 9)
    logits = collect_logits(drafter)
    root = GrowingTree.from_root(torch.tensor(TEXT[9:10]))
    draft = drafter.expand(root, Frontier(torch.tensor([0]), 5), None)
    log_q = logits[0][0].log_softmax(-1)
    order = log_q.argsort(descending=True)[:5]
    ids = EVERY_THIRD if "vocabulary" in kind else torch.arange(VOCAB)
    assert draft.token.tolist() == [ids[order].tolist()]
    torch.testing.assert_close(draft.log_conf[0], log_q[order].float())
    torch.testing.assert_close(draft.entropy[0], -(log_q.exp() * log_q).sum().float())
    assert draft.log_q is None


def test_d2t_is_an_offset_and_drafts_are_target_ids(setups):
    """Draft ids 0, 1, 2, 3 … stand for the tokens 0, 3, 6, 9 …: offsets 0, 2, 4, 6 …"""
    drafter, _, features = setups["eagle3-draft-vocabulary"]
    assert drafter.head.d2t[:4].tolist() == [0, 2, 4, 6]
    assert drafter.head.draft_to_target.tolist() == EVERY_THIRD.tolist()
    assert drafter.head.t2d.nonzero().flatten().tolist() == EVERY_THIRD.tolist()
    assert drafter.vocab_size == 21
    start(drafter, features, 9)
    pool = grow(drafter, Eagle2(99, 7, 2), 9)
    assert (pool.token[1:] % 3 == 0).all()
    assert (pool.token[1:] > 21).any()


def test_heads_without_a_draft_vocabulary_have_no_maps(setups):
    for kind in ("eagle", "eagle3"):
        head = setups[kind][0].head
        assert not hasattr(head, "d2t")
        assert head.draft_to_target.tolist() == list(range(VOCAB))


# --- bad input ---


@every_head
def test_advancing_needs_one_feature_row_a_token(setups, kind):
    drafter, _, features = setups[kind]
    start(drafter, features, 5)
    with pytest.raises(ValueError, match="one feature row a token: 2 tokens, none rows"):
        drafter.advance(torch.tensor([1, 2]), None)
    with pytest.raises(ValueError, match="one feature row a token: 2 tokens, 3 rows"):
        drafter.advance(torch.tensor([1, 2]), features[5:8])
    with pytest.raises(ValueError, match="one feature row a token: 5 tokens, none rows"):
        drafter.start(torch.tensor(TEXT[:5]), None, torch.tensor([3]))


def test_a_config_names_what_is_wrong(setups):
    layer = setups["eagle3"][0].head.config.layer
    with pytest.raises(ValueError, match=r"kind='eagle4' is not one of \('eagle', 'eagle3'\)"):
        EagleConfig("eagle4", layer, (1, 2, 3), 32, VOCAB)
    with pytest.raises(ValueError, match=r"draft_vocab_size=62 is outside 1…61"):
        EagleConfig("eagle3", layer, (1, 2, 3), 32, VOCAB + 1)


@pytest.mark.parametrize(
    ("target_shape", "taps", "complaint"),
    [
        (dict(hidden_size=48), (2, 2, 1), "features of size 32, the target has 48"),
        (dict(vocab_size=60), (2, 2, 1), "vocabulary has 61 tokens, the target's 60"),
        (dict(n_layers=1), (2, 2, 1), "taps layer 2 of a target with 1 layers"),
        ({}, (2, 1, -1), "taps layer -1 of a target with 4 layers"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(setups, target_shape, taps, complaint):
    fitting = dict(hidden_size=32, vocab_size=VOCAB, n_layers=4)
    config = setups["eagle3"][0].head.config
    check_fits(config, **fitting)
    with pytest.raises(ValueError, match=complaint):
        check_fits(replace(config, taps=taps), **{**fitting, **target_shape})


def test_published_taps():
    """EAGLE-3 reads the inputs of layers 2, n//2 and n-3; EAGLE-1/2 the state after the final norm."""
    assert published_taps("eagle3", 32) == (2, 16, 29)
    assert published_taps("eagle", 32) == (32,)


def test_random_heads_are_reproducible_and_leave_the_global_generator_alone(setups):
    config = setups["eagle3"][0].head.config
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, again, other = (EagleHead.random(config, seed) for seed in (7, 7, 8))
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(first.fc.weight, again.fc.weight)
    assert not torch.equal(first.fc.weight, other.fc.weight)


def test_a_head_in_half_precision_keeps_its_rotary_frequencies(setups):
    """Training runs in fp32, use in bf16: frequencies rounded to bf16 would misplace distant tokens."""
    config = setups["eagle3"][0].head.config
    head = EagleHead.random(config)
    exact = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        head = head.to(dtype)
        assert head.fc.weight.dtype == dtype
        torch.testing.assert_close(head.rotary.inv_freq, exact, rtol=1e-6, atol=0)


def test_the_head_runs_in_the_targets_dtype():
    """A bf16 target with a bf16 head: drafts come out, confidences in fp32 and at most 0."""
    target = build_target(dtype=torch.bfloat16)
    drafter = build_drafter(target)
    features = target.prefill(torch.tensor(TEXT), target.new_cache(), drafter.taps).features
    start(drafter, features, 9)
    pool = grow(drafter, Eagle2(20, 4, 2), 9)
    assert pool.log_conf.dtype == torch.float32
    assert (pool.log_conf <= 0).all()
