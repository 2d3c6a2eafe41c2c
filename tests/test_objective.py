"""What heads are trained for: the loss simulates exactly what the drafter will do."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import VOCAB, build_target
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

from eagle_tree.checkpoint import save_eagle
from eagle_tree.drafter.eagle import EagleConfig, EagleDrafter, EagleHead, published_taps
from eagle_tree.drafter.medusa import MedusaConfig, MedusaDrafter, MedusaHeads
from eagle_tree.features import observe
from eagle_tree.objective import (
    Batch,
    Eagle,
    Eagle3,
    Medusa,
    Objective,
    Sums,
    chain_attention,
    frequent_tokens,
    initial_eagle,
    initial_eagle3,
    law_at,
    make_batch,
)
from eagle_tree.target import Target
from eagle_tree.tree import Draft, Frontier, GrowingTree

DRAFT_TOKENS = torch.arange(0, VOCAB, 3)  # 21 of the 61 tokens
TAPS = published_taps("eagle3", 4)
TEXTS = [
    [7, 3, 50, 11, 3, 29, 60, 1, 42, 18, 5, 33],
    [2, 9, 9, 14, 55, 21, 8, 30, 41, 12, 4, 6],
]


@pytest.fixture(scope="module")
def single() -> Target:
    """The tiny target in fp32, in which heads are trained."""
    return build_target(dtype=torch.float32)


@pytest.fixture(scope="module")
def double() -> Target:
    """The same weights in fp64."""
    return Target(build_target(dtype=torch.float32).model.double())


def random_head(target: Target, draft_tokens: Tensor = DRAFT_TOKENS, kind: str = "eagle3", seed: int = 4) -> EagleHead:
    """A head in the target's dtype, random in every parameter."""
    head = initial_eagle3(target, draft_tokens, TAPS) if kind == "eagle3" else initial_eagle(target)
    return randomised(head, seed).to(target.dtype)


def randomised(head: nn.Module, seed: int = 4) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return head


def batch_of(target: Target, texts: list[list[int]], taps: tuple[int, ...], learnt: range | None = None) -> Batch:
    """A batch of texts, learnt everywhere or where `learnt` says."""
    tokens = [torch.tensor(text) for text in texts]
    masks = [torch.tensor([learnt is None or place in learnt for place in range(len(text))]) for text in texts]
    return make_batch(tokens, masks, [observe(target, token, taps) for token in tokens], list(range(len(texts))))


def loss_of(objective: Objective, batch: Batch) -> float:
    """The loss: each depth's mean, weighted."""
    with torch.no_grad():
        sums: Sums = objective(batch)
    return (torch.tensor(objective.depth_weight) * sums.loss / sums.count).sum().item()


# --- the training-time test is the use ---


