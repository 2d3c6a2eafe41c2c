"""The preallocated key/value cache: what a row holds after any history, and how little is copied for it.

Entries are told apart by number: entry e has key e and value -e, plus 1/16 for every layer below.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from eagle_tree.cache import CacheOverflow, KVCache
from eagle_tree.target import Target

N_LAYERS, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 3, 2


def states(entries: list[list[int]], layer: int, dim: int) -> Tensor:
    """`[batch, heads, n, dim]`: every number of an entry is its own, moved by head and layer."""
    number = torch.tensor(entries, dtype=torch.float64)[:, None, :, None]
    head = torch.arange(HEADS)[None, :, None, None] / 4
    return (number + head + layer / 16).expand(-1, -1, -1, dim)


def append(cache: KVCache, entries: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Append entries (one list a row) at every layer; what attention would read there."""
    return [
        cache.update(states(entries, layer, KEY_DIM), -states(entries, layer, VALUE_DIM), layer)
        for layer in range(N_LAYERS)
    ]


def assert_holds(cache: KVCache, rows: list[list[int]]) -> None:
    """Every row of every layer holds exactly these entries."""
    assert cache.lengths == [len(row) for row in rows]
    for number, layer in enumerate(cache.layers):
        assert layer.lengths == cache.lengths
        for row, entries in enumerate(rows):
            if entries:
                kept = slice(0, len(entries))
                assert torch.equal(layer.keys[row, :, kept], states([entries], number, KEY_DIM)[0])
                assert torch.equal(layer.values[row, :, kept], -states([entries], number, VALUE_DIM)[0])


def addresses(cache: KVCache) -> list[int]:
    return [buffer.data_ptr() for layer in cache.layers for buffer in (layer.keys, layer.values)]


def count(n: int, first: int = 0) -> list[list[int]]:
    """One row of n consecutive entries."""
    return [list(range(first, first + n))]


# Append


def test_appending_within_the_capacity_writes_in_place():
    cache = KVCache(N_LAYERS, max_length=1000)
    append(cache, count(5))
    before = addresses(cache)
    for block in range(25):
        append(cache, count(10, 5 + 10 * block))
    assert addresses(cache) == before
    assert_holds(cache, count(255))


def test_attention_reads_a_view_of_the_buffer_up_to_the_newest_entry():
    cache = KVCache(N_LAYERS, max_length=1000)
    append(cache, count(3))
    for layer, (keys, values) in enumerate(append(cache, count(2, 3))):
        assert keys.shape == (1, HEADS, 5, KEY_DIM) and values.shape == (1, HEADS, 5, VALUE_DIM)
        assert keys.data_ptr() == cache.layers[layer].keys.data_ptr()
        assert torch.equal(keys, states(count(5), layer, KEY_DIM))


def test_the_buffers_double_keep_their_content_and_stop_at_the_context():
    cache = KVCache(N_LAYERS, max_length=700)
    capacities = []
    for block in range(70):
        append(cache, count(10, 10 * block))
        capacities.append(cache.layers[0].capacity)
    assert sorted(set(capacities)) == [256, 512, 700]
    assert capacities[25] == 512  # the 26th block of ten is the first that does not fit 256
    assert cache.layers[0].keys.shape[2] == 700
    assert_holds(cache, count(700))


def test_a_block_larger_than_twice_the_capacity_fits_at_once():
    cache = KVCache(N_LAYERS, max_length=5000)
    append(cache, count(10))
    append(cache, count(900, 10))
    assert cache.layers[0].capacity == 910
    assert_holds(cache, count(910))


def test_a_short_context_is_all_that_is_allocated():
    cache = KVCache(N_LAYERS, max_length=12)
    append(cache, count(1))
    assert cache.layers[0].capacity == 12


def test_an_append_past_the_context_is_refused_by_name_and_changes_nothing():
    cache = KVCache(N_LAYERS, max_length=12)
    append(cache, count(10))
    with pytest.raises(CacheOverflow, match=r"10 cached \+ 3 new positions exceed the limit of 12"):
        append(cache, count(3))
    assert_holds(cache, count(10))
    append(cache, count(2, 10))
    assert_holds(cache, count(12))
    assert cache.room() == 0


