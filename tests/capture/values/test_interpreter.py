"""Models whose course depends on values are traced with values on the CPU."""

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import planner
from planner.capture.models.registry import construct_model
from planner.capture.session import record
from planner.capture.values import interpreter, lazy_values, nms as suppression, reads
from planner.capture.values.nms import nms
from planner.errors import BatchTooLargeError, ModelError
from planner.jobs import Job, Loss, Mode, resolve_job
from planner.program.events import Trace, validate
from planner.program.extrapolation.fit import NotAffineError, fit_traces, tensors_diverge
from tests.helpers.models import AMPERE, born, job_of

DRAWN = "come from values drawn at random on the CPU, not from data and trained weights"
COMPUTED = "which reads values: they were computed on the CPU"


def trace_of(make: Callable[[], nn.Module], job: Job, batch: int) -> Trace:
    """The trace of a model that `make` makes, as a user's constructor is called."""
    return record(job, batch, AMPERE, lambda job: construct_model(job, make))


class Calls(nn.Module):
    """A model out of one function."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class Masks(nn.Module):
    """Keeps the columns that a buffer names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.tensor([True, False, True, True]))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.kept]


class Mixture(nn.Module):
    """Sends each row to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 16), nn.Linear(8, 16)])

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        rows = [torch.where(chosen == i)[0] for i in range(2)]
        return sum(expert(x[row]).sum() for expert, row in zip(self.experts, rows, strict=True))


def test_values_of_buffers_are_known() -> None:
    """A mask that the constructor wrote keeps three columns of four, and nothing is drawn."""
    taken = trace_of(Masks, job_of("4"), 5)
    *_, indices, _, selected = born(taken, "index.Tensor")
    assert (indices, selected) == (3 * 8, 5 * 3 * 4)
    assert len(taken.notes) == 1
    assert taken.notes[0].endswith(COMPUTED)


@pytest.mark.parametrize(
    ("count", "elements"),
    [
        (lambda x: torch.arange(5, device=x.device).sum(), 10),
        (lambda x: torch.tensor([2, 7], device=x.device).max(), 7),
        (lambda x: torch.as_tensor(6, device=x.device) + x.new_tensor([1]).long()[0], 7),
        (lambda x: torch.ones(4, 3, device=x.device).t()[1:].sum(), 8),
        (lambda x: torch.eye(3, device=x.device).cumsum(0).count_nonzero(), 6),
        (lambda x: (torch.arange(9, device=x.device).view(3, 3) % 2 == 0).nonzero().shape[0], 5),
        (lambda x: torch.tensor([3, 1, 3], device=x.device).unique().tolist()[1], 3),
    ],
)
def test_what_no_chance_is_in_is_computed(count: Callable[[Tensor], int], elements: int) -> None:
    """Values that follow from numbers in the code decide sizes exactly."""
    taken = trace_of(lambda: Calls(lambda x: x.new_zeros(int(count(x)))), job_of("4"), 2)
    assert born(taken, "new_zeros")[-1] == 4 * elements
    assert taken.notes[0].endswith(COMPUTED)


def test_writes_are_seen_through_views_and_not_before() -> None:
    """A write in place changes what later reads of any view give, and nothing that was made before it."""

    def forward(x: Tensor) -> Tensor:
        base = torch.ones(4, device=x.device)
        doubled = base * 2
        base[1:3].add_(doubled[1:3])
        before, after = int(doubled.sum()), int(base.sum())
        return x.new_zeros(before, after)

    assert born(trace_of(lambda: Calls(forward), job_of("4"), 2), "new_zeros")[-1] == 4 * 8 * 8


def test_values_reach_the_cpu() -> None:
    """A tensor that is copied to the CPU has its values there, and takes no memory on the GPU."""
    seen: list[list[int]] = []

    def forward(x: Tensor) -> Tensor:
        seen.append((torch.arange(3, device=x.device).cpu() + 1).tolist())
        return x.sum()

    taken = trace_of(lambda: Calls(forward), job_of("4"), 2)
    assert seen[-1] == [1, 2, 3]
    assert born(taken, "_to_copy") == []


def test_values_that_pass_through_eight_bits_are_read() -> None:
    taken = trace_of(
        lambda: Calls(lambda x: x * x.to(torch.float8_e4m3fn).float().sum().item()), job_of("4"), 2
    )
    assert born(taken, "_to_copy") == [2 * 4, 2 * 4 * 4]


def test_chance_is_the_same_in_every_trace() -> None:
    """Two traces of a mixture of experts are one and the same, and every row goes to one expert."""
    job = job_of("8", mode=Mode.TRAIN, loss=Loss.OUTPUT, steps=2)
    one, two = (trace_of(Mixture, job, 64) for _ in range(2))
    validate(one)
    assert one == two
    routed, *rows = [size for size in born(one, "addmm") if size <= 64 * 16 * 4][:3]  # else a workspace
    assert (routed, sum(rows)) == (64 * 2 * 4, 64 * 16 * 4)
    assert one.notes[0].endswith(DRAWN)


def test_products_are_not_computed() -> None:
    """A batch whose products would take the CPU minutes is traced: a column of what they give is drawn."""

    def forward(x: Tensor) -> Tensor:
        wide = x @ x.new_empty(2**14, 2**14) @ x.new_empty(2**14, 2**14)
        return x[(wide @ x.new_empty(2**14, 1))[:, 0] > 0]

    taken = trace_of(lambda: Calls(forward), job_of(str(2**14)), 2**14)
    row_count = born(taken, "index.Tensor")[-1] / 4 / 2**14
    assert abs(row_count - 2**13) < 4 * 64  # of 2**14 fair coins, by four standard deviations


def test_values_change_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing is read, the second tracer records what the first does, block by block."""
    job = resolve_job("torchvision:resnet18", {}, optimizer="adam").replace(steps=2)
    first = record(job, 2, AMPERE)
    monkeypatch.setattr("planner.capture.values.interpretation.MetaRunner", interpreter.ValueInterpreter)
    assert record(job, 2, AMPERE) == first


