"""Speculative decoding with draft trees: the algorithm on one page.

One pass: GROW, SELECT, VERIFY, ACCEPT, COMPACT, RECORD. Autoregressive decoding is the policy with the
empty tree, through the same code.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from eagle_tree.accept import Accepted, Match, Rule, surprisal
from eagle_tree.accept.base import DRAFT_FAULTS
from eagle_tree.cache import KVCache
from eagle_tree.checks import check_count
from eagle_tree.clock import Clock
from eagle_tree.drafter.base import Drafter
from eagle_tree.noise import GumbelRows, Noise, PassNoise
from eagle_tree.pairs import check_pair
from eagle_tree.policy import Policy
from eagle_tree.record import NODE_COLUMNS, PassRow
from eagle_tree.target import Target
from eagle_tree.tree import TOP_K, Draft, Draw, GrowingTree, Tree
from eagle_tree.warp import Law, Sampling


class BrokenLogits(ArithmeticError):
    """The target's logits were NaN or infinite where a token had to be drawn."""


class BrokenDraft(ArithmeticError):
    """A draft that is not what the acceptance rule supposes: q is no distribution, or a drawn token is not from it."""


@dataclass(frozen=True)
class Pass:
    """A finished pass, on the host.

    Attributes:
        row: its entry in the pass table; tokens: what it emitted; nodes: columns of the node table.
    """

    row: PassRow
    tokens: list[int]
    nodes: dict[str, np.ndarray]


@dataclass
class Generation:
    """A finished sequence.

    Attributes:
        tokens: emitted tokens, the end-of-sequence token included if it came.
        passes: one entry a target pass after prefill; prefill's own token is in `tokens` only.
        prefill_s, decode_s: seconds before and after the first token.
    """

    tokens: list[int] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def tokens_per_pass(self) -> float:
        """τ: tokens of the passes over passes (prefill's own token excluded, bonus tokens included)."""
        return (len(self.tokens) - 1) / len(self.passes) if self.passes else float("nan")