@pytest.fixture()
def exact_norms(monkeypatch):
    """RMS norms in fp64 (transformers rounds them to fp32), so that 1e-8 says something."""

    def exact_norm(self, state):
        state = state.double()
        return self.weight * state * (state.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", exact_norm)


def collect_logits(module: nn.Module) -> list[Tensor]:
    """A list that fills with what an LM head says from now on."""
    collected: list[Tensor] = []
    module.register_forward_hook(lambda module, arguments, logits: collected.append(logits.detach()))
    return collected


@pytest.mark.parametrize("draft_tokens", [DRAFT_TOKENS, torch.arange(VOCAB)], ids=["draft vocabulary", "whole"])
def test_self_fed_steps_are_what_the_drafter_computes_along_the_true_chain(double, exact_norms, draft_tokens):
    """The logits of step s from position t are those of a drafter with prefix 0…t that grew a chain of s true tokens.

    Tokens, states, rotary positions and who sees whom: training simulates exactly the use, for every t and s.
    """
    steps = 4
    rows = len(TEXTS[0]) - steps
    head = random_head(double, draft_tokens)
    batch = batch_of(double, TEXTS, head.config.taps)
    features = batch.feature
    logits = collect_logits(head.lm_head)
    with torch.no_grad():
        Eagle3(double, head, draft_steps=steps)(batch)
    trained = [step.view(2, rows, -1) for step in logits]
    assert len(trained) == steps

    drafter = EagleDrafter(head, double.embedding, double.apply_head)
    for row, text in enumerate(TEXTS):
        for t in range(rows):
            pending = torch.tensor(text[t + 1 : t + 2])
            drafter.start(torch.tensor(text[: t + 1]), features[row, : t + 1], pending)
            chain = GrowingTree.from_root(pending)
            for s, following in enumerate([*text[t + 2 : t + 1 + steps], 0]):
                end = Frontier(torch.tensor([s]), 1)
                drafter.expand(chain, end, None)
                assert (trained[s][row, t] - logits[-1][0, -1]).abs().max().item() < 1e-8, (row, t, s)
                chain = chain.append(end, Draft(torch.tensor([[following]]), torch.zeros(1, 1), torch.zeros(1)))


def test_the_gradient_flows_through_the_self_fed_states(double, exact_norms):
    """Autograd against a central difference along a random direction of the weights: no step is cut off."""
    head, batch = random_head(double), batch_of(double, TEXTS, TAPS)
    objective = Eagle3(double, head, draft_steps=3, step_weight=1.0)

    def loss() -> Tensor:
        sums = objective(batch)
        return (sums.loss / sums.count).sum()

    parameters = list(head.requires_grad_(True).parameters())
    generator = torch.Generator().manual_seed(2)
    direction = [torch.randn(parameter.shape, dtype=torch.float64, generator=generator) for parameter in parameters]

    def moved(distance: float) -> float:
        with torch.no_grad():
            for parameter, step in zip(parameters, direction):
                parameter += distance * step
            moved_loss = loss().item()
            for parameter, step in zip(parameters, direction):
                parameter -= distance * step
        return moved_loss

    gradients = torch.autograd.grad(loss(), parameters)
    slope = sum((gradient * step).sum().item() for gradient, step in zip(gradients, direction))
    assert (moved(3e-4) - moved(-3e-4)) / 6e-4 == pytest.approx(slope, rel=3e-2)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_chain_attention_equals_attention_under_an_explicit_mask(steps):
    """Row t of step s sees step 0's keys up to t, and of steps 1…s its own only. Keys of all steps side by side."""
    length = 5
    generator = torch.Generator().manual_seed(0)
    query, *keys = (torch.randn(2, 3, length, 8, dtype=torch.float64, generator=generator) for _ in range(1 + steps))
    values = [torch.randn(2, 3, length, 8, dtype=torch.float64, generator=generator) for _ in range(steps)]
    visible = torch.zeros(length, steps * length, dtype=torch.bool)
    for t in range(length):
        visible[t, : t + 1] = True
        for s in range(1, steps):
            visible[t, s * length + t] = True
    scores = query @ torch.cat(keys, 2).transpose(2, 3) / 8**0.5
    expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ torch.cat(values, 2)
    assert (chain_attention(query, keys, values) - expected).abs().max().item() < 1e-12


# --- the loss ---


class FixedLaw(Target):
    """A target whose law is what `log_z` and the hidden state say: logits are the state's first columns."""

    def apply_head(self, hidden: Tensor, token: Tensor | None = None) -> Tensor:
        return hidden[..., :2]


def two_token_head(logit: float) -> EagleHead:
    """A head over the draft tokens {0, 1} that says logits (0, logit) whatever it reads."""
    layer = random_head(build_target()).config.layer
    head = EagleHead(EagleConfig("eagle3", layer, TAPS, 32, 2))
    head.set_draft_vocab(torch.tensor([0, 1]))
    head.lm_head = nn.Linear(32, 2)
    nn.init.zeros_(head.lm_head.weight)
    head.lm_head.bias.data = torch.tensor([0.0, logit])
    return head


def two_token_batch(law: list[list[float]], learnt: list[int]) -> Batch:
    n = len(law)
    mask = torch.tensor([[place in learnt for place in range(n)]])
    hidden = torch.zeros(1, n, 32)
    hidden[..., :2] = torch.tensor([law]).log()
    return Batch(torch.zeros(1, n, dtype=torch.long), mask, torch.ones(1, n, 96), hidden, torch.zeros(1, n))


@pytest.fixture(scope="module")
def fixed() -> Target:
    return FixedLaw(build_target(dtype=torch.float32).model)


def test_the_loss_by_hand_on_two_tokens(fixed):
    """The head says (1/4, 3/4). Two steps over five positions: step 0 is scored at 1, 2, 3, step 1 at 2, 3, 4.

    Position 1 is a prompt's and not learnt. Each learnt position costs -law·log(1/4, 3/4).
    """
    law = [[9.0, 9.0], [9.0, 9.0], [1.0, 0.0], [0.5, 0.5], [0.25, 0.5]]
    first, second = math.log(4), math.log(4 / 3)
    at_2, at_3, at_4 = first, 0.5 * first + 0.5 * second, 0.25 * first + 0.5 * second
    batch = two_token_batch(law, learnt=[2, 3, 4])
    objective = Eagle3(fixed, two_token_head(math.log(3)), draft_steps=2, step_weight=0.8)
    sums = objective(batch)
    assert sums.count.tolist() == [2, 3]
    assert sums.loss.tolist() == pytest.approx([at_2 + at_3, at_2 + at_3 + at_4], abs=1e-5)
    assert loss_of(objective, batch) == pytest.approx((at_2 + at_3) / 2 + 0.8 * (at_2 + at_3 + at_4) / 3, abs=1e-5)
    # the head's first choice is token 1, the law's is 0, 0 (a tie goes to the first), 1
    assert sums.agreed.tolist() == [0, 1]
    # Σ min(p, q) is 1/4, 1/4 + 1/2 and 1/4 + 1/2: the last law lies to a quarter outside the draft vocabulary
    assert sums.overlap.tolist() == pytest.approx([1.0, 1.75], abs=1e-5)


def test_the_loss_terms_add_up_by_their_weights(fixed):
    """Law (1/2, 1/2) against (1/4, 3/4): cross-entropy (log 4 + log 4/3) / 2, total variation 1/4."""
    batch = two_token_batch([[0.5, 0.5]] * 5, learnt=[3])
    objective = Eagle3(fixed, two_token_head(math.log(3)), draft_steps=1, cross_entropy=0.1, total_variation=0.9)
    cross_entropy = (math.log(4) + math.log(4 / 3)) / 2
    assert loss_of(objective, batch) == pytest.approx(0.1 * cross_entropy + 0.9 * 0.25, abs=1e-6)


def objectives(target: Target) -> dict[str, Objective]:
    """One of each kind, random in every parameter."""
    medusa = MedusaHeads(MedusaConfig(target.hidden_size, target.vocab_size, 3))
    return {
        "eagle3": Eagle3(target, random_head(target), draft_steps=3, total_variation=0.5),
        "eagle": Eagle(target, random_head(target, kind="eagle")),
        "medusa": Medusa(target, randomised(medusa).to(target.dtype)),
    }


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "medusa"])
def test_padding_changes_nothing(single, kind):
    """Sums over a batch are the sums over its texts, each alone: what pads a batch is nowhere counted."""
    objective = objectives(single)[kind]
    if kind == "eagle":
        objective.noise = 0.0
    texts = [[(5 * i * i + 3 * k) % VOCAB for i in range(n)] for k, n in enumerate((12, 17, 33))]
    with torch.no_grad():
        alone = [objective(batch_of(single, [text], objective.taps, learnt=range(4, 9))) for text in texts]
        together = objective(batch_of(single, texts, objective.taps, learnt=range(4, 9)))
    for name in ("loss", "agreed", "overlap", "count"):
        torch.testing.assert_close(getattr(together, name), sum(getattr(one, name) for one in alone))
    assert together.count.tolist() == [15] * len(objective.depth_weight)


