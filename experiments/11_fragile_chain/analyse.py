"""Is a chain as fragile as a geometric law says?

python analyse.py WORK [OUT]

If every token is accepted with the same probability α, whatever came before, a pass of a chain of D tokens emits
(1 - α^(D+1)) / (1 - α) tokens and accepts k or more with probability α^k. Verdict, of both temperatures, with α the
chain's own acceptance rate (accepted over tried): it *holds* if α^k is inside the 95 % interval of the measured share
of passes that accept k or more, for every k; *holds partly* if the law's tokens per pass are within 5 % of the measured
ones all the same; else it *does not hold*.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

from eagle_tree import plots
from eagle_tree.analysis import ratio

CLAIM = "A chain's accepted length is geometric: one miss ends it, and six tokens at α = 0.75 yield 3.5, not 7"
SOURCE = "Leviathan et al., arXiv 2211.17192, Equation 1"
DEPTH = 6
EXAMPLE = 0.75
CLOSE = 0.05


def expected_tokens(rate: float, depth: int) -> float:
    """Tokens of a pass of a chain whose tokens are accepted with the same probability, the bonus included."""
    return sum(rate**accepted for accepted in range(depth + 1))


def measured(passes: pd.DataFrame, depth: int) -> pd.DataFrame:
    """One row a token k of the chain: `at_least`, `acceptance` and the geometric law's (`geometric`, `rate`)."""
    of_prompt = passes.groupby("prompt_id", sort=False)
    sums = pd.DataFrame(
        {f"reached_{k}": (passes.accepted >= k).groupby(passes.prompt_id).sum() for k in range(depth + 1)}
    )
    sums = sums.reindex(of_prompt.size().index)
    tried = sum(sums[f"reached_{k}"] for k in range(depth))
    rate = (tried - sums.reached_0 + sums[f"reached_{depth}"]).sum() / tried.sum()
    rows = []
    for k in range(1, depth + 1):
        row = {"depth": k, "rate": rate, "geometric": rate**k, "passes": len(passes), "prompts": len(sums)}
        for name, before in (("at_least", 0), ("acceptance", k - 1)):
            values = ratio(sums, f"reached_{k}", f"reached_{before}")
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))
        rows.append(row)
    tokens = ratio(sums.assign(tokens=sums.sum(axis=1)), "tokens", "reached_0")
    rows = pd.DataFrame(rows).assign(geometric_tokens=expected_tokens(rate, depth))
    return rows.assign(**dict(zip(("tokens", "tokens_low", "tokens_high"), tokens, strict=True)))


def inside(rows: pd.DataFrame) -> pd.Series:
    """Whether the law's share of passes that accept k or more is inside the measured one's interval."""
    return (rows.geometric >= rows.at_least_low) & (rows.geometric <= rows.at_least_high)


def verdict(tables: list[pd.DataFrame]) -> str:
    agrees = [inside(rows).all() for rows in tables]
    near = [abs(rows.geometric_tokens[0] / rows.tokens[0] - 1) <= CLOSE for rows in tables]
    return common.HOLDS if all(agrees) else common.HOLDS_PARTLY if all(near) else common.DOES_NOT_HOLD


def headline(tables: dict[int, pd.DataFrame]) -> str:
    held = {temperature: f"{inside(rows).sum()} of {len(rows)}" for temperature, rows in tables.items()}
    tokens = [
        f"{common.interval(rows.iloc[0], 'tokens')}, law {rows.geometric_tokens.iloc[0]:.2f}"
        for rows in tables.values()
    ]
    return f"intervals that contain the law: {common.at_each(held)}; tokens a pass {'; '.join(tokens)}"


def numbers(tables: dict[int, pd.DataFrame]) -> str:
    parts = [f"closed form: {expected_tokens(EXAMPLE, DEPTH):.2f} tokens at α = {EXAMPLE}, all six accepted in "
             f"{EXAMPLE**DEPTH:.0%} of passes"]  # fmt: skip
    for temperature, rows in tables.items():
        first, last = rows.iloc[0], rows.iloc[-1]
        parts.append(
            f"T = {temperature}: α = {first.rate:.2f} ({common.interval(first, 'acceptance')} of the first token, "
            f"{common.interval(last, 'acceptance')} of the last), {common.interval(first, 'tokens')} tokens a pass "
            f"against {first.geometric_tokens:.2f}, all six accepted in {common.interval(last, 'at_least', 3)} of "
            f"passes against {last.geometric:.3f}"
        )
    return ". ".join(parts)


def main(work: Path, out: Path) -> None:
    chain = {"chain": common.policy({"policy": "chain", "depth": DEPTH})}
    found = {
        temperature: measured(common.replayed(work, "judge", temperature, chain), DEPTH)
        for temperature in common.TEMPERATURES
    }
    table = pd.concat((rows.assign(temperature=temperature) for temperature, rows in found.items()), ignore_index=True)
    figure = plots.accepted_lengths(table, f"Accepted tokens of a chain of {DEPTH}")
    told = headline(found), numbers(found)
    common.write(out, CLAIM, SOURCE, verdict(list(found.values())), *told, table, figure, work)


if __name__ == "__main__":
    main(*common.folders(sys.argv, __file__))