def test_the_longest_row_decides_what_fits():
    cache = KVCache(N_LAYERS, max_length=12, batch_size=2)
    append(cache, count(10) * 2)
    cache.reset(rows=[0], length=1)
    assert cache.room() == 2
    with pytest.raises(CacheOverflow):
        append(cache, count(3) * 2)


def test_a_batch_of_another_size_is_refused_by_name():
    with pytest.raises(ValueError, match="batch of 3 rows given to a cache made for batch_size=2"):
        append(KVCache(N_LAYERS, 100, batch_size=2), count(1) * 3)


# A fixed capacity


def test_a_fixed_capacity_is_allocated_once_and_attended_whole():
    cache = KVCache(N_LAYERS, max_length=1000, fixed_capacity=400)
    append(cache, count(1))
    before = addresses(cache)
    for block in range(39):
        for keys, values in append(cache, count(10, 1 + 10 * block)):
            assert keys.shape[2] == values.shape[2] == 400
            assert cache.get_mask_sizes(10, 0) == (400, 0)
    assert addresses(cache) == before
    assert_holds(cache, count(391))


def test_a_fixed_capacity_is_not_exceeded_although_the_context_is_longer():
    cache = KVCache(N_LAYERS, max_length=1000, fixed_capacity=8)
    assert cache.max_length == 8
    append(cache, count(8))
    with pytest.raises(CacheOverflow, match="limit of 8"):
        append(cache, count(1))


def test_a_growing_cache_is_attended_up_to_its_newest_entry():
    cache = KVCache(N_LAYERS, max_length=1000)
    assert cache.get_mask_sizes(4, 0) == (4, 0)
    append(cache, count(6))
    assert cache.get_mask_sizes(4, 0) == (10, 0)


# Keep


def test_a_kept_path_moves_to_the_front_of_its_block():
    cache = KVCache(N_LAYERS, max_length=100)
    append(cache, [[100, 101, 102]])
    append(cache, [[0, 1, 2, 3, 4, 5, 6]])
    before = addresses(cache)
    cache.keep([[0, 2, 5]])
    assert_holds(cache, [[100, 101, 102, 0, 2, 5]])
    assert addresses(cache) == before


def test_the_front_of_a_block_is_kept_without_moving_anything(monkeypatch: pytest.MonkeyPatch):
    cache = KVCache(N_LAYERS, max_length=100)
    append(cache, count(6))
    monkeypatch.setattr(type(cache.layers[0]), "keep", lambda *_: pytest.fail("moved"))
    cache.keep([[0, 1, 2, 3]])
    assert_holds(cache, count(4))


def test_an_empty_path_forgets_the_block():
    cache = KVCache(N_LAYERS, max_length=100)
    append(cache, count(3))
    append(cache, count(4, 3))
    cache.keep([[]])
    assert_holds(cache, count(3))


def test_entries_are_appended_behind_what_was_kept():
    cache = KVCache(N_LAYERS, max_length=100)
    append(cache, [[0, 1, 2, 3]])
    cache.keep([[0, 3]])
    append(cache, [[7, 8]])
    assert_holds(cache, [[0, 3, 7, 8]])


def test_rows_of_a_batch_keep_paths_of_their_own():
    cache = KVCache(N_LAYERS, max_length=100, batch_size=3)
    append(cache, [[0, 1, 2, 3], [10, 11, 12, 13], [20, 21, 22, 23]])
    cache.keep([[0, 2], [], [1, 2, 3]])
    assert_holds(cache, [[0, 2], [], [21, 22, 23]])
    append(cache, [[4, 5], [14, 15], [24, 25]])
    assert_holds(cache, [[0, 2, 4, 5], [14, 15], [21, 22, 23, 24, 25]])


@dataclass(frozen=True)
class Round:
    """A block appended to every row, and the paths kept of it."""

    size: int
    paths: list[list[int]]


