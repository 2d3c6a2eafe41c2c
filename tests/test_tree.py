"""The draft tree and the growing pool: every derived field against its definition, ties included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle_tree.tree import Draft, Frontier, GrowingTree, Tree, stable_topk, top_nodes

general = settings(max_examples=100, deadline=None)

#        0
#       / \
#      1   2        Node 4 is 1's second child although 5, which is 2's, stands between it and 3.
#     / \   \
#    3   4   5      (depths 0; 1 1; 2 2 2; 3)
#    |
#    6
PARENT = [-1, 0, 0, 1, 2, 1, 3]
TOKEN = [50, 10, 11, 10, 10, 12, 13]
LOG_CONF = [0.0, -1.0, -2.0, -0.5, 0.0, -0.25, -4.0]


def example() -> Tree:
    return Tree.from_lists(TOKEN, PARENT, LOG_CONF)


# Confidences of which many are equal, exactly 0, vanishing beside 1, or arbitrary.
log_confs = st.one_of(
    st.sampled_from([0.0, -0.5, -1.0, -(2.0**-25), -(2.0**-24), -(2.0**-100)]), st.floats(-30, 0, width=32)
)


@st.composite
def parents(draw, max_nodes: int = 12) -> list[int]:
    """The parent list of a random tree, parents first."""
    n_nodes = draw(st.integers(0, max_nodes))
    return [-1, *(draw(st.integers(0, node)) for node in range(n_nodes))]


@st.composite
def trees(draw) -> Tree:
    """A random tree whose host-side depth bound may be loose, as a pruned tree's is."""
    parent = draw(parents())
    log_conf = [0.0, *(draw(log_confs) for _ in parent[1:])]
    tree = Tree.from_lists(list(range(len(parent))), parent, log_conf)
    return Tree(tree.token, tree.parent, tree.log_conf, tree.max_depth + draw(st.integers(0, 5)))


def path_to(parent: list[int], node: int) -> list[int]:
    """Node indices from the root to a node."""
    return [node] if node == 0 else [*path_to(parent, parent[node]), node]


# Depth, position, mask, paths, rank


def test_depth_counts_the_edges_from_the_root():
    assert example().depth.tolist() == [0, 1, 1, 2, 2, 2, 3]


def test_a_node_stands_at_its_depth_behind_the_root_and_not_at_its_flat_index():
    assert example().position_offset.tolist() == [0, 1, 1, 2, 2, 2, 3]


def test_a_node_sees_itself_and_its_ancestors_only():
    seen = [row.nonzero().flatten().tolist() for row in example().mask]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 5], [0, 1, 3, 6]]


def test_paths_run_from_the_root_to_each_node():
    assert example().paths.tolist() == [
        [0, -1, -1, -1],
        [0, 1, -1, -1],
        [0, 2, -1, -1],
        [0, 1, 3, -1],
        [0, 2, 4, -1],
        [0, 1, 5, -1],
        [0, 1, 3, 6],
    ]


def test_rank_counts_earlier_siblings_even_if_others_stand_between():
    assert example().rank.tolist() == [0, 0, 1, 0, 0, 1, 0]


def test_a_root_alone_is_a_tree():
    tree = Tree.from_lists([7], [-1])
    assert (tree.n_nodes, tree.max_depth) == (0, 0)
    assert tree.depth.tolist() == tree.rank.tolist() == tree.score.tolist() == [0]
    assert tree.mask.tolist() == [[True]] and tree.paths.tolist() == [[0]]
    assert tree.expected_draft == 1


@general
@given(trees())
def test_derived_fields_follow_their_definitions_under_any_depth_bound(tree: Tree):
    parent = tree.parent.tolist()
    paths = [path_to(parent, node) for node in range(len(parent))]
    width = tree.max_depth + 1
    assert tree.depth.tolist() == [len(path) - 1 for path in paths]
    assert tree.position_offset.tolist() == tree.depth.tolist()
    assert tree.mask.tolist() == [[other in path for other in range(len(parent))] for path in paths]
    assert tree.paths.tolist() == [path + [-1] * (width - len(path)) for path in paths]
    assert tree.rank.tolist() == [parent[:node].count(parent[node]) for node in range(len(parent))]


