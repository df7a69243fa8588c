"""Models that cannot be planned are refused for the true reason, and those that can be are planned."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from planner.capture.models.registry import build_model, construct_model
from planner.capture.session import record
from planner.errors import ModelError, UsageError
from planner.jobs import Job, Loss, Mode, parse_tensor_spec, resolve_job
from planner.program.events import Trace, validate
from tests.helpers.models import AMPERE, born, job_of

TRAIN = {"mode": Mode.TRAIN, "loss": Loss.OUTPUT}


def trace_of(make: Callable[[], nn.Module], job: Job, batch: int = 4) -> Trace:
    """The trace of a model that `make` makes, as a user's constructor is called."""
    return record(job, batch, AMPERE, lambda job: construct_model(job, make))


class Calls(nn.Module):
    """A layer, and a function of what it gives."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class Embeds(nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.table = kind(10, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).sum()  # type: ignore[no-any-return]


class Lazy(nn.Module):
    """Layers whose widths follow from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()  # type: ignore[no-any-return]


class Eager(Lazy):
    """The lazy model with its widths given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5, bias=False)
        )


class LazyGuard(Lazy):
    """A lazy model that reads a value on its way."""

    def forward(self, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all()
        return super().forward(x)


class Packs(nn.Module):
    """A recurrent layer over packed sequences; lengths from the batch, or all full with `steps`."""

    def __init__(self, kind: type[nn.Module], steps: int = 0) -> None:
        super().__init__()
        self.layer, self.steps = kind(8, 16, batch_first=True), steps

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        known = [self.steps] * len(x) if self.steps else lengths.cpu()
        packed, _ = self.layer(pack_padded_sequence(x, known, batch_first=True))
        return pad_packed_sequence(packed, batch_first=True)[0].sum()


def flex(x: Tensor) -> Tensor:
    """Attention whose kernel a compiler makes."""
    from torch.nn.attention.flex_attention import flex_attention

    x = x.repeat(1, 64).view(x.shape[0], 2, 16, 16)
    return flex_attention(x, x, x)


def import_missing(x: Tensor) -> Tensor:
    """An extension that is not there."""
    import an_extension_of_nobody  # type: ignore[import-not-found]

    return x * float(an_extension_of_nobody.one)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (flex, "flex_attention is not planned, since a compiler makes its kernels; plan with torch.nn."),
        (import_missing, "install an_extension_of_nobody, or remove that import for the plan"),
        (
            lambda x: x.to_sparse_coo() @ x.T if x.is_sparse else torch.eye(8).to_sparse().to(x) @ x.T,
            "sparse",
        ),
        (lambda x: torch.nested.nested_tensor([x, x]), "nested tensors are not planned; use padded ones"),
        (
            lambda x: x + torch.ones(8),
            "tensors of CPU and GPU meet, which fails on a GPU too",
        ),
        (lambda x: x.no_such_method(), "see the traceback with --debug"),
        (lambda x: {}["key"], "'key'; see the traceback with --debug"),  # type: ignore[index]
        (lambda x: x @ x, "check --input and --target"),
        (lambda x: x.view(7, 11), "check --input and --target"),
    ],
)
def test_reasons_are_the_true_ones(function: Callable[[Tensor], Tensor], reason: str) -> None:
    """A construct that is not planned is named as such; shapes are suspected where they may be at fault."""
    with pytest.raises(ModelError) as error:
        trace_of(lambda: Calls(function), job_of("8", **TRAIN), 64)
    message = str(error.value)
    assert reason in message
    assert ("check --input" in message) == ("check --input" in reason)


def says(kind: type[Exception], words: str) -> Callable[[Tensor], Tensor]:
    """Return a function that raises an error of a model's own, whose words are like torch's."""

    def check(x: Tensor) -> Tensor:
        raise kind(words)

    return check


def clash(x: Tensor) -> Tensor:
    """A keyword that is given twice to a module with a long name."""
    given = {"input": x}
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))(input=x, **given)


def missing_in_torch(x: Tensor) -> Tensor:
    """A name that the installed library lacks."""
    from torch.nn import ALayerOfNobody  # type: ignore[attr-defined]

    return ALayerOfNobody(x)  # type: ignore[no-any-return]


def odd_key(x: Tensor) -> Tensor:
    """A key that is nobody's rank."""
    return x * float({"OTHER": "1"}["RANK"])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (says(ValueError, "layout must not be Sparse"), "layout must not be Sparse"),
        (says(RuntimeError, "NestedTensor is my own class"), "NestedTensor is my own class"),
        (says(RuntimeError, "no NVIDIA driver in this joke"), "no NVIDIA driver in this joke"),
        (says(ValueError, "two devices and meta learning"), "two devices and meta learning"),
        (says(ValueError, "the meta tensor of my own"), "the meta tensor of my own"),
        (says(ValueError, "nonzero weights are needed"), "nonzero weights are needed"),
        (
            says(ValueError, "the shape of the target is out of range"),
            "the shape of the target is out of range",
        ),
        (
            says(RuntimeError, "Expected dtype int32/int64 for index, but got torch.float"),
            "for index, but got torch.float",
        ),
        (says(AssertionError, "capturable=True is forbidden"), "capturable=True is forbidden"),
        (says(TypeError, "f() missing 1 required argument"), "f() missing 1 required argument"),
        (says(RuntimeError, "Default process group has not been initialized"), "has not been initialized"),
        (odd_key, "'RANK'"),
    ],
)
def test_words_of_a_model_establish_no_cause(function: Callable[[Tensor], Tensor], words: str) -> None:
    """An error of a model's own that has words of torch's is told as it is, without a hint that guesses."""
    with pytest.raises(ModelError) as error:
        trace_of(lambda: Calls(function), job_of("8", **TRAIN), 64)
    assert str(error.value).endswith(f"{words}; see the traceback with --debug")


