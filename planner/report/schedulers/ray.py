"""Write requests for GPUs as options of Ray's tasks and trainers.

The names are Ray's constants of accelerator_type.
"""

from collections.abc import Sequence

from planner.report.schedulers.need import Naming, Need, Request, comment, unnamed


def ray_text(request: Request) -> str:
    """Return Python code of a list `GPUS` of alternative arguments for Ray, one for each GPU name.

    They are for `ray.remote` or, if several GPUs are needed, for `ScalingConfig`.
    """
    naming = Naming.of(request, "ray")
    named = [need for need in request.needs if naming.own(need)]
    left = [need for need in request.needs if need not in named]
    use = (
        "ray.train.ScalingConfig(**GPUS[0])"
        if any(need.gpus > 1 for need in named)
        else "@ray.remote(**GPUS[0])"
    )
    lines = [request.title, f"any of these: {use}", *unnamed(left, "Ray")]
    entries = "".join(_entries(need, naming.own(need)) for need in named)
    return f"{comment(lines)}GPUS = [\n{entries}]\n"


def _entries(need: Need, names: Sequence[str]) -> str:
    several = f'"num_workers": {need.gpus}, "use_gpu": True'
    count = several if need.gpus > 1 else '"num_gpus": 1'
    options = "".join(f'    {{{count}, "accelerator_type": "{name}"}},\n' for name in names)
    return f"    # {need.device.name}: {need.figures}\n{options}"