def test_the_law_is_the_targets_restricted_and_not_renormalised(single):
    """Tokens outside the draft vocabulary weigh nothing; what lies inside keeps its probability."""
    seen = observe(single, torch.tensor(TEXTS[0]), TAPS)
    logits = single.model(input_ids=torch.tensor(TEXTS[:1])).logits[0]
    torch.testing.assert_close(law_at(single, seen.hidden, seen.log_z), logits.softmax(-1))
    law = law_at(single, seen.hidden, seen.log_z, DRAFT_TOKENS)
    torch.testing.assert_close(law, logits.softmax(-1)[:, DRAFT_TOKENS])
    assert (law.sum(-1) < 1).all()


# --- EAGLE-1/2 ---


def test_an_eagle_head_learns_the_next_feature_and_its_law(double, exact_norms):
    """The prediction at position t is what the drafter computes from the prefix 0…t, scored against t + 1.

    By hand: Smooth-L1 to the target's next state, and cross-entropy of the borrowed head's law with the target's.
    """
    head = random_head(double, kind="eagle")
    objective = Eagle(double, head, feature_weight=1.0, cross_entropy=0.1, noise=0.0)
    text = torch.tensor(TEXTS[0])
    seen = observe(double, text, (4,))
    drafter = EagleDrafter(head, double.embedding, double.apply_head)
    expected = 0.0
    for t in range(len(text) - 1):
        drafter.start(text[: t + 1], seen.hidden[: t + 1], text[t + 1 : t + 2])
        drafter.expand(GrowingTree.from_root(text[t + 1 : t + 2]), Frontier(torch.tensor([0]), 1), None)
        predicted, true = drafter.sequence.last_state[0], seen.hidden[t + 1]
        law = double.apply_head(true).softmax(-1)
        cross_entropy = -(law * double.apply_head(predicted).log_softmax(-1)).sum()
        expected += F.smooth_l1_loss(predicted, true).item() + 0.1 * cross_entropy.item()
    sums = objective(batch_of(double, TEXTS[:1], (4,)))
    assert sums.count.tolist() == [11]
    assert sums.loss.item() == pytest.approx(expected, rel=1e-5)  # the loss itself is taken in fp32


