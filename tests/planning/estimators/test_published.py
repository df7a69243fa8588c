"""The seeds' measured figures: contents, consistency, and the errors of a broken file."""

from pathlib import Path

import pytest

from planner.errors import DataFileError
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.estimators.published import (
    END,
    ESTIMATE,
    Archive,
    Figure,
    Quantity,
    ResultRow,
    Source,
    load_measured,
)

MIB = 2**20
ARCHIVE = load_measured()
FILE = """\
source: {title: T, framework: torch, about: A}
units: {MiB: 1048576}
figures:
  - {model: cnn, batch: 8, points: {end: {allocated: 1.50 MiB}}}
"""


def written(folder: Path, text: str) -> Path:
    """A folder with one such file."""
    (folder / "a.yaml").write_text(text)
    return folder


def printed(model: str, batch: int, kind: str, point: str = END) -> list[str]:
    """The figures of one key as printed, with their units."""
    figures = ARCHIVE.look_up(model, batch, kind, point)
    return [f"{figure.quantity.printed} {figure.quantity.unit}" for figure in figures]


def test_file_is_read_as_it_stands(tmp_path: Path) -> None:
    """Every key of a file arrives, numbers with the digits that were printed."""
    text = (
        'source: {title: T, framework: torch, about: A, when: "2020", gpu: G, versions: {torch: "2.0"}}\n'
        "units: {MiB: 1048576, bits: 0.125}\n"
        "figures:\n"
        "  - model: cnn\n"
        "    batch: 8\n"
        "    note: N\n"
        "    kept: [a, b]\n"
        "    points: {end: {allocated: 1.50 MiB}}\n"
        "    estimates: {modelsize_total: 16 bits}\n"
        "results:\n"
        "  - {label: CNN, model: cnn, batch: 8, estimated: 3 MiB, real: 2 MiB, error_percent: 50.0}\n"
    )
    source = Source("T", "torch", "A", "2020", "G", {"torch": "2.0"})
    bits, residents = Quantity("16", "bits", 0.125), ("a", "b")
    assert load_measured(written(tmp_path, text)) == Archive(
        figures=(
            Figure("cnn", 8, END, "allocated", Quantity("1.50", "MiB", MIB), source, "N", residents),
            Figure("cnn", 8, ESTIMATE, "modelsize_total", bits, source, "N", residents),
        ),
        results=(ResultRow("CNN", "cnn", 8, "3 MiB", "2 MiB", 50.0),),
    )


def test_size_is_the_number_times_its_unit() -> None:
    """1.5 MiB are 1,572,864 bytes, 16 bits two."""
    assert (Quantity("1.50", "MiB", MIB).size_bytes, Quantity("16", "bits", 0.125).size_bytes) == (1572864, 2)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (
            "1.50 MiB",
            "1.50 GB",
            "4, figures[0]: expected a number and one of the units MiB, got ",
        ),
        (
            "1.50 MiB",
            "MiB",
            "4, figures[0]: expected a number and one of the units MiB, got ",
        ),
        ("1.50 MiB", "-1 MiB", "4, figures[0]: expected a number and one of the units MiB, got "),
        ("1.50 MiB", "1.50", "4, figures[0].points: Expected `str`, got `float`"),
        ("allocated:", "alocated:", "4, figures[0]: unknown kind alocated; known are allocated, "),
        ("end:", "estimate:", "4, figures[0]: estimates belong under the key estimates"),
        (", points: {end: {allocated: 1.50 MiB}}", "", "4, figures[0]: missing points or estimates"),
        ("batch: 8", "batch: 0", "4, figures[0].batch: expected a whole number from 1 to "),
        ("batch: 8", "batch: 1.5", "4, figures[0].batch: expected a whole number from 1 to "),
        ("framework: torch", "framework: jax", "1, source.framework: expected one of tensorflow, torch"),
        ("about: A", "abut: A", "1, source.abut: unknown key"),
        ("units: {MiB: 1048576}\n", "", "1: missing units"),
        (
            "figures:\n",
            "figures:\n  - {model: cnn, batch: 8, points: {end: {allocated: 1 MiB}}}\n",
            "5, figures[1]: allocated at end occurs twice in this file",
        ),
    ],
)
def test_errors_of_a_file_name_line_and_key(tmp_path: Path, before: str, after: str, problem: str) -> None:
    """An error names the file, the line and the key."""
    assert before in FILE
    folder = written(tmp_path, FILE.replace(before, after))
    with pytest.raises(DataFileError) as error:
        load_measured(folder)
    assert str(error.value).startswith(f"{folder / 'a.yaml'} line {problem}")


