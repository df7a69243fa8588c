"""Histories that end in an out-of-memory error, written out event by event, and the causes they decide."""

import pytest

from planner.allocator.blocks import BlockState, SegmentState
from planner.allocator.history import History, HistoryEvent
from planner.planning.diagnosis import Cause, Held, Help, Place, diagnose_history
from planner.program import Category, Site

MIB = 2**20
SITES = (Site("net.py:5", "forward"), Site("train.py:9", "keep"), Site("train.py:20", "validate"))


def history_of(*events: HistoryEvent, **fields: object) -> History:
    """Return a history from the first tensor on."""
    return History("T4", "2.13", "", None, None, events, sites=SITES, **fields)  # type: ignore[arg-type]


def segment(address: int, mib: int) -> HistoryEvent:
    """A segment taken from CUDA."""
    return HistoryEvent("segment_alloc", address, mib * MIB)


def alloc(address: int, mib: int, site: int = 0) -> HistoryEvent:
    """A block that is allocated."""
    return HistoryEvent("alloc", address, mib * MIB, site)


def free(address: int, mib: int) -> list[HistoryEvent]:
    """A block that is freed."""
    return [HistoryEvent(action, address, mib * MIB) for action in ("free_requested", "free_completed")]


def oom(mib: int, site: int = 0) -> HistoryEvent:
    """A request that fails."""
    return HistoryEvent("oom", 0, mib * MIB, site)


def test_blocks_that_live_are_too_large() -> None:
    """With every block in use and none unused, the job needs more than there is."""
    found = diagnose_history(history_of(segment(0, 100), alloc(0, 100), oom(60)), "a test")
    assert (found.cause, found.requested_bytes, found.allocated_bytes, found.reserved_bytes) == (
        Cause.TOO_LARGE,
        60 * MIB,
        100 * MIB,
        100 * MIB,
    )
    assert found.site == Place("net.py:5 in forward")
    assert found.live == (Held("net.py:5 in forward", 100 * MIB, 1),)


def test_unused_pieces_are_fragmentation_and_expandable_segments_join_them() -> None:
    """Two segments of 40 MiB whose halves are unused hold no 30 MiB in one piece; pages can be moved."""
    events = (
        *(segment(0, 40), alloc(0, 20), alloc(20 * MIB, 20), segment(1 << 30, 40), alloc(1 << 30, 20)),
        *(alloc((1 << 30) + 20 * MIB, 20), *free(0, 20), *free((1 << 30) + 20 * MIB, 20), oom(30)),
    )
    found = diagnose_history(history_of(*events), "a test")
    assert found.cause is Cause.FRAGMENTATION
    served = {one.setting: (one.fits, one.reserved_bytes) for one in found.would_help}
    assert served["expandable_segments:True"] == (True, 80 * MIB)


def test_pieces_that_no_setting_joins_are_not_the_cause() -> None:
    """Small requests take segments of 2 MiB, whose 30 unused halves no large request may use."""
    events = [segment(0, 40), alloc(0, 40)]
    for start in range(2 << 30, 32 << 30, 1 << 30):
        events += [segment(start, 2), alloc(start, 1), alloc(start + MIB, 1)]
    for start in range(2 << 30, 32 << 30, 1 << 30):
        events += free(start, 1)
    found = diagnose_history(history_of(*events, oom(28)), "a test")
    assert {one.fits for one in found.would_help} == {False}
    assert found.cause is Cause.TOO_LARGE
    assert "30.0 MiB were reserved and unused, in pieces, and none of the settings" in found.reason


def test_a_snapshot_without_events_answers_no_question() -> None:
    """The failed request is not among its blocks, so that nothing can be replayed."""
    found = diagnose_history(history_of(start=(SegmentState(0, 40 * MIB, "large", ()),)), "a test")
    assert (found.cause, found.would_help, found.served_by) == (Cause.UNKNOWN, (), None)
    assert "planner.watch(record=True)" in found.reason


def test_an_evaluation_is_noted_beside_another_cause() -> None:
    """Memory in pieces is the cause, and the evaluation that met it is a note."""
    events = (segment(0, 40), alloc(0, 20), alloc(20 * MIB, 20), segment(1 << 30, 40), alloc(1 << 30, 20))
    freed = (alloc((1 << 30) + 20 * MIB, 20), *free(0, 20), *free((1 << 30) + 20 * MIB, 20))
    found = diagnose_history(history_of(*events, *freed, oom(30, site=2)), "a test")
    assert (found.cause, found.notes) == (
        Cause.FRAGMENTATION,
        ("it happened in validate, an evaluation",),
    )


def test_one_request_larger_than_all_others() -> None:
    """A request of more than what all blocks take is named as that."""
    found = diagnose_history(history_of(segment(0, 20), alloc(0, 20), oom(500)), "a test")
    assert found.cause is Cause.ONE_REQUEST


