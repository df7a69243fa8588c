"""Plan Liger's own kernels by the release of each published row, and by the newest; write liger_kernels.csv.

    python -m benchmarks.accuracy.liger_releases --cudnn FOLDER

Releases of liger-kernel are downloaded by pip; kernels in Triton launch nothing, so none needs Triton. A row
has the newest release of its day, or the first with its operator, whose code was measured before it was
published. `--cudnn` is the folder of a cuDNN 9.20 for the convolutions of two operators.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from benchmarks.accuracy.rows_operators import (
    GPUS,
    KERNEL_PEAKS,
    KEYS,
    Line,
    dtype_of,
    is_kernel,
    published_lines,
    sizes_of,
)
from benchmarks.rows import write_lines
from planner.hardware.database import find_device
from planner.jobs import Job
from planner.program import ConvWorkspaceQuery

NEWEST = "0.8.5"
RELEASES = {
    "cross_entropy": "0.2.1",
    "fused_linear_cross_entropy": "0.4.2",
    "geglu": "0.2.1",
    "swiglu": "0.2.1",
    "fused_linear_orpo_loss": "0.4.2",
    "fused_linear_cpo_loss": "0.5.0",
    "fused_linear_simpo_loss": "0.5.0",
    "distill_jsd_loss": "0.5.3",
    "multi_token_attention": "0.6.0",
    "sparse_multi_token_attention": "0.6.0",
    "softmax": "0.6.0",
    "llama4_rope": "0.6.2",
    "tiled_geglu": "0.6.4",
    "tiled_swiglu": "0.6.4",
    "group_norm": "0.7.0",
    "relu_squared": "0.8.0",
    "fused_moe": "0.8.0",
    "megatron_rms_norm": "0.8.1",
    "megatron_cross_entropy": "0.8.1",
    "megatron_swiglu": "0.8.2",
}
PLAIN = {"fused_linear_cpo_loss": "fused_linear_simpo_loss"}  # whose plain side is measured like another's


def peak_bytes(line: Line, convolutions: ConvWorkspaceQuery) -> int:
    """Return the planned peak of a row, by the Liger that can be imported.

    The plain operator ran before in the same process; of it cuBLAS's workspaces stay.
    """
    from benchmarks.accuracy.kernels import KERNELS
    from benchmarks.accuracy.operator_loop import peak_allocated_bytes
    from benchmarks.accuracy.operators import OPERATORS, Setting

    operator, setting = line["operator"], Setting(line["mode"], sizes_of(line), dtype_of(line))
    plain = OPERATORS.get(PLAIN.get(operator, operator))
    target = replace(find_device(GPUS[line["gpu"]]).target, conv_workspace_query=convolutions)
    return peak_allocated_bytes(
        lambda: KERNELS[line["provider"], operator](setting),
        target,
        () if plain is None else (lambda: plain(setting._replace(mode="full")),),
    )


def selected(release: str) -> list[Line]:
    """Return the rows that a release plans."""
    lines = [line for line in published_lines() if is_kernel(line)]
    return [line for line in lines if release in (NEWEST, RELEASES[line["operator"]])]


def plan(folder: Path, release: str, cudnn: str) -> Iterator[int]:
    """Yield the peaks of a release's rows; its package of models, which old ones cannot import, is bare."""
    from planner.emulator import open_convolutions

    package = types.ModuleType("liger_kernel.transformers")
    package.__path__ = [str(folder / "liger_kernel" / "transformers")]
    sys.modules[package.__name__] = package
    sys.path.insert(0, str(folder))
    convolutions = open_convolutions(Job.create("none", cudnn=cudnn))
    for line in selected(release):
        yield peak_bytes(line, convolutions)


def download(release: str, folder: Path) -> Path:
    """Unpack the wheel of a release; returns where."""
    at = folder / release
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(at)]
    subprocess.run(
        [*command, f"liger-kernel=={release}"], check=True, env={**os.environ, "PIP_CONSTRAINT": ""}
    )
    (wheel,) = at.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(at)
    return at


def main() -> None:
    """Plan all rows, a process for each release, and write the table."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--cudnn", required=True, metavar="FOLDER", help="libraries of a cuDNN 9.20")
    parser.add_argument("--plan", nargs=2, metavar=("RELEASE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan:
        release, folder = options.plan
        print(json.dumps([*plan(Path(folder), release, options.cudnn)]))
        return
    peaks: dict[str, dict[tuple[str, ...], int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for release in sorted({*RELEASES.values(), NEWEST}):
            at = download(release, Path(folder))
            command = [sys.executable, "-m", __spec__.name, "--cudnn", options.cudnn]
            run = subprocess.run(
                [*command, "--plan", release, str(at)], check=True, stdout=subprocess.PIPE, text=True
            )
            keys = [key_of(line) for line in selected(release)]
            peaks[release] = dict(zip(keys, json.loads(run.stdout.splitlines()[-1]), strict=True))
            print(f"{release}: {len(keys)} rows", flush=True)
    write(peaks)


def key_of(line: Line) -> tuple[str, ...]:
    """Return what names a row."""
    return tuple(line[name] for name in KEYS)


def write(peaks: dict[str, dict[tuple[str, ...], int]], path: Path = KERNEL_PEAKS) -> None:
    """Write the peaks of each row."""
    rows = []
    for line in selected(NEWEST):
        key, release = key_of(line), RELEASES[line["operator"]]
        rows.append((*key, release, peaks[release][key], NEWEST, peaks[NEWEST][key]))
    write_lines(path, (*KEYS, "release", "peak_bytes", "newest", "newest_peak_bytes"), rows)


if __name__ == "__main__":
    main()