def test_results_are_the_notebooks_table() -> None:
    """The six rows, as printed."""
    rows = [(row.label, row.estimated, row.real, row.error_percent) for row in ARCHIVE.results]
    assert rows == [
        ("Variable", "1024 MiB", "1024 MiB", 0),
        ("CNN", "636 MiB", "531 MiB", 19.8),
        ("VGG16", "15929 MiB", "17232 MiB", 7.6),
        ("ResNet50", "11378 MiB", "11738 MiB", 3.1),
        ("ViT", "18678 MiB", "17218 MiB", 8.5),
        ("UNETR", "5605 MiB", "5178 MiB", 8.2),
    ]


@pytest.mark.parametrize("row", ARCHIVE.results, ids=lambda row: row.label)
def test_results_follow_from_their_own_columns(row: ResultRow) -> None:
    """A row's error is that of its estimate, without the sign; its real value is the highest allocated."""
    estimated, real = (int(text.removesuffix(" MiB")) for text in (row.estimated, row.real))
    assert round(100 * abs(estimated / real - 1), 1) == row.error_percent
    point = "define" if row.label == "Variable" else END
    (peak,) = (
        figure
        for figure in ARCHIVE.look_up(row.model, row.batch, "peak_allocated", point)
        if figure.source.framework == "torch"
    )
    assert f"{float(peak.quantity.printed):.0f}" == str(real)


@pytest.mark.parametrize(
    ("model", "batch", "kind", "point", "figures"),
    [
        ("vgg16_bn", 128, "peak_allocated", END, ["17231.9 MiB"]),
        ("resnet50", 128, "reserved", END, ["12982.0 MiB"]),
        ("unetr", 8, "allocated", "train 1", ["2645.8 MiB"]),
        ("unetr", 8, "allocated", END, ["2647.4 MiB"]),
        ("tensor_1gib", 1, "used", "define", ["3695.8 MiB", "2486.2 MiB"]),  # TensorFlow and torch
        ("basic_unet", 4, "total_freed", END, ["538928 KB"]),
        ("smp_unet_resnet18", 4, "peak_allocated", END, ["385608 KB"]),
        ("basic_encoder", 4, "allocated", "stage 0", ["274.91 MB"]),
        ("davenet_image", 128, "torchsummary_total", ESTIMATE, ["28273.64 MB"]),
        ("conv_pair", 1, "modelsize_total", ESTIMATE, ["4776960 bits"]),
        ("cnn", 64, "peak_allocated", END, []),
    ],
)
def test_figures_are_found_by_model_and_batch(
    model: str, batch: int, kind: str, point: str, figures: list[str]
) -> None:
    """A model, a batch size, a kind and a point name one figure of each source, with its unit."""
    assert printed(model, batch, kind, point) == figures


def test_models_are_the_catalogues() -> None:
    """Every model is an entry of models.yaml, save the thread's single convolution."""
    models = {figure.model for figure in ARCHIVE.figures} | {row.model for row in ARCHIVE.results}
    assert models - set(load_catalogue()) == {"single_conv"}


def test_batches_are_the_catalogues() -> None:
    """A measured model was measured at the batch size of its entry."""
    catalogue = load_catalogue()
    odd = {
        (figure.model, figure.batch)
        for figure in ARCHIVE.figures
        if figure.model in catalogue and catalogue[figure.model].batch != figure.batch
    }
    assert odd == {("davenet_audio", 1)}


def test_pools_add_up_to_what_is_allocated() -> None:
    """In the thread's tables the large and the small pool make up each total, to the printed unit."""
    for model in ("basic_unet", "smp_unet_resnet18"):
        for kind in ("allocated", "total_allocated", "total_freed"):
            whole, large, small = (
                ARCHIVE.look_up(model, 4, f"{kind}{pool}")[0].quantity
                for pool in ("", "_large_pool", "_small_pool")
            )
            assert 0 <= whole.size_bytes - large.size_bytes - small.size_bytes <= whole.unit_bytes
