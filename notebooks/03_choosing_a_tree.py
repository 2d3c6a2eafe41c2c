# %% [markdown]
# # Choosing a tree: how large should it be?
#
# A larger tree accepts more tokens a pass, always: a node more can only help. A larger tree also takes longer to
# draft and to verify. Tokens per *pass* (τ, the number that papers quote) therefore always favours the largest tree,
# and tokens per *second* does not. This notebook finds the size at which the second is best, on one machine, for one
# drafter.
#
# Three recordings are all it takes, and none of them has to be repeated for another tree:
#
# * `data/cost`: what a forward takes on that machine (`eagle-tree calibrate`);
# * `data/trace`: what the drafter says along the texts (`eagle-tree trace`);
# * `data/replayed`: the passes that every tree would have made on that trace (`eagle-tree replay`, no model needed).
#
# `record.sh` shows the commands. The machine is a plain CPU with two cores and the model a small one in float32:
# about the least friendly place for speculative decoding. That is on purpose. The *method* carries over to your
# machine, the numbers do not, and the last section shows how far they may be apart.

# %%
# %matplotlib inline
# %config InlineBackend.print_figure_kwargs = {"dpi": 64}
import pandas as pd

from eagle_tree import analysis, plots
from eagle_tree.bound import fastest
from eagle_tree.cost import CostTable
from eagle_tree.trace import Trace

cost, trace = CostTable.load("data/cost"), Trace.read("data/trace")
print(", ".join(f"{name} {cost.about[name]}" for name in ("device", "dtype", "threads")))
print(f"{len(trace.parts)} prompts, {len(trace.context)} positions, temperature {trace.settings['temperature']}")

# %% [markdown]
# ## What one more position costs
#
# The claim behind speculative decoding is that verifying n positions takes about as long as one. Here is T(n)/T(1),
# measured. A GPU that waits for its memory has a long flat stretch before it climbs. This CPU has a step at once: one
# position is a matrix times a vector, two and more take another kernel. From there on the curve comes in stairs,
# where the kernels fill another tile. A tree that ends just before a stair is cheap for its size; one that ends just
# behind it is not.

# %%
plots.verify_cost(cost.points)

# %%
forward = cost.verify(context=64)
print(f"target forward over 1 position: {1e3 * forward[1]:.1f} ms")
for n in (5, 9, 17, 33, 60):
    print(f"  over {n:2d} (a tree of {n - 1:2d}): {forward[n] / forward[1]:.2f} times as long")
print(f"drafter step over one node: {1e3 * cost.draft(1, 64):.1f} ms, over six: {1e3 * cost.draft(6, 64):.1f} ms")
print(f"everything else in a pass: {1e3 * cost.fixed:.1f} ms")

# %% [markdown]
# A pass costs one target forward, one drafter step per level of the tree, and a little that is fixed. Note the
# drafter: it is small, but a deep tree calls it once a level, whatever the size of the tree that is kept in the end.
#
# ## What one more node yields
#
# Now the passes. Each row is one tree policy followed through all texts: chains of 1 to 6 nodes, EAGLE-2's tree in
# two shapes (a frontier of 4 nodes and 3 levels; 6 nodes and 5 levels) with budgets from 4 to 59 nodes, and one that
# decides anew in every pass.

# %%
passes = analysis.load("data/replayed").passes
table = analysis.replayed(passes, fastest(trace, cost)).set_index("policy")
table[["nodes", "tau", "tokens_per_second", "speedup", "speedup_low", "speedup_high"]].round(2)

# %%
FAMILIES = {"chain": "chain", "top_k=4": "EAGLE-2, 4 wide, 3 levels", "top_k=6": "EAGLE-2, 6 wide, 5 levels"}


def by_size(table):
    """The rows that draft, as the figures want them; all speeds are a cost table's."""
    drafting = table.drop("autoregressive").reset_index()
    family = [next((FAMILIES[mark] for mark in FAMILIES if mark in name), "rate-optimal") for name in drafting.policy]
    return drafting.assign(family=family, predicted=drafting.tokens_per_second, tokens_per_second=float("nan"))


sizes = by_size(table)
plots.tau_by_size(sizes.assign(policy=sizes.family, temperature=0, prompts=len(trace.parts)))

# %%
plots.speed_by_size(sizes, table.tokens_per_second["autoregressive"], "In this machine's time")

# %% [markdown]
# **τ against size**: it rises steeply and then flattens, since the nodes come in order of their score, the best
# first. A chain stops gaining after a few nodes: it dies at its first miss, a tree loses a branch. The two shapes of
# EAGLE-2 lie on one curve.
#
# **Tokens per second against size**: every family has its peak, at a size far below the one that τ alone would
# choose; behind it each node costs more than it brings. And there the shapes differ: the deeper one calls the drafter
# five times a pass, the other three times. The dashed line is decoding without a drafter, and **no fixed tree reaches
# it here**, in spite of more than two tokens a pass: the first step of the cost curve has eaten the gain. Anybody who
# quotes τ alone would not have noticed.
#
# Where the peak lies is one line of arithmetic. A pass that earns E tokens in S seconds runs at E/S. One more node
# pays if its share of tokens over its share of time beats that rate. Step by step through the better family:

