"""Draft trees for speculative decoding: policies, drafters, acceptance rules, measured pass by pass."""

__version__ = "0.1.0"
