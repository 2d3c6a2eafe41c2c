# %% [markdown]
# # Your own policy
#
# A *policy* decides the shape of the draft tree: which nodes the drafter expands next, and which of all candidates
# the target gets to verify. It never touches a model, it cannot change the text (only how fast it comes), and it is
# one class. This page defines one in ten lines, tries it without a model, and then makes it a part of every command.
#
# ## What a pass asks of a policy
#
# One pass grows a **pool** of candidates, level by level, and keeps the best of it:
#
# 1. `frontier(growing, draft)` is asked again and again: *which nodes shall the drafter expand, with how many
#    candidates each?* It returns a `Frontier(node, n_candidates)`, or `None` to end growth. At first the pool holds
#    the root alone.
# 2. `select(growing)` is asked once: *which nodes become the draft tree?* It returns their pool indices. Every node's
#    parent must be among them (the root goes without saying): a node without its parent could not be verified.
# 3. `max_candidates()`: the most candidates that it ever asks of one node.
#
# ## What the pool offers
#
# | | shape | |
# |---|---|---|
# | `growing.token`, `growing.parent` | `[M]` | the pool's nodes; node 0 is the root, parents come before children |
# | `growing.depth` | `[M]` | 0 at the root |
# | `growing.log_conf` | `[M]` | the drafter's log probability of that token after its path |
# | `growing.score` | `[M]` | sum of `log_conf` along the path; never above the parent's |
# | `growing.rank` | `[M]` | place among its siblings, 0 for the drafter's first choice |
# | `growing.levels` | list of (start, end) | pool indices of each level grown so far; its length is the depth reached |
# | `growing.n_nodes` | number | nodes without the root |
# | `draft.entropy` | `[F]` | of the drafter's distribution at each of the F nodes expanded last, in nats |
# | `draft.token`, `draft.log_conf` | `[F, K]` | what came of them: the last level again, node by node, best first |
#
# `draft` is `None` at the first call. `exp(score)` is what the drafter believes is the probability that the node is
# accepted; notebook 01 shows how far to trust it.

# %%
# %matplotlib inline
# %config InlineBackend.print_figure_kwargs = {"dpi": 64}
import math
from dataclasses import dataclass

import pandas as pd

from eagle_tree import analysis, plots
from eagle_tree.cost import CostTable
from eagle_tree.policy import Autoregressive, Eagle2, Policy
from eagle_tree.replay import replay
from eagle_tree.trace import Trace
from eagle_tree.tree import Frontier, stable_topk, top_nodes

# %% [markdown]
# ## The idea, and ten lines
#
# EAGLE-2 verifies the same number of nodes in every pass. But in one pass the 24th node has a chance of 10 %, in
# another of 0.1 %. So keep, in every pass, **the nodes that are likely enough**: all whose score is at least
# log(`least`). Where the drafter is sure the tree grows deep; where it is lost, there is hardly a tree, and no
# drafter step is spent on extending nodes that would not be kept.


# %%
@dataclass(frozen=True)
class LikelyEnough(Policy):
    """All nodes whose path has at least the probability `least` by the drafter, `budget` at most."""

    least: float = 0.05
    budget: int = 59
    top_k: int = 6
    depth: int = 4

    def max_candidates(self):
        return self.top_k

    def frontier(self, growing, draft):
        if not growing.levels:
            return Frontier(growing.token.new_zeros(1), self.top_k)  # the root
        start, end = growing.levels[-1]
        node = start + stable_topk(growing.score[start:end], min(self.top_k, end - start))[1]
        node = node[growing.score[node] >= math.log(self.least)]
        return Frontier(node, self.top_k) if len(node) and len(growing.levels) <= self.depth else None

    def select(self, growing):
        node = top_nodes(growing, growing.score, self.budget)
        return node[growing.score[node] >= math.log(self.least)]


# %% [markdown]
# The selection is closed under parents because a score never exceeds its parent's: if a node is likely enough, so is
# every node above it. `stable_topk` and `top_nodes` break ties by depth and index; a bare `torch.topk` does not, and
# in half precision, where ties are common, it would keep children without their parents.
#
# ## Try it on a trace
#
# A *trace* holds what the drafter said along texts that the target wrote. `replay` runs any policy on it: exactly the
# passes that decoding would make, in seconds, without a model. The cost table says what each pass would take.

# %%
trace, cost = Trace.read("data/trace"), CostTable.load("data/cost")
policies = {
    "autoregressive": Autoregressive(),
    "eagle2, 8 nodes": Eagle2(budget=8, top_k=6, depth=4),
    "eagle2, 24 nodes": Eagle2(budget=24, top_k=6, depth=4),
    "eagle2, 8 nodes, shallow": Eagle2(budget=8, top_k=4, depth=2),
    **{f"likely enough, {least}": LikelyEnough(least) for least in (0.02, 0.05, 0.1, 0.2)},
}
results = {name: replay(trace, policy, cost, name) for name, policy in policies.items()}
passes = pd.concat([result.passes for result in results.values()], ignore_index=True)
table = analysis.replayed(passes)
table["uncovered"] = [results[name].uncovered for name in table.policy]
table[["policy", "nodes", "tau", "tokens_per_second", "speedup", "speedup_low", "speedup_high", "uncovered"]].round(2)

