"""Capabilities whose cases are the planner's own loop on both sides: the rows of `NAME.csv` name the jobs.

Another job is run, and gets a row, by `--add` of `python -m benchmarks.emulated.capabilities`.
"""

from collections.abc import Mapping

from benchmarks.emulated.capabilities.case import Capability, cases_of_rows

_NOT_EMULATED = "planned, not emulated, where kernels compute nothing and the model reads a result of one"
# What the rows of each are, as the page says it.
OWN_LOOP: Mapping[str, str] = {
    "activation_offload": "activations offloaded to the CPU",
    "cuda_graphs": 'models called through `torch.compile(mode="reduce-overhead")`',
    "diffusion": "networks of diffusers, built on both sides from their configurations",
    "nnunet_plans": "configurations of nnU-Net's plans with deep supervision, Dice and cross entropy",
    "optimizers": "every class of torch.optim without a closure, bitsandbytes, torchao (its compiled steps "
    "with cached kernels) and others",
    "selective_checkpoints": "selective checkpoints in a model's own forward, and budgets of compiled models",
    "vision_language": "models of images and texts, detectors and segmentation with their losses, and "
    "speech, of transformers",
}
# Causes of rows outside the bars, by number.
_CAUSES: Mapping[str, dict[int, str]] = {
    "optimizers": {
        14: "the emulated run reads the `mu` of ASGD, which a kernel fills, as 0 and takes another branch "
        "in the first step than a GPU, where it is 1",
        59: "inductor fuses FP8 conversions of large parameters into the kernel before, without their "
        "buffers",
    },
    "vision_language": {
        **dict.fromkeys((15, 16), f"{_NOT_EMULATED}: which pictures are padding"),
        **dict.fromkeys((17, 18, 19), f"{_NOT_EMULATED}: counts of objects, which split tensors"),
        **dict.fromkeys((28, 29), f"{_NOT_EMULATED}: the patches of each image, which split tensors"),
    },
}


def own_loop_capability(name: str) -> Capability:
    """Return one of these capabilities."""
    return Capability(OWN_LOOP[name], tuple(cases_of_rows(name).values()), _CAUSES.get(name, {}))
