"""One function per figure: a data frame in, a matplotlib figure out."""

from eagle_tree.plots.costs import pass_times, speed_by_size, verify_cost
from eagle_tree.plots.nodes import (
    acceptance_by_position,
    acceptance_rules,
    by_context,
    marginal_value,
    reliability_diagram,
)
from eagle_tree.plots.policies import accepted_lengths, speed_ratios, tau_by_size, tau_by_task, tau_by_variant
from eagle_tree.plots.runs import (
    drafter_alone,
    expected_against_realised,
    expected_by_prompt,
    training_curve,
    waterfall,
)
from eagle_tree.plots.style import COLORS, MARKERS, save

__all__ = [
    "COLORS",
    "MARKERS",
    "acceptance_by_position",
    "acceptance_rules",
    "accepted_lengths",
    "by_context",
    "drafter_alone",
    "expected_against_realised",
    "expected_by_prompt",
    "marginal_value",
    "pass_times",
    "reliability_diagram",
    "save",
    "speed_by_size",
    "speed_ratios",
    "tau_by_size",
    "tau_by_task",
    "tau_by_variant",
    "training_curve",
    "verify_cost",
    "waterfall",
]