def test_memory_that_rises_step_by_step_is_growth() -> None:
    """Each step keeps 2 MiB that the line `keep` allocates; its activations are freed."""
    events: list[HistoryEvent] = [segment(0, 2000)]
    for step in range(24):
        events += [alloc((100 + 2 * step) * MIB, 2, site=1), alloc(1000 * MIB, 40), *free(1000 * MIB, 40)]
    found = diagnose_history(history_of(*events, oom(30)), "a test")
    assert (found.cause, found.grown_by) == (Cause.GROWTH, Place("train.py:9 in keep"))
    assert found.site == Place("net.py:5 in forward")


def test_a_model_that_is_loaded_layer_by_layer_does_not_grow() -> None:
    """Each layer is made in float32, copied to float16 and freed, so that memory falls to higher levels."""
    events: list[HistoryEvent] = [segment(0, 2000)]
    for layer in range(24):
        events += [alloc(1000 * MIB, 4), alloc((100 + 2 * layer) * MIB, 2, site=1), *free(1000 * MIB, 4)]
    categories = (Category.PARAMETER, Category.PARAMETER, None)
    found = diagnose_history(history_of(*events, oom(30), categories=categories), "a test")
    assert (found.cause, found.grown_by) == (Cause.FRAGMENTATION, Place())


def test_one_forward_pass_does_not_grow() -> None:
    """Activations of a single pass rise too, but nothing falls between them."""
    events = [segment(0, 2000), *(alloc(2 * at * MIB, 2) for at in range(60))]
    assert diagnose_history(history_of(*events, oom(30)), "a test").cause is not Cause.GROWTH


def test_a_request_of_an_evaluation_is_named() -> None:
    """The function that asked tells it."""
    found = diagnose_history(history_of(segment(0, 100), alloc(0, 100), oom(60, site=2)), "a test")
    assert found.cause is Cause.EVALUATION


def test_a_history_without_a_failure_shows_its_peak() -> None:
    """Tell what was in use at the peak, and whether other settings serve the same requests."""
    events = (segment(0, 40), alloc(0, 40), *free(0, 40), alloc(0, 20))
    found = diagnose_history(history_of(*events), "a test")
    assert (found.cause, found.requested_bytes, found.allocated_bytes) == (Cause.NO_FAILURE, None, 40 * MIB)
    assert found.live == (Held("net.py:5 in forward", 40 * MIB, 1),)
    assert found.would_help[0] == Help(
        "expandable_segments:True", True, 40 * MIB, "the same requests are served"
    )


def test_a_setting_that_would_need_more_than_was_reserved_is_not_known() -> None:
    """Thirteen blocks of 15 MiB lie in a segment of 200 MiB that is not split with the setting; then each has
    a segment of 16 MiB.
    """
    parts = [alloc(15 * at * MIB, 15) for at in range(13)]
    found = diagnose_history(history_of(segment(0, 200), alloc(0, 200), *free(0, 200), *parts), "a test")
    helps = {one.setting: one for one in found.would_help}
    reason = "whether the GPU had the 408.0 MiB is not recorded"
    assert helps["max_split_size_mb:128"] == Help("max_split_size_mb:128", None, 408 * MIB, reason)
    assert helps["expandable_segments:True"].fits


def test_requests_that_were_served_by_retries_are_counted() -> None:
    """The second segment of 60 MiB is made once the first is released."""
    events = (
        *(segment(0, 40), alloc(0, 40), *free(0, 40)),
        *(HistoryEvent("segment_free", 0, 40 * MIB), segment(1 << 30, 60), alloc(1 << 30, 60)),
    )
    found = diagnose_history(history_of(*events), "a test")
    assert found.reason.startswith("1 request was served only after cached memory was released; ")


def test_free_memory_of_the_gpu_decides_whether_a_setting_helps() -> None:
    """Ten blocks of 4 MiB fill two segments; the first and the last live on, and 8 MiB of the GPU are free.

    16 MiB are unused in each segment, so that 20 MiB are found only if the two segments are one.
    """
    events = [segment(1 << 40, 100), alloc(1 << 40, 100)]
    for start in (0, 1 << 30):
        events += [segment(start, 20), *(alloc(start + 4 * at * MIB, 4) for at in range(5))]
    for address in [4 * at * MIB for at in range(1, 5)] + [(1 << 30) + 4 * at * MIB for at in range(4)]:
        events += free(address, 4)
    failed = HistoryEvent("oom", 8 * MIB, 20 * MIB, 0)
    found = diagnose_history(history_of(*events, failed), "a test")
    assert found.cause is Cause.FRAGMENTATION
    assert {one.setting: one.fits for one in found.would_help} == {
        "expandable_segments:True": True,
        "max_split_size_mb:128": False,
        "garbage_collection_threshold:0.8": False,
        "max_split_size_mb:128,garbage_collection_threshold:0.8": False,
    }


