"""Pairs of an acceptance rule, a kind of draft and a policy that are refused: each with its reason and its paper."""

from __future__ import annotations

from eagle_tree.accept import Rule
from eagle_tree.policy import Policy
from eagle_tree.policy.anticipation import looks_ahead
from eagle_tree.tree import Draw

REASONS = {
    "top_k": "tokens that are in the tree because they are the most likely were not drawn from q, and accepting them "
    "with min(1, p/q) emits them too often (Leviathan et al., arXiv 2211.17192, suppose x ~ q)",
    "with_replacement": "tokens drawn with replacement have the same law q each, and may be equal (SpecInfer, arXiv "
    "2305.09781)",
    "without_replacement": "of tokens drawn without replacement each has the law q without those before it (Sequoia, "
    "arXiv 2402.12374; RSD, arXiv 2402.14160)",
    "hybrid": "in a hybrid draft one token is drawn, from q outside of the others, and these are the most likely ones "
    "(Hu et al., arXiv 2502.18779)",
    "coupled": "coupled candidates are chosen with the noise that the target's token is drawn with, and only "
    "accept=coupled draws it so (Daliri et al., arXiv 2408.07978)",
}
"""Why children of a kind cannot be verified by a rule that is made for others."""


def check_pair(rule: Rule, draw: Draw, policy: Policy) -> None:
    """Raise ValueError, with the reason, for what would not emit what the rule promises."""
    name = type(rule).__name__
    if draw.kind not in rule.draws:
        raise ValueError(
            f"accept={name} cannot verify draw.kind={draw.kind}: {REASONS[draw.kind]}; it takes {', '.join(rule.draws)}"
        )
    if rule.one_child and policy.max_candidates() > 1:
        raise ValueError(
            f"accept={name} verifies chains, one child a node (Leviathan et al., arXiv 2211.17192; Sun et al., arXiv "
            f"2403.10444); {type(policy).__name__} asks for {policy.max_candidates()} candidates a node"
        )
    if rule.reads_q and (fault := looks_ahead(policy)):
        raise ValueError(
            f"{type(policy).__name__} {fault}; of drawn children (draw.kind={draw.kind}) the kept ones would no longer "
            f"have the law q that accept={name} reads (SpecInfer, arXiv 2305.09781, and Sequoia, arXiv 2402.12374, "
            "keep every child they draw); use a tree of fixed shape (chain, specinfer, sequoia), or accept=match"
        )