def generate(
    target: Target,
    drafter: Drafter | None,
    policy: Policy,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: Sequence[int] = (),
    callback: Callable[[list[int], Pass | None], None] | None = None,
    *,
    sampling: Sampling | None = None,
    rule: Rule | None = None,
    draw: Draw | None = None,
    sequence: int | str = 0,
    policy_name: str | None = None,
    category: str = "",
    record_nodes: bool = True,
    cache: KVCache | None = None,
) -> Generation:
    """Decode one prompt. With the match rule, the default, the emitted tokens depend on neither drafter nor policy.

    Args:
        target: the model whose text is wanted. drafter: None only with a policy that never drafts.
        prompt_ids: `[n]` token ids. max_new_tokens: emitted exactly, unless the sequence ends.
        temperature, top_p, top_k: as in `Sampling`; `sampling` replaces all three.
        rule: which drafted tokens are accepted (`accept`). draw: how candidates are taken from the drafter's
            distribution; None: in the way that the rule is made for.
        seed, sequence: key the noise: same seed and sequence (prompt id), same text.
        stop: token ids that end the sequence, beside the model's own end-of-sequence tokens.
        callback: called with new tokens and their pass (None for prefill's token).
        policy_name, category: names in the recorded rows. record_nodes: compute the node table, the target's
            probabilities and both meters (timed apart, as `record_s`).
        cache: a one-row cache to reuse; reset before use.

    Raises:
        ValueError: a bad argument, named. BrokenLogits: NaN or infinite logits. BrokenDraft: a drafter whose q is none.
    """
    sampling = sampling or Sampling(temperature, top_k, top_p)
    rule = rule or Match()
    check_request(target, drafter, policy, prompt_ids, max_new_tokens, sampling, rule, draw)
    drafter = drafter if policy.max_candidates() else None  # a policy that never drafts pays for no drafter
    draw = (draw or rule.default_draw).at(sampling.temperature) if drafter else TOP_K
    cache = cache or target.new_cache()
    if cache.max_length < len(prompt_ids) + max_new_tokens:
        raise ValueError(f"cache holds {cache.max_length} positions; {len(prompt_ids)} + {max_new_tokens} are needed")
    cache.reset()
    ending = target.eos_token_ids | frozenset(stop)
    noise = GumbelRows(Noise(seed, sequence, target.device), target.vocab_size)
    taps = drafter.taps if drafter else ()
    result = Generation()
    clock = Clock(target.device)

    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(clock.forwards(target.model, "target_forward"))
        stack.enter_context(clock.forwards(drafter.module if drafter else None, "drafter_forward"))

        # Prefill: the first token is drawn like every other, from a tree without draft nodes.
        started = time.perf_counter()
        prompt = torch.tensor(list(prompt_ids), device=target.device)
        prefilled = target.prefill(prompt, cache, taps)
        root_only = Tree.from_lists([prompt_ids[-1]], [-1], device=target.device)
        law = Law(prefilled.logits, sampling, root_only, prompt[:-1])
        closed = torch.ones((), dtype=torch.bool, device=target.device)
        first, host = judge(rule, root_only, law, noise, len(prompt_ids), closed, False, clock)
        if host.broken:
            raise BrokenLogits(f"the target's logits after the prompt of {len(prompt_ids)} tokens are not finite")
        pending = first.emitted[:1]
        if drafter:
            drafter.start(prompt, prefilled.features, pending)
        result.tokens += host.emitted
        clock.take()
        result.prefill_s = time.perf_counter() - started
        if callback:
            callback(host.emitted, None)
        text = torch.cat([prompt, pending])  # every token so far; the last is pending

        while len(result.tokens) < max_new_tokens and result.tokens[-1] not in ending:
            start = clock.now()
            position = len(prompt_ids) + len(result.tokens)  # of the first token that this pass emits
            with clock.stage("grow"):
                growing = grow(drafter, policy, text[-1:], noise.for_pass(position), draw)
            with clock.stage("select"):
                tree, _, closed = growing.select(policy.select(growing))
                tree = tree.head(cache.room() - 1)  # near the end of the context a smaller tree must do
            with clock.stage("verify"):
                verified = target.verify([tree], cache, taps)[0]
            with clock.stage("accept"):
                law = Law(verified.logits, sampling, tree, text[:-1])
            accepted, host = judge(rule, tree, law, noise, position, closed, record_nodes, clock)
            if not host.closed:
                raise AssertionError(f"{type(policy).__name__} selected a node without its parent, or one twice")
            if host.broken:
                raise BrokenLogits(f"the target's logits at position {position} are not finite")
            if host.draft_fault:
                raise BrokenDraft(f"position {position}: {DRAFT_FAULTS[host.draft_fault]}")
            with clock.stage("compact"):
                path = accepted.path[: host.n_accepted + 1]
                cache.keep([host.path])
                new = accepted.emitted[: host.n_accepted + 1]
                if drafter:
                    drafter.advance(new, None if verified.features is None else verified.features[path])
                text = torch.cat([text, new])
                noise.forget_before(position + host.n_accepted + 1)
            clock.spans.append(("pass", start, clock.now()))

            tokens = truncate(host.emitted, max_new_tokens - len(result.tokens), ending)
            result.tokens += tokens
            names = (policy_name or type(policy).__name__, str(sequence), category, len(result.passes))
            row = pass_row(names, position - 1, growing, tree, host, len(tokens), clock.take())
            policy.observe(row)
            result.passes.append(Pass(row, tokens, host.nodes))
            if callback:
                callback(tokens, result.passes[-1])
    result.decode_s = time.perf_counter() - started - result.prefill_s
    return result


def grow(
    drafter: Drafter | None, policy: Policy, pending: Tensor, noise: PassNoise | None = None, draw: Draw = TOP_K
) -> GrowingTree:
    """The drafter proposes, the policy says where, frontier by frontier.

    A drafter of limited depth ends growth after as many frontiers: no node is deeper than there were frontiers.

    Args:
        pending: `[1]`, the root's token. noise: of the pass; the most likely candidates (`draw.kind` top_k) need none.
    """
    growing, draft = GrowingTree.from_root(pending), None
    limit = math.inf if drafter is None or drafter.max_depth is None else drafter.max_depth
    while (frontier := policy.frontier(growing, draft)) is not None and len(growing.levels) < limit:
        draft = drafter.expand(growing, replace(frontier, draw=draw), noise)
        check_drawn(drafter, draft, draw)
        growing = growing.append(frontier, draft)
    return growing