# Scores


def test_a_score_sums_the_log_confidences_of_the_path():
    assert example().score.tolist() == [0, -1, -2, -1.5, -2, -1.25, -5.5]


def test_expected_draft_sums_the_path_confidences_and_counts_the_bonus_token():
    log_conf = [0.0, math.log(0.5), math.log(0.25), math.log(0.5)]
    tree = Tree.from_lists([0, 1, 2, 3], [-1, 0, 0, 1], log_conf)
    assert tree.expected_draft.item() == pytest.approx(1 + 0.5 + 0.25 + 0.25, abs=1e-6)


@general
@given(trees())
def test_scores_are_rounded_level_by_level_and_never_exceed_the_parents(tree: Tree):
    parent, edge = tree.parent.tolist(), tree.log_conf.numpy()
    expected = [np.float32(0)]
    for node in range(1, len(parent)):
        expected.append(np.float32(expected[parent[node]] + edge[node]))
    assert tree.score.dtype == torch.float32
    assert tree.score.tolist() == [float(score) for score in expected]
    assert all(tree.score[node] <= tree.score[parent[node]] for node in range(1, len(parent)))


def test_a_product_of_mask_and_confidences_would_round_differently():
    """Sixty-four edges of 2**-25 after one of 1: each addition rounds back to -1, their sum does not."""
    log_conf = [0.0, -1.0] + [-(2.0**-25)] * 64
    chain = Tree.from_lists(list(range(66)), list(range(-1, 65)), log_conf)
    assert chain.score[1:].tolist() == [-1.0] * 65
    product = (chain.mask.double() @ chain.log_conf.double()).float()
    assert product[-1].item() == -1.0 - 2.0**-19


# The first nodes of a tree


def test_the_head_of_a_tree_is_its_first_nodes():
    head = example().head(3)
    assert head.n_nodes == 3
    assert head.token.tolist() == TOKEN[:4] and head.parent.tolist() == PARENT[:4]
    assert head.paths[:, : head.depth.max() + 1].tolist() == [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3]]


def test_a_head_longer_than_the_tree_is_the_tree():
    tree = example()
    assert tree.head(6) is tree and tree.head(100) is tree


@general
@given(trees(), st.integers(0, 12))
def test_a_head_keeps_the_derived_fields_of_its_nodes(tree: Tree, n_nodes: int):
    head = tree.head(n_nodes)
    size = min(n_nodes, tree.n_nodes) + 1
    assert head.n_nodes == size - 1
    assert head.max_depth >= head.depth.max()
    for name in ("token", "parent", "log_conf", "depth", "score", "rank"):
        assert getattr(head, name).tolist() == getattr(tree, name)[:size].tolist()
    assert head.mask.tolist() == tree.mask[:size, :size].tolist()


# What is no tree


@pytest.mark.parametrize(
    "token, parent, log_conf, message",
    [
        ([1, 2], [-1], [0, 0], "have lengths 2, 1, 2"),
        ([1, 2], [-1, 0], [0], "have lengths 2, 2, 1"),
        ([], [], [], "have lengths 0, 0, 0"),
        ([1], [0], [0], "root has parent 0"),
        ([1], [-1], [-1], r"log_conf -1 \(must be 0\)"),
        ([1, 2], [-1, 1], [0, 0], r"parent\[1\]=1 must be in 0…0"),
        ([1, 2, 3], [-1, 2, 0], [0, 0, 0], r"parent\[1\]=2"),
        ([1, 2], [-1, -1], [0, 0], r"parent\[1\]=-1"),
        ([1, 2], [-1, 0], [0, 0.5], r"log_conf\[1\]=0.5 must be at most 0"),
        ([1, 2], [-1, 0], [0, math.nan], r"log_conf\[1\]=nan"),
        ([1, 2, 2], [-1, 0, 0], [0, 0, 0], "distinct tokens"),
    ],
)
def test_lists_that_are_no_tree_are_refused_by_name(token, parent, log_conf, message):
    with pytest.raises(ValueError, match=message):
        Tree.from_lists(token, parent, log_conf)