@st.composite
def histories(draw) -> tuple[int, list[int], list[Round]]:
    """Rows, their first lengths (near the first buffer's end too) and some rounds."""
    rows = draw(st.integers(1, 3))
    first = draw(st.sampled_from([1, 3, 250]))
    lengths = [draw(st.integers(0, first)) for _ in range(rows)]
    rounds = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 9))
        path = st.lists(st.integers(0, size - 1), unique=True).map(sorted)
        rounds.append(Round(size, [draw(path) for _ in range(rows)]))
    return first, lengths, rounds


@settings(max_examples=60, deadline=None)
@given(histories(), st.sampled_from([None, 300]))
def test_after_any_rounds_every_row_holds_what_a_fresh_cache_would(history, fixed_capacity: int | None):
    first, lengths, rounds = history
    cache = KVCache(N_LAYERS, 300, len(lengths), fixed_capacity)
    expected = [[1000 * row + i for i in range(first)] for row in range(len(lengths))]
    append(cache, expected)
    for row, length in enumerate(lengths):
        cache.reset([row], length)
        expected[row] = expected[row][:length]
    for number, turn in enumerate(rounds, 1):
        block = [[10_000 * number + 1000 * row + i for i in range(turn.size)] for row in range(len(lengths))]
        append(cache, block)
        cache.keep(turn.paths)
        expected = [old + [new[i] for i in path] for old, new, path in zip(expected, block, turn.paths)]
        assert_holds(cache, expected)


@pytest.mark.parametrize("path", [[1, 0], [0, 0], [0, 2, 1], [-1], [0, 4], [4]], ids=str)
def test_a_path_that_does_not_ascend_within_the_block_is_refused_and_changes_nothing(path: list[int]):
    cache = KVCache(N_LAYERS, max_length=100, batch_size=2)
    append(cache, count(4) * 2)
    with pytest.raises(ValueError, match="must ascend within the last block of 4 entries"):
        cache.keep([[0, 2], path])
    assert_holds(cache, count(4) * 2)


def test_one_path_a_row_is_wanted():
    cache = KVCache(N_LAYERS, max_length=100, batch_size=2)
    append(cache, count(4) * 2)
    with pytest.raises(ValueError, match="1 paths given for 2 rows"):
        cache.keep([[0]])


def test_a_block_is_kept_once_and_not_after_a_reset():
    cache = KVCache(N_LAYERS, max_length=100)
    append(cache, count(4))
    cache.keep([[0, 1]])
    with pytest.raises(ValueError, match="last block of 0 entries"):
        cache.keep([[0]])
    append(cache, count(4))
    cache.reset(length=3)
    with pytest.raises(ValueError, match="last block of 0 entries"):
        cache.keep([[0]])


# Reset and crop


def test_a_reset_empties_all_rows_and_keeps_the_buffers():
    cache = KVCache(N_LAYERS, max_length=100, batch_size=2)
    append(cache, count(4) * 2)
    before = addresses(cache)
    cache.reset()
    assert_holds(cache, [[], []])
    assert (cache.get_seq_length(), cache.room()) == (0, 100)
    append(cache, [[7], [8]])
    assert_holds(cache, [[7], [8]])
    assert addresses(cache) == before


def test_given_rows_are_shortened_to_a_prefix_and_the_others_left_alone():
    cache = KVCache(N_LAYERS, max_length=100, batch_size=3)
    append(cache, [[0, 1, 2], [10, 11, 12], [20, 21, 22]])
    cache.reset(rows=[0, 2], length=1)
    assert_holds(cache, [[0], [10, 11, 12], [20]])
    cache.reset(length=2)
    assert_holds(cache, [[0], [10, 11], [20]])  # a shorter row is not lengthened
    append(cache, [[5], [15], [25]])
    assert_holds(cache, [[0, 5], [10, 11, 15], [20, 25]])


