"""What counts as a number and as a count, and what a refusal says."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from eagle_tree.checks import check_count, check_counts, check_number, is_count, is_number


@pytest.mark.parametrize("value", [True, False, "1", None, math.nan, math.inf, [1]], ids=repr)
def test_what_is_no_finite_number_is_neither_a_number_nor_a_count(value: object):
    assert not is_number(value) and not is_count(value)


def test_a_count_is_an_integer_from_the_least_on():
    assert is_count(1) and is_count(0, 0) and is_count(2, 2)
    assert not is_count(0) and not is_count(1, 2) and not is_count(1.0)


def test_a_refusal_names_argument_value_and_what_is_allowed():
    with pytest.raises(ValueError, match=r"^depths=0 must be an integer >= 1$"):
        check_count("depths", 0)
    with pytest.raises(ValueError, match=r"^tokens='2' must be an integer >= 2$"):
        check_count("tokens", "2", least=2)
    policy = SimpleNamespace(budget=1, top_k=True, gate=1.5, delta=-1)
    check_counts(policy, "budget")
    with pytest.raises(ValueError, match=r"^SimpleNamespace: top_k=True must be an integer >= 1$"):
        check_counts(policy, "budget", "top_k")
    with pytest.raises(ValueError, match=r"^SimpleNamespace: gate=1.5 must be a number in 0…1$"):
        check_number(policy, "gate", most=1)
    check_number(policy, "gate")
    with pytest.raises(ValueError, match=r"^SimpleNamespace: delta=-1 must be a number >= 0$"):
        check_number(policy, "delta")
