"""Recorded runs as data frames, and estimators over their passes (`curves` has those over nodes).

Sums, never averages of ratios; intervals from a bootstrap over prompts.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from eagle_tree.calibration import error_of_bins
from eagle_tree.cost import CostTable
from eagle_tree.runs import Runs as Runs
from eagle_tree.runs import load as load

RESAMPLES = 2000
INTERVAL = (2.5, 97.5)
STAGES = ("drafter forward", "grow", "select", "target forward", "verify", "accept", "compact", "other")
"""Parts of a pass, in order: `grow` and `verify` without the forwards, `other` what no stage holds."""


def resampled_sums(per_prompt: np.ndarray, seed: int = 0) -> np.ndarray:
    """Column sums of bootstrap resamples: `per_prompt [P, C]` to `[RESAMPLES, C]`.

    The prompt is the unit that was drawn: passes of one prompt are not independent.
    """
    count = per_prompt.shape[0]
    weight = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    return weight @ per_prompt


def ratio(per_prompt: pd.DataFrame, numerator: str, denominator: str) -> tuple[float, float, float]:
    """A ratio of sums over prompts with its 95 % interval; the interval of a single prompt is NaN."""
    values = per_prompt[[numerator, denominator]].to_numpy(float)
    total = values.sum(0)
    estimate = total[0] / total[1] if total[1] else float("nan")
    if len(values) < 2 or not total[1]:
        return estimate, float("nan"), float("nan")
    sums = resampled_sums(values)
    sums = sums[sums[:, 1] > 0]  # a resample of prompts that have nothing to count says nothing
    low, high = np.percentile(sums[:, 0] / sums[:, 1], INTERVAL)
    return estimate, low, high


def meter(passes: pd.DataFrame, column: str) -> tuple[float, float]:
    """Mean of a live meter over passes and its standard error (DESIGN §4): mean zero when lossless."""
    values = passes[column].dropna().to_numpy(float)
    if len(values) < 2:
        return float("nan"), float("nan")
    return values.mean(), values.std(ddof=1) / np.sqrt(len(values))


def counted(passes: pd.DataFrame) -> pd.DataFrame:
    """Passes and emitted tokens by policy and prompt_id, in the order of first appearance."""
    of_prompt = passes.groupby(["policy", "prompt_id"], sort=False)
    return of_prompt.agg(passes=("pass_id", "size"), emitted=("emitted", "sum"))


def prompt_sums(passes: pd.DataFrame) -> pd.DataFrame:
    """`counted`, and the seconds of the passes (NaN without times)."""
    return counted(passes).assign(seconds=passes.groupby(["policy", "prompt_id"], sort=False).pass_s.sum(min_count=1))


def per_prompt(passes: pd.DataFrame, outputs: pd.DataFrame) -> pd.DataFrame:
    """`counted`, and the seconds of decoding, node recording (record_s) taken out."""
    sums, recording = counted(passes), passes.groupby(["policy", "prompt_id"], sort=False).record_s.sum()
    return sums.assign(seconds=outputs.set_index(["policy", "prompt_id"])["decode_s"].reindex(sums.index) - recording)


def summarise(passes: pd.DataFrame, outputs: pd.DataFrame) -> pd.DataFrame:
    """One row a policy, in the order of their first appearance.

    Columns:
        tau, tau_low, tau_high: tokens per pass, prefill's own token excluded, bonus included;
        expected_draft, expected_target, realised: means per pass, before truncation;
        accepted_share: accepted over verified draft nodes;
        tokens_per_second, tokens_per_second_low, tokens_per_second_high: tokens of the passes over decoding time, node
        recording (record_s) taken out;
        speedup, speedup_low, speedup_high: against the policy `autoregressive` on the same prompts, paired
        by prompt (NaN without it);
        *_share: of the pass time without recording: target forward, drafter forward, the rest (overhead);
        record_share: recording over that same time;
        acceptance_meter, surprisal_meter (mean, and standard error in *_error).
    """
    sums = per_prompt(passes, outputs)
    baseline = sums.loc["autoregressive"] if "autoregressive" in sums.index.get_level_values("policy") else None
    rows = []
    for policy, group in passes.groupby("policy", sort=False):
        prompts = sums.loc[policy]
        tau, low, high = ratio(prompts, "emitted", "passes")
        speed, slow, fast = ratio(prompts, "emitted", "seconds")
        total = group[["pass_s", "record_s", "target_forward_s", "drafter_forward_s"]].sum()
        busy = total.pass_s - total.record_s
        row = {
            "policy": policy,
            "prompts": len(prompts),
            "passes": len(group),
            "tau": tau,
            "tau_low": low,
            "tau_high": high,
            "expected_draft": group.expected_draft.mean(),
            "expected_target": group.expected_target.mean(),
            "realised": group.accepted.mean() + 1,
            "accepted_share": group.accepted.sum() / max(1, group.n_nodes.sum()),
            "tokens_per_second": speed,
            "tokens_per_second_low": slow,
            "tokens_per_second_high": fast,
            **dict(zip(("speedup", "speedup_low", "speedup_high"), speedup(prompts, baseline), strict=True)),
            "target_share": total.target_forward_s / busy,
            "drafter_share": total.drafter_forward_s / busy,
            "overhead_share": 1 - (total.target_forward_s + total.drafter_forward_s) / busy,
            "record_share": total.record_s / busy,
        }
        for name in ("acceptance_meter", "surprisal_meter"):
            row[name], row[f"{name}_error"] = meter(group, name)
        rows.append(row)
    return pd.DataFrame(rows)


def speedup(prompts: pd.DataFrame, baseline: pd.DataFrame | None) -> tuple[float, float, float]:
    """Tokens per second over the baseline's, on the prompts both have, with a paired 95 % interval."""
    if baseline is None:
        return (float("nan"),) * 3
    both = prompts.join(baseline.add_suffix("_baseline"), how="inner")
    values = both[["emitted", "seconds", "emitted_baseline", "seconds_baseline"]].to_numpy(float)

    def of(sums: np.ndarray) -> np.ndarray:
        return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])

    if len(values) < 2:
        return (float(of(values.sum(0))) if len(values) else float("nan"), float("nan"), float("nan"))
    low, high = np.percentile(of(resampled_sums(values)), INTERVAL)
    return float(of(values.sum(0))), low, high


