"""What another estimator says of a job, in bytes and in the unit that it prints."""

from dataclasses import dataclass

MEGABYTE_BYTES = 10**6
MEBIBYTE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class PeerEstimate:
    """The three terms that torchinfo, torchsummary and pytorch_modelsize add up."""

    input_bytes: int
    output_bytes: int  # of the layers, for the forward and the backward pass
    parameter_bytes: int
    unit_bytes: int  # what the tool calls a megabyte

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The terms by name."""
        return (
            ("Input", self.input_bytes),
            ("Forward and backward", self.output_bytes),
            ("Parameters", self.parameter_bytes),
        )

    @property
    def total_bytes(self) -> int:
        """The tool's estimate of the memory that training takes."""
        return self.input_bytes + self.output_bytes + self.parameter_bytes

    @property
    def total_in_units(self) -> float:
        """The total as the tool prints it, before rounding."""
        return self.total_bytes / self.unit_bytes


@dataclass(frozen=True, slots=True)
class TrackedPeak:
    """What is alive at the peak of a run, by the tool's own categories: PyTorch's MemTracker."""

    parts: tuple[tuple[str, int], ...]
    unit_bytes: int = MEBIBYTE_BYTES

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return sum(size_bytes for _, size_bytes in self.parts)

    @property
    def total_in_units(self) -> float:
        """The total as the tool prints it, before rounding."""
        return self.total_bytes / self.unit_bytes
