"""The GPUs, their reader and the generic GPU."""

import re
import runpy
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.errors import DataFileError, NoGpuError, UsageError
from planner.hardware.database import find_device, load_devices, search_devices
from planner.hardware.device import (
    DRIVER_MIB,
    DRIVER_SHARE,
    DRIVER_SPREAD_MIB,
    GENERIC_CONTEXT,
    MIB,
    Device,
    FigureKind,
    ProductInfo,
    ProductLine,
    SourcedBytes,
    SourcedValue,
    generic_device,
    generic_usable,
    unlimited_device,
)
from planner.hardware.local_gpu import local_device

CARD = """\
name: Test 8GB
aliases: [T-8, "8"]
capability:
  version: [8, 9]
  source: made up
total:
  mib: 8000
  kind: measured
  source: nvidia-smi
usable:
  mib: 7900.5
  spread_mib: 2
  kind: published
  source: a log
context: generic
"""


def write(folder: Path, text: str, name: str = "card.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_becomes_a_device(tmp_path: Path) -> None:
    """A file's figures arrive in bytes, with their kind and source."""
    write(tmp_path, CARD)
    assert load_devices(tmp_path) == (
        Device(
            name="Test 8GB",
            total=SourcedBytes(8000 * MIB, "nvidia-smi", 0, FigureKind.MEASURED),
            usable=SourcedBytes(7900 * MIB + MIB // 2, "a log", 2 * MIB, FigureKind.PUBLISHED),
            context=GENERIC_CONTEXT,
            capability=(8, 9),
            aliases=("T-8", "8"),
            capability_source="made up",
        ),
    )


def test_generic_usable_in_a_file(tmp_path: Path) -> None:
    """A GPU whose usable memory is not known takes the generic rule, with a note."""
    cut = CARD.index("usable:")
    write(tmp_path, CARD[:cut] + "usable: generic\ncontext: generic\n")
    (device,) = load_devices(tmp_path)
    assert device.usable == generic_usable(8000 * MIB)
    assert device.usable.kind is FigureKind.DERIVED


BROKEN = [
    (
        "name: Test 8GB",
        "name: 8",
        "line 1, name: expected a string, got 8; write it in quotes",
    ),
    ("name: Test 8GB\n", "", "line 1: missing name"),
    (
        "name: Test 8GB",
        "nam: Test 8GB",
        "line 1, nam: unknown key; known are name, capability, total",
    ),
    ('"8"', "8", "line 2, aliases[1]: expected a string, got 8"),
    ("aliases: [T-8, ", "aliases: T-8 #", "line 2, aliases: expected a list, got 'T-8'"),
    ("[8, 9]", "8.9", "line 4, capability.version: expected a list of 2, each a whole number"),
    (
        "[8, 9]",
        "[8]",
        "line 4, capability.version: expected a list of 2, each",
    ),
    ("mib: 8000", "mib: many", "line 7, total.mib: expected a number from 0 to 10,000,000, got 'many'"),
    ("mib: 8000", "mib: -8000", "line 7, total.mib: expected a number from 0 to 10,000,000, got -8000"),
    ("mib: 8000", "mib: .nan", "line 7, total.mib: expected a number from 0 to 10,000,000, got '.nan'"),
    ("mib: 8000", "mib: yes", "line 7, total.mib: expected a number from 0 to 10,000,000, got 'yes'"),
    ("mib: 8000", "mib: 80", "line 6, total: a GPU has at least 100 MiB"),
    ("mib: 8000", "mib: 7000", "line 10, usable: more than the total"),
    ("kind: measured", "kind: guess", "line 8, total.kind: expected one of datasheet, derived, measured"),
    ("kind: measured", "kind: user", "line 8, total.kind: expected one of datasheet, derived, measured"),
    ("  source: nvidia-smi\n", "", "line 6, total: missing source"),
    ("nvidia-smi", '" "', "line 9, total.source: expected a string, got ' '"),
    ("  source: nvidia-smi", "  kind: measured", "line 9, total.kind: each key must be one plain"),
    ("  spread_mib: 2", "  spread: 2", "line 12, usable.spread: unknown key; known are mib, kind, source"),
    ("context: generic", "context: 400", "line 15, context: expected keys with values or generic, got 400"),
    ("context: generic", "context: [1", "line 16: not YAML (did not find expected ',' or ']')"),
    (CARD, "", "line 1: the file is empty"),
    (CARD, "- 1\n", "line 1: expected keys with values, got a list of 1"),
]


@pytest.mark.parametrize(("right", "wrong", "message"), BROKEN, ids=[case[2] for case in BROKEN])
def test_broken_files(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    """A broken file is refused in one line with the file, the line and the key."""
    assert right in CARD
    path = write(tmp_path, CARD.replace(right, wrong, 1))
    with pytest.raises(DataFileError) as caught:
        load_devices(tmp_path)
    assert str(caught.value).startswith(f"{path} {message}")
    assert "\n" not in str(caught.value)


def test_no_files(tmp_path: Path) -> None:
    """A folder without GPUs is an error, not an empty answer."""
    with pytest.raises(DataFileError, match="no device file"):
        load_devices(tmp_path)


def test_not_text(tmp_path: Path) -> None:
    """A file that is no UTF-8 text is refused in one line."""
    (tmp_path / "card.yaml").write_bytes(b"name: \xff\n")
    with pytest.raises(DataFileError, match=r"card\.yaml: not readable \('utf-8' codec"):
        load_devices(tmp_path)


def test_one_name_two_cards(tmp_path: Path) -> None:
    """Two GPUs may not answer to one name."""
    write(tmp_path, CARD, "a.yaml")
    path = write(tmp_path, CARD.replace("Test 8GB", "Other").replace('"8"', '"9"'), "b.yaml")
    with pytest.raises(DataFileError) as caught:
        load_devices(tmp_path)
    assert str(caught.value) == f"{path}: 'T-8' names the GPU of a.yaml too; change one"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("4090", "RTX 4090 24GB"),
        ("rtx4090", "RTX 4090 24GB"),
        ("RTX_4090", "RTX 4090 24GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090 24GB"),
        ("a100-80", "A100 80GB"),
        ("A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("Tesla T4", "T4 16GB"),
        ("nvidia l4", "L4 24GB"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada 48GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell 96GB"),
    ],
)
def test_spellings(spelling: str, name: str) -> None:
    """A GPU is found by its common names and by the name that nvidia-smi prints."""
    assert find_device(spelling).name == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("A100", "the nearest are A100 40GB, A100 80GB"),
        ("v100 sxm", "the nearest are V100 16GB, V100 32GB"),
        ("RTX 3090 Super", "the nearest are RTX 3090 24GB, RTX "),
        ("4900", "the nearest are RTX 4090 24GB, RTX "),
        ("RTX", " GPUs match; `planner devices RTX` lists them"),
        ("", "`planner devices` lists all that are known"),
    ],
)
def test_unknown_names_lead_to_the_nearest(name: str, hint: str) -> None:
    """The GPUs that a name matches come first, then those spelled like it; then the way out."""
    with pytest.raises(UsageError) as caught:
        find_device(name)
    assert str(caught.value).startswith(f"unknown GPU {name!r}: ")
    assert hint in str(caught.value)
    assert str(caught.value).endswith("; for any other GPU give --gpu-mib N")


def test_shipped_cards_make_sense() -> None:
    """Every whole GPU keeps something for the driver, less than a tenth; a slice is all its own."""
    for device in load_devices():
        driver_share = 1 - device.usable.value / device.total.value
        assert device.about is not None, device.name
        if device.about.line is ProductLine.SLICE:
            assert driver_share == 0, device.name
        else:
            assert 0 < driver_share < 0.1, device.name
        assert 80 * MIB < device.context.value < 1000 * MIB, device.name
        assert (6, 0) <= device.capability <= (12, 1), device.name


def test_the_database_is_broad() -> None:
    """The database has 60 whole GPUs or more, GTX 1080 Ti to B200, and slices of A100, H100 and H200."""
    lines = Counter(device.about.line for device in load_devices() if device.about is not None)
    assert sum(lines.values()) - lines[ProductLine.SLICE] >= 60
    assert all(count >= 10 for count in lines.values())
    assert {find_device(name).capability for name in ("1080 ti", "b200")} == {(6, 1), (10, 0)}
    slices = [device.name for device in load_devices() if " MIG " in device.name]
    assert {name.split()[0] for name in slices} == {"A100", "H100", "H200"}


@pytest.mark.parametrize("device", load_devices(), ids=lambda device: device.name)
def test_every_figure_has_an_origin(device: Device) -> None:
    """No figure is without its kind and source, and derived ones name their origin and their error."""
    about = device.about
    assert about is not None
    noted = [figure for figure in (about.multiprocessors, about.bandwidth) if figure is not None]
    for figure in (device.total, device.usable, device.context, *noted):
        assert figure.source.strip(), device.name
        assert figure.kind is not FigureKind.USER
    if device.usable.kind is FigureKind.DERIVED:
        assert device.usable.spread > 0
        assert re.search(r"\d|have|has|keeps?|slice", device.usable.source)
    assert bool(about.instances) == bool(about.instances_source)


DIFFERENCES = [
    (re.compile(r"total less (?:the )?([\d,]+) MiB"), lambda card, mib: card.total.value / MIB - mib),
    (
        re.compile(r"^(\d+)(?: to \d+)? MiB in logs under earlier drivers, less the 127"),
        lambda _, mib: mib - 127,
    ),
    (re.compile(r"^(\d+) MiB in logs under earlier drivers, less the 190"), lambda _, mib: mib - 190),
]


@pytest.mark.parametrize("device", load_devices(), ids=lambda device: device.name)
def test_derived_figures_follow_their_rule(device: Device) -> None:
    """A usable memory that names a difference is the figure that it names less that difference."""
    if device.usable.kind is not FigureKind.DERIVED:
        return
    for rule, compute in DIFFERENCES:
        match = rule.search(device.usable.source)
        if match:
            expected = compute(device, float(match[1].replace(",", "")))
            assert abs(device.usable.value / MIB - expected) <= max(4, device.usable.spread / MIB / 2)


def test_cards_of_one_memory_and_generation_agree() -> None:
    """Whole GPUs of one architecture and total see the same memory, but for 1 % of it."""
    seen: dict[tuple[int, int], Device] = {}
    for device in load_devices():
        if device.about is None or device.about.line is ProductLine.SLICE:
            continue
        if device.usable.kind is FigureKind.UNVERIFIED:
            continue
        key = (device.capability[0] * 10 + device.capability[1], device.total.value)
        other = seen.setdefault(key, device)
        assert abs(device.usable.value - other.usable.value) < 0.01 * device.total.value, device.name


def test_search() -> None:
    """Each word begins a word of a GPU's texts, or is its compute capability."""
    cards = load_devices()

    def names(*words: str) -> list[str]:
        return [card.name for card in search_devices(cards, words)]

    assert names("rtx4090") == names("4090") == names("RTX 4090") == ["RTX 4090 24GB"]
    assert names("g6e") == ["L40S 48GB"]
    assert names("l4") == ["L4 24GB", "L40 48GB", "L40S 48GB"]
    assert names("h200", "slice") == ["H200 141GB MIG 1g.18gb", "H200 141GB MIG 3g.71gb"]
    assert names("10.3") == ["B300 288GB"]
    assert names("gddr5x", "consumer") == ["GTX 1080 8GB", "GTX 1080 Ti 11GB", "TITAN Xp 12GB"]
    assert names("of no card") == []
    assert len(names()) == len(cards)


def test_notes_of_a_card(tmp_path: Path) -> None:
    """Notes that help to choose a GPU arrive with their kinds and sources."""
    notes = """\
line: consumer
multiprocessors: {count: 20, kind: datasheet, source: a sheet}
memory: {type: GDDR6, gb_per_second: 224.5, kind: unverified, source: memory}
instances: {names: [AWS x1], kind: unverified, source: a page}
"""
    write(tmp_path, CARD + notes)
    assert load_devices(tmp_path)[0].about == ProductInfo(
        line=ProductLine.CONSUMER,
        multiprocessors=SourcedValue(20, "a sheet", FigureKind.DATASHEET),
        memory_type="GDDR6",
        bandwidth=SourcedValue(224.5, "memory", FigureKind.UNVERIFIED),
        instances=("AWS x1",),
        instances_source="a page",
    )


class FakeNvml:
    """The part of `pynvml` that is used."""

    def __init__(self, name: str | bytes, total_mib: int) -> None:
        self.name, self.total_mib, self.is_open = name, total_mib, False

    def nvmlInit(self) -> None:  # noqa: N802
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:  # noqa: N802
        return self.name

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:  # noqa: N802
        if not self.total_mib:
            raise RuntimeError("GPU is lost")
        return SimpleNamespace(total=self.total_mib * MIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return (9, 9)


def test_local_card_of_the_database() -> None:
    """A local GPU that the database knows by name and memory is that GPU; NVML is closed again."""
    nvml = FakeNvml(b"NVIDIA GeForce RTX 4090", 24564)
    assert local_device(nvml=nvml) == find_device("4090")
    assert not nvml.is_open


def test_local_card_that_nobody_knows() -> None:
    """Any other local GPU is what NVML reports of it, with the generic line for what torch sees."""
    device = local_device(nvml=FakeNvml("NVIDIA GeForce RTX 4090", 48000))
    assert (device.name, device.capability, device.total.value) == (
        "NVIDIA GeForce RTX 4090",
        (9, 9),
        48000 * MIB,
    )
    assert device.usable == generic_usable(48000 * MIB)


def test_no_local_card() -> None:
    """Without a GPU that answers, `--gpu auto` is one line and exit code 5."""
    with pytest.raises(NoGpuError) as caught:
        local_device(nvml=FakeNvml("broken", 0))
    assert str(caught.value) == (
        "--gpu auto: no NVIDIA GPU here (GPU is lost); give --gpu NAME or --gpu-mib N"
    )
    assert caught.value.exit_code == 5


def test_generic_device() -> None:
    """A GPU of 24,000 MiB keeps 398 MiB and 0.23 % for the driver and 258 MiB for the context."""
    device = generic_device(24000)
    assert device == Device(
        name="generic GPU of 24000 MiB",
        total=SourcedBytes(24000 * MIB, "given by the user", 0, FigureKind.USER),
        usable=SourcedBytes(
            value=24000 * MIB - 398 * MIB - round(0.0023 * 24000 * MIB),
            source="total less 398 MiB and 0.23%: the known GPUs' line",
            spread=98 * MIB,
            kind=FigureKind.DERIVED,
        ),
        context=GENERIC_CONTEXT,
        capability=(8, 6),
        capability_source="assumed: an Ampere GPU",
    )


def test_smallest_generic_device() -> None:
    """If the driver would keep more than there is, nothing is usable."""
    assert generic_device(100).usable.value == 0


def test_unlimited_device() -> None:
    """Without a GPU all memory is usable and the context is the generic one."""
    device = unlimited_device()
    assert device.usable == device.total == SourcedBytes(2**60, "no GPU given", 0, FigureKind.USER)
    assert device.context == GENERIC_CONTEXT


@pytest.mark.parametrize("total_mib", [0, -24000, 99, 10_000_001])
def test_absurd_totals(total_mib: int) -> None:
    """A total that no GPU has is refused in one line that states what to give."""
    with pytest.raises(UsageError) as caught:
        generic_device(total_mib)
    assert str(caught.value) == (
        f"a GPU of {total_mib} MiB makes no sense: give its total memory in MiB as nvidia-smi shows it, "
        "from 100 to 10000000"
    )


def test_generic_constants_come_from_the_cards() -> None:
    """The constants of the generic GPU are what the fit through the shipped GPUs prints."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "fits" / "generic_device.py"))
    base, share, spread = script["fit_driver_share"](script["fitted_cards"]())
    assert (round(base), round(share, 4), round(spread)) == (
        DRIVER_MIB,
        DRIVER_SHARE,
        DRIVER_SPREAD_MIB,
    )


def test_context_by_multiprocessors() -> None:
    """A GPU's generic context follows from its stacks: 28 x 1,536 KiB are 42 MiB, and the context 154."""
    card = find_device("RTX 3060")
    assert card.context == SourcedBytes(
        154 * MIB,
        "line through published contexts (torch >= 2.1) of 12 GPUs, at 28 multiprocessors",
        40 * MIB,
        FigureKind.DERIVED,
    )
