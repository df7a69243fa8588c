"""Batch sizes that run above some that do not: the allocator cuts segments better for them."""

from pathlib import Path

import pytest

from planner import estimate, max_batch
from planner.planning.search.boundary import NEIGHBOUR_SHARES, NEIGHBOURS


@pytest.mark.slow
def test_no_neighbour_above_the_largest_without_retries_runs_without_retries(tmp_path: Path) -> None:
    """The leading answer is searched among the neighbours as the largest with retries is."""
    saved = tmp_path / "saved.trace"
    model = "torchvision:quantization.quantized_mobilenet_v3_large"
    result = max_batch(model, gpu_mib=24_000, save_trace=saved)
    best = result.comfortable_batch
    distances = {*range(1, NEIGHBOURS + 1), *(round(share * best) for share in NEIGHBOUR_SHARES)}
    neighbours = [best + distance for distance in distances if best + distance <= result.max_batch]
    assert len(neighbours) > NEIGHBOURS
    fits = {batch: estimate(trace=saved, batch=batch, gpu_mib=24_000).fits for batch in neighbours}
    assert "yes" not in fits.values()
