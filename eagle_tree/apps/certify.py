"""eagle-tree certify: is a rule lossless? The law of what it emits, exactly, and mistakes that must be caught."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from eagle_tree.accept import Rule
from eagle_tree.apps import common
from eagle_tree.certify import SAMPLINGS, TOLERANCE, Certificate, World, certificates
from eagle_tree.checks import check_count, check_flag
from eagle_tree.mutants import MUTANTS
from eagle_tree.simulate import NOISE_MUTANTS, ChiSquare, chi_square
from eagle_tree.warp import Sampling

DISTANCE = 0.1
"""Total variation for which the power of the tests of the noise is stated."""
QUICK_SAMPLINGS = (Sampling(1.0), Sampling(1.5, top_p=0.8))


def main(arguments: list[str]) -> int:
    """Entry point of the verb."""
    return common.run_verb("certify", certify, arguments)


def certify(config: DictConfig) -> dict[str, Any]:
    """Certify rules as a config says; `passed` tells whether all that had to hold did and all mistakes were caught."""
    rules = named_rules(OmegaConf.to_container(config, resolve=True)["rules"])
    for name in ("quick", "mutants"):
        check_flag(name, config[name])
    check_count("noise_texts", config.noise_texts, least=0)
    started = time.perf_counter()
    samplings, levels = (QUICK_SAMPLINGS, (1, 2)) if config.quick else (SAMPLINGS, (1, 2, 3))
    with torch.inference_mode():
        certified = [certified_row(name, rule, kind, samplings, levels) for name, rule in rules for kind in kinds(rule)]
        print("\n".join(common.aligned([cells(row) for row in certified])))
        print(
            f"\nAll drafts over small vocabularies at {len(samplings)} settings, trees of {levels[-1]} levels at most. "
            f"lossless: emitted law,\n`reach` and acceptance are those of theory to {TOLERANCE:.0e}. "
            "variation: total variation to the target's law.\n"
        )
        noise = noise_rows(rules, config.noise_texts) if config.noise_texts else []
        mutants = mutant_rows(config.noise_texts) if config.mutants else []
    for rows in (noise, mutants):
        if rows:
            print("\n".join(common.aligned([row["cells"] for row in rows])) + "\n")
    sound = all(row["holds"] or not row["lossless"] for row in certified) and all(row["holds"] for row in noise)
    caught = sum(row["caught"] for row in mutants)
    print(
        f"{'passed' if sound and caught == len(mutants) else 'FAILED'}: "
        f"{sum(row['holds'] for row in certified)} of {len(certified)} pairs lossless, "
        f"{caught} of {len(mutants)} mistakes caught, in {time.perf_counter() - started:.0f} s"
    )
    return {
        "passed": sound and caught == len(mutants),
        "rules": [{key: value for key, value in row.items() if key != "cells"} for row in certified],
        "mutants": {row["mistake"]: row["total_variation"] for row in mutants},
        "caught": caught,
        "seconds": time.perf_counter() - started,
    }


def named_rules(names: list[str] | None) -> list[tuple[str, Rule]]:
    """The rules of conf/accept, or those named; a yaml that chooses among the others is no rule of its own."""
    folder = common.conf_dir() / "accept"
    known = sorted(path.stem for path in folder.glob("*.yaml") if "among" not in OmegaConf.load(path))
    if names is not None and (not isinstance(names, list) or not names or set(names) - set(known)):
        raise ValueError(f"rules={names!r} must be a list of names in conf/accept: {', '.join(known)}")
    return [(name, common.build(OmegaConf.load(folder / f"{name}.yaml"))()) for name in names or known]


def kinds(rule: Rule) -> tuple[str, ...]:
    """The drafts to certify a rule on: of one child, all that are drawn are alike."""
    return rule.draws[:1] if rule.one_child else rule.draws


def certified_row(
    name: str, rule: Rule, kind: str, samplings: tuple[Sampling, ...], levels: tuple[int, ...]
) -> dict[str, Any]:
    """The worst that was found of a rule and a kind of draft."""
    found: list[Certificate] = []
    for sampling in samplings:
        if kind == "coupled" and sampling.greedy:  # nothing to look at: the draft is top_k
            continue
        for level in levels:
            found += certificates(rule, kind, sampling, level)
    errors = [abs(one.accepted - one.closed_form) for one in found if not math.isnan(one.closed_form)]
    return {
        "accept": name,
        "draw": kind,
        "lossless": rule.lossless,
        "holds": all(one.holds for one in found),
        "total_variation": max(one.total_variation for one in found),
        "reach_error": max(one.reach_error for one in found),
        "closed_form_error": max(errors) if errors else None,
        "worlds": len(found),
        "drafts": sum(one.drafts for one in found),
    }


def cells(row: dict[str, Any]) -> dict[str, str]:
    """A certified row for people."""
    error = row["closed_form_error"]
    verdict = "lossless" if row["holds"] else "FAILED"
    return {
        "accept": row["accept"],
        "draw": row["draw"],
        "worlds": str(row["worlds"]),
        "drafts": str(row["drafts"]),
        "variation": f"{row['total_variation']:.1e}",
        "reach": f"{row['reach_error']:.1e}",
        "acceptance": "–" if error is None else f"{error:.1e}",
        "verdict": verdict if row["lossless"] else "LOSSY, as stated",
    }


def noise_rows(rules: list[tuple[str, Rule]], count: int) -> list[dict[str, Any]]:
    """Texts decoded with the production noise, by chi-square."""
    rows = []
    for name, rule in rules:
        if rule.lossless:
            shape = (1, 1) if rule.one_child else (2, 1)
            test = chi_square(rule, rule.draws[0], World(3, 1, Sampling(1.0)), shape, count=count)
            rows.append({"holds": test.passes, "cells": test_cells("accept", name, test)})
    return rows


def test_cells(title: str, name: str, test: ChiSquare) -> dict[str, str]:
    """A test of the noise for people."""
    return {
        title: name,
        "texts": str(test.count),
        "χ²": f"{test.statistic:.1f}",
        "limit": f"{test.limit:.1f} ({test.freedom})",
        f"power at {DISTANCE}": f"{test.power(DISTANCE):.3f}",
        "verdict": "as it should be" if test.passes else "not the target's law",
    }


def mutant_rows(count: int) -> list[dict[str, Any]]:
    """Every known mistake, and whether it was caught."""
    rows = []
    for mutant in MUTANTS:
        found = mutant.certificate()
        verdict = "NOT CAUGHT" if found.holds else "caught"
        shown = {"mistake": mutant.mistake, "variation": f"{found.total_variation:.1e}", "verdict": verdict}
        rows.append(
            {
                "mistake": mutant.mistake,
                "caught": not found.holds,
                "total_variation": found.total_variation,
                "cells": shown,
            }
        )
    for mutant in NOISE_MUTANTS if count else ():
        test = mutant.chi_square(count)
        found = f"χ² {test.statistic:.0f}, limit {test.limit:.0f}, power {test.power(mutant.distance):.2f}"
        shown = f"{mutant.distance:.1e} ({found})"
        verdict = "NOT CAUGHT" if test.passes else "caught"
        rows.append(
            {
                "mistake": mutant.mistake,
                "caught": not test.passes,
                "total_variation": mutant.distance,
                "cells": {"mistake": mutant.mistake, "variation": shown, "verdict": verdict},
            }
        )
    return rows
