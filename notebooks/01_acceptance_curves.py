# %% [markdown]
# # Acceptance curves: how good is a drafter, and where?
#
# A large language model spends most of a decoding step on moving its weights through the memory. Running one more
# position through the same forward is almost free. **Speculative decoding** uses that: a small model, the *drafter*,
# guesses the next few tokens, and the large one, the *target*, checks all guesses in one forward. Guesses that agree
# with the target are kept; at the first one that does not, the target's own token is taken in its place. The text
# that comes out is exactly the target's.
#
# EAGLE-2 guesses a **tree**. Its root is the *pending token*: the last one emitted, which the target has not read
# yet. Every other node is one guessed token, and its path from the root is one guessed continuation. The drafter
# gives each node a *confidence*, its own probability of that token after that path. The target reads the whole tree
# at once and then walks down from the root: it says which token comes next; if one of the children has that token,
# the walk goes on there (the child is *accepted*); if none has, the walk ends, and the target's token is emitted as a
# *bonus*.
#
# So the question that decides everything is: **how often is a node accepted?** This notebook asks it of a recorded
# run, and shows two ways to get the answer wrong.

# %%
# %matplotlib inline
# %config InlineBackend.print_figure_kwargs = {"dpi": 64}
import numpy as np
import pandas as pd

from eagle_tree import analysis, curves, plots
from eagle_tree.calibration import judged_nodes

runs = analysis.load("data/decoded")
runs.runs.T

# %% [markdown]
# `record.sh` made this run: twelve prompts, decoded at temperature 1, once with EAGLE-2's tree of 24 nodes and once
# with a *chain*, a tree without branches. `eagle-tree bench` leaves the same two tables for any model and any
# drafter. One row of the node table is one drafted node:
#
# * `depth` (1: child of the root) and `rank` among its siblings (0: the drafter's first choice);
# * `log_conf`, the log of its confidence, and `score`, the sum of `log_conf` along its path: what EAGLE-2 ranks nodes
#   by;
# * `parent_accepted`: whether the walk reached its parent, and `accepted`: whether it went on to this node;
# * `target_log_prob`: the target's own log probability of the token after that path.

# %%
nodes = runs.nodes[runs.nodes.policy == "eagle2"]
columns = ["node", "parent", "depth", "rank", "log_conf", "score", "parent_accepted", "accepted", "target_log_prob"]
nodes.loc[nodes.pass_id == 3, columns].head(8).round(2)

# %% [markdown]
# ## The wrong way: accepted nodes over drafted nodes
#
# The obvious estimator divides: of all nodes drafted at depth 3, how many were accepted? Here it is, beside the two
# numbers that it is made of.

# %%
of_depth = nodes.groupby("depth")
naive = pd.DataFrame(
    {
        "drafted": of_depth.size(),
        "accepted / drafted": of_depth.accepted.mean(),
        "share whose parent was accepted": of_depth.parent_accepted.mean(),
        "accepted, of those": nodes[nodes.parent_accepted].groupby("depth").accepted.mean(),
    }
)
naive.round(3)

# %% [markdown]
# The second column is the product of the third and the fourth, in every row. A node whose parent was rejected is
# never looked at: the walk did not come by. Counting it as a failure blames the node for its parent, and for all of
# its ancestors. So the naive column sinks with depth **whatever the drafter is like**; compare it with the last
# column, which looks only at nodes that had their chance.
#
# To see that it is the estimator and not the drafter, take one that we know: a chain of six guesses, each right with
# probability 0.7 given that the ones before were right, equally good at every depth.

# %%
right = np.random.default_rng(0).random((4000, 6)) < 0.7
accepted = np.logical_and.accumulate(right, axis=1)  # a guess counts only if all guesses before it were accepted
parent_accepted = np.column_stack([np.ones(len(right), bool), accepted[:, :-1]])
pd.DataFrame(
    {
        "truth": 0.7,
        "accepted / drafted": accepted.mean(0),
        "given that the parent was accepted": accepted.sum(0) / parent_accepted.sum(0),
    },
    index=pd.RangeIndex(1, 7, name="depth"),
).round(3)

