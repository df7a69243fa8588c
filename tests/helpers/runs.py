"""Runs that no GPU made: literal observations, a GPU, and a measure that follows a formula."""

from dataclasses import dataclass, field

from calibration.probe.client import DetectedGpu, ProbeRequest
from planner.hardware.calibration.model import Observation, Settings, Versions, origin_of
from planner.hardware.device import MIB
from planner.jobs import Job, Loss, Optimizer, parse_tensor_spec
from tests.helpers.structs import replace

VERSIONS = Versions("2.13.0+cu130", "13.0", "9.1.0", "580.65", (8, 6), 12_037 * MIB, 12_288 * MIB)
CARD = DetectedGpu("NVIDIA GeForce RTX 3060", VERSIONS, Settings())
JOB = Job.create(
    "torchvision:resnet18",
    inputs=(parse_tensor_spec("3x224x224"),),
    target=parse_tensor_spec("scalar:int64"),
)
OTHER_JOB = JOB.replace(model="torchvision:vgg11", loss=Loss.CROSS_ENTROPY, optimizer=Optimizer.ADAM)

RUN = Observation(
    job=JOB,
    batch=32,
    gpu=CARD.name,
    versions=VERSIONS,
    settings=Settings(),
    peak_allocated_bytes=900 * MIB,
    peak_reserved_bytes=1_000 * MIB,
    end_allocated_bytes=100 * MIB,
    process_peak_bytes=1_420 * MIB,
    context_before_bytes=300 * MIB,
    context_after_bytes=420 * MIB,
    retries=0,
    oom=False,
    source="measured",
    about="",
    when="2026-01-31",
)


@dataclass(slots=True)
class FakeMeasure:
    """100 MiB and 10 MiB a sample; it dies where that is more than the cap. Records its queries."""

    seconds_each: float = 0.0
    besides_mib: int = 0  # what a run takes on top
    context_mib: int = 420
    name: str = CARD.name
    now: float = 0.0
    requests: list[ProbeRequest] = field(default_factory=list)

    def __call__(self, request: ProbeRequest, timeout_seconds: float) -> Observation:
        self.requests.append(request)
        self.now += self.seconds_each
        need = (100 + 10 * request.batch + self.besides_mib) * MIB
        cap = request.allocator_cap_bytes
        oom = cap is not None and need > cap
        settings = replace(
            CARD.settings,
            alloc_conf=request.alloc_conf,
            allocator_cap_bytes=cap,
        )
        return replace(
            RUN,
            job=request.job,
            batch=request.batch,
            gpu=self.name,
            source=origin_of(self.name),
            settings=settings,
            peak_allocated_bytes=need,
            peak_reserved_bytes=need,
            process_peak_bytes=need + self.context_mib * MIB,
            end_allocated_bytes=None if oom else 100 * MIB,
            oom=oom,
        )