def check_drawn(drafter: Drafter, draft: Draft, draw: Draw) -> None:
    """Raise ValueError for candidates that were drawn by chance and should not have been, or the other way round."""
    if draw.sampled and draft.log_q is None:
        raise ValueError(f"{type(drafter).__name__} does not draw its candidates, as draw.kind={draw.kind} asks")
    if draft.log_q is not None and not draw.sampled:
        raise ValueError(f"{type(drafter).__name__} draws its candidates at random, and draw.kind={draw.kind} does not")


def judge(
    rule: Rule,
    tree: Tree,
    law: Law,
    noise: GumbelRows,
    position: int,
    closed: Tensor,
    record_nodes: bool,
    clock: Clock,
) -> tuple[Accepted, HostView]:
    """Walk the tree, measure its nodes if they are recorded, and bring the outcome to the host.

    One transfer, unless a nucleus was wider than what top-p had sorted: then once more, sorted wider.
    """
    accepted, measured = None, None
    while True:
        if accepted is None:
            with clock.stage("accept"):
                accepted = rule.accept(tree, law, noise, position)
                uncovered = law.uncovered
        with clock.stage("record"):
            measured = measure(rule, tree, law, accepted) if record_nodes else None
        with clock.stage("transfer"):
            host = transfer(tree, accepted, uncovered, law.uncovered, closed, measured)
        if not (host.uncovered or host.unmeasured):
            return accepted, host
        law = law.widened()
        accepted = None if host.uncovered else accepted


@dataclass(frozen=True)
class Measured:
    """Device-side columns of the node table, the pass's expectations and its surprisal meter."""

    columns: dict[str, Tensor]
    expected_target: Tensor
    surprisal: Tensor


def measure(rule: Rule, tree: Tree, law: Law, accepted: Accepted) -> Measured:
    """What the target thinks of every node: costs a pass over the vocabulary per node."""
    log_prob = law.node_log_prob(tree)
    columns = {
        "node": torch.arange(tree.token.shape[0], device=tree.token.device),
        "parent": tree.parent,
        "depth": tree.depth,
        "rank": tree.rank,
        "token": tree.token,
        "log_conf": tree.log_conf,
        "score": tree.score,
        "selected": torch.ones_like(tree.token),
        "tried": accepted.tried,
        "accepted": accepted.accepted,
        "parent_accepted": accepted.tried,
        "target_log_prob": log_prob,
    }
    expected = rule.reach(tree, log_prob, law).sum()
    meter = expected.new_zeros(()) if law.sampling.greedy else surprisal(law, accepted.path, accepted.emitted)
    return Measured(columns, expected, meter)


@dataclass(frozen=True)
class HostView:
    """What the host learns of a pass, in one transfer."""

    closed: bool
    broken: bool
    uncovered: bool
    unmeasured: bool
    draft_fault: int
    n_accepted: int
    depth: int
    expected_draft: float
    expected_target: float
    surprisal: float
    path: list[int]
    emitted: list[int]
    nodes: dict[str, np.ndarray]


