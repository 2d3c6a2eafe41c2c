"""Acceptance rules: which drafted tokens are emitted, and what follows them.

| rule | children | paper |
|---|---|---|
| `Match` | any but coupled ones | Leviathan's and Chen's rule with point masses, as EAGLE-2 runs it (2406.16858) |
| `Coupled` | chosen with the noise that decides | Daliri et al. (2408.07978) |
| `Sequential` | the most likely tokens | the same as EAGLE-2's released loop writes it |
| `WithReplacement` | drawn with replacement | SpecInfer (2305.09781), MCSD (2401.06706) |
| `WithoutReplacement` | drawn without replacement | Sequoia (2402.12374), RSD (2402.14160) |
| `Hybrid` | the most likely tokens and one draw | Hu et al. (2502.18779) |
| `ChainRejection` | one drawn child a node | Leviathan et al. (2211.17192), Chen et al. (2302.01318) |
| `BlockVerification` | one drawn child a node | Sun et al. (2403.10444) |
| `Typical` | the most likely tokens | Medusa (2401.10774); **lossy** |
"""

from eagle_tree.accept.base import Accepted, Rule, surprisal
from eagle_tree.accept.block import BlockVerification
from eagle_tree.accept.match import Coupled, Match
from eagle_tree.accept.trials import ChainRejection, Hybrid, Sequential, WithoutReplacement, WithReplacement
from eagle_tree.accept.typical import Typical

__all__ = [
    "Accepted",
    "BlockVerification",
    "ChainRejection",
    "Coupled",
    "Hybrid",
    "Match",
    "Rule",
    "Sequential",
    "Typical",
    "WithReplacement",
    "WithoutReplacement",
    "surprisal",
]
