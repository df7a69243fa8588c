"""Models called through torch.compile in its default mode, dynamo, AOTAutograd and inductor as they are."""

from collections.abc import Iterator

from benchmarks.emulated.capabilities.case import Capability, Case, cases_of_rows

_SCRIPTS = (26, 27)  # which compile by themselves; the planner's own loop runs the others


def _cases() -> Iterator[Case]:
    for number, case in cases_of_rows("compiled").items():
        file = case.job.model.partition(":")[0]
        command = (file, "--batch-size", str(case.job.batch), "--steps", "3")
        yield Case(case.job, command, stop_after=1000) if number in _SCRIPTS else case


CAPABILITY = Capability("models called through `torch.compile`", tuple(_cases()))
