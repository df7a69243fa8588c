"""Write requests for GPUs as the resources of a SkyPilot task.

The GPU names are from SkyPilot's catalogue.
"""

from typing import Any

from planner.report.schedulers.need import Naming, Request, comment, unnamed


def skypilot_text(request: Request) -> str:
    """Return a SkyPilot task in YAML that accepts any of the GPUs that need the fewest nodes.

    A comment lists the GPUs that need more nodes.
    """
    import yaml

    naming = Naming.of(request, "skypilot")
    named = [need for need in request.needs if naming.own(need)]
    left = [need for need in request.needs if need not in named]
    fewest = min((need.nodes for need in named), default=1)
    used = [need for need in named if need.nodes == fewest]
    more = ", ".join(f"{need.gpus} {need.device.name}" for need in named if need not in used)
    lines = [
        request.title,
        *(f"{need.device.name}: {need.figures}" for need in used),
        *([f"also, in more nodes: {more}"] if more else []),
        *unnamed(left, "SkyPilot"),
    ]
    accelerators = [{"accelerators": f"{name}:{need.per_node}"} for need in used for name in naming.own(need)]
    task: dict[str, Any] = {"num_nodes": fewest} if fewest > 1 else {}
    task["resources"] = {"any_of": accelerators} if accelerators else {}
    return comment(lines) + yaml.safe_dump(task, sort_keys=False)
