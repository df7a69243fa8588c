"""Installations of torch that the emulated GPU takes, and its refusals of the others."""

from pathlib import Path

import pytest

from planner.emulator.child.installation import EmulatorError, find_installation


def installation(folder: Path, torch: str, cudnn: str) -> Path:
    """Lay out the files that decide, as pip does, and return the folder of torch."""
    major, minor, patch = cudnn.split(".")
    files = {
        "torch/version.py": f"__version__ = '{torch}'\n",
        "torch/lib/libtorch_cuda.so": "",
        "nvidia/cuda_runtime/include/cuda_runtime_api.h": "",
        "nvidia/cudnn/lib/libcudnn.so.9": "",
        "nvidia/cudnn/include/cudnn_version.h": f"#define CUDNN_MAJOR {major}\n#define CUDNN_MINOR {minor}\n"
        f"#define CUDNN_PATCHLEVEL {patch}\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "torch"


@pytest.mark.parametrize(
    ("torch", "cudnn", "package"),
    [("2.6.0+cu124", "9.1.0", "nvidia-cudnn-cu12"), ("2.7.1+cu118", "9.7.1", "nvidia-cudnn-cu11")],
)
def test_a_cudnn_that_takes_no_description_is_refused(
    tmp_path: Path, torch: str, cudnn: str, package: str
) -> None:
    """Convolutions would fail later, so that the line comes first and states what to install."""
    with pytest.raises(EmulatorError) as caught:
        find_installation(installation(tmp_path, torch, cudnn))
    assert str(caught.value) == (
        f"torch {torch}: its cuDNN {cudnn} does not answer for a GPU that is only described; put a newer one "
        f"in its place: pip install '{package}>=9.8'"
    )


def test_the_first_cudnn_that_takes_one_is_not_refused(tmp_path: Path) -> None:
    """The refusal is of a missing library, not of this version of cuDNN."""
    with pytest.raises(EmulatorError) as caught:
        find_installation(installation(tmp_path, "2.6.0+cu124", "9.8.0"))
    assert "cuDNN" not in str(caught.value)
