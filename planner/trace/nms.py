"""Non-maximum suppression on the CPU, for a torchvision whose compiled operators do not load."""

import numpy as np
import torch
from torch import Tensor


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes that stay, by falling score: each removes those that overlap with it too much.

    `boxes` is n x 4 of x1, y1, x2, y2. Answers as torchvision::nms on the CPU.
    """
    order = scores.argsort(descending=True, stable=True)
    corners = boxes.detach().to(torch.float64)[order].numpy()
    x1, y1, x2, y2 = corners.T
    areas = (x2 - x1) * (y2 - y1)
    left = np.arange(len(order))
    kept = []
    while len(left):
        first, rest = left[0], left[1:]
        kept.append(int(first))
        width = np.minimum(x2[rest], x2[first]) - np.maximum(x1[rest], x1[first])
        height = np.minimum(y2[rest], y2[first]) - np.maximum(y1[rest], y1[first])
        shared = np.maximum(width, 0) * np.maximum(height, 0)
        left = rest[~(shared > iou_threshold * (areas[first] + areas[rest] - shared))]
    return order[torch.tensor(kept, dtype=torch.int64)]
