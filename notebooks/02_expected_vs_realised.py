# %% [markdown]
# # Expected against realised: does a pass deliver what was promised?
#
# In one *pass* the drafter grows a tree of guesses, the target reads it in one forward, and the accepted path plus
# one more token (the *bonus*, the target's own) are emitted. A pass without a drafter emits exactly one token; the
# point of all of this is to emit more. Before the target has spoken, how many tokens should one expect?
#
# A sum answers it. The number of accepted nodes is a sum over nodes of "1 if accepted", so its expectation is the sum
# of the nodes' acceptance probabilities. Add 1 for the bonus:
#
# * `expected_draft` = 1 + Σ exp(score), with the **drafter's** probabilities: what EAGLE-2 believes when it chooses
#   the tree;
# * `expected_target` = 1 + Σ reach, with the **target's** own probabilities along each path: what a pass over this
#   tree yields on average, known only after the forward;
# * `accepted` + 1: what came.
#
# The first against the second tells whether the drafter is honest. The second against the third tells whether the
# *code* is: if decoding is lossless the two agree on average, and nothing but chance lies between them.

# %%
# %matplotlib inline
# %config InlineBackend.print_figure_kwargs = {"dpi": 64}
import pandas as pd

from eagle_tree import analysis, plots

runs = analysis.load("data/decoded")
passes = runs.passes
columns = ["prompt_id", "pass_id", "n_nodes", "expected_draft", "expected_target", "accepted", "emitted"]
passes.loc[passes.policy == "eagle2", columns].head(8).round(2)

# %% [markdown]
# Temperature 1, on purpose: at temperature 0 the target's probabilities are 0 or 1, `expected_target` equals
# `accepted` + 1 in every single pass, and there is nothing to see.
#
# ## Pass by pass
#
# One pass is one draw, so a point per pass would be a cloud. Each mark is a bin of passes with similar expectations;
# the bars are two standard errors.

# %%
plots.expected_against_realised(passes)

# %% [markdown]
# **Right**: marks lie on the diagonal within their bars, over the whole range. The target keeps its promises.
# **Left**: where the marks lie below the diagonal, the drafter promised more than came. Both panels rise: passes that
# were expected to be good are good, which is what a policy needs in order to choose between trees.
#
# ## Prompt by prompt
#
# The same means, one mark a prompt. Texts differ far more than policies do: some are easy for any drafter. That is
# why every interval in this project is a bootstrap over prompts, and why policies are compared on the same prompts.

# %%
plots.expected_by_prompt(analysis.by_prompt(passes))

# %%
analysis.tokens_per_pass(passes).round(3)

# %% [markdown]
# `tau` (τ) is the field's number: emitted tokens over passes. It is a little below `realised`, because the last pass
# of a text may accept tokens that lie beyond its end.
#
# ## Two live meters
#
# "It looks right" is not good enough for a claim of losslessness. Every pass reads two meters, whose mean is **zero
# if the target's distribution is kept**, whatever the drafter, the tree or the policy:
#
# * **acceptance meter** = (`accepted` + 1) − `expected_target`. Given the tree, the walk should accept as much as the
#   target's probabilities say. A rule that is too generous drives it up, one that is too strict drives it down.
# * **surprisal meter** = Σ over the emitted tokens y of −log p(y) − H(p). The surprise of a token drawn from p is, on
#   average, the entropy of p. If tokens come from another distribution than the target's, their surprise is off.
#
# Each covers for the other. The acceptance meter does not look at the bonus token, so it cannot notice one drawn from
# the wrong distribution; the surprisal meter sees every token.

# %%
meters = {}
for policy, group in passes.groupby("policy", sort=False):
    for name in ("acceptance_meter", "surprisal_meter"):
        mean, error = analysis.meter(group, name)
        meters[policy, name] = {"mean": mean, "standard error": error, "errors from zero": mean / error}
pd.DataFrame(meters).T.round(3)

# %% [markdown]
# Between −2 and 2 standard errors is what chance does. So this run gives no reason to doubt its decoding, and the
# standard error says how much a run of this length could have noticed: a bias of three standard errors or more. More
# passes make the net finer, by the square root of their number.
#
# ## A meter that cannot move proves nothing
#
# Let us make it move. Suppose that a mistake in the walk cut the last node off the accepted path, in some of the
# passes. The text might still read well. What does the meter say?

# %%
tree = passes[passes.policy == "eagle2"]
rows = []
for every in (10, 3, 1):
    lost = (tree.pass_id % every == 0) & (tree.accepted > 0)
    mean, error = analysis.meter(tree.assign(acceptance_meter=tree.acceptance_meter - lost), "acceptance_meter")
    row = {
        "damaged": f"every pass in {every}",
        "tokens lost": lost.sum(),
        "mean": mean,
        "errors from zero": mean / error,
    }
    rows.append(row)
pd.DataFrame(rows).set_index("damaged").round(3)

# %% [markdown]
# Losing a token here and there shifts the mean by the share of the passes that lost one; whether that stands out
# depends on the length of the run. This is the use of the standard error: it turns "we saw no problem" into "a
# problem larger than this would have shown".
#
# One mistake is worth knowing, because it is easy to make: do not drop passes by how they went. The last pass of each
# text, or the passes that accepted nothing, belong to the mean as much as any other. Without the passes that accepted
# nothing:

# %%
mean, error = analysis.meter(tree[tree.accepted > 0], "acceptance_meter")
print(f"acceptance meter of the passes that accepted something: {mean:+.3f} ± {error:.3f}")

# %% [markdown]
# A perfectly honest run looks broken, because the selection looked at the outcome.
#
# The meters are statistical. The strict tests stand beside them: `eagle-tree certify` computes the law of each
# acceptance rule exactly, over small vocabularies; and since the noise here belongs to a text position and not to a
# pass, all policies emit the same tokens from the same seed (`eagle-tree bench` counts the answers that differ).