@pytest.mark.parametrize(
    ("function", "ending"),
    [
        (
            clash,
            "Sequential() got multiple values for keyword argument 'input'; see the traceback with --debug",
        ),
        (
            lambda x: nn.Identity()(),
            "missing 1 required positional argument: 'input'; see the traceback with --debug",
        ),
        (missing_in_torch, "; install the version of torch that has it, or remove that import for the plan"),
        (
            lambda x: nn.functional.nll_loss(x, x[:, 0]),
            "; check --input and --target; classes are int64, such as --target scalar:int64",
        ),
        (
            lambda x: torch.gather(x, 0, x),
            "; check --input and --target; indices are int64, such as --input 128:int64",
        ),
        (
            lambda x: nn.functional.nll_loss(x, torch.zeros(4, 8, 8, dtype=torch.int64)),
            "; check --input and --target",
        ),
        (
            lambda x: torch.softmax(x > 0, -1),
            "'Bool'; convert its operands, as by .float(), or check --input and --target",
        ),
        (
            lambda x: float(os.environ["RANK"]) * x,
            "'RANK'; it is one rank of several: give their number, such as --world-size 2",
        ),
    ],
)
def test_causes_that_are_established_have_a_hint(function: Callable[[Tensor], Tensor], ending: str) -> None:
    """Who raised it, and in which operator, decides the hint."""
    with pytest.raises(ModelError) as error:
        trace_of(lambda: Calls(function), job_of("8", **TRAIN), 64)
    assert str(error.value).endswith(ending)


def test_inputs_that_the_model_does_not_take_are_those_of_the_job() -> None:
    """A call of the model itself that lacks an argument hints at the option that gives it."""
    with pytest.raises(ModelError, match="missing 1 required positional argument: 'lengths'; check --input"):
        trace_of(lambda: Packs(nn.LSTM), job_of("10x8", **TRAIN), 4)


def test_a_failing_evaluation_is_named_with_its_input() -> None:
    """The training's input is right, and the evaluation's is not."""
    job = job_of("8", **TRAIN, evaluate=True, eval_batch=3, eval_input=("9",))
    with pytest.raises(ModelError, match=r"in the evaluation, .* fails at batch 3 .*; check --eval-input$"):
        trace_of(lambda: nn.Linear(8, 2), job)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_that_keeps_something_is_named(reentrant: bool) -> None:
    """The second run of the block finds its cache filled, as a decoder with use_cache does."""
    kept: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        kept.append(x)
        return x + torch.cat(kept).sigmoid()

    def forward(x: Tensor) -> Tensor:
        kept.clear()
        return checkpoint(block, x.requires_grad_(), use_reentrant=reentrant)

    with pytest.raises(ModelError, match="finds what its first run kept: .* --model-arg use_cache=false$"):
        trace_of(lambda: Calls(forward), job_of("8", mode=Mode.TRAIN, loss=Loss.SUM), 4)


