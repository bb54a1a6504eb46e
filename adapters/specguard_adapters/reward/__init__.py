"""Published process reward models: a number in [0, 1] for each step of an answer."""

from specguard_adapters.reward.kinds import KINDS, Head, Layout, RewardKind, Scale

__all__ = ["KINDS", "Head", "Layout", "RewardKind", "Scale"]
