"""Exact certificates of acceptance rules: the law of what they emit, by enumeration, in double precision.

The production `accept()` is driven as it is. In place of the noise it gets a `Chooser`, before which every draw of a
token and every comparison with a uniform variate is a fork: the draw's law and the threshold are what the rule itself
hands over, so a rule that draws from a wrong law is seen to do so. All drafts over a small vocabulary are gone through,
each with the probability with which it is drawn. What a walk has not decided is, by induction, the target's own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import permutations, product

import torch
from torch import Tensor

from eagle_tree.accept import (
    Accepted,
    BlockVerification,
    ChainRejection,
    Hybrid,
    Match,
    Rule,
    Sequential,
    WithReplacement,
)
from eagle_tree.draw import candidates
from eagle_tree.noise import GumbelRows, Noise, PassNoise
from eagle_tree.policy import DepthStop, Eagle2
from eagle_tree.tree import Draft, Draw, Drawn, Frontier, GrowingTree, Tree
from eagle_tree.warp import Law, Sampling

TOLERANCE = 1e-10
SPREAD = 1.5
ROOT = 0
SEED = 4
"""Of worlds in which later siblings are accepted with probabilities between 0 and 1."""
Path = tuple[int, ...]


@dataclass
class Chooser:
    """Stands in for the noise of a pass: answers as it is told to, and lists what it was asked.

    Attributes:
        token: what the draws yield, by (level, how many draws there were at that level).
        interval: where uniform variates lie, by (level, index); (0, 1) if unknown. A comparison that the interval does
            not decide is answered with "below", and narrows it.
        draws: law `[V]` of every draw, by its key; open_draws: keys that `token` did not tell.
        thresholds: of every comparison that was open, with the variate's key and interval before.
    """

    token: dict[tuple[int, int], int]
    interval: dict[tuple[int, int], tuple[float, float]]
    draws: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    answered: dict[tuple[int, int], int] = field(default_factory=dict)
    thresholds: list[tuple[tuple[int, int], float, tuple[float, float]]] = field(default_factory=list)

    def for_pass(self, position: int) -> Chooser:
        return self

    def draw(self, level: int, scores: Tensor) -> Tensor:
        key = (level, sum(known == level for known, _ in self.draws))
        law = scores.double().softmax(-1)[0]
        self.draws[key] = law
        self.answered[key] = self.token.get(key, int(law.argmax()))
        return torch.tensor([self.answered[key]])

    def draw_at(self, level: Tensor, levels: int, scores: Tensor) -> Tensor:
        return self.draw(int(level), scores)

    def below(self, level: int, index: int, threshold: Tensor) -> Tensor:
        key, value = (level, index), float(threshold)
        low, high = self.interval.get(key, (0.0, 1.0))
        if low < value < high:
            self.thresholds.append((key, value, (low, high)))
            self.interval = {**self.interval, key: (low, value)}
            return torch.tensor(True)
        return torch.tensor(value >= high)  # False for NaN


@dataclass(frozen=True)
class Outcome:
    """One way that a pass can go.

    Attributes:
        probability: of all draws and comparisons that made it; emitted: its tokens; accepted: node indices.
    """

    probability: float
    emitted: Path
    accepted: Path


def outcomes(accept: Callable[[Chooser], Accepted], leaf: Callable[[int], bool]) -> Iterator[Outcome]:
    """Every way that a pass over one tree can go.

    Args:
        accept: the production rule on its tree, given the noise.
        leaf: whether a node has no children: then a token drawn there decides nothing else.
    """
    waiting: list[tuple[float, dict, dict]] = [(1.0, {}, {})]
    while waiting:
        probability, token, interval = waiting.pop()
        chooser = Chooser(token, interval)
        walk = accept(chooser)
        length = int(walk.n_accepted)
        emitted = tuple(walk.emitted[: length + 1].tolist())
        path = tuple(walk.path[: length + 1].tolist())
        if chooser.thresholds:
            key, value, (low, high) = chooser.thresholds[0]
            for part in ((low, value), (value, high)):
                share = (part[1] - part[0]) / (high - low)
                waiting.append((probability * share, token, {**interval, key: part}))
            continue
        # a draw matters if its token was emitted: others belong to levels that the walk left or did not come to
        open_draws = [
            key
            for key, law in chooser.draws.items()
            if key not in token and key[0] <= length and emitted[key[0]] == chooser.answered[key]
        ]
        if not open_draws:
            yield Outcome(probability, emitted, path)
        elif open_draws == [(length, open_draws[0][1])] and leaf(path[-1]):
            for last, share in enumerate(chooser.draws[open_draws[0]].tolist()):
                if share:
                    yield Outcome(probability * share, (*emitted[:-1], last), path)
        else:
            for choice, share in enumerate(chooser.draws[open_draws[0]].tolist()):
                if share:
                    waiting.append((probability * share, {**token, open_draws[0]: choice}, interval))


@dataclass(frozen=True)
class World:
    """A target and a drafter over a small vocabulary: random logits after every text, the same whenever asked.

    Attributes:
        vocab_size: V; seed; temperature: of the drafter's distribution; sampling: of the target's.
        closeness: 0…1, how much of the drafter's logits is the target's.
    """

    vocab_size: int
    seed: int
    sampling: Sampling
    temperature: float = 1.0
    closeness: float = 0.5

    def logits(self, text: Path) -> Tensor:
        """The target's, `[V] f64`."""
        return SPREAD * normal(self.seed, self.vocab_size, "target", text)

    def q(self, text: Path) -> Tensor:
        """The drafter's distribution `[V] f64`."""
        own = SPREAD * normal(self.seed, self.vocab_size, "drafter", text)
        mixed = self.closeness * self.logits(text) + (1 - self.closeness) * own
        return (mixed / self.temperature).softmax(-1)

    def p(self, text: Path) -> Tensor:
        """The target's law `[V] f64`, warped."""
        return warped(self, text)


