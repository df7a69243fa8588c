"""Measure the memory of plain tensors with TensorFlow on a real GPU.

The tensors are defined and deleted by the steps of a `Process`. Nothing is simulated. The module is in this
folder because it imports a framework; it is the only module that imports TensorFlow. As in the notebook
(docs/notebook.md), TensorFlow's memory grows with the requests, and `get_memory_info` is read.
"""

from collections.abc import Iterator
from typing import Any

from planner.errors import ModelError, NoGpuError, UsageError
from planner.planning.process import Define, Delete, Heading, MemoryReading, Print, Process, ResetPeak

GPU = "GPU:0"
KNOWN = (Heading, Print, Define, Delete, ResetPeak)


def load_tensorflow() -> Any:
    """Import TensorFlow and return the module. Raises ModelError if that fails."""
    try:
        import tensorflow
    except ImportError as error:
        reason = "is not installed" if error.name == "tensorflow" else f"does not import: {error}"
        raise ModelError(f"tensorflow {reason}; pip install 'gpu-batch-planner[tensorflow]'") from error
    return tensorflow


def measure(process: Process, tf: Any) -> tuple[MemoryReading, ...]:
    """Run a process's steps with TensorFlow, and return the memory readings.

    They run on TensorFlow's first GPU. `tf` is the module `tensorflow`. `allocated_bytes` is TensorFlow's
    `current`, and the peak is its `peak`; the reserved memory is not shown. Raises UsageError for a step that
    is not about plain tensors, and NoGpuError if there is no GPU.
    """
    for index, step in enumerate(process):
        if not isinstance(step, KNOWN):
            raise UsageError(
                f"steps[{index}]: TensorFlow is measured with plain tensors only; "
                f"remove {type(step).__name__}, or use --framework torch"
            )
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise NoGpuError(
            "TensorFlow sees no GPU, and this measures on one; run it where there is an NVIDIA GPU"
        )
    tf.config.experimental.set_memory_growth(gpus[0], True)
    return tuple(_readings(process, tf))


def _readings(process: Process, tf: Any) -> Iterator[MemoryReading]:
    import numpy

    tensors: dict[str, object] = {}
    section = ""
    for step in process:
        match step:
            case Heading(text):
                section = text
            case ResetPeak():
                tf.config.experimental.reset_memory_stats(GPU)
            case Define(name, tensor):
                zeros = numpy.zeros(tensor.shape, dtype=tf.as_dtype(tensor.dtype).as_numpy_dtype)
                with tf.device(GPU):
                    tensors[name] = tf.constant(zeros)
            case Delete(names):
                for name in names:
                    del tensors[name]
            case Print(label):
                info = tf.config.experimental.get_memory_info(GPU)
                yield MemoryReading(section, label, info["current"], None, info["peak"])
