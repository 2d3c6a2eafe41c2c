"""Losses by hand, on two or three tokens."""

from __future__ import annotations

import math

import pytest
import torch

from eagle_tree.losses import agreement, feature_distance, overlap, soft_cross_entropy, total_variation

QUARTER = torch.tensor([[0.0, math.log(3)]])  # softmax: (1/4, 3/4)


def law(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


def test_soft_cross_entropy_by_hand():
    assert soft_cross_entropy(QUARTER, law([1.0, 0.0])).item() == pytest.approx(math.log(4))
    assert soft_cross_entropy(QUARTER, law([0.5, 0.25])).item() == pytest.approx(
        0.5 * math.log(4) + 0.25 * math.log(4 / 3)
    )


def test_cross_entropy_of_the_law_with_itself_is_its_entropy():
    entropy = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert soft_cross_entropy(QUARTER, law([0.25, 0.75])).item() == pytest.approx(entropy)


@pytest.mark.parametrize(
    ("row", "shared"),
    [([0.25, 0.75], 1.0), ([1.0, 0.0], 0.25), ([0.5, 0.5], 0.75), ([0.0, 0.0], 0.0), ([0.1, 0.8], 0.1 + 0.75)],
)
def test_overlap_is_the_shared_mass_and_total_variation_the_rest(row, shared):
    """The last rows' law lies partly outside the draft vocabulary: what cannot be drafted is lost."""
    assert overlap(QUARTER, law(row)).item() == pytest.approx(shared)
    assert total_variation(QUARTER, law(row)).item() == pytest.approx(1 - shared)


def test_feature_distance_is_quadratic_near_and_linear_far():
    """Smooth-L1 with knee 1: 0.5² / 2 and 3 - 1/2, a mean over the two features."""
    distance = feature_distance(torch.tensor([[0.5, 3.0]]), torch.zeros(1, 2))
    assert distance.item() == pytest.approx((0.125 + 2.5) / 2)


def test_agreement_compares_first_choices():
    logits = torch.tensor([[0.0, 1.0, 0.5], [2.0, 1.0, 0.5]])
    assert agreement(logits, law([0.1, 0.2, 0.0], [0.3, 0.0, 0.6])).tolist() == [True, False]
