"""What all tests share: tests marked `gpu` are skipped, visibly, where torch sees no GPU."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the marked tests; torch is asked only when there are some."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
