"""Requests for schedulers, read back with the schedulers' own types where there is such a package."""

import ast
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import planner
from planner.hardware import Device, find_device, load_devices, load_names, load_other_devices
from tests.helpers.command_line import Capture, outcome

DOCS = Path(__file__).parents[3] / "docs" / "schedulers.md"


def request(scheduler: str, *names: str, batch: int | None = 8) -> str:
    """Return the request for a small model on GPUs of the database."""
    return planner.gpus("cnn", batch, devices=cards(*names), sort="memory").to_scheduler(scheduler)


def cards(*names: str) -> list[Device]:
    return [find_device(name) for name in names]


@pytest.mark.parametrize("vocabulary", ["nvml", "ray", "skypilot"])
def test_names_are_those_of_known_gpus(vocabulary: Any) -> None:
    """A GPU that is renamed in the database keeps its names in the schedulers."""
    assert set(load_names(vocabulary)) <= {device.name for device in (*load_devices(), *load_other_devices())}


def test_every_whole_gpu_has_a_name_of_the_driver() -> None:
    whole = {device.name for device in load_devices() if " MIG " not in device.name}
    assert whole == set(load_names("nvml"))


@pytest.mark.slow
def test_slurm_types_are_those_of_its_detection() -> None:
    """The first request is active, the others are comments; slices are named by GPU, slices and GiB."""
    text = request("slurm", "L4", "A100-40", "A100-80-3g.40gb")
    lines = [line for line in text.splitlines() if "SBATCH --gres" in line]
    assert lines[:4] == [
        "#SBATCH --gres=gpu:nvidia_l4:1",
        "##SBATCH --gres=gpu:nvidia_a100_3g.39gb:1",
        "##SBATCH --gres=gpu:nvidia_a100_80gb_pcie_3g.39gb:1",
        "##SBATCH --gres=gpu:nvidia_a100-sxm4-40gb:1",
    ]
    assert '--constraint="nvidia_l4|nvidia_a100-sxm4-40gb|nvidia_a100-pcie-40gb"' in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.slow
def test_kubernetes_reads_its_jobs_without_an_unknown_key() -> None:
    """Its Python client reads the documents and writes the same again."""
    client = pytest.importorskip("kubernetes.client")
    for document in yaml.safe_load_all(request("k8s", "L4", "A100-40-3g.20gb", "H100-80-3g.40gb")):
        job = client.V1Job.from_dict(document)
        assert client.ApiClient().sanitize_for_serialization(job) == document


def test_kubernetes_asks_for_slices_by_their_profile() -> None:
    documents = list(yaml.safe_load_all(request("k8s", "L4", "A100-80-3g.40gb", "H100-80-3g.40gb")))
    limits = [one["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] for one in documents]
    assert limits == [{"nvidia.com/gpu": "1"}, {"nvidia.com/mig-3g.40gb": "1"}]
    assert "NVIDIA-H100-80GB-HBM3" in str(documents[1]) and "NVIDIA-H100-80GB-HBM3" not in str(documents[0])


def test_kubernetes_tells_gpus_of_one_product_apart_by_memory() -> None:
    """The driver calls both sizes of the RTX 3080 the same."""
    (document,) = yaml.safe_load_all(request("k8s", "3080-12"))
    affinity = document["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][1] == {
        "key": "nvidia.com/gpu.memory", "operator": "Gt", "values": ["10240"]
    }  # fmt: skip


def test_skypilot_takes_any_of_the_gpus() -> None:
    """A slice has no name there, which is said."""
    text = request("skypilot", "T4", "A100-80", "A100-80-3g.40gb")
    names = [one["accelerators"] for one in yaml.safe_load(text)["resources"]["any_of"]]
    assert names == ["T4:1", "A100-80GB:1", "A100-80GB-SXM:1"]
    assert "# also, without a name of their own in SkyPilot: A100 80GB MIG 3g.40gb\n" in text


def test_a_name_of_a_gpu_that_is_too_small_is_not_used() -> None:
    """Ray calls V100s of 16 and of 32 GB the same."""
    options = ast.literal_eval(request("ray", "V100-32", "L4").partition("GPUS = ")[2])
    assert options == [{"num_gpus": 1, "accelerator_type": "L4"}]
    both = ast.literal_eval(request("ray", "V100-32", "V100-16").partition("GPUS = ")[2])
    assert {one["accelerator_type"] for one in both} == {"V100"}


@pytest.mark.slow
def test_several_gpus_become_nodes() -> None:
    """The fewest GPUs of a global batch are asked for by node."""
    arguments = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 10, "vocab_size": 8000}
    result = planner.clusters(
        "hf:llama", global_batch=8, seq=512, devices=cards("RTX 3060 Ti"), gpus_per_node=2, optimizer="adamw",
        model_arg={**arguments, "num_attention_heads": 8},
    )  # fmt: skip
    gpus = result.table.rows[0].plans[0].split.gpus
    assert gpus > 2, "several nodes"
    slurm = result.to_scheduler("slurm")
    assert f"#SBATCH --nodes={gpus // 2} --ntasks-per-node=2\n#SBATCH --gres=gpu:" in slurm
    assert len(re.findall(r"SBATCH --nodes=.*\n#+SBATCH --gres", slurm)) == slurm.count("SBATCH --gres")
    (job,) = yaml.safe_load_all(result.to_scheduler("k8s"))
    assert job["spec"]["parallelism"] == job["spec"]["completions"] == gpus // 2


def test_the_command_prints_the_request_alone(capsys: Capture) -> None:
    command = "gpus --model cnn --batch 8 --filter l4 --format"
    code, answer, _ = outcome(f"{command} skypilot", capsys)
    assert code == 0 and yaml.safe_load(answer)["resources"]["any_of"]
    code, _, error = outcome(f"{command} pbs", capsys)
    assert code == 2 and "give one of k8s, ray, skypilot, slurm" in error


def test_where_nothing_fits_there_is_only_a_comment() -> None:
    text = request("slurm", "T4", batch=2**20)
    assert re.fullmatch(r"# cnn, batch 1,048,576, at confidence 0.99: none of the GPUs runs it\n", text)


def test_the_job_submit_plugin_of_the_docs_turns_memory_into_features() -> None:
    """It runs in a Lua interpreter: enough memory, too much, features of the job's own."""
    lupa = pytest.importorskip("lupa")
    lua = lupa.LuaRuntime()
    lua.execute("slurm = {SUCCESS = 0, ERROR = -1, log_user = function(text) told = text end}")
    lua.execute(DOCS.read_text(encoding="utf-8").partition("```lua\n")[2].partition("```")[0])
    submit = lua.globals().slurm_job_submit

    def features(**job: str) -> str | None:
        description = lua.table_from(job)
        return description.features if submit(description, None, 0) == 0 else None

    assert features(comment="gpu_mib=26415") == "a40|h100"
    assert features(comment="gpu_mib=26415", features="infiniband") == "(infiniband)&(a40|h100)"
    assert features(comment="nothing") is None
    assert features(comment="gpu_mib=90000") is None and "90000" in lua.globals().told
