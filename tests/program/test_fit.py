"""Two traces are fitted to one program for every batch size, or a message states where they diverge."""

import pytest
from hypothesis import given, strategies as st

from planner.program.events import Alloc, Category, Event, Free, Phase, PhaseStart, Site, Trace
from planner.program.extrapolation.fit import NotAffineError, fit_by_site, fit_traces, tensors_diverge
from planner.program.program import AffineAlloc, Program, ProgramEvent, constant_events
from tests.helpers.structs import replace
from tests.helpers.traces import SITES, alloc, programs


def trace(batch: int, *events: Event, sites: tuple[Site, ...] = SITES) -> Trace:
    return Trace(events, sites, batch)


def fitted(first: Trace, second: Trace) -> tuple[ProgramEvent, ...]:
    return fit_traces(first, second).events


def refusal(first: Trace, second: Trace) -> str:
    with pytest.raises(NotAffineError) as caught:
        fit_traces(first, second)
    return str(caught.value)


BASE = (
    PhaseStart(1, Phase.FORWARD),
    Alloc(0, 2048, Category.INPUT, 0),
    Alloc(1, 4096, Category.ACTIVATION, 1),
    Free(0),
    PhaseStart(1, Phase.BACKWARD),
)
AFFINE_BASE = constant_events(BASE)


@given(programs(), st.integers(1, 40), st.integers(1, 40))
def test_recovers_programs(program: Program, low: int, distance: int) -> None:
    """The traces of a program at any two batch sizes, in either order, give all its sizes back."""
    first, second = program.instantiate(low), program.instantiate(low + distance)
    assert fit_traces(first, second) == fit_traces(second, first) == replace(program, targets={})
    assert not tensors_diverge(program, second)


def test_sizes_by_hand() -> None:
    """Sizes that stay, grow from nothing, grow from a base, and vanish at batch 1 become affine."""
    sizes = {2: (512, 800, 900, 64), 3: (512, 1200, 1300, 128)}
    first, second = (trace(batch, *map(alloc, range(4), sizes[batch])) for batch in (2, 3))
    lines = ((512, 0), (0, 400), (100, 400), (-64, 64))
    assert fitted(first, second) == tuple(
        AffineAlloc(block, fixed, slope, Category.TEMPORARY, 0) for block, (fixed, slope) in enumerate(lines)
    )


def test_sites_are_compared_by_what_they_name() -> None:
    """Two traces that number their sites differently are fitted."""
    events = (replace(e, site=2 - e.site) if isinstance(e, Alloc) else e for e in BASE)
    second = replace(trace(3, *events), sites=SITES[::-1])
    assert fitted(trace(2, *BASE), second) == AFFINE_BASE


@pytest.mark.parametrize(
    ("place", "event", "message"),
    [
        (
            2,
            Alloc(1, 4096, Category.ACTIVATION, 2),
            "event 2 is aten.convolution in features.0 allocating block 1 for activations at batch 2 and "
            "aten.addmm in classifier allocating block 1 for activations at batch 3",
        ),
        (
            2,
            Alloc(1, 4096, Category.TEMPORARY, 1),
            "event 2 is aten.convolution in features.0 allocating block 1 for activations at batch 2 and "
            "aten.convolution in features.0 allocating block 1 for temporaries at batch 3",
        ),
        (
            3,
            Free(1),
            "event 3 is block 0 of to in the loop freed at batch 2 and "
            "block 1 of aten.convolution in features.0 freed at batch 3",
        ),
        (
            3,
            Alloc(2, 512, Category.WORKSPACE, 2),
            "event 3 is block 0 of to in the loop freed at batch 2 and "
            "aten.addmm in classifier allocating block 2 for workspaces at batch 3",
        ),
        (
            4,
            PhaseStart(2, Phase.BACKWARD),
            "event 4 is the start of step 1, backward at batch 2 and "
            "the start of step 2, backward at batch 3",
        ),
        (
            0,
            Free(0),
            "event 0 is the start of step 1, forward at batch 2 and "
            "block 0 of to in the loop freed at batch 3",
        ),
    ],
    ids=["site", "category", "which freed", "free or alloc", "phase", "phase or free"],
)
def test_different_events(place: int, event: Event, message: str) -> None:
    """If two traces diverge, the message names the event and what it is in each of them."""
    other = (*BASE[:place], event, *BASE[place + 1 :])
    assert refusal(trace(2, *BASE), trace(3, *other)) == message


def test_different_lengths() -> None:
    """If one trace ends early, the message names the first event that it lacks."""
    message = (
        "event 3 at batch {} is block 0 of to in the loop freed; the trace at batch {} has ended before it"
    )
    assert refusal(trace(2, *BASE), trace(3, *BASE[:3])) == message.format(2, 3)
    assert refusal(trace(2, *BASE[:3]), trace(3, *BASE)) == message.format(3, 2)


