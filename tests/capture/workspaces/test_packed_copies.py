"""Tables of kernels that copy between many tensors and one, beside those of an emulated run of FSDP2.

The run: a transformer of width 512 over two emulated A100s with torch 2.13, parameters in bfloat16 and
gradients reduced in float32; the sizes are those that its allocator was asked for.
"""

from math import prod

import pytest
import torch

from planner.capture.workspaces.registry import RULES, rule_of
from planner.program import Target

A100, RANKS = Target((8, 0), 108), 2
VECTOR = (512,)
BLOCK = (
    *(VECTOR, VECTOR, (1536, 512), (1536,), (512, 512), VECTOR),  # attention with its norm
    *(VECTOR, VECTOR, (2048, 512), (2048,), (512, 2048), VECTOR),  # the other half
)
REST = ((32000, 512), VECTOR, VECTOR, (32000, 512))  # embedding, last norm, head


@pytest.mark.parametrize(("shapes", "size_bytes"), [(BLOCK, 12744), (REST, 25752)])
def test_copies_out_of_a_gathered_buffer(shapes: tuple[tuple[int, ...], ...], size_bytes: int) -> None:
    """A table of addresses, sizes and thread blocks, of which large parts take fewer than their tiles."""
    parts = [prod(shape) // RANKS for shape in shapes]
    gathered = torch.empty(RANKS, sum(parts), dtype=torch.bfloat16, device="meta")
    out = [torch.empty(RANKS, part, dtype=torch.bfloat16, device="meta") for part in parts]
    rule = RULES[torch.ops.aten.split_with_sizes_copy.out]
    assert rule((gathered, parts, 1, out), None, A100) == (size_bytes,)
    cast = [part.to(torch.float32) for part in out]
    assert rule((gathered, parts, 1, cast), None, A100) == ()  # one copy for each


@pytest.mark.parametrize(("shapes", "size_bytes"), [(BLOCK, 25248), (REST, 256224)])
def test_copies_into_the_buffer_of_a_reduction(shapes: tuple[tuple[int, ...], ...], size_bytes: int) -> None:
    """A table as large as the tiles of all gradients, counted in the type of the reduction."""
    gradients = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    buffer = torch.empty(RANKS, sum(map(prod, shapes)) // RANKS, dtype=torch.float32, device="meta")
    rule = RULES[torch.ops.aten._chunk_cat.out]
    assert rule((gradients, 0, RANKS, buffer), None, A100) == (size_bytes,)


def test_other_casts_pad_one_after_another() -> None:
    """From float16 to float32 there is no kernel for all: only uneven gradients are copied, with padding."""
    even, uneven = (torch.empty(rows, 8, dtype=torch.float16, device="meta") for rows in (4, 5))
    buffer = torch.empty(RANKS, 40, dtype=torch.float32, device="meta")
    (held,) = RULES[torch.ops.aten._chunk_cat.out](([even, uneven], 0, RANKS, buffer), None, A100)
    assert getattr(held, "number", None) == 6 * 8 * 2


def test_fsdp_has_the_same_rules() -> None:
    """Its own operators call those of ATen."""
    import torch.distributed.fsdp  # registers them

    for name, plain in (("chunk_cat", "_chunk_cat"), ("split_with_sizes_copy", "split_with_sizes_copy")):
        of_fsdp = rule_of(getattr(torch.ops.fsdp, name).default)
        assert of_fsdp is RULES[getattr(torch.ops.aten, plain).out]
