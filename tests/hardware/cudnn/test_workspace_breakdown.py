"""Parts of workspaces: published sizes, answers of cuDNN 9.10.2 written out, sums for any size."""

import csv
from collections import Counter
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from planner.emulator.compiled import open_cudnn_with_cublaslt
from planner.errors import UsageError
from planner.hardware.cudnn.workspace_breakdown import NARROW_BYTES, Part, Term, name_parts
from planner.program.kernels.convolution import Convolution, Direction

ROWS = Path(__file__).parents[3] / "benchmarks/published/cudnn_workspaces.csv"
DIRECTIONS = {"fwd": Direction.FORWARD, "dgrad": Direction.DATA, "wgrad": Direction.WEIGHT}
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
NOTES = {"WINOGRAD": ("Winograd",), "WINOGRAD_NONFUSED": ("Winograd",), "FFT_TILING": ("FFT",)}
TENSOR_CORES = ("tensor cores",)


def convolution(
    direction: Direction,
    x: tuple[int, ...],
    w: tuple[int, ...],
    dtype: str = "float32",
    *,
    stride: int = 1,
    padding: int = 0,
    last: bool = False,
) -> Convolution:
    extents = [(size + 2 * padding - k) // stride + 1 for size, k in zip(x[2:], w[2:], strict=True)]
    y = (x[0], w[0], *extents)
    count = len(extents)
    steps = (padding,) * count, (stride,) * count, (1,) * count
    return Convolution(direction, dtype, x, w, y, last, *steps)


def named(
    query: Convolution, size_bytes: int, notes: tuple[str, ...] = TENSOR_CORES
) -> list[tuple[str, str, int]]:
    """Term, tensor and times of what is named, in the order of x, w and y."""
    parts = name_parts(query, notes, size_bytes)
    return sorted((part.term.value, part.of, part.times) for part in parts if part.term is not Term.UNNAMED)


# ---- published


def published() -> Iterator[tuple[str, Convolution, int]]:
    """Rows with a kernel, an image and no groups: algorithm, convolution, bytes."""
    with ROWS.open(newline="") as file:
        for row in csv.DictReader(file):
            if (
                row["groups"] != "1"
                or not all(row[key] for key in "nchkrsw")
                or row["workspace_bytes"] == "0"
            ):
                continue
            image = [int(row[key]) for key in "dhw" if row[key]]
            kernel = [int(row[key]) for key in "trs" if row[key]]
            query = convolution(
                DIRECTIONS[row["operation"]],
                (int(row["n"]), int(row["c"]), *image),
                (int(row["k"]), int(row["c"]), *kernel),
                DTYPES[row["dtype"]],
                stride=int(row["stride"] or 1),
                padding=int(row["pad"] or 0),
                last=row["layout"] in ("NHWC", "NDHWC"),
            )
            yield row["algorithm"], query, int(row["workspace_bytes"])


@pytest.mark.parametrize(
    ("algorithm", "term", "exceptions"),
    [
        ("WINOGRAD_NONFUSED", Term.WINOGRAD, 0),
        ("WINOGRAD", Term.FILTERS, 4),  # channels that fill no group of the kernel
        ("FFT_TILING", Term.FFT, 6),  # kernels of one point, or of seven
    ],
)
def test_algorithms_of_published_logs(algorithm: str, term: Term, exceptions: int) -> None:
    """Each is the term of its formula, or unnamed."""
    counts = Counter(
        name_parts(query, NOTES[algorithm], size_bytes)[0].term
        for name, query, size_bytes in published()
        if name == algorithm
    )
    assert set(counts) <= {term, Term.UNNAMED}
    assert counts[term] > 20
    assert counts[Term.UNNAMED] == exceptions


def test_explicit_gemm_holds_a_column_for_each_patch() -> None:
    """The columns of a convolution of points are a copy of x."""
    counts = Counter(
        (prod(query.w[2:]) > 1, name_parts(query, (), size_bytes)[0].term)
        for name, query, size_bytes in published()
        if name == "GEMM"
    )
    assert counts == {(True, Term.GEMM): 15, (False, Term.COPY): 1}


@pytest.mark.parametrize(
    ("query", "size_bytes", "letters"),
    [
        (convolution(Direction.FORWARD, (1, 20, 12, 12), (50, 20, 5, 5)), 128_848, "wxy"),  # RTX 3060
        (
            convolution(Direction.FORWARD, (1, 64, 361, 370, 251), (32, 64, 3, 3, 3), "float16", padding=1),
            6_437_116_048,  # A100
            "wxy",
        ),
        (convolution(Direction.FORWARD, (1, 256, 4, 1090, 1922), (64, 256, 3, 3, 3)), 8_582_807_568, "wx"),
    ],
)
def test_published_copies(query: Convolution, size_bytes: int, letters: str) -> None:
    """Tensor cores on contiguous tensors: copies of x, w and y, or of the inputs alone."""
    assert named(query, size_bytes) == [("copy", letter, 1) for letter in letters]


# ---- answers of cuDNN 9.10.2


@pytest.mark.parametrize(
    ("query", "size_bytes", "notes", "terms"),
    [
        (  # compute capability 8.0, engine 34
            convolution(Direction.WEIGHT, (64, 128, 56, 56), (128, 128, 3, 3), stride=2, padding=1),
            134_348_944,
            TENSOR_CORES,
            [("copy", "x", 1), ("copy", "y", 1), ("partial sums", "w", 10)],
        ),
        (  # 8.0, engine 10: sums in float32 beside a copy of the gradient in half precision
            convolution(Direction.WEIGHT, (256, 256, 13, 13), (256, 256, 3, 3), "float16", padding=1),
            47_841_743,
            TENSOR_CORES,
            [("copy", "w", 1), ("copy", "x", 1), ("copy", "y", 1), ("partial sums", "w", 1)],
        ),
        (  # 9.0, engine 67
            convolution(Direction.FORWARD, (48, 832, 7, 7), (384, 832, 1, 1)),
            12_488_915,
            TENSOR_CORES,
            [("copy", "x", 1), ("copy", "y", 1), ("partial sums in tiles", "", 16)],
        ),
        (  # 8.6, engine 25: three channels are filled up to four
            convolution(Direction.FORWARD, (16, 3, 224, 224), (64, 3, 7, 7), "float16", stride=2, padding=3),
            32_137_744,
            TENSOR_CORES,
            [("copy", "w", 1), ("copy", "x", 1), ("copy", "y", 1)],
        ),
        (  # 7.5, engine 42: the result is held in float32 before it is rounded
            convolution(Direction.DATA, (64, 128, 28, 28), (512, 128, 1, 1), "float16"),
            89_918_703,
            TENSOR_CORES,
            [("copy", "x", 1), ("copy", "y", 1), ("float32 copy", "x", 1)],
        ),
        (  # 7.5, engine 12
            convolution(Direction.FORWARD, (3, 512, 28, 28), (512, 512, 3, 3), padding=1),
            26_216_448,
            ("Winograd", "Winograd 4x4"),
            [("Winograd filters", "", 1)],
        ),
        (  # 7.0, engine 12, which does not read channels_last
            convolution(Direction.FORWARD, (32, 64, 224, 224), (64, 64, 3, 3), padding=1, last=True),
            822_640_912,
            ("Winograd", "Winograd 4x4"),
            [("Winograd filters", "", 1), ("copy", "w", 1), ("copy", "x", 1), ("copy", "y", 1)],
        ),
        (  # 7.5, engine 28
            convolution(Direction.WEIGHT, (64, 512, 28, 28), (256, 512, 1, 1), "float16", last=True),
            2_097_471,
            TENSOR_CORES,
            [("partial sums", "w", 4)],
        ),
    ],
)
def test_answers_of_the_library(
    query: Convolution, size_bytes: int, notes: tuple[str, ...], terms: list[tuple[str, str, int]]
) -> None:
    """All but `NARROW_BYTES` is named, or a ten-thousandth."""
    assert named(query, size_bytes, notes) == terms
    left = [part.size_bytes for part in name_parts(query, notes, size_bytes) if part.term is Term.UNNAMED]
    assert sum(left) <= max(NARROW_BYTES, size_bytes // 10_000)


def test_channels_of_each_group_are_filled_up() -> None:
    """Depthwise on tensor cores: eight channels for one, 8.6, engine 9."""
    grouped = (192, 1, 3, 3)
    x = (200, 192, 28, 28)
    query = Convolution(Direction.WEIGHT, "float16", x, grouped, x, True, (1, 1), (1, 1), (1, 1))
    copy, *rest = name_parts(query, TENSOR_CORES, 481_744_912)
    assert copy == Part(Term.FILLED, "x", 1, 8 * 2 * prod(x))
    assert sum(part.size_bytes for part in rest) == 55_312


def test_images_are_summed_up_one_by_one() -> None:
    """A depthwise gradient without tensor cores, 9.0, engine 16: eight sums of each image."""
    x = (200, 960, 7, 7)
    query = Convolution(Direction.WEIGHT, "float16", x, (960, 1, 3, 3), x, True, (1, 1), (1, 1), (1, 1))
    assert name_parts(query, (), 55_296_000) == (Part(Term.IMAGES, "w", 1600, 55_296_000),)


@pytest.mark.parametrize(("dtype", "last"), [("float32", False), ("float16", False), ("float16", True)])
def test_most_of_what_a_library_requests_has_a_name(
    request: pytest.FixtureRequest, dtype: str, last: bool
) -> None:
    """Nine tenths of a VGG16's layers at batch 32 on an RTX 3060 have one, by the library of `--cudnn`."""
    try:
        library = open_cudnn_with_cublaslt(request.config.getoption("--cudnn") or "installed")
    except UsageError as error:
        pytest.skip(f"no cuDNN to ask: {error}")
    left_bytes = all_bytes = 0
    for channels, rows, extent in ((64, 64, 224), (64, 128, 112), (128, 256, 56), (256, 512, 28)):
        for direction in Direction:
            x, w = (32, channels, extent, extent), (rows, channels, 3, 3)
            query = convolution(direction, x, w, dtype, padding=1, last=last)
            engine = library.workspaces((8, 6), 28, query).engine
            assert engine is not None
            all_bytes += engine.workspace_bytes
            parts = name_parts(query, engine.notes, engine.workspace_bytes)
            left_bytes += sum(part.size_bytes for part in parts if part.term is Term.UNNAMED)
    assert left_bytes <= 0.1 * all_bytes


# ---- parts without a name


def test_copies_with_a_rest_beside_them() -> None:
    """A tenth of the copies is not named with them; half as much again, nothing is."""
    query = convolution(Direction.WEIGHT, (64, 100, 50, 50), (100, 100, 3, 3), padding=1)
    copies = 2 * 4 * 64 * 100 * 50 * 50
    tenth, half = copies // 10 + 5000, copies // 2 + 5000
    assert name_parts(query, TENSOR_CORES, copies + tenth)[-1] == Part(Term.UNNAMED, "", 1, tenth)
    assert name_parts(query, TENSOR_CORES, copies + half) == (Part(Term.UNNAMED, "", 1, copies + half),)


def test_another_transform_is_not_named_copies() -> None:
    """An engine noted as FFT, of another size than the formula."""
    query = convolution(Direction.FORWARD, (32, 64, 20, 20), (64, 64, 7, 7), padding=3)
    size_bytes = 2 * 4 * 32 * 64 * 20 * 20
    assert named(query, size_bytes) == [("copy", "x", 1), ("copy", "y", 1)]
    assert name_parts(query, ("FFT",), size_bytes) == (Part(Term.UNNAMED, "", 1, size_bytes),)


small = st.integers(1, 40)


@given(
    st.sampled_from(Direction),
    st.sampled_from(("float32", "float64", "float16")),
    st.tuples(small, small, small, small),
    small,
    st.sampled_from((1, 3, 5)),
    st.booleans(),
    st.sampled_from(((), ("Winograd",), ("FFT",), TENSOR_CORES)),
    st.integers(0, 2**40),
)
def test_parts_add_up(
    direction: Direction,
    dtype: str,
    x: tuple[int, int, int, int],
    rows: int,
    kernel: int,
    last: bool,
    notes: tuple[str, ...],
    size_bytes: int,
) -> None:
    """Parts add up to any workspace; each part has bytes, and the unnamed one comes last and once."""
    query = convolution(direction, x, (rows, x[1], kernel, kernel), dtype, padding=kernel // 2, last=last)
    parts = name_parts(query, notes, size_bytes)
    assert sum(part.size_bytes for part in parts) == size_bytes
    assert all(part.size_bytes > 0 and part.times > 0 for part in parts)
    assert Term.UNNAMED not in [part.term for part in parts[:-1]]