def predicted_speed(passes: pd.DataFrame, cost: CostTable) -> float:
    """Tokens per second that a cost table gives recorded or followed passes: tokens over the sum of their seconds."""
    columns = (passes[name].to_numpy() for name in ("n_nodes", "draft_steps", "expanded", "context_length"))
    return float(passes.emitted.sum() / cost.pass_seconds(*columns).sum())


def binned(passes: pd.DataFrame, column: str, bins: int = 8) -> pd.DataFrame:
    """Realised tokens by quantile bins of an expectation: columns expected, realised, error (standard), count."""
    data = passes[[column, "accepted"]].dropna()
    realised = data.accepted + 1
    edges = np.unique(np.quantile(data[column], np.linspace(0, 1, bins + 1)))
    if len(edges) < 2:
        edges = np.array([edges[0] - 0.5, edges[0] + 0.5])
    place = np.clip(np.searchsorted(edges, data[column], side="right") - 1, 0, len(edges) - 2)
    grouped = pd.DataFrame({"bin": place, "expected": data[column], "realised": realised}).groupby("bin")
    return pd.DataFrame(
        {
            "expected": grouped.expected.mean(),
            "realised": grouped.realised.mean(),
            "error": grouped.realised.sem().fillna(0.0),
            "count": grouped.size(),
        }
    ).reset_index(drop=True)


def hit_rates(hits: pd.DataFrame, ranks: tuple[int, ...] = (1, 2, 4, 8)) -> pd.DataFrame:
    """How well a drafter guesses, one row a depth of self-feeding, from the counts of `evaluate.measure`.

    Columns:
        positions: text positions looked at;
        n_alpha, n_alpha_low, n_alpha_high: expected acceptance of the first candidate, EAGLE-1's n-α of a chain
        (arXiv 2401.15077): the target's probability of it; its agreement with the text at temperature 0;
        hit_k, hit_k_low, hit_k_high: share of positions whose true token is among the first k candidates.
    """
    rows = []
    for depth, group in hits.groupby("depth"):
        of_prompt = group.groupby("prompt_id", sort=False)
        sums = pd.DataFrame({"positions": of_prompt.positions.first()})
        sums["n_alpha"] = group[group["rank"] == 0].groupby("prompt_id", sort=False).probability.sum()
        row = {"depth": depth, "positions": int(sums.positions.sum())}
        for rank in ranks:
            sums[f"hit_{rank}"] = group[group["rank"] < rank].groupby("prompt_id", sort=False).hits.sum()
        for name in sums.columns.drop("positions"):
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), ratio(sums, name, "positions"), strict=True))
        rows.append(row)
    return pd.DataFrame(rows)


