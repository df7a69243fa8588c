"""Write requests for GPUs as Kubernetes Jobs.

The cluster's nodes must have the labels of NVIDIA's gpu-feature-discovery.
"""

from collections.abc import Sequence
from typing import Any

from planner.hardware import mig_slice
from planner.report.schedulers.need import Naming, Need, Request, comment, unnamed
from planner.report.units import mib

_PRODUCT, _MEMORY = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"


def kubernetes_text(request: Request) -> str:
    """Return alternative Kubernetes Jobs as YAML documents, of which the user applies one.

    There is one for each combination of resource, node count and GPUs per node.
    """
    import yaml

    naming = Naming.of(request, "nvml")
    groups: dict[tuple[str, int, int], list[Need]] = {}
    for need in request.needs:
        if naming.of_device(need.device):
            groups.setdefault((_resource(need), need.nodes, need.per_node), []).append(need)
    count = f"; apply one of these {len(groups)} documents" if len(groups) > 1 else ""
    labels = "labels of gpu-feature-discovery; slices under the MIG strategy mixed"
    left = [need for need in request.needs if not naming.of_device(need.device)]
    title = f"{request.title}{count}"
    head = comment([title, f"{labels}; image and command are yours", *unnamed(left, "these labels")])
    return head + "---\n".join(
        comment(f"{need.device.name}: {need.figures}" for need in needs)
        + yaml.safe_dump(_job(resource, nodes, per_node, needs, naming), sort_keys=False)
        for (resource, nodes, per_node), needs in groups.items()
    )


def _resource(need: Need) -> str:
    part = mig_slice(need.device)
    return "nvidia.com/gpu" if part is None else f"nvidia.com/mig-{part.profile}"


def _job(resource: str, nodes: int, per_node: int, needs: Sequence[Need], naming: Naming) -> dict[str, Any]:
    terms = [{"matchExpressions": expressions} for expressions in _terms(needs, naming)]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    several = {"completions": nodes, "parallelism": nodes, "completionMode": "Indexed"} if nodes > 1 else {}
    pod = {
        "restartPolicy": "Never",
        "affinity": {"nodeAffinity": required},
        "containers": [
            {
                "name": "training",
                "image": "training:latest",
                "command": ["python", "train.py"],
                "resources": {"limits": {resource: str(per_node)}},
            }
        ],
    }
    kind = resource.rpartition("/")[2].replace(".", "-")
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"training-{kind}-{nodes * per_node}"},
        "spec": {"backoffLimit": 0, **several, "template": {"spec": pod}},
    }


def _terms(needs: Sequence[Need], naming: Naming) -> list[list[dict[str, Any]]]:
    """Return alternative conditions on a node's labels, which select the GPUs of `needs`.

    One is for all unambiguous products together, and each other product has its own. The name of a product is
    ambiguous if smaller GPUs outside of the request share the name; the condition excludes these GPUs by
    their memory.
    """
    plain: list[str] = []
    shared: list[list[dict[str, Any]]] = []
    for need in needs:
        for name in naming.of_device(need.device):
            product = name.replace(" ", "-")
            others = [] if mig_slice(need.device) else naming.strangers(name)
            smaller = [other.total.value for other in others if other.total.value < need.device.total.value]
            if not smaller:
                plain.append(product)
                continue
            above = {"key": _MEMORY, "operator": "Gt", "values": [f"{mib(max(smaller), 0):.0f}"]}
            shared.append([_among(product), above])
    products = list(dict.fromkeys(plain))
    return [*([[_among(*products)]] if products else []), *shared]


def _among(*products: str) -> dict[str, Any]:
    return {"key": _PRODUCT, "operator": "In", "values": list(products)}
