"""Find the operators of torch that are composite kernels everywhere but on CUDA.

    python -m benchmarks.fits.composite_operators --python PYTHON

PYTHON has the CUDA build of torch. Autograd takes an operator apart where its device has but the composite
kernel, and keeps it whole where the device has one of its own (ATen/core/dispatch/OperatorEntry.cpp). A
build without CUDA has no kernels for CUDA, so the planner names these operators
(`planner.capture.beneath_autograd.COMPOSITE_WITH_CUDA_KERNEL`). Prints them, and exits with 1 where it names
others.
"""

import argparse
import json
import subprocess
import sys

from planner.capture.beneath_autograd import COMPOSITE_WITH_CUDA_KERNEL

_FIND = """
import json, torch
has = torch._C._dispatch_has_kernel_for_dispatch_key
names = torch._C._dispatch_get_all_op_names()
both = [n for n in names if has(n, "CompositeImplicitAutograd") and has(n, "CUDA")]
print(json.dumps([torch.__version__, sorted(both)]))
"""


def main() -> int:
    """Print the operators of a build, and return 1 where the planner names others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True)
    python = parser.parse_args().python
    done = subprocess.run([python, "-c", _FIND], capture_output=True, text=True, check=True)
    version, names = json.loads(done.stdout.splitlines()[-1])
    print(version, *names)
    return int(names != [f"aten::{name}" for name in COMPOSITE_WITH_CUDA_KERNEL])


if __name__ == "__main__":
    sys.exit(main())
