"""Predict whether `trunc_normal_` draws weights again.

That depends on values that it reads (torch 2.13). `trunc_normal_` draws until all weights are between its
bounds, and reads from the GPU after each round whether a weight is not.
"""

import sys
from math import erf, exp, pi, sqrt
from types import FrameType

from msgspec import Struct

from planner.capture.cuda.callers import draws_truncated

_MOST_FRAMES = 16  # between a read in Python and the dispatch mode that asks


class Rejections(Struct):
    """A predictor of whether a round of `trunc_normal_` rejects a weight; it counts the rounds of a call."""

    rounds: int = 0  # rounds after the first of the current call

    def answer(self) -> bool | None:
        """Return whether this round of `trunc_normal_` probably rejects a weight, or None if none runs.

        Each call inside `trunc_normal_` counts one round.
        """
        frame = _drawing_frame()
        if frame is None:
            return None
        drawn = frame.f_locals
        is_first = drawn.get("result", drawn["tensor"]) is drawn["tensor"]
        self.rounds = 0 if is_first else self.rounds + 1
        rejected = 1 - _accepted(drawn["mean"], drawn["std"], drawn["a"], drawn["b"])
        count = drawn["tensor"].numel() * rejected ** (self.rounds + 1)
        if isinstance(drawn, dict):  # before Python 3.13 a copy, which would keep the tensors alive
            drawn.clear()
        return bool(count >= 1)


def _drawing_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None or draws_truncated(frame):
            return frame
        frame = frame.f_back
    return None


def _accepted(mean: float, std: float, low: float, high: float) -> float:
    """Return the probability that a drawn weight is accepted.

    Weights are drawn from the normal distribution, or from a uniform distribution if at most 30 % of the
    normal distribution is between the bounds.
    """

    def below(x: float) -> float:
        return (1 + erf((x - mean) / std / sqrt(2))) / 2

    inside = below(high) - below(low)
    if inside > 0.3:
        return inside
    peak = exp(-(((max(low, min(mean, high)) - mean) / std) ** 2) / 2)
    return inside * std * sqrt(2 * pi) / ((high - low) * peak)
