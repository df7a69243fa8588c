"""Compare needs of networks as people write them by stored answers with those by the library.

    python -m benchmarks.emulated.own_cnns --cudnn FOLDER [--jobs 0-239] [--to FILE.csv]

The networks of `own_networks.py` have drawn widths, depths, kernels, extents, batch sizes, recipes and GPUs,
so that few of their convolutions are stored and most borrow the answers of similar ones. A need is the least
memory in which a replay does not fail, to a MiB; a peak is what it reserves where nothing limits it. Both are
computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.emulated.answers import add_rows, needed_mib, peak_mib
from benchmarks.emulated.differential import SEED
from benchmarks.emulated.jobs import GPUS, DrawnJob
from planner.api.request.request import make_job
from planner.hardware.cudnn import StoredWorkspaces
from planner.hardware.database import find_device
from planner.hardware.likeness import part_of_convolutions
from planner.planning.programs import open_programs
from planner.program import WorkspaceAccount, ignore_progress
from planner.store import ProgramSource

OWN_CNNS = Path(__file__).with_name("own_cnns.csv")
NETWORKS = Path(__file__).with_name("own_networks.py").relative_to(Path(__file__).parents[2])
HARDLY_FAR = 0.2  # share of convolutions that borrow from far ones, below which a network counts as near
_EXTENTS = (28, 32, 48, 64, 80, 100, 128, 160, 192, 200, 256, 320)
_LARGEST_ELEMENTS = 2**30  # of the first layer's result
# Networks with the depths and kernels to draw from, and whether kernels are an argument.
_DRAWN: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("classifier", (2, 3, 4, 5), (3, 5, 7)),
    ("autoencoder", (2, 3, 4), (3, 4)),
    ("generator", (3, 4, 5), ()),
    ("discriminator", (2, 3, 4), ()),
    ("UNet", (2, 3, 4), ()),
    ("residual_classifier", (2, 3, 4), ()),
    ("restorer", (2, 6, 12), (3, 5, 9)),
    ("translator", (3, 6), ()),
    ("sequence_classifier", (2, 4, 6), (3, 7, 15)),
)
_LENGTHS = (100, 256, 1000, 4096, 16000)


@dataclass(frozen=True, slots=True)
class OwnCnnRow:
    """One job by both sources, in MiB."""

    number: int
    model: str
    batch: int
    gpu: str
    options: str
    part: float  # of convolutions in what layers allocate
    convolutions: str  # the source of the stored answers: of the very convolutions, or some of similar ones
    uncounted: float  # shares of convolutions by stored answers
    far: float
    library_mib: int  # needs
    stored_mib: int
    library_peak_mib: int
    stored_peak_mib: int

    @property
    def is_near(self) -> bool:
        """True if hardly any convolution borrows from a far one or has no answer."""
        return self.far < HARDLY_FAR and self.uncounted < 0.1


def draw(number: int) -> DrawnJob:
    """Draw the job of this number."""
    random = Random(f"{SEED}/own/{number}")
    name, depths, kernels = random.choice(_DRAWN)
    channels, width, extent = random.choice((1, 3)), random.choice((8, 16, 20, 32, 48, 64)), 1
    own = {"channels": channels, "width": width, "depth": random.choice(depths)}
    if kernels:
        own["kernel"] = random.choice(kernels)
    shape: Sequence[int]
    if name == "sequence_classifier":
        extent = random.choice(_LENGTHS)
        shape = (channels, extent)
    elif name == "generator":
        shape, extent = (100, 1, 1), 4 * 2 ** own["depth"]
    else:
        extent = random.choice(_EXTENTS) // 16 * 16 if name != "classifier" else random.choice(_EXTENTS)
        shape = (channels, extent, extent)
    pixels = extent if len(shape) == 2 else extent**2
    batches = [2**power for power in range(12) if pixels * width * 2**power <= _LARGEST_ELEMENTS]
    options = {
        "model_arg": own,
        "input": "x".join(map(str, shape)),
        "loss": "sum",
        "optimizer": "adam",
        "precision": random.choice(("fp32", "fp32", "amp-fp16")),
    }
    return DrawnJob(number, f"{NETWORKS}:{name}", random.choice(batches[-5:]), random.choice(GPUS), options)


def compare_job(drawn: DrawnJob, cudnn: str) -> OwnCnnRow:
    """Plan one job by both sources."""
    job, _, _ = make_job(drawn.model, {**drawn.options, "cudnn": cudnn})  # type: ignore[typeddict-item]
    programs = open_programs(job, ignore_progress)
    assert isinstance(programs, ProgramSource)
    target = find_device(drawn.gpu).target
    needs, peaks, part, account = [], [], 0.0, WorkspaceAccount()
    for answers in (programs.convolutions, StoredWorkspaces(benchmark=False)):
        trace = ProgramSource(job, (), programs.open_builder, answers).trace(drawn.batch, target)
        peaks.append(peak_mib(trace, job.environment.torch))
        needs.append(needed_mib(trace, drawn.batch, job.environment.torch, peaks[-1]))
        part, account = round(part_of_convolutions(trace), 3), trace.conv_account
    row = drawn.number, drawn.model, drawn.batch, drawn.gpu, drawn.words, part, account.source.value
    shares = round(account.uncounted_share, 3), round(account.far_share, 3)
    return OwnCnnRow(*row, *shares, *needs, *peaks)


if __name__ == "__main__":
    add_rows(__doc__, OWN_CNNS, OwnCnnRow, "0-239", lambda number, cudnn: compare_job(draw(number), cudnn))