def test_crop_counts_downwards_as_in_transformers():
    cache = KVCache(N_LAYERS, max_length=100, batch_size=2)
    append(cache, count(6) * 2)
    cache.reset(rows=[1], length=1)
    cache.crop(0)
    cache.crop(-2)
    assert_holds(cache, [[0, 1, 2, 3], []])
    with pytest.raises(ValueError, match="tokens_to_remove=2"):
        cache.crop(2)


def test_what_crop_leaves_of_a_block_can_still_be_kept():
    cache = KVCache(N_LAYERS, max_length=100)
    append(cache, count(3))
    append(cache, count(5, 3))
    cache.crop(-2)
    with pytest.raises(ValueError, match="last block of 3 entries"):
        cache.keep([[3]])
    cache.keep([[0, 2]])
    assert_holds(cache, [[0, 1, 2, 3, 5]])


# Construction


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(max_length=0), "max_length=0"),
        (dict(max_length=-5), "max_length=-5"),
        (dict(max_length=10, batch_size=0), "batch_size=0"),
        (dict(max_length=10, fixed_capacity=0), "fixed_capacity=0 is outside 1…10"),
        (dict(max_length=10, fixed_capacity=11), "fixed_capacity=11 is outside 1…10"),
    ],
    ids=str,
)
def test_impossible_sizes_are_refused_by_name(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        KVCache(N_LAYERS, **arguments)


# As a cache of transformers

GREEDY = dict(do_sample=False, max_new_tokens=30)
CACHES = pytest.mark.parametrize("fixed_capacity", [None, 48], ids=["growing", "fixed"])


def generated(target: Target, cache, prompt: list[list[int]], **keywords) -> list[list[int]]:
    """`generate` by the library, with a cache of ours or of its own."""
    return target.model.generate(torch.tensor(prompt), **{target.cache_keyword: cache}, **keywords).tolist()


@CACHES
@pytest.mark.parametrize("prompt", [[5], [1, 2, 3, 1, 2, 3, 1]], ids=["one token", "seven tokens"])
def test_generate_emits_what_it_does_with_its_own_cache(target: Target, fixed_capacity: int | None, prompt: list[int]):
    cache = target.new_cache(fixed_capacity=fixed_capacity)
    tokens = generated(target, cache, [prompt], **GREEDY)
    assert tokens == generated(target, DynamicCache(), [prompt], **GREEDY)
    assert cache.lengths == [len(tokens[0]) - 1]


@CACHES
def test_generate_emits_what_it_does_with_its_own_cache_for_a_padded_batch(target: Target, fixed_capacity: int | None):
    prompt = [[0, 0, 1, 2, 3], [5, 6, 7, 8, 9]]
    keywords = dict(**GREEDY, attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]))
    cache = target.new_cache(batch_size=2, fixed_capacity=fixed_capacity)
    assert generated(target, cache, prompt, **keywords) == generated(target, DynamicCache(), prompt, **keywords)


def test_generate_samples_what_it_does_with_its_own_cache(target: Target):
    tokens = []
    for cache in (target.new_cache(), DynamicCache()):
        with torch.random.fork_rng():
            torch.manual_seed(4)
            tokens.append(generated(target, cache, [[1, 2, 3]], do_sample=True, max_new_tokens=30))
    assert tokens[0] == tokens[1]


def test_generate_may_take_back_what_its_own_speculation_appended(target: Target):
    """Prompt lookup drafts from the text and crops the cache after every refused draft."""
    prompt = [[1, 2, 3, 1, 2, 3, 1, 2]]
    tokens = generated(target, target.new_cache(), prompt, prompt_lookup_num_tokens=4, **GREEDY)
    assert tokens == generated(target, DynamicCache(), prompt, **GREEDY)


def test_a_reused_cache_does_not_remember_the_last_text(target: Target):
    cache = target.new_cache(fixed_capacity=48)
    generated(target, cache, [[9, 8, 7, 6]], **GREEDY)
    cache.reset()
    assert generated(target, cache, [[5]], **GREEDY) == generated(target, DynamicCache(), [[5]], **GREEDY)