def tokens_per_pass(passes: pd.DataFrame) -> pd.DataFrame:
    """One row a policy, in the order of their first appearance: passes, tau, tau_low, tau_high, nodes (verified, a
    pass), expected_draft and realised (tokens a pass before truncation; of a followed text, within it)."""
    rows = []
    for policy, group in passes.groupby("policy", sort=False):
        of_prompt = group.groupby("prompt_id", sort=False).agg(passes=("pass_id", "size"), emitted=("emitted", "sum"))
        tau, low, high = ratio(of_prompt, "emitted", "passes")
        means = {"nodes": group.n_nodes.mean(), "expected_draft": group.expected_draft.mean()}
        means["realised"] = group.accepted.mean() + 1
        rows.append({"policy": policy, "passes": len(group), "tau": tau, "tau_low": low, "tau_high": high, **means})
    return pd.DataFrame(rows)


def compared(sums: pd.DataFrame, numerator: str, denominator: str, reference: str) -> pd.DataFrame:
    """Policies against one of them, paired by prompt with common resamples: a ratio of ratios of sums.

    Args:
        sums: indexed by (policy, prompt_id); numerator, denominator: its columns, such as `emitted` and `seconds`.
        reference: the policy that the others are compared with, on the prompts both have.

    Returns:
        one row a policy but the reference: policy, prompts, gain (1 is no difference), gain_low, gain_high, p (from the
        bootstrap, two-sided: how often resamples lie on the other side of 1), p_holm (corrected for all comparisons).

    Raises:
        ValueError: the reference is not among the policies.
    """
    names = list(dict.fromkeys(sums.index.get_level_values(0)))
    if reference not in names:
        raise ValueError(f"reference={reference!r} is not among the policies {', '.join(names)}")
    rows = []
    for policy in names:
        if policy == reference:
            continue
        both = sums.loc[policy].join(sums.loc[reference].add_suffix("_reference"), how="inner")
        columns = [numerator, denominator, f"{numerator}_reference", f"{denominator}_reference"]
        values = both[columns].to_numpy(float)
        gain, low, high, p = gain_of(values)
        row = {"policy": policy, "prompts": len(values), "gain": gain, "gain_low": low, "gain_high": high, "p": p}
        rows.append(row)
    table = pd.DataFrame(rows, columns=["policy", "prompts", "gain", "gain_low", "gain_high", "p"])
    return table.assign(p_holm=holm(table.p.to_numpy(float)))


def gain_of(values: np.ndarray) -> tuple[float, float, float, float]:
    """(a / b) / (c / d) of the column sums of `[P, 4]`, its 95 % interval and two-sided p; NaN from a single prompt."""

    def of(sums: np.ndarray) -> np.ndarray:
        return (sums[..., 0] * sums[..., 3]) / (sums[..., 1] * sums[..., 2])

    if not len(values) or not np.isfinite(values).all():
        return (float("nan"),) * 4
    if len(values) < 2:
        return float(of(values.sum(0))), float("nan"), float("nan"), float("nan")
    resamples = of(resampled_sums(values))
    low, high = np.percentile(resamples, INTERVAL)
    beyond = min((resamples <= 1).sum(), (resamples >= 1).sum())
    return float(of(values.sum(0))), low, high, min(1.0, 2 * (1 + beyond) / (1 + len(resamples)))


def holm(p: np.ndarray) -> np.ndarray:
    """p-values `[m]` corrected for being many (Holm 1979): the i-th smallest times m - i + 1, never below one before;
    NaN are no comparisons."""
    corrected = np.full(len(p), np.nan)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)))
    return corrected