def test_nodes_of_different_parents_may_carry_the_same_token():
    assert Tree.from_lists([1, 2, 3, 9, 9], [-1, 0, 0, 1, 2]).n_nodes == 4


# The growing pool


def draft(token: list[list[int]], log_conf: list[list[float]], dtype=torch.float32) -> Draft:
    values = torch.tensor(log_conf, dtype=dtype)
    return Draft(torch.tensor(token), values, values.new_zeros(len(token)))


def grown() -> GrowingTree:
    """Root 50 with children 1 (token 10) and 2 (11); 2's children 3, 4 and 1's children 5, 6."""
    pool = GrowingTree.from_root(torch.tensor([50]))
    pool = pool.append(Frontier(torch.tensor([0]), 2), draft([[10, 11]], [[-1, -2]]))
    return pool.append(Frontier(torch.tensor([2, 1]), 2), draft([[20, 21], [20, 22]], [[-0.5, -3], [-0.25, -4]]))


def test_a_pool_starts_with_the_pending_token_alone():
    pool = GrowingTree.from_root(torch.tensor([50]))
    assert (pool.n_nodes, pool.levels) == (0, ())
    assert (pool.token.tolist(), pool.parent.tolist(), pool.depth.tolist()) == ([50], [-1], [0])
    assert pool.log_conf.tolist() == pool.score.tolist() == [0.0]


def test_candidates_are_appended_parent_by_parent_best_first():
    pool = grown()
    assert pool.token.tolist() == [50, 10, 11, 20, 21, 20, 22]
    assert pool.parent.tolist() == [-1, 0, 0, 2, 2, 1, 1]
    assert pool.depth.tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert pool.log_conf.tolist() == [0, -1, -2, -0.5, -3, -0.25, -4]
    assert pool.score.tolist() == [0, -1, -2, -2.5, -5, -1.25, -5]
    assert pool.levels == ((1, 3), (3, 7))
    assert pool.n_nodes == 6


def test_children_stand_and_score_one_below_their_parent_whenever_it_is_expanded():
    pool = grown().append(Frontier(torch.tensor([0, 3]), 1), draft([[12], [30]], [[-3], [-1]]))
    assert pool.depth.tolist()[-2:] == [1, 3]
    assert pool.score.tolist()[-2:] == [-3, -2 - 0.5 - 1]
    assert pool.levels[-1] == (7, 9)


def test_confidences_above_one_are_clamped_and_half_precision_is_summed_in_fp32():
    pool = GrowingTree.from_root(torch.tensor([50]))
    pool = pool.append(Frontier(torch.tensor([0]), 2), draft([[1, 2]], [[0.5, -1]], torch.bfloat16))
    pool = pool.append(Frontier(torch.tensor([2]), 1), draft([[3]], [[-(2.0**-10)]], torch.bfloat16))
    assert pool.log_conf.dtype == pool.score.dtype == torch.float32
    assert pool.log_conf.tolist() == [0, 0, -1, -(2.0**-10)]
    assert pool.score.tolist() == [0, 0, -1, -1 - 2.0**-10]  # bf16 would round it to -1


def test_selected_nodes_are_renumbered_in_pool_order():
    tree, index, closed = grown().select(torch.tensor([5, 3, 1, 2]))
    assert index.tolist() == [0, 1, 2, 3, 5]
    assert tree.token.tolist() == [50, 10, 11, 20, 20]
    assert tree.parent.tolist() == [-1, 0, 0, 2, 1]
    assert tree.log_conf.tolist() == [0, -1, -2, -0.5, -0.25]
    assert tree.max_depth >= 2
    assert closed


