"""Count an optimizer's memory outside of CUDA's caching allocator."""

from dataclasses import dataclass

_MIB = 2**20


@dataclass(slots=True)
class OutsideMemory:
    """The bytes of optimizer state outside of the caching allocator, and whether the step is compiled."""

    paged_bytes: int = 0  # state in CUDA managed memory, which the driver moves between GPU and host
    host_state_bytes: int = 0  # state in ordinary memory of the host
    compiles: bool = False  # whether the optimizer compiles its step, so that a first run times the kernels

    def notes(self) -> tuple[str, ...]:
        """Return a note for each kind of memory that the trace does not count."""
        notes = []
        if self.paged_bytes:
            notes.append(
                f"{_size(self.paged_bytes)} of optimizer state is paged (CUDA managed memory): it is "
                "outside of PyTorch's allocator, is on the GPU while there is room and on the host "
                "otherwise, and is not counted"
            )
        if self.host_state_bytes:
            notes.append(
                "the optimizer keeps parameters and gradients in pinned memory of the host, and "
                f"{_size(self.host_state_bytes)} of state there, which is not counted"
            )
        if self.compiles:
            notes.append(
                "torchao compiles its step: a first run without cached kernels also times them in its "
                "first step, with a buffer as large as the L2 cache and copies of a parameter, which is not "
                "counted"
            )
        return tuple(notes)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.1f} MiB" if size_bytes >= _MIB // 10 else f"{size_bytes:,} bytes"