def test_feature_noise_is_bounded_and_keyed_by_the_text(single):
    """±noise, drawn anew for every seed; the same text with the same seed meets the same noise."""
    objective = Eagle(single, random_head(single, kind="eagle"), noise=0.1)
    zeros = torch.zeros(2, 5000, 32)
    moved = objective.noised(zeros, (7, 8))
    assert 0.0999 < moved.max() <= 0.1 and -0.1 <= moved.min() < -0.0999
    assert moved.mean().abs() < 1e-3
    assert not torch.equal(moved[0], moved[1])
    assert torch.equal(moved[1], objective.noised(zeros[:1], (8,))[0])


# --- Medusa ---


def test_medusa_head_i_learns_what_the_drafter_proposes_at_depth_i(single):
    """Head i at position t is scored against the law after token t + 1 + i: the children of depth-i nodes."""
    heads = randomised(MedusaHeads(MedusaConfig(32, VOCAB, 3)))
    objective = Medusa(single, heads, step_weight=0.5)
    assert objective.depth_weight == (1.0, 0.5, 0.25)
    text = torch.tensor(TEXTS[0])
    seen = observe(single, text, (4,))
    laws = single.model(input_ids=text[None]).logits[0].softmax(-1)
    drafter = MedusaDrafter(heads, 4, single.apply_head)
    expected = torch.zeros(3)
    for t in range(len(text) - 3):
        drafter.start(text[: t + 1], seen.hidden[: t + 1], text[t + 1 : t + 2])
        growing = GrowingTree.from_root(text[t + 1 : t + 2])
        for depth in range(3):
            draft = drafter.expand(growing, Frontier(torch.tensor([depth]), VOCAB), None)
            expected[depth] -= (laws[t + 1 + depth][draft.token[0]] * draft.log_conf[0]).sum()
            following = text[t + 2 + depth : t + 3 + depth] if depth < 2 else text[:1]
            growing = growing.append(
                Frontier(torch.tensor([depth]), 1), Draft(following[None], torch.zeros(1, 1), torch.zeros(1))
            )
    sums = objective(batch_of(single, TEXTS[:1], (4,)))
    assert sums.count.tolist() == [9, 9, 9]
    torch.testing.assert_close(sums.loss, expected, rtol=1e-4, atol=1e-4)