def test_nothing_selected_is_the_root_alone():
    tree, index, closed = grown().select(torch.empty(0, dtype=torch.int64))
    assert (tree.token.tolist(), tree.parent.tolist(), index.tolist()) == ([50], [-1], [0])
    assert closed


def test_an_orphan_is_flagged():
    assert not grown().select(torch.tensor([1, 3]))[2]  # 3's parent is 2
    assert grown().select(torch.tensor([2, 3]))[2]


def test_an_orphan_does_not_make_the_indices_illegal_before_the_flag_is_read():
    tree = grown().select(torch.tensor([3]))[0]
    assert tree.parent.tolist() == [-1, 0]


@pytest.mark.parametrize("nodes", [[1, 1], [1, 2, 1], [0, 1], [0]])
def test_a_node_selected_twice_is_flagged(nodes: list[int]):
    assert not grown().select(torch.tensor(nodes))[2]  # the root is always selected already


def pool_of(parent: list[int], log_conf: list[float]) -> GrowingTree:
    """A pool whose index order need not be depth order."""
    tree = Tree.from_lists(list(range(len(parent))), parent, log_conf)
    return GrowingTree(tree.token, tree.parent, tree.depth, tree.log_conf, tree.score, ((1, 2),) * tree.max_depth)


@general
@given(parents(), st.data())
def test_a_selection_is_closed_iff_every_parent_is_in_it(parent: list[int], data: st.DataObject):
    pool = pool_of(parent, [0.0] * len(parent))
    nodes = list(range(1, len(parent)))
    chosen = data.draw(st.lists(st.sampled_from(nodes), unique=True)) if nodes else []
    tree, index, closed = pool.select(torch.tensor(chosen, dtype=torch.int64))
    kept = {0, *chosen}
    assert bool(closed) == all(parent[node] in kept for node in chosen)
    assert index.tolist() == sorted(kept)
    assert tree.token.tolist() == sorted(kept)
    if closed:
        assert [index[up].item() for up in tree.parent.tolist()[1:]] == [parent[node] for node in sorted(chosen)]
        assert tree.mask.tolist() == [[u in path_to(parent, v) for u in sorted(kept)] for v in sorted(kept)]


def test_a_candidates_rank_is_its_place_among_its_siblings():
    """The root's three candidates, then two each of its second and third."""
    pool = GrowingTree.from_root(torch.tensor([9]))
    pool = pool.append(Frontier(torch.tensor([0]), 3), Draft(torch.arange(3)[None], torch.zeros(1, 3), torch.zeros(1)))
    pair = Draft(torch.arange(2).repeat(2, 1), torch.zeros(2, 2), torch.zeros(2))
    pool = pool.append(Frontier(torch.tensor([2, 3]), 2), pair)
    assert pool.rank.tolist() == [0, 0, 1, 2, 0, 1, 0, 1]


# The k largest


def by_value_then_index(values: Tensor, k: int) -> list[int]:
    """Python's sort is stable: equal values stay in index order."""
    return sorted(range(len(values)), key=lambda i: -values[i].item())[:k]


def test_siblings_that_tie_are_kept_in_index_order():
    values, index = stable_topk(torch.tensor([-1.0, 0.5, -1.0, 0.5, 0.5]), 4)
    assert index.tolist() == [1, 3, 4, 0]
    assert values.tolist() == [0.5, 0.5, 0.5, -1]


def test_many_equal_values_are_kept_in_index_order():
    assert stable_topk(torch.full((5000,), -3.0), 700)[1].tolist() == list(range(700))


def test_minus_zero_and_zero_tie():
    assert stable_topk(torch.tensor([-0.0, 0.0, -0.0, 0.0]), 4)[1].tolist() == [0, 1, 2, 3]


def test_negative_values_are_ordered_by_value_not_by_magnitude():
    values, index = stable_topk(torch.tensor([-3.0, -1e-40, -1.0, -1e30, 2.0]), 5)
    assert index.tolist() == [4, 1, 2, 0, 3]
    assert values.tolist() == torch.tensor([2.0, -1e-40, -1.0, -3.0, -1e30]).tolist()


