"""Answer the queries of `planner/hardware/cudnn/client.py` as a worker of `planner/_support/worker.py`.

    python worker.py FOLDER DEVICE [CUBLASLT GPU]

FOLDER holds cuDNN, DEVICE describes a GPU to begin with. CUBLASLT is a library to load as cuBLASLt; the
driver in its folder shows GPU, in the form of `planner/emulator/gpu.py`.

It runs as a file, with the standard library alone, since cuDNN may end a process and prints to standard
error. Enumerators are from cuDNN's headers (cudnn_graph_v9.h).
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any

OLDEST = 90800  # the first version that answers for a GPU that is only described
_DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_NOTES = (
    *("tensor cores", "down-converts", "reduced precision", "FFT", "not deterministic", "Winograd"),
    *("Winograd 4x4", "Winograd 6x6", "Winograd 13x13", "strict NaN"),
)  # CUDNN_NUMERICAL_NOTE_*, by number
_REFUSED_BY_TORCH = "down-converts"  # ATen/native/cudnn/Conv_v8.cpp, filterEngineConfigs
# Engines with wrong results in three dimensions, by direction, with the first version and the first version
# after the last (Conv_v8.cpp, plan_errata_exception, torch 2.11; pytorch/pytorch#163539).
_ERRATA = {"forward": (23, 90800, 91500), "data gradient": (23, 8000, None)}

# Descriptors, attributes and types of the backend API.
_CONVOLUTION, _ENGINE, _CONFIG, _HEURISTICS, _GRAPH, _TENSOR, _DEVICE = 1, 2, 3, 4, 15, 17, 38
_OPERATIONS = {  # its descriptor, then the attributes convolution, x, w, y, alpha, beta
    "forward": (10, 702, 704, 703, 705, 700, 701),
    "data gradient": (12, 708, 710, 709, 711, 706, 707),
    "weight gradient": (11, 714, 716, 715, 717, 712, 713),
}
_INSTANT, _FALLBACK = 0, 2  # CUDNN_HEUR_MODE_*, as PyTorch requests them
_ALL_CONFIGS = sys.maxsize
_TYPES: dict[str, tuple[int, Any]] = {
    "dtype": (1, ctypes.c_int32),
    "int64": (3, ctypes.c_int64),
    "float": (4, ctypes.c_float),
    "mode": (7, ctypes.c_int32),
    "heuristic": (8, ctypes.c_int32),
    "note": (11, ctypes.c_int32),
    "descriptor": (15, ctypes.c_void_p),
    "char": (24, ctypes.c_char),
}
_ALIGNMENT = 32  # bytes; the most that Conv_v8.cpp checks for; the caching allocator aligns to 512


class RefusedError(Exception):
    """The error of a call that cuDNN refuses, with cuDNN's message."""