def transfer(
    tree: Tree,
    accepted: Accepted,
    uncovered: Tensor,
    unmeasured: Tensor,
    closed: Tensor,
    measured: Measured | None,
) -> HostView:
    """The pass's one device-to-host transfer: everything packed into one fp64 vector (ids fit exactly)."""
    nan = tree.expected_draft.new_full((), torch.nan)
    scalars = [
        closed,
        accepted.broken,
        uncovered,
        unmeasured,
        accepted.draft_fault,
        accepted.n_accepted,
        tree.depth.max(),
        tree.expected_draft,
        measured.expected_target if measured else nan,
        measured.surprisal if measured else nan,
    ]
    columns = list(measured.columns.values()) if measured else []
    pieces = [torch.stack([scalar.double() for scalar in scalars]), accepted.path, accepted.emitted, *columns]
    packed = torch.cat([piece.double() for piece in pieces]).cpu().numpy()
    flags, path, emitted, rest = np.split(packed, np.cumsum([len(scalars), len(accepted.path), len(accepted.emitted)]))
    n = int(flags[5])
    table = rest.reshape(len(NODE_COLUMNS), -1)[:, 1:] if measured else np.empty((len(NODE_COLUMNS), 0))
    return HostView(
        *(bool(flag) for flag in flags[:4]),
        int(flags[4]),
        n,
        int(flags[6]),
        *flags[7:].tolist(),
        path[: n + 1].astype(int).tolist(),
        emitted[: n + 1].astype(int).tolist(),
        dict(zip(NODE_COLUMNS, table, strict=True)),
    )


def truncate(tokens: list[int], room: int, ending: frozenset[int]) -> list[int]:
    """The tokens that are emitted: nothing beyond `room`, nothing after an ending token."""
    for count, token in enumerate(tokens[:room], 1):
        if token in ending:
            return tokens[:count]
    return tokens[:room]


def pass_row(
    names: tuple[str, str, str, int],
    context_length: int,
    growing: GrowingTree,
    tree: Tree,
    host: HostView,
    emitted: int,
    seconds: dict[str, float],
) -> PassRow:
    """The pass's entry in the pass table. The transfer waits for the walk, so its time is the walk's."""
    return PassRow(
        *names,
        context_length=context_length,
        n_nodes=tree.n_nodes,
        depth=host.depth,
        draft_steps=len(growing.levels),
        expanded=growing.expanded,
        expected_draft=host.expected_draft,
        expected_target=host.expected_target,
        accepted=host.n_accepted,
        emitted=emitted,
        acceptance_meter=host.n_accepted + 1 - host.expected_target,
        surprisal_meter=host.surprisal,
        grow_s=seconds.get("grow", 0.0),
        select_s=seconds["select"],
        verify_s=seconds["verify"],
        accept_s=seconds["accept"] + seconds["transfer"],
        compact_s=seconds["compact"],
        record_s=seconds["record"],
        target_forward_s=seconds["target_forward"],
        drafter_forward_s=seconds.get("drafter_forward", 0.0),
        pass_s=seconds["pass"],
    )


def check_request(
    target: Target,
    drafter: Drafter | None,
    policy: Policy,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    rule: Rule | None = None,
    draw: Draw | None = None,
) -> None:
    """Raise ValueError, before any work, for what cannot be decoded."""
    if len(prompt_ids) == 0:
        raise ValueError("prompt_ids is empty: a prompt needs at least one token")
    if len(prompt_ids) >= target.max_length:
        raise ValueError(
            f"the prompt has {len(prompt_ids)} tokens; the target's context of {target.max_length} leaves no room"
        )
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < target.vocab_size:
        raise ValueError(f"prompt_ids must be in 0…{target.vocab_size - 1}, the target's vocabulary")
    check_count("max_new_tokens", max_new_tokens)
    if len(prompt_ids) + max_new_tokens > target.max_length:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} after a prompt of {len(prompt_ids)} tokens "
            f"exceeds the target's context of {target.max_length}"
        )
    if sampling.top_k is not None and sampling.top_k > target.vocab_size:
        raise ValueError(f"top_k={sampling.top_k} exceeds the vocabulary of {target.vocab_size}")
    wanted = policy.max_candidates()
    if wanted and drafter is None:
        raise ValueError(f"{type(policy).__name__} drafts, but drafter is None")
    if drafter is not None and wanted > drafter.vocab_size:
        raise ValueError(
            f"{type(policy).__name__} asks for top_k={wanted} candidates a node; "
            f"the drafter's vocabulary has {drafter.vocab_size}"
        )
    if rule is not None and wanted:
        draw = draw or rule.default_draw
        draw.at(sampling.temperature)
        check_pair(rule, draw, policy)