def replayed(passes: pd.DataFrame, bound: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row a policy of passes whose `pass_s` is a cost table's; `tokens_per_pass`, and NaN without times.

    Columns:
        tokens_per_second, and its interval; speedup, and its interval: against `autoregressive`, paired by prompt;
        bound_share: of the tokens per second that the shortest path through the texts reaches (`bound.fastest`).
    """
    rows, sums = tokens_per_pass(passes), prompt_sums(passes)
    baseline = sums.loc["autoregressive"] if "autoregressive" in sums.index else None
    fastest = float("nan") if bound is None else bound.emitted.sum() / bound.seconds.sum()
    missing = (float("nan"),) * 3
    for index, policy in enumerate(rows.policy):
        timed = passes.pass_s.notna().all()
        speed = ratio(sums.loc[policy], "emitted", "seconds") if timed else missing
        faster = speedup(sums.loc[policy], baseline) if timed else missing
        for name, values in (("tokens_per_second", speed), ("speedup", faster)):
            rows.loc[index, [name, f"{name}_low", f"{name}_high"]] = values
        rows.loc[index, "bound_share"] = speed[0] / fastest
    return rows


def reliability(bins: pd.DataFrame) -> pd.DataFrame:
    """Confidence against hits by confidence bin, over all prompts and depths given.

    Columns:
        bin; confidence, hit_rate: means over candidates; hit_rate_low, hit_rate_high: 95 % over prompts; count of
        candidates; prompts.
    """
    rows = []
    for place, group in bins[bins["count"] > 0].groupby("bin"):
        sums = group.groupby("prompt_id", sort=False)[["count", "confidence", "hits"]].sum()
        rate, low, high = ratio(sums, "hits", "count")
        row = {"bin": place, "confidence": sums.confidence.sum() / sums["count"].sum(), "hit_rate": rate}
        row |= {"hit_rate_low": low, "hit_rate_high": high}
        rows.append({**row, "count": int(sums["count"].sum()), "prompts": len(sums)})
    columns = ["bin", "confidence", "hit_rate", "hit_rate_low", "hit_rate_high", "count", "prompts"]
    return pd.DataFrame(rows, columns=columns)


def calibration_error(bins: pd.DataFrame) -> float:
    """Expected calibration error: mean over candidates of |confidence - hit rate| of their bin (Naeini et al. 2015)."""
    sums = bins.groupby("bin")[["count", "confidence", "hits"]].sum().to_numpy(float)
    total = sums[:, 0].sum()
    return error_of_bins(sums[:, 1], sums[:, 2], total) if total else float("nan")


def by_prompt(passes: pd.DataFrame) -> pd.DataFrame:
    """One row a policy and prompt: passes, and mean expected_draft, expected_target and realised tokens a pass."""
    of_prompt = passes.assign(realised=passes.accepted + 1).groupby(["policy", "prompt_id"], sort=False)
    means = of_prompt[["expected_draft", "expected_target", "realised"]].mean()
    return means.assign(passes=of_prompt.size()).reset_index()


def stage_times(passes: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds a pass by stage, recording taken out: one row a policy, in the order of their first appearance.

    Columns:
        passes, prompts; one a stage of `STAGES`; total, total_low, total_high: their sum, with its interval.

    Raises:
        ValueError: passes without stage times (replayed or followed ones).
    """
    if passes.verify_s.isna().any():
        raise ValueError("these passes were replayed or followed: only decoding (eagle-tree bench) times its stages")
    stages = passes[["select_s", "accept_s", "compact_s"]].rename(columns=lambda name: name.removesuffix("_s"))
    stages = stages.assign(
        **{"drafter forward": passes.drafter_forward_s, "target forward": passes.target_forward_s},
        grow=passes.grow_s - passes.drafter_forward_s,
        verify=passes.verify_s - passes.target_forward_s,
        total=passes.pass_s - passes.record_s,
    )
    stages["other"] = stages.total - stages.drop(columns="total").sum(axis=1)
    stages = 1e3 * stages[[*STAGES, "total"]]
    rows = []
    for policy, group in stages.assign(count=1).groupby(passes.policy, sort=False):
        sums = group.groupby(passes.prompt_id, sort=False)[["total", "count"]].sum()
        total, low, high = ratio(sums, "total", "count")
        row = {"policy": policy, "passes": len(group), "prompts": len(sums), **group[list(STAGES)].mean()}
        rows.append({**row, "total": total, "total_low": low, "total_high": high})
    return pd.DataFrame(rows)