class Library:
    """A loaded cuDNN library with its backend API.

    The methods are limited to the functions that convolution queries need.
    """

    def __init__(self, folder: Path, cublaslt: str = "") -> None:
        # Libraries that cuDNN needs from NVIDIA's other packages; once loaded, they are found by name.
        patterns = ["libnvrtc-builtins.so.*", "libnvrtc.so.*"]  # for the engines that it compiles at run time
        if not cublaslt:
            patterns.insert(0, "libcublasLt.so.*")
        others = [path for name in patterns for path in sorted(folder.parent.parent.glob(f"*/lib/{name}"))]
        own = [Path(cublaslt).with_name("libcuda.so.1"), Path(cublaslt)] if cublaslt else []
        for path in [*own, *others]:
            with suppress(OSError):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.functions = ctypes.CDLL(str(folder / "libcudnn.so.9"), mode=ctypes.RTLD_GLOBAL)
        self.functions.cudnnGetVersion.restype = ctypes.c_size_t
        self.functions.cudnnGetErrorString.restype = ctypes.c_char_p
        self.version = int(self.functions.cudnnGetVersion())
        self.devices: dict[str, Any] = {}

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the backend API by name. Raises RefusedError if it returns an error."""
        status = getattr(self.functions, f"cudnnBackend{name}")(*arguments)
        if status:
            raise RefusedError(self.functions.cudnnGetErrorString(status).decode())

    def create(self, kind: int, made: ExitStack) -> Any:
        """Return a new descriptor of type `kind`, which is destroyed when the stack `made` is closed."""
        descriptor = ctypes.c_void_p()
        self.call("CreateDescriptor", kind, ctypes.byref(descriptor))
        made.callback(self.functions.cudnnBackendDestroyDescriptor, descriptor)
        return descriptor

    def set(self, descriptor: Any, attribute: int, kind: str, *values: Any) -> None:
        """Set the values of a descriptor's attribute."""
        code, of = _TYPES[kind]
        array = _pointers(values) if kind == "descriptor" else (of * len(values))(*values)
        self.call("SetAttribute", descriptor, attribute, code, ctypes.c_int64(len(values)), array)

    def get(self, descriptor: Any, attribute: int, kind: str, capacity: int, into: Any) -> int:
        """Read at most `capacity` values of a descriptor's attribute into `into`, and return their number."""
        count = ctypes.c_int64()
        capacity_there, count_there = ctypes.c_int64(capacity), ctypes.byref(count)
        self.call("GetAttribute", descriptor, attribute, _TYPES[kind][0], capacity_there, count_there, into)
        return count.value

    def device(self, described: dict[str, Any]) -> Any:
        """Return the descriptor of the GPU with this description, created on the first call."""
        text = json.dumps(described)
        if text not in self.devices:
            device = self.create(_DEVICE, ExitStack())  # lives as long as the process
            encoded = text.encode()
            self.set(device, 2702, "char", *(bytes([byte]) for byte in encoded))
            self.call("Finalize", device)
            self.devices[text] = device
        return self.devices[text]


def engines(library: Library, question: dict[str, Any]) -> Iterator[tuple[int, list[str], int]]:
    """Yield the engines that PyTorch accepts for a convolution, in the order of cuDNN's heuristics.

    Each engine has its number, notes and workspace in bytes. No plan is made of an engine: this takes up to
    three seconds if the engine is compiled at run time, and its configuration states the same workspace. If
    only the first engine is needed (not `every`), the first configuration is requested alone before all
    configurations, for which cuDNN takes ten times as long.
    """
    with ExitStack() as made:
        try:
            device = library.device(question["device"])
            graph = _graph(library, made, question)
        except RefusedError:
            return
        requests = [(_INSTANT, _ALL_CONFIGS), (_FALLBACK, _ALL_CONFIGS)]
        for mode, most in requests if question["every"] else [(_INSTANT, 1), *requests]:
            for config in _configs(library, made, graph, device, mode, most):
                number, notes = _engine(library, config)
                if _REFUSED_BY_TORCH in notes or _is_erratum(library, question, number):
                    continue
                with suppress(RefusedError):
                    yield number, notes, _workspace(library, config)


def _is_erratum(library: Library, question: dict[str, Any], number: int) -> bool:
    """Return whether PyTorch excludes an engine because of wrong results."""
    if len(question["x"]) != 5 or question["direction"] not in _ERRATA:
        return False
    engine, first, after = _ERRATA[question["direction"]]
    return number == engine and first <= library.version and (after is None or library.version < after)


def _graph(library: Library, made: ExitStack, question: dict[str, Any]) -> Any:
    kind, convolution, *places, alpha, beta = _OPERATIONS[question["direction"]]
    operation = library.create(kind, made)
    library.set(operation, convolution, "descriptor", _convolution(library, made, question))
    for place, letter in zip(places, "xwy", strict=True):
        library.set(operation, place, "descriptor", _tensor(library, made, letter, question))
    library.set(operation, alpha, "float", 1.0)
    library.set(operation, beta, "float", 0.0)
    library.call("Finalize", operation)
    graph = library.create(_GRAPH, made)
    library.set(graph, 801, "descriptor", operation)
    library.call("Finalize", graph)
    return graph


def _tensor(library: Library, made: ExitStack, letter: str, question: dict[str, Any]) -> Any:
    sizes, tensor = question[letter], library.create(_TENSOR, made)
    library.set(tensor, 901, "dtype", _DTYPES[question["dtype"]])
    library.set(tensor, 902, "int64", *sizes)
    library.set(tensor, 903, "int64", *strides_of(sizes, question["channels_last"]))
    library.set(tensor, 906, "int64", ord(letter))
    library.set(tensor, 900, "int64", _ALIGNMENT)
    library.call("Finalize", tensor)
    return tensor


