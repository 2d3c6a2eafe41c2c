"""Tree policies: small pure classes over one seam, so that a difference in a table is a difference of policies."""

from eagle_tree.policy.base import Autoregressive, Policy
from eagle_tree.policy.calibrated import Calibrated
from eagle_tree.policy.dynamic import BestFirst, Eagle2, OptTree, Talon, greedy_closed
from eagle_tree.policy.fixed import Chain, Static, specinfer
from eagle_tree.policy.hindsight import hindsight
from eagle_tree.policy.measured import Accuracy, medusa, medusa_from_file, sequoia, sequoia_from_file, sequoia_sized
from eagle_tree.policy.rate import RateOptimal
from eagle_tree.policy.stops import ConfidenceStop, DepthStop, EntropyStop

__all__ = [
    "Accuracy",
    "Autoregressive",
    "BestFirst",
    "Calibrated",
    "Chain",
    "ConfidenceStop",
    "DepthStop",
    "Eagle2",
    "EntropyStop",
    "OptTree",
    "Policy",
    "RateOptimal",
    "Static",
    "Talon",
    "greedy_closed",
    "hindsight",
    "medusa",
    "medusa_from_file",
    "sequoia",
    "sequoia_from_file",
    "sequoia_sized",
    "specinfer",
]
