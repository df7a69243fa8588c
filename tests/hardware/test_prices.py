"""Files of prices in SkyPilot's schema."""

import os
from datetime import date
from pathlib import Path

import pytest

from planner.errors import DataFileError, UsageError
from planner.hardware.database import find_device
from planner.hardware.prices import Offer, read_prices
from planner.hardware.scheduler_names import load_names

HEADER = "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,Price,SpotPrice"
L4, T4, CPU = "l4.small,4,16,L4,1,,r1,0.7,0.2", "t4.big,8,32,T4,4,,r2,2.0,", "cpu,4,16,,,,r1,0.1,0.05"


def write(folder: Path, *rows: str, name: str = "prices.csv", header: str = HEADER) -> Path:
    path = folder / name
    path.write_text("\n".join([header, *rows, ""]), encoding="utf-8")
    return path


def test_the_cheapest_instance_of_each_gpu_counts(tmp_path: Path) -> None:
    """Rows without a GPU are left out, and accelerators that the database does not have are named."""
    dear = "l4.large,8,32,L4,1,,r3,0.9,0.1"
    prices = read_prices(write(tmp_path, dear, L4, T4, CPU, "tpu,4,8,tpu-v9,1,,r1,1.0,"))
    assert prices.offers == {
        "L4 24GB": Offer(0.7, "l4.small", 1, "r1"), "T4 16GB": Offer(2.0, "t4.big", 4, "r2")
    }  # fmt: skip
    assert prices.offers["T4 16GB"].price_of_gpu == 0.5
    assert prices.unknown == ("tpu-v9",)


def test_spot_prices(tmp_path: Path) -> None:
    """A GPU without a spot price has none."""
    dear = "l4.large,8,32,L4,1,,r3,0.9,0.1"
    assert read_prices(write(tmp_path, dear, L4, T4), is_spot=True).offers == {
        "L4 24GB": Offer(0.1, "l4.large", 1, "r3")
    }


def test_parts_of_a_gpu_have_no_price(tmp_path: Path) -> None:
    """Azure rents a sixth of an A10, with a sixth of its memory."""
    assert not read_prices(write(tmp_path, "nv6,6,55,A10,0.167,,r1,0.45,")).offers


def test_the_date_is_always_known(tmp_path: Path) -> None:
    """The given day, else the file's comment, its name, its last change."""
    named = write(tmp_path, L4, name="aws-2026-02-03.csv")
    said = write(tmp_path, L4, header=f"# fetched 2026-01-02\n{HEADER}", name="x-2025-01-01.csv")
    plain = write(tmp_path, L4)
    os.utime(plain, (1_750_000_000, 1_750_000_000))
    assert [(one.date, one.date_source) for one in map(read_prices, (named, said, plain))] == [
        (date(2026, 2, 3), "of its name"),
        (date(2026, 1, 2), "as the file says"),
        (date(2025, 6, 15), "its last change"),
    ]
    assert read_prices(said, "2026-03-04").sentence() == (
        "prices of 2026-03-04 (--prices-date) from x-2025-01-01.csv, on demand"
    )
    with pytest.raises(UsageError, match="--prices-date 2026-13-01: give the day as 2026-01-31"):
        read_prices(plain, "2026-13-01")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": empty; expected the columns InstanceType"),
        ("InstanceType,Price\n", " line 1: missing column AcceleratorName, AcceleratorCount"),
        (f"{HEADER},Price\n", " line 1: a column occurs twice"),
        (f"{HEADER}\n{CPU}\na,b\n", " line 3: 2 values, but 9 columns"),
        (f"# 2026-01-01\n{HEADER}\na,4,16,L4,1,,r1,free,\n", " line 3, Price: expected a number from 0, got"),
        (f"{HEADER}\na,4,16,L4,1,,r1,-1,\n", " line 2, Price: expected a number"),
        (f"{HEADER}\na,4,16,L4,1.5,,r1,1,\n", " line 2, AcceleratorCount: 1.5 is no number of GPUs"),
        (f"{HEADER}\na,4,16,L4,nan,,r1,1,\n", " line 2, AcceleratorCount: expected a number"),
        (f'{HEADER}\na,4,16,"L4"x,1,,r1,1,\n', " line 2: not CSV"),
    ],
)
def test_broken_files_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataFileError) as caught:
        read_prices(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_a_name_of_skypilot_is_of_one_gpu() -> None:
    """Else a price would be that of another GPU; A6000 and RTXA6000 are names of one."""
    names = [name for given in load_names("skypilot").values() for name in given]
    assert len(names) == len(set(names))
    assert all(find_device(gpu).name == gpu for gpu in load_names("skypilot"))
