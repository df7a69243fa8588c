"""The profile run of a server, beside plain torch on emulated GPUs."""

import csv

from benchmarks.emulated.serving import ROWS, SHAPES, compute


def test_sums_are_what_the_allocator_held() -> None:
    """Each shape is computed as its row says; layers are the same to the byte, the sampler within 1.6 %."""
    with ROWS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(SHAPES) >= 10
    for row, shape in zip(rows, SHAPES, strict=True):
        layers, sampler = compute(*shape)
        assert (int(row["layers"]), int(row["sampler"])) == (layers, sampler)
        assert int(row["emulated_layers"]) == layers
        assert 0 <= int(row["emulated_sampler"]) - sampler <= 0.016 * sampler