@pytest.mark.parametrize("setting", ["max_split_size_mb:128", "garbage_collection_threshold:0.8"])
def test_a_setting_that_does_not_help_is_a_no(setting: str) -> None:
    """If more than the GPU has is in use, no setting of the allocator helps."""
    found = diagnose_history(history_of(segment(0, 100), alloc(0, 100), oom(60)), "a test")
    assert [one.fits for one in found.would_help if one.setting == setting] == [False]


def test_other_settings_keep_the_options_of_the_run() -> None:
    """Options with lists and options of the same name are read as torch reads them."""
    events = (segment(0, 100), alloc(0, 100), oom(60))
    options = "roundup_power2_divisions:[1:8,128:4],max_split_size_mb:256,"
    found = diagnose_history(History("T4", "2.13", options, None, None, events, sites=SITES), "a test")
    assert len(found.would_help) == 4


def test_blocks_are_summed_by_category() -> None:
    """A block without a function is taken as one of the backward pass if other blocks have functions."""
    sites = (Site("net.py:5", "forward"), Site("train.py:2", "main"), Site("", ""), Site("data.py:1", "get"))
    categories = (Category.ACTIVATION, Category.PARAMETER, None, None)
    blocks = [
        alloc(at * MIB, size, site) for at, size, site in ((0, 40, 0), (40, 20, 1), (60, 9, 2), (69, 1, 3))
    ]
    history = History(
        "T4", "2.13", "", None, None, (segment(0, 80), *blocks, oom(30)), sites=sites, categories=categories
    )
    found = diagnose_history(history, "a test")
    assert found.by_category == (
        Held("activations", 40 * MIB, 1),
        Held("parameters", 20 * MIB, 1),
        Held("gradients", 9 * MIB, 1),
        Held("other", MIB, 1),
    )
    assert any("autograd's threads" in note for note in found.notes)


@pytest.mark.parametrize(
    ("sites", "start", "cause"),
    [
        ([0, 1, 1], (), Cause.FIRST_STEP),
        ([0, 1, 0, 1], (), Cause.TOO_LARGE),  # of the second step
        ([0, 1, 0], (), Cause.TOO_LARGE),  # not the optimizer's
        (
            [0, 1, 1],
            (SegmentState(1 << 40, MIB, "large", (BlockState(1 << 40, MIB, True),)),),
            Cause.TOO_LARGE,
        ),
    ],
)
def test_an_optimizer_that_asks_before_a_second_forward_pass_takes_its_first_step(
    sites: list[int], start: tuple[SegmentState, ...], cause: Cause
) -> None:
    """Its state is allocated then; of a history that began later the number of the step is not known."""
    *before, last = sites
    blocks = [alloc(40 * at * MIB, 40, site) for at, site in enumerate(before)]
    events = (segment(0, 40 * len(before)), *blocks, oom(30, last))
    categories = (Category.ACTIVATION, Category.OPTIMIZER, None)
    found = diagnose_history(history_of(*events, categories=categories, start=start), "a test")
    assert (found.cause, "optimizer's first step" in found.reason) == (cause, cause is Cause.FIRST_STEP)


def test_without_stacks_no_category_is_stated() -> None:
    """A history of a published run has lines and no stacks."""
    found = diagnose_history(history_of(segment(0, 100), alloc(0, 100), oom(60)), "a test")
    assert (found.by_category, found.notes) == ((), ())


def test_the_smallest_gpus_that_serve_the_requests_are_named() -> None:
    """20 GiB need a GPU sold with 24 GB, since of 20 GB context and driver take their part."""
    gib = 2**30
    events = (HistoryEvent("segment_alloc", 0, gib), HistoryEvent("alloc", 0, gib, 0))
    found = diagnose_history(history_of(*events, HistoryEvent("oom", 0, 19 * gib, 0)), "a test").served_by
    assert found is not None
    assert (found.reserved_bytes, found.retries) == (20 * gib, 0)
    assert "L4 24GB" in found.names and 22 * gib < found.total_bytes < 23 * gib
    assert found.too_small is not None and "20GB" in found.too_small


def test_a_history_that_no_known_gpu_serves_names_none() -> None:
    """4 TiB at once."""
    found = diagnose_history(history_of(oom(2**22)), "a test")
    assert found.served_by is None


def test_growth_without_a_failure_names_its_line_and_its_end() -> None:
    """Each step keeps 2 MiB; of 1,000 MiB 94 are in use at the peak, so that 453 more steps are the most."""
    events: list[HistoryEvent] = [segment(0, 2000)]
    for step in range(24):
        events += [alloc((100 + 2 * step) * MIB, 2, site=1), alloc(1000 * MIB, 40), *free(1000 * MIB, 40)]
    history = History("T4", "2.13", "", 1000 * MIB, None, tuple(events), sites=SITES)
    found = diagnose_history(history, "a test")
    assert (found.cause, found.grown_by) == (Cause.NO_FAILURE, Place("train.py:9 in keep"))
    peak = 2 * 24 + 40
    assert f"end after {(1000 - peak) // 2} more at the latest" in found.reason