def test_new_medusa_heads_say_what_the_target_says(single):
    """Zero blocks: all heads start as the target's own next-token head, and each has blocks of its own to train."""
    objective = Medusa.build(single, torch.ones(VOCAB), n_heads=3, n_layers=2)
    state = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(objective.head(state), state.expand(3, 5, 32))
    assert len({parameter.data_ptr() for parameter in objective.head.parameters()}) == 3 * 2 * 2


# --- vocabulary ---


def test_frequent_tokens_by_hand():
    """Token 5 three times, 9 twice, 2 and 7 once: ties go to the smaller id; the choice is given in ascending order."""
    counts = torch.zeros(12, dtype=torch.long)
    counts[torch.tensor([5, 9, 2, 7])] = torch.tensor([3, 2, 1, 1])
    assert frequent_tokens(counts, 2).tolist() == [5, 9]
    assert frequent_tokens(counts, 3).tolist() == [2, 5, 9]


def test_coverage_is_the_share_of_answers_that_can_be_proposed(single):
    counts = torch.zeros(VOCAB, dtype=torch.long)
    counts[torch.tensor([5, 9, 2, 7])] = torch.tensor([3, 2, 1, 1])
    assert Eagle3.build(single, counts, draft_vocab_size=2).coverage(counts) == pytest.approx(5 / 7)
    assert Eagle.build(single, counts).coverage(counts) == 1
    assert Medusa.build(single, counts).coverage(counts) == 1


# --- the initial head ---


def test_the_initial_head_is_the_targets_last_layer(single):
    """`fc` passes the last tap through, the layer reads the state half of its input, head rows are the target's."""
    head = initial_eagle3(single, DRAFT_TOKENS, TAPS)
    tapped = torch.randn(1, 4, 96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.feature(tapped), tapped[..., -32:])
    last = single.layers[-1]
    assert torch.equal(head.midlayer.self_attn.k_proj.weight[:, 32:], last.self_attn.k_proj.weight)
    assert torch.equal(head.midlayer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    assert torch.equal(head.lm_head.weight, single.model.lm_head.weight[DRAFT_TOKENS])
    assert torch.equal(head.norm.weight, single.decoder.norm.weight)
    assert head.draft_to_target.tolist() == DRAFT_TOKENS.tolist()
    again = initial_eagle3(single, DRAFT_TOKENS, TAPS)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))


def test_the_initial_layer_is_the_targets_up_to_the_embedding_half(single):
    """With the (small, random) embedding half set to zero the layer computes what the target's last layer computes."""
    head = initial_eagle3(single, DRAFT_TOKENS, TAPS)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(head.midlayer.self_attn, name).weight[:, :32] = 0
    state, position = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0)), torch.arange(6)[None]
    rotary = single.decoder.rotary_emb(state, position)
    expected = single.layers[-1](state, attention_mask=None, position_ids=position, position_embeddings=rotary)

    def causal(query, key, value):
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    torch.testing.assert_close(head.step(torch.zeros_like(state), state, position, causal), expected)


def test_a_new_eagle_head_predicts_that_the_feature_does_not_change(single):
    head = initial_eagle(single)
    state, embedding = torch.randn(2, 1, 5, 32, generator=torch.Generator().manual_seed(0))
    predicted = head.step(embedding, state, torch.arange(5)[None], lambda query, key, value: query)
    assert torch.equal(predicted, state)
    assert not torch.equal(initial_eagle(single, random=True).fc.weight, head.fc.weight)


def test_a_random_start_knows_nothing_of_the_target(single):
    head = initial_eagle3(single, DRAFT_TOKENS, TAPS, random=True)
    assert not torch.equal(head.midlayer.mlp.up_proj.weight, single.layers[-1].mlp.up_proj.weight)
    assert head.draft_to_target.tolist() == DRAFT_TOKENS.tolist()


def test_a_head_goes_on_from_a_folder(single, tmp_path):
    head = random_head(single)
    save_eagle(tmp_path, head, torch.float32)
    counts = torch.zeros(VOCAB)
    counts[head.draft_to_target] = 1  # the corpus says what the head can propose
    objective = Eagle3.build(single, counts, initial=str(tmp_path), draft_vocab_size=21)
    for name, tensor in head.state_dict().items():
        assert torch.equal(objective.head.state_dict()[name], tensor), name


