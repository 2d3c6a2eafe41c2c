"""Training: the loss simulates exactly what the drafter will do, and a resumed run is the same run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, build_target
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

from eagle_tree.corpus import Sequence
from eagle_tree.drafter.eagle import EagleConfig, EagleDrafter, EagleHead
from eagle_tree.noise import Noise
from eagle_tree.target import Target
from eagle_tree.train import (
    Batch,
    Example,
    Trainer,
    TrainSettings,
    batches,
    chain_attention,
    examples,
    frequent_tokens,
    initial_head,
    make_batch,
    observe,
    self_fed_loss,
)
from eagle_tree.tree import Draft, Frontier, GrowingTree

DRAFT_TOKENS = torch.arange(0, VOCAB, 3)  # 21 of the 61 tokens
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


def random_head(target: Target, draft_tokens: Tensor = DRAFT_TOKENS, seed: int = 4) -> EagleHead:
    """A head in the target's dtype, random in every parameter."""
    head = initial_head(target, draft_tokens)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return head.to(target.dtype)


# --- the training-time test is the use ---


@pytest.fixture()
def exact_norms(monkeypatch):
    """RMS norms in fp64 (transformers rounds them to fp32), so that 1e-8 says something."""

    def exact_norm(self, state):
        state = state.double()
        return self.weight * state * (state.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", exact_norm)


def collect_logits(head: EagleHead) -> list[Tensor]:
    """A list that fills with what the head's own LM head says from now on."""
    collected: list[Tensor] = []
    head.lm_head.register_forward_hook(lambda module, arguments, logits: collected.append(logits.detach()))
    return collected


@pytest.mark.parametrize("draft_tokens", [DRAFT_TOKENS, torch.arange(VOCAB)], ids=["draft vocabulary", "whole"])
def test_self_fed_steps_are_what_the_drafter_computes_along_the_true_chain(double, exact_norms, draft_tokens):
    """The logits of step s from position t are those of a drafter with prefix 0…t that grew a chain of s true tokens.

    Tokens, states, rotary positions and who sees whom: training simulates exactly the use, for every t and s.
    """
    steps = 4
    rows = len(TEXTS[0]) - steps
    head = random_head(double, draft_tokens)
    token = torch.tensor(TEXTS)
    features = torch.stack(
        [double.prefill(text, double.new_cache(), head.config.taps).features for text in token]
    ).clone()
    everywhere = torch.ones_like(token, dtype=torch.bool)
    law = torch.full((*token.shape, draft_tokens.shape[0]), 1.0 / draft_tokens.shape[0])
    logits = collect_logits(head)
    with torch.no_grad():
        self_fed_loss(head, double.embedding, Batch(token, everywhere, features, law), TrainSettings(draft_steps=steps))
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
                drafter.expand(chain, end, Noise(0, 0))
                assert (trained[s][row, t] - logits[-1][0, -1]).abs().max().item() < 1e-8, (row, t, s)
                chain = chain.append(end, Draft(torch.tensor([[following]]), torch.zeros(1, 1), torch.zeros(1)))


def test_the_gradient_flows_through_the_self_fed_states(double, exact_norms):
    """Autograd against a central difference along a random direction of the weights: no step is cut off."""
    head, token = random_head(double), torch.tensor(TEXTS)
    features = torch.randn(2, 12, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    law = torch.rand(2, 12, 21, generator=torch.Generator().manual_seed(1)).softmax(-1)
    batch = Batch(token, torch.ones_like(token, dtype=torch.bool), features, law)
    settings = TrainSettings(draft_steps=3, step_weight=1.0)
    parameters = list(head.requires_grad_(True).parameters())
    generator = torch.Generator().manual_seed(2)
    direction = [torch.randn(parameter.shape, dtype=torch.float64, generator=generator) for parameter in parameters]

    def moved(distance: float) -> float:
        with torch.no_grad():
            for parameter, step in zip(parameters, direction):
                parameter += distance * step
            loss = self_fed_loss(head, double.embedding, batch, settings)[0].item()
            for parameter, step in zip(parameters, direction):
                parameter -= distance * step
        return loss

    gradients = torch.autograd.grad(self_fed_loss(head, double.embedding, batch, settings)[0], parameters)
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


def two_token_head(logit: float) -> EagleHead:
    """A head over the draft tokens {0, 1} that says logits (0, logit) whatever it reads."""
    layer = random_head(build_target()).config.layer
    head = EagleHead(EagleConfig("eagle3", layer, (2, 2, 1), 32, 2))
    head.set_draft_vocab(torch.tensor([0, 1]))
    head.lm_head = nn.Linear(32, 2)
    nn.init.zeros_(head.lm_head.weight)
    head.lm_head.bias.data = torch.tensor([0.0, logit])
    return head


def two_token_batch(law: list[list[float]], learnt: list[int]) -> Batch:
    n = len(law)
    mask = torch.tensor([[place in learnt for place in range(n)]])
    return Batch(torch.zeros(1, n, dtype=torch.long), mask, torch.ones(1, n, 96), torch.tensor([law]))


def test_the_loss_by_hand_on_two_tokens(single):
    """The head says (1/4, 3/4). Two steps over five positions: step 0 is scored at 1, 2, 3, step 1 at 2, 3, 4.

    Position 1 is a prompt's and not learnt. Each learnt position costs -law·log(1/4, 3/4).
    """
    law = [[9.0, 9.0], [9.0, 9.0], [1.0, 0.0], [0.5, 0.5], [0.25, 0.5]]
    first, second = math.log(4), math.log(4 / 3)
    at_2, at_3, at_4 = first, 0.5 * first + 0.5 * second, 0.25 * first + 0.5 * second
    batch = two_token_batch(law, learnt=[2, 3, 4])
    head, settings = two_token_head(math.log(3)), TrainSettings(draft_steps=2, step_weight=0.8, max_length=5)
    loss, agreement = self_fed_loss(head, single.embedding, batch, settings)
    assert loss.item() == pytest.approx((at_2 + at_3) / 2 + 0.8 * (at_2 + at_3 + at_4) / 3, abs=1e-6)
    # the head's first choice is token 1, the law's is 0, 0 (a tie goes to the first), 1
    assert agreement == pytest.approx([0.0, 1 / 3])


def test_a_head_that_equals_the_law_loses_its_entropy(single):
    batch = two_token_batch([[0.25, 0.75]] * 6, learnt=list(range(6)))
    loss, agreement = self_fed_loss(
        two_token_head(math.log(3)), single.embedding, batch, TrainSettings(draft_steps=1, max_length=6)
    )
    entropy = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert loss.item() == pytest.approx(entropy, abs=1e-6)
    assert agreement == [1.0]


def example(text: list[int], learnt: range) -> Example:
    return Example(torch.tensor(text), torch.tensor([place in learnt for place in range(len(text))]))


def test_padding_changes_nothing(single):
    """An example costs the same alone and beside longer ones: the mean over a batch is the mean over its positions.

    All learnt positions are scored at every step here, so the losses weigh by their number.
    """
    settings = TrainSettings(draft_steps=3, max_length=40)
    head = random_head(single)
    texts = [[(5 * i * i + 3 * k) % VOCAB for i in range(n)] for k, n in enumerate((9, 14, 30))]
    short, middle, long = (example(text, range(4, min(len(text), 20))) for text in texts)

    def loss_of(*chosen: Example, padding: int = 0) -> float:
        """The loss of a batch that is padded on the right by further positions."""
        batch = make_batch(single, list(chosen), observe(single, list(chosen), head.config.taps), DRAFT_TOKENS)
        token, learnt = (F.pad(tensor, (0, padding)) for tensor in (batch.token, batch.learnt))
        feature, law = (F.pad(tensor, (0, 0, 0, padding)) for tensor in (batch.feature, batch.law))
        with torch.no_grad():
            return self_fed_loss(head, single.embedding, Batch(token, learnt, feature, law), settings)[0].item()

    counts = {id(each): int(each.learnt.sum()) for each in (short, middle, long)}
    assert list(counts.values()) == [5, 10, 16]
    alone = {id(each): loss_of(each, padding=settings.draft_steps) for each in (short, middle, long)}
    for each in (short, middle, long):
        assert loss_of(each, padding=17) == pytest.approx(alone[id(each)], rel=1e-5)
    for chosen in ((short, long), (short, middle, long), (middle, short, long)):
        total = sum(alone[id(each)] * counts[id(each)] for each in chosen)
        expected = total / sum(counts[id(each)] for each in chosen)
        assert loss_of(*chosen) == pytest.approx(expected, rel=1e-5)


def test_what_the_target_says_does_not_depend_on_the_batch(single):
    """Features, states and normaliser of a short example, alone and padded beside a long one."""
    short, long = example(TEXTS[0][:5], range(5)), example(TEXTS[1], range(12))
    taps = (1, 2, 4)
    alone, beside = observe(single, [short], taps)[0], observe(single, [short, long], taps)[0]
    for name in ("feature", "hidden", "log_z"):
        torch.testing.assert_close(getattr(alone, name), getattr(beside, name))


def test_the_law_is_the_targets_restricted_and_not_renormalised(single):
    """Tokens outside the draft vocabulary weigh nothing; what lies inside keeps its probability."""
    one = example(TEXTS[0], range(12))
    batch = make_batch(single, [one], observe(single, [one], (1, 2, 4)), DRAFT_TOKENS)
    logits = single.model(input_ids=one.token[None]).logits[0]
    torch.testing.assert_close(batch.law[0], logits.softmax(-1)[:, DRAFT_TOKENS])
    assert (batch.law.sum(-1) < 1).all()
    states = single.model(input_ids=one.token[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(batch.feature[0], torch.cat([states[tap][0] for tap in (1, 2, 4)], -1))


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


def test_frequent_tokens_by_hand():
    """Answers say 5 three times, 9 twice, 2 and 7 once. Prompts do not count; ties go to the smaller id."""
    sequences = [Sequence([4, 4, 4, 4], [5, 9, 5], 0.0), Sequence([4], [9, 7, 5, 2], 0.9)]
    chosen, coverage = frequent_tokens(sequences, 2, vocab_size=12)
    assert chosen.tolist() == [5, 9]
    assert coverage == pytest.approx(5 / 7)
    chosen, coverage = frequent_tokens(sequences, 3, vocab_size=12)
    assert chosen.tolist() == [2, 5, 9]
    assert coverage == pytest.approx(6 / 7)


def corpus(count: int = 8) -> list[Example]:
    """Examples of different lengths."""
    texts = [[(7 * i + 3 * i * i + 5 * k) % VOCAB for i in range(12 + 3 * (k % 4))] for k in range(count)]
    return [example(text, range(2, len(text))) for text in texts]


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


# --- the initial head ---


def test_the_initial_head_is_the_targets_last_layer(single):
    """`fc` passes the last tap through, the layer reads the state half of its input, head rows are the target's."""
    head = initial_head(single, DRAFT_TOKENS)
    tapped = torch.randn(1, 4, 96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.feature(tapped), tapped[..., -32:])
    last = single.layers[-1]
    assert torch.equal(head.midlayer.self_attn.k_proj.weight[:, 32:], last.self_attn.k_proj.weight)
    assert torch.equal(head.midlayer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    assert torch.equal(head.lm_head.weight, single.model.lm_head.weight[DRAFT_TOKENS])
    assert torch.equal(head.norm.weight, single.decoder.norm.weight)
    assert head.draft_to_target.tolist() == DRAFT_TOKENS.tolist()
    again = initial_head(single, DRAFT_TOKENS)
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), again.parameters(), strict=True))


def test_the_initial_layer_is_the_targets_up_to_the_embedding_half(single):
    """With the (small, random) embedding half set to zero the layer computes what the target's last layer computes."""
    head = initial_head(single, DRAFT_TOKENS)
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


# --- the loop ---

SETTINGS = TrainSettings(steps=12, draft_steps=3, max_length=32, warmup_steps=2, learning_rate=1e-2, autocast=False)


def new_trainer(single: Target, settings: TrainSettings = SETTINGS, **options) -> Trainer:
    return Trainer(single, initial_head(single, DRAFT_TOKENS), settings, **options)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.head.state_dict().items()}


def assert_same_weights(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("memory_bytes", [0, 6 << 30], ids=["nothing remembered", "all remembered"])
def test_a_killed_and_resumed_run_is_the_uninterrupted_one(single, tmp_path, autocast, memory_bytes):
    """Saved at step 3, killed at 5, resumed over three epochs: the same weights, bit for bit."""
    data, settings = corpus(), replace(SETTINGS, autocast=autocast)
    whole = new_trainer(single, settings, memory_bytes=memory_bytes)
    whole_losses = [whole.train_step(batch)[0] for batch in batches(data, settings, 0)]

    killed = new_trainer(single, settings, memory_bytes=memory_bytes)
    for batch in batches(data, settings, 0):
        killed.train_step(batch)
        if killed.step == 3:
            killed.save(tmp_path / "run" / "state.pt")
        if killed.step == 5:
            break
    resumed = new_trainer(single, settings, memory_bytes=memory_bytes)
    resumed.load(tmp_path / "run" / "state.pt")
    assert resumed.step == 3
    losses = [resumed.train_step(batch)[0] for batch in batches(data, settings, resumed.step)]
    assert resumed.step == whole.step == 12
    assert losses == whole_losses[3:]
    assert_same_weights(weights(resumed), weights(whole))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["state.pt"]


def test_training_lowers_the_loss(single):
    """Twelve steps on four examples, seen three times over."""
    data = corpus(4)
    trainer = new_trainer(single, replace(SETTINGS, steps=40))
    losses = [trainer.train_step(batch)[0] for batch in batches(data, trainer.settings, 0)]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_a_nan_loss_is_raised_and_leaves_the_weights(single):
    """And the next sound step is the one that would have been taken without the broken one."""
    data = corpus(4)
    trainer, undisturbed = new_trainer(single), new_trainer(single)
    for each in (trainer, undisturbed):
        each.train_step(data[:2])
    before = weights(trainer)
    honest = trainer.observed
    trainer.observed = lambda chosen: [replace(one, feature=one.feature * math.nan) for one in honest(chosen)]
    with pytest.raises(FloatingPointError, match="the loss is nan at step 1"):
        trainer.train_step(data[2:])
    assert_same_weights(weights(trainer), before)
    assert trainer.step == 1
    trainer.observed = honest
    for each in (trainer, undisturbed):
        each.train_step(data[2:])
    assert_same_weights(weights(trainer), weights(undisturbed))


def test_the_target_is_not_trained(single):
    before = single.fingerprint
    trainer = new_trainer(single)
    trainer.train_step(corpus(2))
    assert single.fingerprint == before
    assert all(parameter.grad is None for parameter in single.model.parameters())
    assert all(parameter.requires_grad for parameter in trainer.head.parameters())


def test_the_target_is_asked_once_per_example(single, monkeypatch):
    """Later epochs read what it said from memory, as far as that goes."""
    asked = []
    real = observe
    monkeypatch.setattr(
        "eagle_tree.train.observe", lambda t, chosen, taps: asked.append(len(chosen)) or real(t, chosen, taps)
    )
    data = corpus(4)
    for memory_bytes, expected in ((6 << 30, 4), (0, 12)):
        asked.clear()
        trainer = new_trainer(single, memory_bytes=memory_bytes)
        for batch in batches(data, replace(SETTINGS, steps=6), 0):  # three epochs of two steps
            trainer.train_step(batch)
        assert sum(asked) == expected


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
        (dict(steps=0), "steps=0 must be at least 1"),
        (dict(sequences_per_step=0), "sequences_per_step=0 must be at least 1"),
        (dict(draft_steps=0), "draft_steps=0 must be at least 1"),
        (dict(max_length=6, draft_steps=4), r"max_length=6 must exceed draft_steps \+ 2 = 6"),
        (dict(learning_rate=0.0), "learning_rate=0.0 must be above 0"),
        (dict(learning_rate=math.nan), "learning_rate=nan must be above 0"),
    ],
)
def test_settings_name_what_is_wrong(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        TrainSettings(**fields)