@lru_cache(maxsize=1 << 14)
def normal(seed: int, size: int, name: str, text: Path) -> Tensor:
    """`[size] f64` standard normal values, keyed."""
    digest = hashlib.blake2b(repr((seed, name, text)).encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(size, generator=generator, dtype=torch.float64)


@lru_cache(maxsize=1 << 14)
def warped(world: World, text: Path) -> Tensor:
    """The target's law `[V] f64`: computed apart from `warp.py`, one token after the other."""
    logits, sampling = world.logits(text), world.sampling
    if sampling.greedy:
        return torch.nn.functional.one_hot(logits.argmax(), world.vocab_size).double()
    weight = (logits / sampling.temperature).exp()
    order = weight.argsort(descending=True)
    if sampling.top_k is not None:
        weight[order[sampling.top_k :]] = 0
    share = weight / weight.sum()
    before = 0.0
    for token in order.tolist():
        if before >= sampling.top_p:
            weight[token] = 0
        before += float(share[token])
    return weight / weight.sum()


def options(kind: str, q: Tensor, k: int) -> list[tuple[float, Path, Tensor]]:
    """Every way to take k children from `q [V]`: its probability, the tokens, and the law `[V]` behind the draws."""
    tokens, likely = range(q.shape[0]), q.argsort(descending=True).tolist()
    if kind == "top_k":
        return [(1.0, tuple(likely[:k]), q)]
    if kind == "with_replacement":
        return [(math.prod(float(q[x]) for x in drawn), drawn, q) for drawn in product(tokens, repeat=k)]
    if kind == "without_replacement":
        found = []
        for drawn in permutations(tokens, k):
            left, probability = 1.0, 1.0
            for x in drawn:
                probability *= float(q[x]) / left
                left = sum(float(q[y]) for y in tokens if y not in drawn[: drawn.index(x) + 1])
            found.append((probability, drawn, q))
        return found
    rest = q.clone()
    rest[likely[: k - 1]] = 0
    rest /= rest.sum()
    return [(float(rest[x]), (x, *likely[: k - 1]), rest) for x in tokens if rest[x] > 0]


@dataclass(frozen=True)
class Drafted:
    """A tree, the probability with which it is drafted, and the text before each node's children."""

    probability: float
    tree: Tree
    texts: list[Path]


def drafts(world: World, kind: str, shape: Sequence[int], reads_q: bool = True) -> Iterator[Drafted]:
    """Every tree in which the nodes of level i have `shape[i]` children.

    Args:
        reads_q: whether the rule wants to know what the children were drawn from.
    """
    parent, level, parents = [-1], [0], [0]
    for width in shape:
        parent += [node for node in level for _ in range(width)]
        level = list(range(len(parent) - len(level) * width, len(parent)))
        parents += level
    internal = sorted(set(parent[1:]))
    width = {node: parent.count(node) for node in internal}

    def expand(node: int, probability: float, tokens: Path, texts: list[Path], laws: list[Tensor]) -> Iterator[Drafted]:
        """Trees in which the nodes before `node` have their children."""
        if node not in width:
            drawn = Drawn(torch.stack(laws).log(), torch.tensor([i if i in width else -1 for i in range(len(parent))]))
            yield Drafted(
                probability, Tree.from_lists(tokens, parent, drawn=drawn if reads_q or kind != "top_k" else None), texts
            )
            return
        for share, children, law in options(kind, world.q(texts[node]), width[node]):
            if share:
                after = [*texts, *((*texts[node], token) for token in children)]
                yield from expand(node + 1, probability * share, (*tokens, *children), after, [*laws, law])

    yield from expand(0, 1.0, (ROOT,), [()], [])


@dataclass(frozen=True)
class Certificate:
    """What an enumeration found.

    Attributes:
        total_variation: between the law of the emitted text and the target's; mass: how far the probabilities of
            all outcomes are from 1.
        reach_error: largest difference between `reach` and how often a node was accepted, over all drafts.
        accepted: expected accepted tokens; closed_form: the same by the rule's formula, NaN where none is known.
        drafts: how many were gone through.
    """

    total_variation: float
    mass: float
    reach_error: float
    accepted: float
    closed_form: float
    drafts: int

    @property
    def holds(self) -> bool:
        """Whether the rule emits the target's law and knows what it accepts, to `TOLERANCE`."""
        errors = [self.total_variation, self.mass, self.reach_error]
        if not math.isnan(self.closed_form):
            errors.append(abs(self.accepted - self.closed_form))
        return max(errors) <= TOLERANCE and not any(map(math.isnan, errors))


def certificate(
    rule: Rule,
    kind: str,
    world: World,
    shape: Sequence[int],
    closed_form: float = math.nan,
    keep: Callable[[Drafted], Drafted] | None = None,
) -> Certificate:
    """Enumerate all that a rule can do on all drafts of a kind.

    Args:
        kind: one of `tree.DRAWS` but coupled. shape: children of every node, by level. keep: a policy that prunes.
    """
    length = len(shape) + 1
    law_of_text: dict[Path, float] = {}
    reach_error = accepted = mass = 0.0
    count = 0
    for count, drafted in enumerate(drafts(world, kind, shape, rule.reads_q), 1):  # noqa: B007
        drafted = keep(drafted) if keep else drafted
        tree = drafted.tree
        law = Law(torch.stack([world.logits(text) for text in drafted.texts]), world.sampling, tree)
        has_children = set(tree.parent.tolist())
        share = torch.zeros(tree.n_nodes + 1, dtype=torch.float64)
        for outcome in outcomes(
            lambda noise, tree=tree, law=law: rule.accept(tree, law, noise, 0),
            lambda node, has_children=has_children: node not in has_children,
        ):
            share[list(outcome.accepted)] += outcome.probability
            weight = drafted.probability * outcome.probability
            accepted += weight * (len(outcome.accepted) - 1)
            mass += weight
            for text, probability in continued(world, outcome.emitted, length):
                law_of_text[text] = law_of_text.get(text, 0.0) + weight * probability
        reach = rule.reach(tree, law.node_log_prob(tree), law)
        reach_error = max(reach_error, float((reach - share).abs().max()))
    target = dict(continued(world, (), length))
    texts = set(target) | set(law_of_text)
    difference = sum(abs(law_of_text.get(text, 0.0) - target.get(text, 0.0)) for text in texts) / 2
    return Certificate(difference, abs(mass - 1), reach_error, accepted, closed_form, count)


def continued(world: World, text: Path, length: int) -> Iterator[tuple[Path, float]]:
    """Every continuation of a text to a length by the target itself, and its probability."""
    if len(text) >= length:
        yield text[:length], 1.0
        return
    for token, probability in enumerate(world.p(text).tolist()):
        if probability:
            for longer, rest in continued(world, (*text, token), length):
                yield longer, probability * rest


# What a rule accepts on the average, in closed form


def accepts_point_masses(world: World, shape: Sequence[int], text: Path = ()) -> float:
    """Match and sequential on the most likely tokens: Σ p(x) over them, and what follows each."""
    if not shape:
        return 0.0
    p, q = world.p(text), world.q(text)
    likely = q.argsort(descending=True)[: shape[0]].tolist()
    return sum(float(p[x]) * (1 + accepts_point_masses(world, shape[1:], (*text, x))) for x in likely)


def accepts_with_replacement(world: World, shape: Sequence[int], text: Path = ()) -> float:
    """Trial i accepts x with probability Π_{j<i} (1 - Σ min(r_j, q))·min(r_i(x), q(x)): no r depends on the draws."""
    if not shape:
        return 0.0
    residual, q, open_share, total = world.p(text), world.q(text), 1.0, 0.0
    for _ in range(shape[0]):
        taken = torch.minimum(residual, q)
        for x in range(world.vocab_size):
            total += open_share * float(taken[x]) * (1 + accepts_with_replacement(world, shape[1:], (*text, x)))
        open_share *= 1 - float(taken.sum())
        residual = (residual - q).clamp(min=0)
        if not residual.sum() > 0:
            break
        residual = residual / residual.sum()
    return total


def accepts_hybrid(world: World, shape: Sequence[int], text: Path = ()) -> float:
    """p(S) + Σ_{x not in S} min(p, q_rest), and what follows each (Hu et al.)."""
    if not shape:
        return 0.0
    p, q = world.p(text), world.q(text)
    likely = q.argsort(descending=True)[: shape[0] - 1]
    rest = q.index_fill(0, likely, 0.0)
    share = torch.minimum(p, rest / rest.sum()).index_copy(0, likely, p[likely])
    return sum(float(share[x]) * (1 + accepts_hybrid(world, shape[1:], (*text, x))) for x in range(len(share)))


def accepts_block(
    world: World, shape: Sequence[int], text: Path = (), drawn: float = 1.0, weight: float = 1.0
) -> float:
    """Σ_i E[w_i], w_i = min(1, w_{i-1}·p(x_i) / q(x_i)): the probability that at least i tokens are accepted."""
    if not shape:
        return 0.0
    p, q, total = world.p(text), world.q(text), 0.0
    for x in range(world.vocab_size):
        here = min(1.0, weight * float(p[x] / q[x]))
        share = drawn * float(q[x])
        total += share * here + accepts_block(world, shape[1:], (*text, x), share, here)
    return total


CLOSED_FORMS: dict[tuple[type[Rule], str], Callable[[World, Sequence[int]], float]] = {
    (Match, "top_k"): accepts_point_masses,
    (Sequential, "top_k"): accepts_point_masses,
    (WithReplacement, "with_replacement"): accepts_with_replacement,
    (Hybrid, "hybrid"): accepts_hybrid,
    (ChainRejection, "with_replacement"): accepts_with_replacement,
    (BlockVerification, "with_replacement"): accepts_block,
}
SAMPLINGS = (
    Sampling(0.0),
    Sampling(0.6),
    Sampling(1.0),
    Sampling(1.0, top_k=2),
    Sampling(1.5, top_p=0.8),
)
TREES = {1: ((4, (3,)), (6, (2,))), 2: ((3, (2, 1)),), 3: ((2, (2, 1, 1)),)}
CHAINS = {1: ((6, (1,)),), 2: ((3, (1, 1)),), 3: ((3, (1, 1, 1)),)}
"""Levels to vocabulary size and children by level; all drafts of each are gone through."""


def certificates(rule: Rule, kind: str, sampling: Sampling, levels: int, seed: int = SEED) -> list[Certificate]:
    """Certificates of a rule and a kind of draft on random worlds, with trees of that many levels."""
    found = []
    for vocab_size, shape in (CHAINS if rule.one_child else TREES)[levels]:
        world = World(vocab_size, seed, sampling, sampling.temperature or 1.0)
        if kind == "coupled":
            found.append(coupled_certificate(replace(world, vocab_size=min(3, vocab_size)), levels, rule))
            continue
        closed_form = CLOSED_FORMS.get((type(rule), kind))
        accepts = closed_form(world, shape) if closed_form else math.nan
        found.append(certificate(rule, kind, world, shape, accepts))
    return found


def grown(
    world: World,
    text: Path,
    kind: str,
    next_frontier: Callable[[GrowingTree, Draft | None], Frontier | None],
    noise: PassNoise,
) -> tuple[GrowingTree, list[Path]]:
    """The world's drafts behind a text, by the production draw.

    Args:
        kind: one of `tree.DRAWS`. next_frontier: what to expand next, as `Policy.frontier` says it; None ends growth.

    Returns:
        the pool, and the text up to each of its nodes.
    """
    draw = Draw(kind, world.temperature)
    growing, texts, draft = GrowingTree.from_root(torch.tensor([ROOT])), [text], None
    while (frontier := next_frontier(growing, draft)) is not None:
        nodes = frontier.node.tolist()
        log_q = torch.stack([world.q(texts[node]) for node in nodes]).log().float()
        draft = candidates(log_q, growing, replace(frontier, draw=draw), noise)
        for node, tokens in zip(nodes, draft.token.tolist(), strict=True):
            texts += [(*texts[node], token) for token in tokens]
        growing = growing.append(frontier, draft)
    return growing, texts


def coupled_trees(world: World, levels: int, seeds: int) -> dict[tuple[Path, ...], Tree]:
    """The distinct trees that coupled drafts make of many sequences' noise, pruned by score, by their nodes' texts."""
    width = world.vocab_size
    policy, trees = DepthStop(Eagle2(width + 1, width, levels), levels), {}
    for seed in range(seeds):
        noise = GumbelRows(Noise(world.seed, seed), width).for_pass(0)
        growing, texts = grown(world, (), "coupled", policy.frontier, noise)
        tree, index, _ = growing.select(policy.select(growing))
        trees[tuple(texts[node] for node in index.tolist())] = tree
    return trees


def coupled_certificate(world: World, levels: int, rule: Rule, seeds: int = 20) -> Certificate:
    """Coupled drafts, pruned by score: whatever tree the noise makes, the emitted tokens are those that are drawn.

    Trees are grown by the production draw and an EAGLE-2 policy. On each of them every sequence y of draws is put in,
    and the walk must emit y as far as it goes: then the text is y for every noise, and its law is that of the draws,
    however the tree depends on them. `total_variation` bounds it: the probability of the y that were not emitted.
    """
    trees = coupled_trees(world, levels, seeds)
    worst = accepted = mass = 0.0
    for texts, tree in trees.items():
        law = Law(torch.stack([world.logits(text) for text in texts]), world.sampling, tree)
        wrong = 0.0
        for text, probability in continued(world, (), levels + 1):
            walk = rule.accept(tree, law, Chooser({(level, 0): y for level, y in enumerate(text)}, {}), 0)
            length = int(walk.n_accepted)
            if tuple(walk.emitted[: length + 1].tolist()) != text[: length + 1]:
                wrong += probability
            accepted += probability * length / len(trees)
            mass += probability / len(trees)
        worst = max(worst, wrong)
    return Certificate(worst, abs(mass - 1), 0.0, accepted, math.nan, len(trees))