def _convolution(library: Library, made: ExitStack, question: dict[str, Any]) -> Any:
    convolution = library.create(_CONVOLUTION, made)
    # Conv_v8.cpp, getConvDescriptor: half precision is summed in single precision
    computed = "float64" if question["dtype"] == "float64" else "float32"
    library.set(convolution, 100, "dtype", _DTYPES[computed])
    library.set(convolution, 101, "mode", 1)  # CUDNN_CROSS_CORRELATION
    library.set(convolution, 106, "int64", len(question["padding"]))
    for attribute, name in ((105, "padding"), (104, "padding"), (102, "dilation"), (103, "stride")):
        library.set(convolution, attribute, "int64", *question[name])
    library.call("Finalize", convolution)
    return convolution


def _configs(library: Library, made: ExitStack, graph: Any, device: Any, mode: int, most: int) -> list[Any]:
    """Return up to `most` engine configurations in cuDNN's order, or [] if cuDNN refuses the query."""
    heuristics = library.create(_HEURISTICS, made)
    library.set(heuristics, 201, "descriptor", graph)
    library.set(heuristics, 200, "heuristic", mode)
    library.set(heuristics, 204, "descriptor", device)
    try:
        library.call("Finalize", heuristics)
        count = min(most, library.get(heuristics, 202, "descriptor", 0, None))
        configs = [library.create(_CONFIG, made) for _ in range(count)]
        config_count = library.get(heuristics, 202, "descriptor", count, _pointers(configs))
    except RefusedError:
        return []
    return configs[:config_count]


def _engine(library: Library, config: Any) -> tuple[int, list[str]]:
    with ExitStack() as made:
        engine = library.create(_ENGINE, made)
        library.get(config, 300, "descriptor", 1, _pointers([engine]))
        number = ctypes.c_int64()
        library.get(engine, 1301, "int64", 1, ctypes.byref(number))
        notes = (ctypes.c_int32 * len(_NOTES))()
        count = library.get(engine, 1303, "note", len(_NOTES), notes)
        return number.value, [_NOTES[note] for note in notes[:count] if note < len(_NOTES)]


def _workspace(library: Library, config: Any) -> int:
    size_bytes = ctypes.c_int64()
    library.get(config, 303, "int64", 1, ctypes.byref(size_bytes))
    return size_bytes.value


def strides_of(sizes: Sequence[int], channels_last: bool) -> list[int]:
    """Return the strides, in elements, of a dense contiguous or channels_last tensor.

    >>> strides_of((2, 3, 5, 7), False), strides_of((2, 3, 5, 7), True)
    ([105, 35, 7, 1], [105, 1, 21, 3])
    """
    order = [0, *range(2, len(sizes)), 1] if channels_last else list(range(len(sizes)))
    strides = [1] * len(sizes)
    step = 1
    for place in reversed(order):
        strides[place] = step
        step *= sizes[place]
    return strides


def _pointers(descriptors: Sequence[Any]) -> Any:
    return (ctypes.c_void_p * len(descriptors))(*(each.value for each in descriptors))


def main() -> None:
    """Answer each query on standard input with its engines, and an empty query with cuDNN's version.

    The answer to an empty query is an error if the library cannot be loaded.
    """
    _, folder, device, *stand_in = sys.argv
    if stand_in:
        os.environ["PLANNER_EMULATED_GPU"] = stand_in[1]
    try:
        library = Library(Path(folder), *stand_in[:1])
        about: dict[str, Any] = {"version": library.version}
        if library.version >= OLDEST:  # it accepts a GPU's description
            library.device(json.loads(device))
    except (OSError, RefusedError) as error:
        about = {"error": str(error)}
    for line in sys.stdin:
        request = json.loads(line)
        query = request["message"]
        answer = list(islice(engines(library, query), None if query["every"] else 1)) if query else about
        sys.stdout.write(json.dumps({"number": request["number"], "answer": answer}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
