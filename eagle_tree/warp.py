"""The target's law at the nodes of a tree: logits, processed and warped as `generate` would.

Order, as in transformers: processors (each node with its own prefix), temperature, top-k, top-p, then
further warpers. Temperature, top-k and top-p are native. Rows are warped on demand: an acceptance walk
looks at D+1 rows of a tree of N+1 nodes, and a row costs a pass over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eagle_tree.checks import is_count, is_number
from eagle_tree.tree import Tree

NUCLEUS_WIDTH = 1024
"""Tokens per row that top-p sorts at first; a wider nucleus is flagged, and the caller widens."""
WIDENING = 8


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the target's logits.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep tokens whose logit reaches the k-th largest; None keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1 keeps all.
        processors: transformers `LogitsProcessor`s that go before the temperature (penalties, bans).
        warpers: transformers warpers that go after top-p (min-p, typical, eta).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    processors: Sequence = field(default=())
    warpers: Sequence = field(default=())

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature={self.temperature!r} must be a number >= 0")
        if self.top_k is not None and not is_count(self.top_k):
            raise ValueError(f"top_k={self.top_k!r} must be an integer >= 1, or None for all tokens")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p!r} must be in (0, 1]")

    @property
    def greedy(self) -> bool:
        """Whether the next token is the largest logit's."""
        return self.temperature == 0


class Law:
    """The target's next-token law at every node of one tree.

    Args:
        logits: `[N+1, V]`, raw; row v is the law after node v's path.
        sampling: how to process and warp them.
        tree: the tree, for processors that read a node's prefix.
        prefix: `[n] i64`, the tokens before the root; only processors and warpers need it.
        nucleus_width: tokens a row that top-p sorts; see `uncovered`.

    Attributes:
        uncovered: a boolean scalar on the device: some nucleus looked at so far was wider than
            `nucleus_width`. What was computed is then wrong and is computed again from `widened()`: so the
            common case needs neither a whole sort nor a look at the device.
    """

    def __init__(
        self,
        logits: Tensor,
        sampling: Sampling,
        tree: Tree | None = None,
        prefix: Tensor | None = None,
        nucleus_width: int = NUCLEUS_WIDTH,
    ):
        self.sampling = sampling
        self.tree = tree
        self.prefix = prefix
        self.nucleus_width = min(nucleus_width, logits.shape[-1])
        self.uncovered = torch.zeros((), dtype=torch.bool, device=logits.device)
        self.logits = logits
        if sampling.processors:
            self.logits = self._per_node(sampling.processors, torch.arange(logits.shape[0], device=logits.device))

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    def widened(self) -> Law:
        """The same law with more of every nucleus sorted; a few times over, all of it."""
        plain = Sampling(self.sampling.temperature)
        wide = Law(self.logits, plain, self.tree, self.prefix, WIDENING * self.nucleus_width)
        wide.sampling = self.sampling  # the processors went over the logits already
        return wide

    def scores(self, node: Tensor) -> Tensor:
        """Warped logits `[m, V] f32` of the given nodes, -inf where a token is excluded.

        Defined up to a constant per row. At temperature 0 they are the processed logits themselves.
        """
        scores = self.logits.index_select(0, node)
        scores = scores.double() if scores.dtype == torch.float64 else scores.float()
        sampling = self.sampling
        if sampling.greedy:
            return scores
        if sampling.temperature != 1:
            scores = scores / sampling.temperature
        if sampling.top_k is not None and sampling.top_k < self.vocab_size:
            threshold = scores.topk(sampling.top_k, -1).values[:, -1:]
            scores = scores.masked_fill(scores < threshold, -torch.inf)
        if sampling.top_p < 1:
            scores = self._nucleus(scores)
        if sampling.warpers:
            scores = self._per_node(sampling.warpers, node, scores)
        return scores

    def log_probs(self, node: Tensor) -> Tensor:
        """Normalised log law `[m, V]` of the given nodes; one-hot at temperature 0."""
        scores = self.scores(node)
        if self.sampling.greedy:
            best = scores.argmax(-1, keepdim=True)
            return torch.full_like(scores, -torch.inf).scatter(-1, best, 0.0)
        return scores.log_softmax(-1)

    def node_log_prob(self, tree: Tree) -> Tensor:
        """`[N+1]`, log p(token[v] | path of v's parent); 0 at the root."""
        parent = tree.parent.clamp(min=0)
        if self.sampling.greedy:
            best = self.logits.argmax(-1)
            log_prob = torch.where(tree.token == best[parent], 0.0, -torch.inf).to(tree.log_conf)
        else:
            scores = self.scores(torch.arange(self.logits.shape[0], device=self.logits.device))
            log_prob = scores[parent, tree.token] - scores.logsumexp(-1)[parent]
        log_prob[0] = 0.0
        return log_prob

    def _nucleus(self, scores: Tensor) -> Tensor:
        """Top-p by partial selection: transformers' rule on the `nucleus_width` largest of each row.

        transformers drops a token if the mass of it and all smaller ones is at most 1 - p; that is: keep
        it if the mass strictly before it, in descending order, is below p.
        """
        top, index = scores.topk(self.nucleus_width, -1)
        mass = (top - scores.logsumexp(-1, keepdim=True)).exp()
        cumulative = mass.cumsum(-1)
        keep = cumulative - mass < self.sampling.top_p
        keep[:, 0] = True
        if self.nucleus_width < self.vocab_size:
            self.uncovered = self.uncovered | (cumulative[:, -1] < self.sampling.top_p).any()
        return torch.full_like(scores, -torch.inf).scatter(-1, index, top.masked_fill(~keep, -torch.inf))

    def _per_node(self, processors: Sequence, node: Tensor, scores: Tensor | None = None) -> Tensor:
        """Run transformers processors on rows, each with its own node's prefix, grouped by depth.

        Processors are other people's code over `[batch, length]` prefixes of one length, hence the groups.
        """
        if self.prefix is None or self.tree is None:
            raise ValueError("logits processors read prefixes: give the law its tree and prefix")
        scores = self.logits.float() if scores is None else scores
        result = scores.clone()
        depth = self.tree.depth[node]
        tokens = self.tree.token[self.tree.paths.clamp(min=0)]
        for level in range(self.tree.max_depth + 1):
            rows = (depth == level).nonzero().squeeze(-1)
            if not rows.numel():
                continue
            path = tokens[node[rows], : level + 1]
            prefix = torch.cat([self.prefix.expand(rows.shape[0], -1), path], 1)
            processed = scores[rows]
            for processor in processors:
                processed = processor(prefix, processed)
            result[rows] = processed
        return result
