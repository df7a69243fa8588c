"""Note backend settings of a model's code that change memory and are not planned."""

from collections.abc import Iterator

import torch

from planner.jobs import Job

_OTHER = "which is not planned: convolutions may run with other workspaces"


def notes_on_settings(job: Job) -> Iterator[str]:
    """Yield a note for each current setting of cuDNN or determinism that is not planned."""
    cudnn = torch.backends.cudnn
    if cudnn.benchmark and not job.environment.cudnn_benchmark:
        yield "torch.backends.cudnn.benchmark is set, which is planned with --cudnn-benchmark alone"
    if cudnn.deterministic:
        yield f"torch.backends.cudnn.deterministic is set, {_OTHER}"
    if not _allows_tf32():
        yield f"torch.backends.cudnn.allow_tf32 is False, {_OTHER}"
    if not cudnn.enabled:
        yield "cuDNN is switched off, which is not planned: convolutions then take columns as workspaces"
    if torch.are_deterministic_algorithms_enabled():
        yield "deterministic algorithms are asked for, and not planned: some operators then take more memory"


def _allows_tf32() -> bool:
    """Return whether convolutions may run in TF32.

    torch's old setting is read or, if that fails, the new one.
    """
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return bool(torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32")