# %% [markdown]
# `uncovered` is 0 everywhere, so these are the passes of decoding. `LikelyEnough` grows like the first two rows of
# EAGLE-2 (6 wide, 5 levels), but only as far and as large as it seems worth it: at the same τ it verifies fewer
# nodes. The third row is EAGLE-2 in a shape that suits this machine better (notebook 03), the rival to beat. (That
# nothing is faster than decoding without a drafter here is the machine's doing; notebook 03 shows another.) Is a
# difference in speed more than chance? Compare on the same prompts:

# %%
drafting = passes[passes.policy != "autoregressive"]
analysis.compared(analysis.prompt_sums(drafting), "emitted", "seconds", "eagle2, 8 nodes, shallow").round(3)

# %% [markdown]
# `gain` above 1 is faster than the reference, paired by prompt; an interval (`gain_low` to `gain_high`) with 1 in it
# says that other prompts might turn the order round. `p_holm` is corrected for making several comparisons at once.
# Keep in mind that both sides had their settings chosen on these texts; a claim needs others
# (`experiments/split_prompts.py`).

# %%
drawn = table[table.policy != "autoregressive"].rename(columns={"tokens_per_second": "predicted"})
drawn["family"] = drawn.policy.str.replace(r", [\d.]+( nodes)?", "", regex=True)  # without the size
drawn["tokens_per_second"] = float("nan")  # nothing was measured here: the speeds are the cost table's
plots.speed_by_size(drawn, table.tokens_per_second[0], "Beside EAGLE-2, replayed")

# %% [markdown]
# ## What the trace does not hold
#
# A trace answers only what was asked when it was recorded. A request outside of it is **counted and answered by
# nothing, never by a guess**. Ask for 8 candidates where 6 were recorded:

# %%
wider = replay(trace, LikelyEnough(least=0.05, top_k=8), cost, "wider")
print(f"uncovered requests: {wider.uncovered} in {len(wider.passes)} passes")

# %% [markdown]
# Such a row must not be believed. With the policy installed as below, one command adds to the trace what it lacks:
#
#     eagle-tree trace extend=notebooks/data/trace policy=likely_enough policy.top_k=8 compare=[] target.dtype=float32
#
# (`LikelyEnough` with 6 candidates is covered by EAGLE-2's requests: at every level it expands those of EAGLE-2's
# nodes that are likely enough. That is not so for any two policies; a top-6 beam does not contain a top-4 beam's
# second level.)
#
# ## Closure is asserted
#
# What if `select` keeps a node without its parent? The pass stops, with the policy's name:


# %%
class Orphans(LikelyEnough):
    """Wrong on purpose: keeps the least likely nodes of the pool, whose parents it leaves out."""

    def select(self, growing):
        return growing.score.topk(5, largest=False).indices


try:
    replay(trace, Orphans(), cost)
except AssertionError as error:
    print("AssertionError:", error)

# %% [markdown]
# ## Entropy, and anything else that was drafted
#
# A subclass changes one answer. This one ends growth when the drafter is unsure at each of the nodes that it has just
# expanded (`EntropyStop` in the package wraps any policy in this way):


# %%
@dataclass(frozen=True)
class SureEnough(LikelyEnough):
    """`LikelyEnough`, grown no further once the entropy of the drafter is above `most` nats everywhere."""

    most: float = 3.0

    def frontier(self, growing, draft):
        if draft is not None and draft.entropy.min() > self.most:
            return None
        return super().frontier(growing, draft)


stopped = replay(trace, SureEnough(), cost, "sure enough")
columns = ["policy", "nodes", "tau", "tokens_per_second"]
both = pd.concat([results["likely enough, 0.05"].passes, stopped.passes], ignore_index=True)
analysis.replayed(both)[columns].round(2)

# %% [markdown]
# ## Make it a part of every command
#
# Two files. The class, with its imports, in a module that Python finds:
#
# ```python
# # my_policies.py
# import math
# from dataclasses import dataclass
#
# from eagle_tree.policy import Policy
# from eagle_tree.tree import Frontier, stable_topk, top_nodes
#
#
# @dataclass(frozen=True)
# class LikelyEnough(Policy):
#     ...
# ```
#
# and a yaml, whose name is the policy's name from then on:
#
# ```yaml
# # conf/policy/likely_enough.yaml
# _target_: my_policies.LikelyEnough
# least: 0.05
# budget: 59
# top_k: 6
# depth: 4
# ```
#
# Then every verb knows it:
#
#     export PYTHONPATH=.
#     eagle-tree replay trace=notebooks/data/trace cost=measured cost.folder=notebooks/data/cost \
#                       policy=likely_enough policy.least=0.1 compare=[eagle2]
#     eagle-tree bench  policy=likely_enough compare=[autoregressive,eagle2] target.dtype=float32
#     eagle-tree bench  policy=likely_enough "compare=[{policy: likely_enough, least: 0.2}]" temperature=1
#
# `bench` decodes with the model and is the judge: it counts the answers that differ between policies, and in float32
# there must be none. A policy that is to stay belongs in `eagle_tree/policy/`, with its yaml, a test and its paper.
#
# Three more things that a policy may say, when it needs them:
#
# * `observe(row)` is told how each pass went (`record.PassRow`), for policies that learn. Such a policy also
#   overrides `covering()`: a policy that asks for all that it may ever ask, which is what a trace records for it.
# * `fixed_shape = True`: the sizes of all frontiers and of the tree never depend on what was drafted. Replay then
#   runs hundreds of positions in one batch.
# * Keep to tensor operations. `len(node)` and comparisons in an `if` wait for the device once a level; that is the
#   price of deciding by what was drafted, and on a GPU it has to be earned back.
