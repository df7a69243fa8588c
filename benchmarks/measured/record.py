"""Run a script to its end and write what torch's allocator recorded of it.

    python -m benchmarks.measured.record SCRIPT.py FILE.pickle.gz

Runs on a GPU or, under `planner run`, on an emulated one. FILE is torch's own snapshot with the Python lines
of each allocation; beside it, FILE.json has the allocator's peaks, versions and the process's memory.
"""

import gzip
import json
import os
import pickle
import runpy
import sys
from pathlib import Path

os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
EVENTS = 2_000_000


def main(script: str, to: Path) -> None:
    """Run the script, and write the record whether it fails or not."""
    sys.path.insert(0, str(Path(script).parent))
    source = Path(script).read_text(encoding="utf-8")
    for line in source.splitlines():  # settings that the allocator reads when torch is imported
        if line.startswith("os.environ["):
            exec(line, {"os": os})  # noqa: S102
    import torch

    from calibration.probe.gauge import detect_gpu, open_gauge
    from calibration.probe.memory_sampler import CudaRun

    gauge = open_gauge()
    run = CudaRun(gauge.level if gauge else lambda: None)
    run.sample()
    context = run.highest_bytes
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=EVENTS)
    failure = ""
    with run.sampling():
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    gpu = detect_gpu(gauge)
    to.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(to, "wb", compresslevel=6) as file:
        pickle.dump(torch.cuda.memory._snapshot(), file)
    seen = {
        "script": Path(script).name,
        "gpu": gpu.name,
        "versions": {
            "torch": gpu.versions.torch,
            "cuda": gpu.versions.cuda,
            "cudnn": gpu.versions.cudnn,
            "driver": gpu.versions.driver,
        },
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "ooms": stats["num_ooms"],
        "context_before_bytes": context,
        "process_peak_bytes": run.highest_bytes,
        "remark": gauge.remark if gauge else "no NVML",
        "failure": failure,
    }
    to.with_suffix("").with_suffix(".json").write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
