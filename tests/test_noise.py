"""Keyed noise: a pure function of its key, uniform, Gumbel, and finite at both ends.

Statistical tests use fixed seeds, so they cannot fail by chance; their thresholds are stated as the
probability with which ideal noise under a fresh seed would exceed them.
"""

from __future__ import annotations

import hashlib
import math
import struct

import pytest
import torch
from torch import Tensor

import eagle_tree.noise as noise_module
from eagle_tree.noise import STREAMS, GumbelRows, Noise, key_words

KEY = dict(seed=7, sequence="chat/3", position=41, stream="target")


def words(seed: int, sequence: int | str, position: int, stream: str, size: int) -> list[int]:
    """The 32-bit words behind `Noise.uniform`."""
    uniform = Noise(seed, sequence).uniform(position, size, stream)
    return (uniform * 2.0**32 - 0.5).long().tolist()


# The hash, once more in plain Python: unbounded integers, no tensor, no in-place step


def mixed(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def plain_words(seed: int, sequence: int | str, position: int, stream: str, size: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed}|{sequence}|{position}|{stream}".encode(), digest_size=12).digest()
    first, second, third = struct.unpack("<3I", digest)
    return [mixed((mixed(mixed(i ^ first) ^ second) + third) % 2**32) for i in range(size)]


def test_words_are_those_of_the_hash_in_plain_python():
    for position in (0, 1, 41, 10**6):
        for stream in STREAMS:
            assert words(7, "chat/3", position, stream, 300) == plain_words(7, "chat/3", position, stream, 300)


def test_the_noise_of_one_key_never_changes():
    """Texts, recorded traces and seeds of published runs depend on these numbers."""
    assert words(**KEY, size=4) == [159684765, 1513125603, 1126708638, 604168310]
    gumbel = Noise(7, "chat/3").gumbel(41, 4, "target").tolist()
    assert gumbel == pytest.approx([3.273113, 0.833949, 1.189867, 1.886503], abs=1e-5)
    assert gumbel == pytest.approx([-math.log(-math.log1p(-(word + 0.5) / 2**32)) for word in words(**KEY, size=4)])


# The key


def test_the_same_key_gives_the_same_vector():
    one, two = Noise(7, "chat/3"), Noise(7, "chat/3")
    two.gumbel(40, 1000)  # having drawn something else before does not matter
    assert torch.equal(one.gumbel(41, 1000), two.gumbel(41, 1000))


@pytest.mark.parametrize(
    "change",
    [{"seed": 8}, {"seed": -7}, {"sequence": "chat/4"}, {"sequence": 3}, {"position": 42}, {"position": 40}]
    + [{"stream": stream} for stream in STREAMS[1:]],
    ids=str,
)
def test_every_component_of_the_key_changes_all_of_the_vector(change: dict):
    before, after = words(**KEY, size=2000), words(**{**KEY, **change}, size=2000)
    assert sum(a == b for a, b in zip(before, after)) == 0  # by chance: once in two million keys


def test_components_of_the_key_do_not_run_together():
    keys = [(1, 11, 1), (11, 1, 1), (1, 1, 11), (111, "", 1), (1, "1|1", 1), (1, 1, 1)]
    assert len({key_words(*key, "target") for key in keys}) == len(keys)


def test_an_unknown_stream_is_refused_by_name():
    with pytest.raises(ValueError, match="stream='bonus' is not one of"):
        Noise(0, 0).gumbel(0, 4, "bonus")


def test_no_two_tokens_share_a_word():
    """Every step of the hash is a bijection of 32-bit words, so distinct tokens get distinct words."""
    assert len(set(words(**KEY, size=50_000))) == 50_000


# Both ends of the range


def extreme_words(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Uniform variates of the words 2**32 - 1 and 0, by a hash that only adds the third key word."""
    monkeypatch.setattr(noise_module, "mix", lambda x: x)
    monkeypatch.setattr(noise_module, "key_words", lambda *key: (0, 0, 2**32 - 1))
    return Noise(0, 0).uniform(0, 2, "target")


def test_the_extreme_words_stay_strictly_between_0_and_1(monkeypatch: pytest.MonkeyPatch):
    assert extreme_words(monkeypatch).tolist() == [1 - 2.0**-33, 2.0**-33]


def test_the_extreme_words_have_finite_noise_in_fp64_but_not_in_fp32(monkeypatch: pytest.MonkeyPatch):
    extreme_words(monkeypatch)
    gumbel = Noise(0, 0).gumbel(0, 2)
    assert gumbel.dtype == torch.float32
    assert gumbel.tolist() == pytest.approx([-math.log(33 * math.log(2)), 33 * math.log(2)])
    in_fp32 = (torch.tensor([2**32 - 1, 0]).float() + 0.5) / 2.0**32
    assert in_fp32[0] == 1
    assert torch.isinf(-torch.log(-torch.log1p(-in_fp32)))[0]


def test_all_noise_is_finite():
    for position in range(50):
        assert Noise(3, 0).gumbel(position, 49_152).isfinite().all()


# The law


def chi_square(count: Tensor, expected: Tensor) -> float:
    return ((count - expected) ** 2 / expected).sum().item()


def chi_square_limit(freedom: int) -> float:
    """What chi-square exceeds with probability 1e-4 (Wilson and Hilferty's approximation, a little above)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3


def test_the_limit_of_chi_square_is_the_tabulated_one():
    assert chi_square_limit(10) == pytest.approx(35.56, rel=0.02)
    assert chi_square_limit(100) == pytest.approx(161.3, rel=0.02)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("byte", [0, 1, 2, 3])
def test_every_byte_of_the_words_is_uniform_over_the_tokens(stream: str, byte: int):
    word = torch.tensor(words(5, 0, 17, stream, 65_536))
    count = torch.bincount(word >> 8 * byte & 255, minlength=256)
    assert chi_square(count, torch.full((256,), 256.0)) < chi_square_limit(255)


@pytest.mark.parametrize("token", [0, 1, 7])
def test_one_tokens_words_are_uniform_over_the_positions(token: int):
    word = torch.tensor([words(5, 0, position, "target", 8)[token] for position in range(2048)])
    count = torch.bincount(word >> 27, minlength=32)
    assert chi_square(count, torch.full((32,), 64.0)) < chi_square_limit(31)


def test_the_mean_and_variance_are_a_standard_gumbels():
    gumbel = Noise(0, 0).gumbel(0, 200_000).double()
    mean_error = math.pi / math.sqrt(6) / math.sqrt(200_000)
    assert abs(gumbel.mean().item() - 0.5772157) < 4 * mean_error
    assert gumbel.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)  # its standard error is 0.5 %


def draws(log_p: Tensor, positions: int, seed: int = 1) -> Tensor:
    """Gumbel-max draws `[positions]` from one law."""
    noise = Noise(seed, 0)
    return torch.stack([(log_p + noise.gumbel(position, len(log_p))).argmax() for position in range(positions)])


@pytest.mark.parametrize(
    "law", [[0.25] * 4, [0.5, 0.3, 0.15, 0.05], [0.9, 0.05, 0.03, 0.02], [0.35, 0.0, 0.65]], ids=str
)
def test_the_largest_of_log_p_plus_noise_is_drawn_from_p(law: list[float]):
    p = torch.tensor(law)
    count = torch.bincount(draws(p.log(), 4000), minlength=len(law))
    possible = p > 0
    assert count[~possible].sum() == 0
    limit = chi_square_limit(int(possible.sum()) - 1)
    assert chi_square(count[possible], 4000 * p[possible]) < limit


def test_draws_at_neighbouring_positions_are_independent():
    """Pairs (draw at t, draw at t + 1) have the product law."""
    p = torch.tensor([0.5, 0.3, 0.2])
    drawn = draws(p.log(), 6001)
    pair = torch.bincount(drawn[:-1] * 3 + drawn[1:], minlength=9)
    assert chi_square(pair, 6000 * torch.outer(p, p).flatten()) < chi_square_limit(8)


@pytest.mark.parametrize(
    "change", [{"position": 42}, {"stream": "draft"}, {"sequence": "chat/4"}, {"seed": 8}], ids=str
)
def test_vectors_of_neighbouring_keys_are_uncorrelated(change: dict):
    size = 40_000
    pair = [
        Noise(key["seed"], key["sequence"]).uniform(key["position"], size, key["stream"])
        for key in (KEY, {**KEY, **change})
    ]
    correlation = torch.corrcoef(torch.stack(pair))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(size)


# Rows


class CountingNoise:
    """Stands in for `Noise` and lists what was computed."""

    def __init__(self) -> None:
        self.computed: list[tuple[int, int, str]] = []

    def gumbel(self, position: int, size: int, stream: str) -> Tensor:
        self.computed.append((position, size, stream))
        return Noise(0, 0).gumbel(position, size, stream)


def test_a_row_is_computed_once():
    noise = CountingNoise()
    rows = GumbelRows(noise, 5, "draft")
    assert rows.row(3) is rows.row(3)
    assert torch.equal(rows.row(3), Noise(0, 0).gumbel(3, 5, "draft"))
    assert noise.computed == [(3, 5, "draft")]


def test_rows_of_decided_positions_are_forgotten_and_later_ones_kept():
    noise = CountingNoise()
    rows = GumbelRows(noise, 5)
    for position in (3, 4, 5, 6):
        rows.row(position)
    rows.forget_before(5)
    assert sorted(rows.rows) == [5, 6]
    rows.row(5)
    assert len(noise.computed) == 4
    rows.row(4)  # asked for once more, it is the same vector
    assert noise.computed[-1] == (4, 5, "target")