# %%
wide = sizes[sizes.family == FAMILIES["top_k=4"]].sort_values("nodes")
seconds = wide.tau / wide.predicted  # a pass
steps = wide[["nodes", "tau", "predicted"]].assign(
    tokens_added=wide.tau.diff(),
    ms_added=1e3 * seconds.diff(),
    tokens_a_second_of_the_step=wide.tau.diff() / seconds.diff(),
)
steps.round(3)

# %% [markdown]
# Read the last column against `predicted` in the row above: as long as a step's own rate is higher, the step raises
# the whole. Once it is lower, the tree is too large. (A step across no stair costs nothing and has a rate without
# bound.)
#
# ## A size of its own for every pass
#
# One size for all passes is a compromise. Where the drafter is sure, a deep tree pays; where it is lost, any tree is
# a waste. `policy=rate_optimal` takes the arithmetic from above into each pass: it knows the cost table, takes the
# scores for acceptance probabilities, and keeps the nodes whose worth exceeds their price at the going rate. Sizes
# that it chose:

# %%
chosen = passes[passes.policy == "rate_optimal"]
chosen[["n_nodes", "draft_steps", "accepted"]].describe().loc[["mean", "min", "25%", "50%", "75%", "max"]].round(1)

# %%
print(
    f"passes without a tree: {(chosen.n_nodes == 0).mean():.0%}, without a call of the drafter: "
    f"{(chosen.draft_steps == 0).mean():.0%}"
)

# %% [markdown]
# No tree at all where the drafter has little to offer, and otherwise mostly 15 nodes, which with the root are the 16
# positions in front of the next stair: up to there another node costs next to nothing.
#
# Compared with the best fixed tree, on the same prompts:

# %%
best_fixed = table.drop(["autoregressive", "rate_optimal"]).tokens_per_second.idxmax()
sums = analysis.prompt_sums(passes[passes.policy.isin(["rate_optimal", best_fixed])])
print("best fixed tree:", best_fixed)
analysis.compared(sums, "emitted", "seconds", best_fixed).round(3)

# %% [markdown]
# `gain` is a ratio of speeds, with its 95 % interval over prompts. Mind the selection: the best fixed tree was picked
# on these very texts, which flatters it, while the rate-optimal policy had to find its way; and twelve short texts
# leave a wide interval. If the interval holds 1, the honest summary is that the two are level here.
#
# ## How far could one go?
#
# The text is known, so one can compute the fastest way through it that any policy could take with this drafter's
# candidates on this machine: a shortest path over text positions (`bound.fastest`). It knows every token beforehand
# and drafts nothing in vain; it is a bound, not a rival.

# %%
share = table.bound_share.rename("share of the bound").sort_values(ascending=False)
share.head(6).to_frame().round(3)

# %% [markdown]
# What is missing to 1 is the price of not knowing: nodes verified that were not accepted, and steps drafted for
# nothing. `eagle-tree replay regret=true` splits it into its causes.
#
# ## The same trace on another machine
#
# Nothing about the texts, the drafter or the trees depends on the machine. Only the cost table does, so another one
# gives another answer within seconds. Here is the same trace in the time of an 8B model on one H100, as a roofline
# models it (marked as modelled wherever it appears: an upper bound of speed, good for comparing policies). There, a
# forward over 60 positions takes hardly longer than one over a single position.

# %%
other = analysis.replayed(analysis.load("data/replayed_h100").passes).set_index("policy")
plots.speed_by_size(by_size(other), other.tokens_per_second["autoregressive"], "In a modelled H100's time")

# %%
both = {"CPU, float32 (measured)": table, "H100, 8B (modelled)": other}
fixed = {name: one.drop(["autoregressive", "rate_optimal"]) for name, one in both.items()}
pd.DataFrame(
    {
        "best fixed tree": {name: one.speedup.idxmax() for name, one in fixed.items()},
        "its speed-up": {name: one.speedup.max() for name, one in fixed.items()},
        "its nodes": {name: one.nodes[one.speedup.idxmax()] for name, one in fixed.items()},
        "rate-optimal speed-up": {name: one.speedup["rate_optimal"] for name, one in both.items()},
        "rate-optimal nodes": {name: one.nodes["rate_optimal"] for name, one in both.items()},
    }
).round(2)

# %% [markdown]
# One trace, one drafter, two answers. The rate-optimal policy found both without being told: it read the cost table.
#
# **For your own model**: `eagle-tree calibrate`, `eagle-tree trace` with the policies that you consider, then
# `eagle-tree replay cost=measured`. Do not take a tree from a paper that was measured on another machine.
