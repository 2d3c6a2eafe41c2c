"""Which rule accepts most? Rules and kinds of draft on the same distributions of a target and a drafter.

One node at a time: the expected number of its k children that are accepted, 0 … 1, along texts of the target. What
follows a child is not asked, so rules for trees and for chains stand side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from eagle_tree.accept import Coupled, Hybrid, Match, Rule, WithoutReplacement, WithReplacement
from eagle_tree.checks import as_path
from eagle_tree.drafter.base import Drafter
from eagle_tree.draw import candidates
from eagle_tree.noise import GumbelRows, Noise
from eagle_tree.target import Target
from eagle_tree.tree import Draw, Frontier, GrowingTree
from eagle_tree.warp import Law, Sampling

RULES: dict[str, Rule] = {
    "match": Match(),
    "coupled": Coupled(),
    "with replacement": WithReplacement(),
    "without replacement": WithoutReplacement(),
    "hybrid": Hybrid(),
}
"""With one child a node, `with replacement` is rejection sampling along a chain."""
BUNDLED = Path(__file__).parent / "assets" / "smollm2-135m-eagle3" / "rules.csv"


@dataclass(frozen=True)
class Position:
    """What target and drafter say after the same text.

    Attributes:
        logits: `[V]`, the target's; log_q: `[W]`, the drafter's at temperature 1; target_id: `[W]` or None.
        index: of the token that follows, in the sequence.
    """

    logits: Tensor
    log_q: Tensor
    target_id: Tensor | None
    index: int


def positions(
    target: Target, drafter: Drafter, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> Iterator[Position]:
    """Every position of an answer behind its first token, the drafter fed with the target's true features."""
    ids, n = torch.tensor([*prompt_ids, *answer_ids], device=target.device), len(prompt_ids)
    count = len(answer_ids) - 1
    seen = target.read(ids[:-1], drafter.taps, n_logits=max(1, count))
    features = seen.features
    noise = GumbelRows(Noise(0, 0, target.device), target.vocab_size).for_pass(0)
    drafter.start(ids[:n], None if features is None else features[:n], ids[n : n + 1])
    for step in range(count):
        if step:
            row = slice(n + step - 1, n + step)
            drafter.advance(ids[n + step : n + step + 1], None if features is None else features[row])
        root = GrowingTree.from_root(ids[n + step : n + step + 1])
        # any sampled draw brings the distribution along
        draft = drafter.expand(root, Frontier(ids.new_zeros(1), 1, Draw("with_replacement", 1.0)), noise)
        yield Position(seen.logits[step], draft.log_q[0], draft.target_id, n + step + 1)


def accepted(rule: Rule, position: Position, k: int, sampling: Sampling, draw: Draw, rows: GumbelRows) -> Tensor:
    """`[] f64`, the expected accepted children of a node, over what the rule draws, given this draft of k children.

    Coupled children are settled by the noise that they were chosen with: 0 or 1.
    """
    root = GrowingTree.from_root(torch.zeros(1, dtype=torch.int64, device=position.logits.device))
    frontier = Frontier(torch.zeros_like(root.token), k, draw)
    drafted = candidates(position.log_q[None], root, frontier, rows.for_pass(position.index), position.target_id)
    grown = root.append(frontier, drafted)
    tree = grown.select(torch.arange(1, k + 1, device=root.token.device))[0]
    law = Law(position.logits.expand(k + 1, -1), sampling, tree)
    if isinstance(rule, Coupled):
        return rule.accept(tree, law, rows, position.index).n_accepted.double()
    return rule.reach(tree, law.node_log_prob(tree), law)[1:].sum()


@torch.inference_mode()
def compare(
    found: Iterator[Position],
    temperatures: Sequence[float],
    widths: Sequence[int],
    sequence: int | str,
    repeats: int = 4,
) -> pd.DataFrame:
    """One row a (position, temperature, rule, k): `entropy` of the target's law, in nats, and `accepted`, a mean over
    `repeats` drafts of what is drawn.

    Raises:
        ValueError: a temperature that is not above 0.
    """
    if not all(temperature > 0 for temperature in temperatures):
        raise ValueError(f"temperatures={list(temperatures)} must be above 0: at 0 all rules accept the same")
    rows = []
    for position in found:
        for temperature in temperatures:
            sampling = Sampling(temperature)
            p = (position.logits.double() / temperature).softmax(-1)
            entropy = float(torch.special.entr(p).sum())
            for name, rule in RULES.items():
                draw = rule.default_draw.at(temperature)
                times = 1 if draw.kind == "top_k" else repeats
                for k in widths:
                    drawn = [
                        accepted(
                            rule, position, k, sampling, draw,
                            GumbelRows(Noise(seed, sequence, p.device), p.shape[-1]),
                        )
                        for seed in range(times)
                    ]  # fmt: skip
                    mean = float(torch.stack(drawn).mean())
                    rows.append((str(sequence), position.index, temperature, name, k, entropy, mean))
    return pd.DataFrame(rows, columns=["sequence", "position", "temperature", "rule", "k", "entropy", "accepted"])


def most_accepting(
    temperature: float, table: str = "bundled", children: int = 4, among: Sequence[str] = ("match", "coupled")
) -> Rule:
    """The rule that was measured to accept most of a node's children, at the nearest temperature that was looked at.

    Args:
        temperature: of the sampling; at 0 all lossless rules accept the same, and `match` it is.
        table: columns temperature, rule, k, accepted (experiments/08_acceptance_rules); bundled: of the bundled head.
        children: of a node, k in the table; the nearest there is. among: rules to choose from. Those that draw from q
            take trees of fixed shape alone.

    Raises:
        ValueError: an unknown rule, or one that the table lacks. FileNotFoundError: no table.
    """
    if unknown := [name for name in among if name not in RULES]:
        raise ValueError(f"among={list(among)}: {unknown[0]!r} is not one of {', '.join(RULES)}")
    if temperature == 0:
        return RULES["match"]
    place = BUNDLED if table == "bundled" else as_path("table", table)
    if not place.is_file():
        raise FileNotFoundError(f"table={table!r}: no table of rules there (experiments/08_acceptance_rules makes one)")
    rows = pd.read_csv(place)
    if "entropy_third" in rows:
        rows = rows[rows.entropy_third == "all"]
    for column, wanted in (("temperature", temperature), ("k", children)):
        distance = (rows[column] - wanted).abs()
        rows = rows[distance == distance.min()]
    accepted = rows.groupby("rule").accepted.mean()
    if lacking := [name for name in among if name not in accepted]:
        raise ValueError(f"table={table!r} lacks the rule {lacking[0]!r}; it has {', '.join(accepted.index)}")
    return RULES[max(among, key=accepted.get)]
