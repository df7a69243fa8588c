"""Write requests for GPUs as lines of a Slurm batch script.

Types have the names that AutoDetect=nvml (plugin gpu/nvml) gives.
"""

from collections.abc import Mapping, Sequence

from planner.hardware import mig_slice
from planner.report.schedulers.need import Naming, Need, Request, comment, unnamed
from planner.report.units import mib


def slurm_text(request: Request) -> str:
    """Return a batch script of alternative requests, one per GPU type, of which the first is active.

    All others are commented out with ##SBATCH.
    """
    naming = Naming.of(request, "nvml")
    types = {need: _types(need, naming) for need in request.needs}
    named = [need for need in request.needs if types[need]]
    left = [need for need in request.needs if need not in named]
    lines = [
        f"{request.title}",
        "Keep one request; ##SBATCH is a comment. Types: as AutoDetect=nvml in gres.conf names GPUs.",
        *unnamed(left, "Slurm"),
    ]
    parts = [f"#!/bin/bash\n{comment(lines)}"]
    for need in named:
        lines = [f"# {need.device.name}: {need.figures}"]
        for name in types[need]:
            is_first = need is named[0] and name == types[need][0]
            lines += _request(need, name, "#SBATCH" if is_first else "##SBATCH")
        parts.append("\n".join([*lines, ""]))
    return "\n".join([*parts, *_constraint({need: types[need] for need in named})])


def _types(need: Need, naming: Naming) -> list[str]:
    """Return the Slurm types that identify a need's GPU, or [] if there are none.

    They are the GPU's names that no GPU outside the request shares, in lower case with underscores. The type
    of a MIG slice is the GPU's name up to its first hyphen, and the size of the slice, rounded to GiB
    (src/plugins/gpu/nvml).
    """
    part = mig_slice(need.device)
    if part is None:
        return [_lower(name) for name in naming.own(need)]
    slices = part.profile.partition("g.")[0]
    size = f"{slices}g.{round(mib(need.device.total.value) / 1024)}gb"
    names = (_lower(name).partition("-")[0] for name in naming.of_device(need.device))
    return list(dict.fromkeys(f"{name}_{size}" for name in names))


def _lower(name: str) -> str:
    return name.lower().replace(" ", "_")


def _request(need: Need, name: str, word: str) -> list[str]:
    return [*_nodes(need, word), f"{word} --gres=gpu:{name}:{need.per_node}"]


def _nodes(need: Need, word: str) -> list[str]:
    return [f"{word} --nodes={need.nodes} --ntasks-per-node={need.per_node}"] if need.gpus > 1 else []


def _constraint(types: Mapping[Need, Sequence[str]]) -> list[str]:
    """Return a list with a commented-out request for any whole GPU by node feature, or [].

    The list is empty unless the job needs the same number of nodes, and of GPUs per node, of each kind of
    whole GPU. MIG slices are left out.
    """
    whole = [need for need in types if mig_slice(need.device) is None]
    if len({(need.nodes, need.per_node) for need in whole}) != 1:
        return []
    words = "|".join(name for need in whole for name in types[need])
    lines = [
        "# Any of them, where nodes have these types as features (NodeName=... Feature=...)",
        *_nodes(whole[0], "##SBATCH"),
        f'##SBATCH --gres=gpu:{whole[0].per_node} --constraint="{words}"',
    ]
    return ["\n".join([*lines, ""])]
