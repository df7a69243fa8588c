"""Compute non-maximum suppression on the CPU.

torchvision's compiled operators do not load in all installations.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Pairs = tuple[NDArray[np.intp], NDArray[np.intp]]

MOST_PAIRS = 2**20  # limit of pairs; if there are more, few boxes are kept, and compared one by one


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the indices of the boxes that non-maximum suppression keeps, by descending score.

    A kept box removes the later boxes whose intersection over union with it exceeds the threshold.
    `boxes` is n x 4 of x1, y1, x2, y2. The result equals torchvision::nms on the CPU.
    """
    order = scores.argsort(descending=True, stable=True)
    corners = boxes.detach().to(torch.float64)[order].numpy()
    stays = _survivors(corners, iou_threshold)
    return order[torch.from_numpy(np.flatnonzero(stays))]


def _survivors(corners: NDArray[np.float64], threshold: float) -> NDArray[np.bool_]:
    """Return a mask of the boxes that are kept, of boxes sorted from the best score to the worst."""
    is_usual = threshold >= 0 and bool((corners[:, 2:] >= corners[:, :2]).all())
    near = _near(corners[:, 0], corners[:, 2], threshold) if is_usual else None
    if near is None:
        return _survivors_one_by_one(corners, threshold)
    better, worse = _both_near(corners[:, 1], corners[:, 3], near, threshold)
    overlapping = _overlap(corners[better], corners[worse], threshold)
    better, worse = better[overlapping], worse[overlapping]
    better, worse = np.minimum(better, worse), np.maximum(better, worse)
    by_rank = np.argsort(better, kind="stable")
    better, worse = better[by_rank], worse[by_rank]
    stays = np.ones(len(corners), dtype=np.bool_)
    for box, removed in zip(better.tolist(), worse.tolist(), strict=True):
        if stays[box]:
            stays[removed] = False
    return stays


def _near(left: NDArray[np.float64], right: NDArray[np.float64], threshold: float) -> Pairs | None:
    """Return the pairs of boxes close enough in x to overlap beyond the threshold, or None if too many.

    `left` and `right` are the boxes' sides. More than `MOST_PAIRS` pairs are too many. An overlapping pair
    shares more than the threshold of each box's width. So the box that begins further right begins within the
    first 1 - threshold of the other box's width.
    """
    by_left = np.argsort(left, kind="stable")
    begins = left[by_left]
    reach = begins + max(1 - threshold, 0.0) * (right[by_left] - begins)
    # The reach is slightly enlarged against rounding errors.
    ends = np.searchsorted(begins, reach + 1e-9 * np.abs(reach), side="right")
    counts = np.maximum(ends - np.arange(1, len(begins) + 1), 0)
    if counts.sum() > MOST_PAIRS:
        return None
    first = np.repeat(np.arange(len(begins)), counts)
    within = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
    return by_left[first], by_left[first + 1 + within]


def _both_near(
    top: NDArray[np.float64], bottom: NDArray[np.float64], pairs: Pairs, threshold: float
) -> Pairs:
    """Return the pairs in `pairs` that are also close enough in y to overlap beyond the threshold."""
    one, other = pairs
    slack = max(1 - threshold, 0.0) * (bottom - top) + 1e-9 * np.abs(bottom)
    top = np.ascontiguousarray(top)
    near = np.abs(top[one] - top[other]) <= np.maximum(slack[one], slack[other])
    return one[near], other[near]


def _survivors_one_by_one(corners: NDArray[np.float64], threshold: float) -> NDArray[np.bool_]:
    stays = np.zeros(len(corners), dtype=np.bool_)
    left = np.arange(len(corners))
    while len(left):
        first, rest = left[0], left[1:]
        stays[first] = True
        left = rest[~_overlap(corners[first], corners[rest], threshold)]
    return stays


def _overlap(a: NDArray[np.float64], b: NDArray[np.float64], threshold: float) -> NDArray[np.bool_]:
    """Return a mask of the pairs of boxes whose intersection over union exceeds the threshold."""
    width = np.minimum(a[..., 2], b[..., 2]) - np.maximum(a[..., 0], b[..., 0])
    height = np.minimum(a[..., 3], b[..., 3]) - np.maximum(a[..., 1], b[..., 1])
    shared = np.maximum(width, 0) * np.maximum(height, 0)
    return np.asarray(shared > threshold * (_areas(a) + _areas(b) - shared))


def _areas(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray((boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1]))