def test_an_error_that_a_model_wraps_keeps_its_cause() -> None:
    """A model that reads a value and raises an error of its own for torch's is planned with values."""

    def reads(x: Tensor) -> Tensor:
        try:
            return x * float(x.detach().sum())
        except RuntimeError as error:
            raise ValueError("my loss is not finite") from error

    trace = trace_of(lambda: Calls(reads), job_of("8", mode=Mode.TRAIN, loss=Loss.SUM), 4)
    validate(trace)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(kind: type[nn.Module]) -> None:
    """Sparse gradients are not planned, and the remedy is the option that requests them."""
    with pytest.raises(
        ModelError, match="sparse gradients are not planned; use dense ones .of an embedding by sparse=F"
    ):
        trace_of(lambda: Embeds(kind), job_of("6:int64", **TRAIN))


def test_sparse_tensors_are_refused_by_name_after_a_read_too() -> None:
    """Once a model reads a value, sparse tensors could be made on the CPU, but are not planned either."""

    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            places = torch.arange(4, device=out.device).repeat(2, 1)
            assert out.sum().item() < 1e9
            return torch.sparse.mm(torch.sparse_coo_tensor(places, out[0, :4], (4, 4)), out.t()[:4])

    with pytest.raises(ModelError, match="sparse gradients are not planned; use dense ones"):
        trace_of(lambda: Reads(8, 8), job_of("8", **TRAIN))


def test_lazy_modules_are_planned_as_others() -> None:
    """A first batch gives lazy layers their shapes; from then on they are layers like any."""
    job = job_of("3x8x8", **TRAIN, steps=2)
    trace = trace_of(Lazy, job)
    validate(trace)
    assert trace.events == trace_of(Eager, job).events


def test_lazy_modules_that_read_values_are_planned() -> None:
    """A lazy model is planned even if its first batch needs values."""
    validate(trace_of(LazyGuard, job_of("3x8x8", **TRAIN)))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_lengths_of_the_batch_are_taken_as_full(kind: type[nn.Module]) -> None:
    """Sequences whose lengths are data take what full ones take, and the answer notes it."""
    job = job_of("10x8", "scalar:int64", **TRAIN)
    trace, full = trace_of(lambda: Packs(kind), job), trace_of(lambda: Packs(kind, steps=10), job)
    assert [size for size in born(trace) if size > 512] == [size for size in born(full) if size > 512]
    assert trace.notes[0] == (
        "lengths of packed sequences are values of the batch: each sample is assumed to have all 10 steps"
    )
    assert full.notes == ()


def test_lengths_in_numbers_count() -> None:
    """Lengths that the code gives are those that are packed."""
    job = job_of("10x8", "scalar:int64", **TRAIN)
    short, full = (trace_of(lambda steps=steps: Packs(nn.LSTM, steps), job, 64) for steps in (4, 10))  # type: ignore[misc]
    assert sum(born(short)) < sum(born(full))


@pytest.mark.parametrize("name", ["hf:meta-llama/Llama-3-8B", "hf:bert-base-uncased"])
def test_names_of_a_hub_lead_to_a_folder(name: str) -> None:
    """Nothing is fetched, and the way without a hub is named."""
    pytest.importorskip("transformers")
    with pytest.raises(UsageError, match="nothing is fetched from a hub.*config.json.*hf:FOLDER"):
        build_model(resolve_job(name, {}, inputs=[parse_tensor_spec("8:int64")]))


@pytest.mark.parametrize("name", ["meta-llama/Llama-3-8B", "bert-base-uncased"])
def test_names_of_a_hub_without_a_source_do_too(name: str) -> None:
    """A hub's name without a source gets the same refusal."""
    with pytest.raises(UsageError, match="nothing is fetched from a hub.*config.json.*hf:FOLDER"):
        resolve_job(name, {})


@pytest.mark.parametrize(
    "text",
    [
        "import an_extension_of_nobody\n",
        "def Net():\n    import an_extension_of_nobody\n",
    ],
)
def test_missing_extensions_are_to_be_installed(tmp_path: Path, text: str) -> None:
    """A module that is missing at import or in a constructor is named with a remedy."""
    file = tmp_path / "net.py"
    file.write_text(text)
    with pytest.raises(ModelError, match="; install an_extension_of_nobody, or remove that import"):
        build_model(Job.create(f"{file}:Net"))
