"""Train a torchvision model as the CNNs of benchmarks/published/runs_torch26.csv were trained.

Run by `cnns.py` on an emulated GPU. The loop is described in benchmarks/published/README.md: float32, TF32
as torch has it by default, four iterations, targets of int64, an optimizer with a learning rate alone.
"""

import torch
import torchvision
from cases import Case, run_cases

MIB = 2**20
ITERATIONS = 4
CLASSES = 10  # of MNASNet and MobileNetV3; the others have 1,000


def run(case: Case) -> Case:
    """Train within the cap, if there is one, and return the peaks and the memory reserved before the loop."""
    torch.backends.cudnn.benchmark = False
    if case["cap_mib"]:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(case["cap_mib"] * MIB / total)
    small = case["model"].startswith(("mnasnet", "mobilenet_v3"))
    model = getattr(torchvision.models, case["model"])(**({"num_classes": CLASSES} if small else {}))
    figures: Case = {"fits": True}
    try:
        model = model.to("cuda").train()
        optimizer = getattr(torch.optim, case["optimizer"])(model.parameters(), lr=0.001)
        figures["set_up"] = torch.cuda.memory_reserved()
        _train(model, optimizer, case)
    except torch.cuda.OutOfMemoryError:
        figures["fits"] = False
    return figures | {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, case: Case) -> None:
    for _ in range(ITERATIONS):
        x = torch.empty(case["batch"], *case["input_shape"])
        y = torch.zeros(case["batch"], dtype=torch.int64)
        if case["zero_grad"] == "before_forward":
            optimizer.zero_grad()
        x, y = x.to("cuda"), y.to("cuda")
        output = model(x)
        loss = torch.nn.functional.cross_entropy(output, y)
        if case["zero_grad"] == "before_backward":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        predicted = output.argmax(1)  # noqa: F841 - it lives until the next iteration's
        if case["zero_grad"] == "after_step":
            optimizer.zero_grad()


if __name__ == "__main__":
    run_cases(run)
