"""Memory that an optimizer has outside of CUDA's caching allocator."""

from dataclasses import dataclass

_MIB = 2**20


@dataclass(slots=True)
class OutsideMemory:
    """Bytes of an optimizer's state that no replay of the caching allocator counts."""

    paged_bytes: int = 0  # CUDA managed memory, which the driver moves between GPU and host
    pinned_bytes: int = 0  # of the host, as the pinned allocator rounds them up
    host_state_bytes: int = 0  # of the host, in ordinary memory
    compiles: bool = False  # its step, whose kernels a first run times

    def notes(self) -> tuple[str, ...]:
        """Return a sentence for each kind."""
        notes = []
        if self.paged_bytes:
            notes.append(
                f"{_size(self.paged_bytes)} of optimizer state is paged (CUDA managed memory): it lies "
                "outside of PyTorch's allocator, is on the GPU while there is room and on the host "
                "otherwise, and is not counted"
            )
        if self.pinned_bytes:
            notes.append(
                f"the optimizer keeps parameters and gradients on the host: {_size(self.pinned_bytes)} of "
                f"pinned memory, rounded up to powers of two, and {_size(self.host_state_bytes)} of state; "
                "none of it is counted"
            )
        if self.compiles:
            notes.append(
                "torchao compiles its step: a first run without cached kernels also times them in its "
                "first step, beside a buffer as large as the L2 cache and copies of a parameter, which is "
                "not counted"
            )
        return tuple(notes)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.1f} MiB" if size_bytes >= _MIB // 10 else f"{size_bytes:,} bytes"