@pytest.mark.parametrize(
    ("low_bytes", "high_bytes", "flaw"),
    [
        (2048, 2049, "2048 at batch 2 and 2049 at batch 4: no whole number per sample"),
        (2049, 2048, "2049 at batch 2 and 2048 at batch 4: no whole number per sample"),
        (2048, 2046, "2048 bytes at batch 2 and 2046 at batch 4: no affine size for every batch"),
        (2048, 8192, "2048 bytes at batch 2 and 8192 at batch 4: no affine size for every batch"),
    ],
    ids=["half a byte", "half a byte less", "less with more samples", "negative at batch 1"],
)
def test_not_affine(low_bytes: int, high_bytes: int, flaw: str) -> None:
    """A size that is not affine in whole bytes for every batch size is refused with its place."""
    first = trace(2, alloc(0, 512), Alloc(1, low_bytes, Category.ACTIVATION, 1))
    second = trace(4, alloc(0, 512), Alloc(1, high_bytes, Category.ACTIVATION, 1))
    assert refusal(first, second) == f"block 1 (aten.convolution in features.0): {flaw}"


def test_a_third_trace_finds_out_a_parabola() -> None:
    """A size that two batch sizes take for affine diverges at the third."""

    def at(batch: int) -> Trace:
        return trace(batch, alloc(0, 512), Alloc(1, batch * batch + 10 * batch, Category.ACTIVATION, 1))

    program = fit_traces(at(2), at(3))
    assert not tensors_diverge(program, at(3))
    assert tensors_diverge(program, at(4))


def test_one_batch_size_is_no_line() -> None:
    """Two traces of one batch size are a mistake of the caller, no answer."""
    with pytest.raises(ValueError, match="both traces are of batch 2"):
        fit_traces(trace(2, *BASE), trace(2, *BASE))


def with_workspaces(sizes: tuple[int, ...], batch: int) -> Trace:
    """The base with workspaces of these sizes, one after the other, before the second operator's output."""
    workspaces: list[Event] = []
    for number, size in enumerate(sizes, 10):
        workspaces += [Alloc(number, size, Category.WORKSPACE, 1), Free(number)]
    return trace(batch, *BASE[:2], *workspaces, *BASE[2:])


def test_affine_workspaces() -> None:
    """Workspaces that both batch sizes take alike, and that grow evenly, hold for every batch size."""
    assert fitted(with_workspaces((1000, 64), 2), with_workspaces((1500, 64), 3)) == (
        *AFFINE_BASE[:2],
        *(AffineAlloc(10, 0, 500, Category.WORKSPACE, 1), Free(10)),
        *(AffineAlloc(11, 64, 0, Category.WORKSPACE, 1), Free(11)),
        *AFFINE_BASE[2:],
    )


@pytest.mark.parametrize(
    ("low", "high"),
    [((), (512,)), ((512,), ()), ((1000,), (1001,)), ((2000,), (1000,)), ((512, 512), (512,))],
    ids=["only there", "only here", "half bytes", "less with more", "another number"],
)
def test_workspaces_that_are_not_affine(low: tuple[int, ...], high: tuple[int, ...]) -> None:
    """Workspaces that come, go, or are not affine stand as the second trace had them; the rest is fitted."""
    batch = 4 if (low, high) == ((1000,), (1001,)) else 3
    free = 10 + len(low) if low else 2  # names that come after those of the first trace
    expected: list[ProgramEvent] = []
    for number, size in enumerate(high, free):
        expected += [AffineAlloc(number, size, 0, Category.WORKSPACE, 1), Free(number)]
    both = with_workspaces(low, 2), with_workspaces(high, batch)
    assert fitted(*both) == (*AFFINE_BASE[:2], *expected, *AFFINE_BASE[2:])


def test_workspaces_around_an_output_are_replaced_whole() -> None:
    """A workspace that is allocated before an output and freed after it keeps both events together."""

    def around(size: int, batch: int) -> Trace:
        held = Alloc(10, size, Category.WORKSPACE, 1)
        return trace(batch, *BASE[:2], held, BASE[2], Free(10), *BASE[3:])

    def merged(block: AffineAlloc) -> tuple[ProgramEvent, ...]:
        return (*AFFINE_BASE[:2], block, AFFINE_BASE[2], Free(block.block), *AFFINE_BASE[3:])

    assert fitted(around(1000, 2), around(1500, 3)) == merged(AffineAlloc(10, 0, 500, Category.WORKSPACE, 1))
    assert fitted(around(1500, 2), around(1000, 3)) == merged(AffineAlloc(11, 1000, 0, Category.WORKSPACE, 1))


def test_a_workspace_that_stays_is_compared() -> None:
    """A workspace that is never freed has to be there in both traces."""
    stays = Alloc(10, 512, Category.WORKSPACE, 1)
    assert refusal(trace(2, *BASE), trace(3, *BASE[:2], stays, *BASE[2:])) == (
        "event 2 is aten.convolution in features.0 allocating block 1 for activations at batch 2 and "
        "aten.convolution in features.0 allocating block 10 for workspaces at batch 3"
    )


def test_an_estimate_from_a_loop_over_samples() -> None:
    """What both traces have follows the two, and what comes of single samples stays as it is."""

    def looping(batch: int) -> Trace:
        losses = [Alloc(10 + sample, 512, Category.TEMPORARY, 0) for sample in range(batch)]
        whole = [Alloc(1, 100 + 8 * batch, Category.INPUT, 1), Alloc(2, 1000 * batch, Category.TEMPORARY, 0)]
        return trace(batch, PhaseStart(1, Phase.FORWARD), *losses, *whole)

    estimated = fit_by_site(looping(5), looping(3)).instantiate(9)
    assert estimated.events == (*looping(5).events[:6], *looping(9).events[10:])