def test_torch_is_as_it_was_afterwards() -> None:
    """The generator, the threads and what makes tensors are restored, also after an error."""

    def broken(x: Tensor) -> Tensor:
        x.sum().item()
        torch.rand(1)
        raise ValueError("stop")

    state, threads = torch.get_rng_state(), torch.get_num_threads()
    tensor, as_tensor, new_tensor = torch.tensor, torch.as_tensor, Tensor.new_tensor
    with pytest.raises(ModelError, match="stop; see the traceback"):
        trace_of(lambda: Calls(broken), job_of("4"), 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert (torch.tensor, torch.as_tensor, Tensor.new_tensor) == (tensor, as_tensor, new_tensor)


def test_values_beyond_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that would fill the machine are not drawn; one line states where, and what can be done."""
    monkeypatch.setattr(lazy_values, "MOST_BYTES", 2**20)
    with pytest.raises(BatchTooLargeError) as error:
        trace_of(lambda: Calls(lambda x: x[x > 0]), job_of(str(2**19)), 1)
    place, _, rest = str(error.value).partition(" (test_interpreter.py:")
    assert place == "test: the model's own forward at batch 1"
    assert rest.endswith(
        "values of a tensor of 2 MiB are read, more than the 1 MiB that are drawn at random on the CPU; "
        "take that call out of the traced path"
    )


class Reads(nn.Module):
    """Two layers with something between them that reads what the first one gives."""

    def __init__(self, read: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.read = read
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.read(hidden)
        return self.second(hidden).mean()


def refuse_nan(x: Tensor) -> None:
    """A guard as people write it."""
    if torch.isnan(x).any() or not torch.isfinite(x).all():
        raise ValueError("not finite")


NOTHING_DEPENDS_ON_THESE: list[Callable[[Tensor], object]] = [
    refuse_nan,
    lambda x: x.mean().item(),
    lambda x: f"{float(x.max()):.2f}",
    lambda x: x.detach().cpu().numpy().mean(),
    lambda x: x.mean((0, 2, 3)).tolist(),
    lambda x: torch.equal(x, x + 1),
    lambda x: x.relu() if x.max() > 30 else x,
    lambda x: refuse_nan(x.log()),
    lambda x: refuse_nan(1 / x.relu()),
    lambda x: int((x > 0).sum()),
]


@pytest.mark.slow
@pytest.mark.parametrize("read", NOTHING_DEPENDS_ON_THESE)
def test_what_decides_no_shape_changes_no_answer(read: Callable[[Tensor], object]) -> None:
    """If tensors of any size are read to no effect on memory, sizes are straight lines in the batch, and
    the answer rests on no trace with values at each batch size.
    """
    job = job_of("1x256x256", mode=Mode.TRAIN, loss=Loss.OUTPUT)
    low, high, large = (trace_of(lambda: Reads(read), job, batch) for batch in (2, 3, 128))
    validate(large)
    assert not tensors_diverge(fit_traces(low, high), large)
    assert large.notes[-1].endswith("decided by random numbers on the CPU, not by data and trained weights")
    assert large.notes[0] == "values of large tensors are those at batch 4, counts in proportion"


def test_counts_of_large_tensors_are_in_proportion() -> None:
    """Half the elements pass a mask at a batch too large to be computed if half do at a smaller one; each is
    found as two indices.
    """
    for count in (
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: (x > 0).nonzero()[:, 0].float(),
    ):
        taken = trace_of(lambda count=count: Calls(count), job_of(str(2**20)), 80)  # type: ignore[misc]
        sizes = born(taken, "index.Tensor") + born(taken, "masked_select") + born(taken, "nonzero")
        assert abs(max(sizes) / 16 / (80 * 2**20) - 0.5) < 0.002
        assert taken.notes[-1].endswith(DRAWN)


def test_reads_of_many_samples_give_what_those_of_few_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a model reads each of its samples and they are too many to compute, the elements that pass a mask
    are those of a batch of four, again and again.
    """

    def keep_positive(x: Tensor) -> Tensor:
        return torch.cat([sample[sample > 0] for sample in x])

    def kept(batch: int) -> tuple[list[int], tuple[str, ...]]:
        trace = trace_of(lambda: Calls(keep_positive), job_of("1024"), batch)
        validate(trace)
        return born(trace, "index.Tensor"), trace.notes

    few, notes = kept(4)
    each, all_notes = kept(8)
    monkeypatch.setattr(reads, "_MOST_BYTES_OF_RUN", 2**14)
    many, many_notes = kept(8)
    assert len(set(few)) > 1
    assert many == few * 2 != each
    assert "values that are read are those at batch 4, counts in proportion" in many_notes
    assert not any("counts in proportion" in note for note in (*notes, *all_notes))


def test_counts_that_are_read_grow_with_the_batch() -> None:
    """A number that counts elements is as many times larger as the batch is."""
    taken = trace_of(lambda: Calls(lambda x: x.new_zeros(int((x > 0).sum()))), job_of(str(2**20)), 64)
    assert abs(born(taken, "new_zeros")[-1] / 4 / (64 * 2**20) - 0.5) < 0.002


def test_the_answer_stays_below_what_the_cpu_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """If more values decide shapes than can be drawn, the largest batch size that can be traced is the
    answer, which notes it.
    """
    monkeypatch.setattr(lazy_values, "MOST_BYTES", 2**22)
    model = partial(Reads, lambda x: torch.repeat_interleave((x > 0).long().flatten()))
    options = {"input": "1x64x64", "loss": "output", "allocator_cap_mib": 2000}
    answer = planner.max_batch(model, **options).to_dict()  # type: ignore[arg-type]
    assert answer["max_batch"] == 16
    assert answer["first_failure"] is None
    assert any(
        text.startswith("batch sizes from 17 on are not planned") for text in answer["at_max"]["assumptions"]
    )


def test_models_with_shapes_alone_are_built_once() -> None:
    """A model that reads nothing is traced on shapes, and one that fails otherwise is not tried again."""
    built: list[str] = []

    def make(forward: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
        return lambda: built.append("once") or Calls(forward)  # type: ignore[func-returns-value]

    assert trace_of(make(F.relu), job_of("4"), 2).notes == ()
    with pytest.raises(ModelError):
        trace_of(make(lambda x: x @ x), job_of("4"), 2)
    assert built == ["once", "once"]


def test_boxes_that_overlap_a_better_one_go() -> None:
    """The best of boxes that share more than the threshold stays; the order is by falling score."""
    boxes = torch.tensor([[0, 0, 10, 10], [0, 0, 10, 9], [20, 0, 30, 10], [0, 5, 10, 15.0]])
    assert nms(boxes, torch.tensor([0.5, 0.9, 0.7, 0.6]), 0.5).tolist() == [1, 2, 3]
    assert nms(boxes, torch.tensor([0.5, 0.9, 0.7, 0.6]), 0.2).tolist() == [1, 2]
    assert nms(boxes[:0], torch.empty(0), 0.5).tolist() == []


@given(
    st.lists(st.tuples(*[st.integers(-3, 12)] * 4, st.integers(0, 9)), max_size=12),
    st.sampled_from([-0.5, 0.0, 0.3, 0.5, 0.7, 1.0]),
    st.sampled_from([0, 5, 2**20]),
)
def test_boxes_that_stay_by_brute_force(
    rows: list[tuple[int, int, int, int, int]], threshold: float, most_pairs: int
) -> None:
    """Boxes stay that no better one removes, also of boxes turned inside out, whichever way is taken."""
    left = sorted(range(len(rows)), key=lambda row: -rows[row][4])
    stays = []
    while left:
        best, *left = left
        stays.append(best)
        left = [row for row in left if not _removes(rows[best], rows[row], threshold)]
    values = torch.tensor(rows, dtype=torch.float32).reshape(-1, 5)
    with mock.patch.object(suppression, "MOST_PAIRS", most_pairs):
        assert nms(values[:, :4], values[:, 4], threshold).tolist() == stays


def _removes(a: tuple[int, ...], b: tuple[int, ...], threshold: float) -> bool:
    width, height = (max(min(a[i + 2], b[i + 2]) - max(a[i], b[i]), 0) for i in (0, 1))
    both = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)) - width * height
    return width * height > threshold * both


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.INFER])
def test_detector_is_traced(mode: Mode) -> None:
    """A detector of torchvision is traced with lists of images; a second image needs more than the first."""
    job = resolve_job("torchvision:detection.fasterrcnn_mobilenet_v3_large_320_fpn", {}, mode=mode.value)
    one, two = (record(job.replace(steps=1), batch, AMPERE) for batch in (1, 2))
    validate(two)
    assert one.notes[-1].endswith(DRAWN)
    assert sum(born(two)) > sum(born(one))
    with pytest.raises(NotAffineError):
        fit_traces(one, two)
    images = [size for size in born(two, "empty.memory_format") if size == 3 * 480 * 640 * 4]
    assert len(images) == 2


def test_detectors_get_images_of_their_own_type() -> None:
    """In pure half precision images come in it, as any other input does."""
    job = resolve_job("torchvision:ssdlite320_mobilenet_v3_large", {}, mode="infer", precision="fp16")
    taken = record(job.replace(steps=1), 2, AMPERE)
    assert [size for size in born(taken, "empty.memory_format") if size == 3 * 480 * 640 * 2] != []
    assert 3 * 480 * 640 * 4 not in born(taken, "empty.memory_format")


def test_a_result_of_another_shape_on_the_cpu_does_not_keep_the_others_from_being_read() -> None:
    """On the CPU, `logsigmoid` also fills a buffer, which is empty on a GPU."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Calls(F.logsigmoid), Calls(lambda x: x[x < -0.5]))

    trace = trace_of(make, job_of("8", mode=Mode.TRAIN), 4)
    validate(trace)
    assert any(DRAWN in note for note in trace.notes)