def test_minus_infinity_comes_last_and_in_index_order():
    index = stable_topk(torch.tensor([-torch.inf, -1e38, -torch.inf, torch.inf]), 4)[1]
    assert index.tolist() == [3, 1, 0, 2]


def test_every_row_of_a_batch_is_ranked_by_itself():
    values = torch.tensor([[[1.0, 2.0, 2.0]], [[0.0, -1.0, 0.0]]])
    assert stable_topk(values, 2)[1].tolist() == [[[1, 2]], [[0, 2]]]


def test_a_strided_view_is_ranked_like_its_copy():
    values = torch.tensor([[3.0, 0.0], [1.0, 0.0], [3.0, 0.0]])[:, 0]
    assert stable_topk(values, 3)[1].tolist() == [0, 2, 1]


@general
@given(st.lists(st.floats(width=32, allow_nan=False), max_size=30), st.data())
def test_the_largest_are_those_of_a_stable_sort(values: list[float], data: st.DataObject):
    tensor = torch.tensor(values, dtype=torch.float32)
    k = data.draw(st.integers(0, len(values)))
    found, index = stable_topk(tensor, k)
    assert index.tolist() == by_value_then_index(tensor, k)
    assert found.tolist() == tensor[index].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_values_tie_where_they_round_together(dtype: torch.dtype):
    values = torch.linspace(-1.01, -1, 200).flip(0).to(dtype)
    assert values.unique().numel() < 20
    assert stable_topk(values, 150)[1].tolist() == by_value_then_index(values, 150)


# The best nodes of a pool

#     0
#    / \
#   1   3       all scores -1, in a pool that lists 1's child before 1's sibling
#   |
#   2
DEEP_FIRST = pool_of([-1, 0, 1, 0], [0.0, -1.0, 0.0, -1.0])


def test_of_equal_scores_the_shallower_node_is_kept_first():
    assert top_nodes(DEEP_FIRST, DEEP_FIRST.score, 2).tolist() == [1, 3]
    assert top_nodes(DEEP_FIRST, DEEP_FIRST.score, 3).tolist() == [1, 3, 2]


def test_of_equal_scores_and_depths_the_earlier_node_is_kept_first():
    pool = pool_of([-1, 0, 0, 0], [0.0, -2.0, -1.0, -1.0])
    assert top_nodes(pool, pool.score, 2).tolist() == [2, 3]


def test_a_smaller_pool_is_kept_whole():
    assert sorted(top_nodes(DEEP_FIRST, DEEP_FIRST.score, 50).tolist()) == [1, 2, 3]
    assert top_nodes(GrowingTree.from_root(torch.tensor([1])), torch.zeros(1), 5).tolist() == []


@general
@given(parents(16), st.integers(1, 16), st.data())
def test_the_best_nodes_are_those_of_a_sort_by_score_depth_and_index(parent: list[int], budget: int, data):
    pool = pool_of(parent, [0.0] * len(parent))
    score = torch.tensor([0.0, *(data.draw(log_confs) for _ in parent[1:])])
    order = sorted(range(1, len(parent)), key=lambda node: (-score[node].item(), pool.depth[node].item(), node))
    assert top_nodes(pool, score, budget).tolist() == order[:budget]


@general
@given(parents(16), st.integers(1, 16), st.data())
def test_the_best_nodes_by_path_score_are_closed_even_where_parent_and_child_tie(parent: list[int], budget: int, data):
    edges = st.sampled_from([0.0, -1.0, -(2.0**-25), -0.5])  # a confident edge of half precision is exactly 0
    pool = pool_of(parent, [0.0, *(data.draw(edges) for _ in parent[1:])])
    tree, _, closed = pool.select(top_nodes(pool, pool.score, budget))
    assert closed
    assert tree.n_nodes == min(budget, pool.n_nodes)
