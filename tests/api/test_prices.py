"""GPUs by price, and by the price of samples."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.errors import DataFileError, UsageError
from planner.hardware import find_device
from tests.helpers.command_line import Capture, outcome

CARDS = [find_device(name) for name in ("T4", "L4", "A100-40", "RTX 4090")]
PRICES = """\
# 2026-05-06
InstanceType,AcceleratorName,AcceleratorCount,Price,SpotPrice,Region
l4,L4,1,0.72,0.30,r1
t4x4,T4,4,2.40,0.80,r1
a100,A100,1,3.60,1.20,r2
"""


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.csv"
    path.write_text(PRICES, encoding="utf-8")
    return path


def names(**options: Any) -> list[str]:
    return [row["gpu"] for row in planner.gpus("cnn", 8, devices=CARDS, **options).to_dict()["rows"]]


def test_the_cheapest_hour_comes_first(prices: Path) -> None:
    """A GPU without a price comes last."""
    assert names(prices=prices) == ["L4 24GB", "T4 16GB", "A100 40GB", "RTX 4090 24GB"]
    assert names(prices=prices, spot=True)[:2] == ["L4 24GB", "T4 16GB"]
    assert names(prices=prices, sort="memory")[0] == "T4 16GB"


def test_throughput_makes_it_the_price_of_samples(prices: Path, tmp_path: Path) -> None:
    """An A100 for 3.60 at 1,000 samples a second takes a dollar for a million, an L4 for 0.72 at 100 two."""
    rates = tmp_path / "rates.csv"
    rates.write_text("gpu,samples_per_second\nL4,100\n")
    result = planner.gpus("cnn", 8, devices=CARDS, prices=prices, throughput=["A100-40=1000", str(rates)])
    rows = result.to_dict()["rows"]
    assert [(row["gpu"], row["price_per_million_samples"]) for row in rows[:3]] == [
        ("A100 40GB", pytest.approx(1)), ("L4 24GB", pytest.approx(2)), ("RTX 4090 24GB", None)
    ]  # fmt: skip
    assert "prices of 2026-05-06 (as the file says) from prices.csv, on demand" in " ".join(
        str(result).split()
    )
    assert max(map(len, str(result).splitlines())) <= 100
    table = list(csv.DictReader(io.StringIO(result.to_csv())))
    assert [row["price_per_hour"] for row in table] == ["3.6", "0.72", "", "2.4"]


def test_a_machine_is_paid_for_whole(prices: Path) -> None:
    rows = {row["gpu"]: row for row in planner.gpus("cnn", devices=CARDS, prices=prices).to_dict()["rows"]}
    t4 = rows["T4 16GB"]
    assert (t4["price_per_hour"], t4["price_per_gpu_hour"], t4["instance_gpus"]) == (2.4, 0.6, 4)
    assert rows["RTX 4090 24GB"]["price_per_hour"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spot": True}, "--spot: give the prices as well"),
        ({"prices_date": "2026-01-01"}, "--prices-date: give the prices as well"),
        ({"sort": "price"}, "--sort price: give the prices as well"),
        ({"throughput": ["L4"]}, "--throughput L4: give GPU=SAMPLES_PER_SECOND or"),
        ({"throughput": ["L4=0"]}, "--throughput L4=0: expected samples a second, more than 0"),
        ({"throughput": {"L99": 3}}, "unknown GPU 'L99'"),
    ],
)
def test_what_is_missing_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        names(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected the columns gpu,samples_per_second"),
        ("gpu,samples_per_second\nL4\n", "line 2: 1 values, but 2 columns"),
        ("gpu,samples_per_second\nL4,fast\n", "line 2: expected samples a second"),
        ("gpu,samples_per_second\n\nL99,3\n", "line 3: unknown GPU"),
        ("gpu,samples_per_second\nL4,3\nNVIDIA L4,4\n", "line 3: L4 24GB occurs twice"),
    ],
)
def test_broken_files_of_throughput_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(text)
    with pytest.raises(DataFileError) as caught:
        names(throughput=str(path))
    assert str(caught.value).startswith(f"{path} {message}")


def test_sorting_by_cost_needs_throughput(prices: Path) -> None:
    with pytest.raises(UsageError, match="--sort cost: give --throughput"):
        names(prices=prices, sort="cost")


def test_the_command_reads_prices(prices: Path, capsys: Capture) -> None:
    command = f"gpus --model cnn --filter l4 --prices {prices} --prices-date 2026-07-08"
    code, answer, _ = outcome(f"{command} --spot --throughput L4=100", capsys)
    assert code == 0 and "prices of 2026-07-08 (--prices-date)" in answer and "0.30" in answer
    code, _, error = outcome(f"{command} --global-batch 8", capsys)
    assert code == 2 and "--prices: not with --global-batch" in error