@pytest.mark.parametrize("size", [3, VOCAB])
def test_a_head_that_goes_on_learns_the_tokens_that_are_frequent_now(single, tmp_path, size):
    """It could propose 0, 3, 6, …; now 3, 4, 6, or everything. What it knew of 3 and 6 it still knows."""
    head = random_head(single)
    save_eagle(tmp_path, head, torch.float32)
    counts = torch.zeros(VOCAB)
    counts[[3, 4, 6]] = 1
    changed = Eagle3.build(single, counts, initial=str(tmp_path), draft_vocab_size=size).head
    tokens = changed.draft_to_target.tolist()
    assert tokens == ([3, 4, 6] if size == 3 else list(range(VOCAB)))
    for row, token in enumerate(tokens):
        known = token in head.draft_to_target.tolist()
        source = head.lm_head.weight[token // 3] if known else single.model.get_output_embeddings().weight[token]
        assert torch.equal(changed.lm_head.weight[row], source)
    assert torch.equal(changed.midlayer.mlp.up_proj.weight, head.midlayer.mlp.up_proj.weight)
    assert torch.equal(changed.fc.weight, head.fc.weight)


@pytest.mark.parametrize(
    ("build", "fields", "complaint"),
    [
        (Eagle3.build, dict(draft_vocab_size=0), "draft_vocab_size=0 is outside 1…61"),
        (Eagle3.build, dict(draft_vocab_size=62), "draft_vocab_size=62 is outside 1…61"),
        (Eagle3.build, dict(draft_vocab_size=21, draft_steps=0), "draft_steps=0 must be an integer >= 1"),
        (Eagle3.build, dict(draft_vocab_size=21, step_weight=0.0), "step_weight=0.0 is outside 0…1"),
        (Eagle3.build, dict(draft_vocab_size=21, cross_entropy=0.0), "nothing would be learnt"),
        (Eagle3.build, dict(draft_vocab_size=21, total_variation=-1.0), "total_variation=-1.0 must not be negative"),
        (Eagle3.build, dict(initial="nowhere", draft_vocab_size=21), "drafter folder nowhere does not exist"),
        (Eagle.build, dict(noise=-0.1), "noise=-0.1 must not be negative"),
        (Eagle.build, dict(feature_weight=math.nan), "feature_weight=nan must not be negative"),
        (Medusa.build, dict(n_heads=0), "n_heads=0 must be an integer >= 1"),
        (Medusa.build, dict(n_layers=1.5), "n_layers=1.5 must be an integer >= 1"),
    ],
)
def test_objectives_name_what_is_wrong(single, build, fields, complaint):
    with pytest.raises((ValueError, FileNotFoundError), match=complaint):
        build(single, torch.ones(VOCAB), **fields)


@pytest.mark.parametrize(
    ("build", "fields", "complaint"),
    [
        (Eagle3.build, dict(draft_vocab_size=21, taps=[0, 1, 2]), r"not an eagle3 head with \[0, 1, 2\]"),
        (Eagle.build, {}, "is an eagle3 head, not an EAGLE-1/2 one"),
        (Medusa.build, {}, "holds EagleHead, not MedusaHeads"),
    ],
)
def test_a_head_of_another_kind_or_shape_is_not_gone_on_from(single, tmp_path, build, fields, complaint):
    save_eagle(tmp_path, random_head(single), torch.float32)
    with pytest.raises(ValueError, match=complaint):
        build(single, torch.ones(VOCAB), initial=str(tmp_path), **fields)


def test_a_target_of_another_build_needs_a_random_start():
    """A layer without gate, up and down projections cannot be copied, and the message says what can be done."""
    target = build_target(dtype=torch.float32)
    target.layers[-1].mlp = nn.Identity()
    with pytest.raises(ValueError, match="use initial=random"):
        initial_eagle3(target, DRAFT_TOKENS, TAPS)
    assert initial_eagle3(target, DRAFT_TOKENS, TAPS, random=True)