# %% [markdown]
# The naive column says that the drafter gets worse and worse; the conditional one finds the 0.7 again, at every
# depth. So acceptance is always taken **given that the parent was accepted**. It is also the only number of which a
# tree can be built: the probability that the walk reaches a node is the product of the conditional ones along its
# path.
#
# ## The other wrong way: given that the earlier siblings were rejected
#
# It is tempting to think of siblings as tried one after the other: the second child gets its chance when the first
# has failed. Under the rule used here (*match*) nothing is tried in turn. The target names one token, and at most one
# child has it. Leaving out the cases in which an earlier sibling was right removes failures of the later ones, and so
# flatters them.

# %%
reached = nodes[nodes.parent_accepted].sort_values(["prompt_id", "pass_id", "parent", "rank"])
siblings = reached.groupby(["prompt_id", "pass_id", "parent"])
earlier_was_right = siblings.accepted.cumsum() - reached.accepted > 0
right_way = reached.groupby("rank").accepted.mean()
wrong_way = reached[~earlier_was_right].groupby("rank").accepted.mean()
by_rank = pd.DataFrame({"given the parent": right_way, "given that earlier siblings failed": wrong_way})
by_rank.round(3)

# %% [markdown]
# The difference is small where first choices are mostly wrong and large where they are mostly right. Only the first
# column can be added up: siblings exclude each other, so its sum over ranks is the probability that one of the
# children is right. The second column's sum means nothing; with a good drafter it exceeds 1.
#
# ## The curves
#
# `curves.acceptance` does it properly. It also uses what is known beyond hit or miss: at temperature 1 the target's
# probability of a node *is* the probability that it is accepted, so each node whose parent was accepted contributes
# that probability, not a coin flip. Intervals are a bootstrap over prompts, because nodes of one text are not
# independent of each other.

# %%
curves.acceptance(nodes, ["depth"]).round(3)

# %%
plots.acceptance_by_position(curves.acceptance_by_place(nodes))

# %% [markdown]
# How to read it:
#
# * **By rank** acceptance falls steeply. This is why a tree is worth more than several independent chains, and why a
#   node's tenth child is rarely worth its place.
# * **By depth** it need not fall. A drafter feeds on its own guesses, so deep nodes should be harder; but EAGLE-2
#   puts deep nodes only where it is confident all the way down, and those are easy places. What you see is acceptance
#   *of the nodes that the policy chose*. For the drafter alone, at every position of the text, use `eagle-tree
#   evaluate`.
# * **Both at once**, on the right: the depth curve mixes ranks (most children of the root are late siblings, few
#   nodes of depth 4 are), the map does not. Its small figures are the nodes counted: believe no cell that counts ten.
# * **The hollow marks** are the drafter's mean confidence. Where they lie above the filled ones it is overconfident.
#
# ## Is the confidence worth its name?
#
# EAGLE-2 builds its trees from confidences as if they were acceptance probabilities. The reliability diagram checks
# that: nodes are put into bins by confidence, and each bin's acceptance is set against it. On the diagonal a
# confidence of 0.3 is accepted 3 times in 10.

# %%
judged = judged_nodes(nodes)  # the nodes whose parent was accepted
bins = curves.confidence_bins(judged)
points = analysis.reliability(bins).assign(kind="as drafted", error=analysis.calibration_error(bins))
plots.reliability_diagram(points)

# %% [markdown]
# The *order* of confidences is what growth and pruning need, and an increasing curve keeps it. Their *size* matters
# as soon as a policy asks whether a node is worth its time (notebook 03). `eagle-tree calibrate nodes=RUN` fits a
# correction, `policy=calibrated` uses it.
#
# ## What the N-th node adds
#
# Multiply conditional acceptances along the path and you have the probability that a node is accepted at all: its
# contribution to the tokens of a pass. Nodes in order of score:

# %%
plots.marginal_value(curves.marginal_value(nodes))

# %% [markdown]
# The first few nodes carry most of the value and the rest share little. How many are worth verifying depends on what
# one more costs: that is notebook 03.
#
# **Try it.** Replace `"eagle2"` by the chain's name (`runs.nodes.policy.unique()`). Then record a run at temperature
# 0 (`eagle-tree bench temperature=0`) and load it: `target_log_prob` is then 0 or minus infinity, and every curve is
# made of hits and misses.
