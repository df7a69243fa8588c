"""Files that set up a process group themselves, planned as one of their ranks."""

import os
from pathlib import Path

import pytest
from torch import distributed

from planner.capture.session import record
from planner.errors import ModelError, UsageError
from planner.jobs import Compile, Job, TensorSpec, resolve_job
from planner.program.events import Alloc, Category, Free, Trace, validate
from tests.helpers.models import AMPERE, born

SCRIPT = """
import os
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Trainer:
    def __init__(self):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl")
        self.rank = distributed.get_rank()
        mesh = init_device_mesh("cuda", (distributed.get_world_size(),))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 129, bias=False), nn.ReLU(), nn.Linear(129, 64, bias=False))
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel(output_layouts=Shard(0))}
        self.model = parallelize_module(model, mesh, plan).to_empty(device="cuda")
        self.group = distributed.new_group([0, 1], backend="nccl")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch):
        loss = self.model(batch.cuda()).sum()
        loss.backward()
        distributed.all_reduce(loss.detach(), group=self.group)
        self.optimizer.step()
        self.optimizer.zero_grad()


def at_import():
    distributed.destroy_process_group()
    return Trainer()
"""


STEP = "        self.optimizer.step()\n"  # of the script, which cases replace


def planned(folder: Path, rank: int = 0, name: str = "Trainer", step: str = STEP) -> Trace:
    """The trace of a rank of four, with other lines in place of the optimizer's step."""
    file = folder / "script.py"
    file.write_text(SCRIPT.replace(STEP, step), encoding="utf-8")
    options = {"inputs": [TensorSpec((64,))], "world_size": 4, "rank": rank}
    return record(resolve_job(f"{file}:{name}", {}, **options), 8, AMPERE)


def parameters(trace: Trace) -> list[int]:
    """Numbers of the parameters, in float32."""
    of_model = [e for e in trace.events if isinstance(e, Alloc) and e.category is Category.PARAMETER]
    return [event.size_bytes // 4 for event in of_model]


@pytest.mark.parametrize(("rank", "rows"), [(0, 33), (3, 30)])
def test_a_rank_holds_its_own_part(tmp_path: Path, rank: int, rows: int) -> None:
    """Of 129 rows the last of four ranks has three fewer."""
    trace = planned(tmp_path, rank)
    validate(trace)
    assert parameters(trace) == [rows * 64, rows * 64]
    assert not trace.unknown_ops


def test_outputs_of_collectives_are_recorded(tmp_path: Path) -> None:
    """A row-wise product of 8 samples is summed and scattered to two a rank."""
    scattered = born(planned(tmp_path), "reduce_scatter_tensor")
    assert set(scattered) == {4 * 2 * 64} and scattered


def test_a_destroyed_group_is_made_again_and_nothing_stays(tmp_path: Path) -> None:
    """Scripts open and close groups; the environment of torchrun is gone afterwards."""
    assert parameters(planned(tmp_path, name="at_import")) == [33 * 64, 33 * 64]
    assert not distributed.is_initialized()
    assert "LOCAL_RANK" not in os.environ


CLIPPED = """
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.seen = norm.full_tensor()
        self.optimizer.step()
"""


def test_a_clipped_norm_of_sharded_gradients_is_sharded(tmp_path: Path) -> None:
    """Scripts sum the norm's parts over the ranks themselves, to log it."""
    trace = planned(tmp_path, step=CLIPPED)
    assert any("all_reduce" in site.op for site in trace.sites)


SAVED = """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict
        state = {"model": get_model_state_dict(self.model), "optimizer": self.optimizer}
        dcp.save(state, checkpoint_id=FOLDER)
        dcp.async_save(state, checkpoint_id=FOLDER).result()
        dcp.load(state, checkpoint_id=FOLDER)
        self.optimizer.step()
"""


def test_sharded_checkpoints_are_neither_written_nor_read(tmp_path: Path) -> None:
    """A rank's parts are copied to the CPU and back, which takes no memory of the GPU."""
    trace = planned(tmp_path, step=SAVED.replace("FOLDER", repr(str(tmp_path / "saved"))))
    assert born(trace) == born(planned(tmp_path))
    assert not (tmp_path / "saved").exists()


LISTED = """
        every = [torch.empty(8, 64, device="cuda") for _ in range(4)]
        distributed.CALL
        self.optimizer.step()
"""


@pytest.mark.parametrize(
    "call", ["all_gather(every, batch.cuda())", "reduce_scatter(batch.cuda(), every)", "barrier()"]
)
def test_collectives_over_lists_take_a_flat_buffer(tmp_path: Path, call: str) -> None:
    """NCCL gathers into one tensor, which is then copied to those of the list, and scatters from one."""
    trace = planned(tmp_path, step=LISTED.replace("CALL", call))
    assert born(trace, "new_empty").count(4 * 8 * 64 * 4) == (3 if "every" in call else 0)
    assert not trace.unknown_ops


GATHERING = """
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


class Trainer:
    def __init__(self):
        distributed.init_process_group("nccl")
        self.mesh = init_device_mesh("cuda", (2,))
        self.layer = nn.Linear(64, 64, bias=False).cuda()
        self.layer.compile()

    def step(self, batch):
        part = distribute_tensor(batch.cuda(), self.mesh, [Shard(0)])
        whole = part.redistribute(self.mesh, [Replicate()]).to_local()
        out = self.layer(whole)
        del part, whole
        out.sum().backward()
        self.layer.zero_grad()
"""


def test_compiled_code_waits_for_what_was_gathered(tmp_path: Path) -> None:
    """The result of a collective that is an input of compiled code lives no longer in the first step, which
    compiles, than in the next.
    """
    file = tmp_path / "gathering.py"
    file.write_text(GATHERING, encoding="utf-8")
    options = {"inputs": [TensorSpec((64,))], "world_size": 2, "compile": Compile.DEFAULT}
    trace = record(resolve_job(f"{file}:Trainer", {}, **options), 8, AMPERE)
    made = [event for event in trace.events if isinstance(event, Alloc)]
    gathered = [event.block for event in made if "all_gather" in trace.sites[event.site].op]
    freed = {e.block for e in trace.events if isinstance(e, Free)}
    assert len(gathered) == 3 and set(gathered) <= freed


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("torchvision:resnet18", {"world_size": 2}, "--world-size without FILE.py:NAME: a file shards"),
        ("f.py:Net", {"world_size": 2, "rank": 2}, "--rank 2: of 2 ranks give one from 0 to 1"),
        ("f.py:Net", {"world_size": 1}, "--world-size 1: a model is sharded over two ranks or more"),
        ("f.py:Net", {"rank": 1}, "--rank without --fsdp, --tp or --world-size: give the number of ranks"),
        (
            "f.py:Net",
            {"world_size": 2, "tp": 2},
            "the file shards its model by itself; remove",
        ),
    ],
)
def test_ranks_that_are_not_planned_are_refused(model: str, options: dict[str, int], words: str) -> None:
    """One line says what to do."""
    with pytest.raises(UsageError, match=words):
        resolve_job(model, {}, inputs=[TensorSpec((64,))], mode="train", loss="sum", **options)


def test_the_rank_is_part_of_the_job() -> None:
    """By default a job has one process."""
    assert (Job.create("test").sharding.world_size, Job.create("test").sharding.rank) == (0, 0)


LOSS = """
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module


class Trainer:
    def __init__(self):
        distributed.init_process_group("nccl")
        model = nn.Sequential(nn.Linear(64, 4096, bias=False)).to("cuda", torch.bfloat16)
        self.model = parallelize_module(
            model, init_device_mesh("cuda", (2,)), {"0": ColwiseParallel(use_local_output=False)}
        )

    def step(self, batch):
        labels = torch.zeros(len(batch), dtype=torch.int64, device="cuda")
        with loss_parallel():
            nn.functional.cross_entropy(self.model(batch.cuda().bfloat16()), labels).backward()
"""


def test_loss_parallel_converts_logits_of_half_precision_to_float32_and_back(tmp_path: Path) -> None:
    file = tmp_path / "loss.py"
    file.write_text(LOSS, encoding="utf-8")
    trace = record(resolve_job(f"{file}:Trainer", {}, inputs=[TensorSpec((64,))], world_size=2), 32, AMPERE)
    copies = [
        event.size_bytes
        for event in trace.events
        if isinstance(event, Alloc)
        and event.size_bytes >= 32 * 2048 * 2
        and trace.sites[event.site].op == "aten._to_copy.default"
    ]
    assert copies[:2] == [32 * 2048 * 4, 32 * 2048 * 2]


TRAINER = """
import tempfile
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def make_trainer(version=2, **config):
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, **sizes))
    config = {"version": version, **config}
    arguments = TrainingArguments(tempfile.mkdtemp(), fsdp=True, fsdp_config=config, report_to="none")
    ids = torch.zeros(16, dtype=torch.int64)
    data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}]
    return Trainer(model, arguments, train_dataset=data)
"""
HELD = 2 * 64 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64  # parameters of its Llama


def trained(folder: Path, **given: object) -> Trace:
    """The trace of a rank of two of a Trainer."""
    pytest.importorskip("accelerate")
    file = folder / "train.py"
    file.write_text(TRAINER, encoding="utf-8")
    options = {"model_args": tuple(given.items()), "world_size": 2}
    return record(resolve_job(f"{file}:make_trainer", {}, **options), 4, AMPERE)


def test_a_trainer_shards_by_itself(tmp_path: Path) -> None:
    """Adam's states are of the rank's half of all parameters, though accelerate knows those by addresses."""
    trace = trained(tmp_path)
    validate(trace)
    made = [e for e in trace.events if isinstance(e, Alloc) and e.category is Category.OPTIMIZER]
    large = sum(one.size_bytes for one in made if one.size_bytes > 512)
    assert large == 2 * 4 * (HELD - 5 * 64) / 2  # the norms' halves are 128 bytes


@pytest.mark.parametrize(
    ("config", "words"),
    [({"version": 1}, "fsdp_config version 1"), ({"cpu_offload": True}, "fsdp_config cpu_offload")],
)
def test_what_a_trainer_shards_otherwise_is_refused(
    tmp_path: Path, config: dict[str, object], words: str
) -> None:
    """One line names the setting."""
    with pytest.raises(UsageError, match=f"{words} of its arguments is not planned"):
        trained(tmp_path, **config)


SHARDED = """
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard


class Script:
    def __init__(self):
        distributed.init_process_group("nccl")
        self.model = nn.Linear(64, 512, bias=False)

    def step(self, batch):
        fully_shard(self.model)
        self.model(batch.cuda()).sum().backward()
"""


def test_a_model_of_the_cpu_is_moved_as_it_is_sharded(tmp_path: Path) -> None:
    """Without a mesh FSDP takes all GPUs: the weight is there whole, then in two parts, then gathered."""
    file = tmp_path / "script.py"
    file.write_text(SHARDED, encoding="utf-8")
    job = resolve_job(f"{file}:Script", {}, inputs=[TensorSpec((64,))], world_size=2, steps=1)
    sizes = [e.size_bytes for e in record(job, 8, AMPERE).events if isinstance(e, Alloc)]
    assert 4 * 64 * 256 in sizes


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            "nn.parallel.DistributedDataParallel(model, mixed_precision=object())",
            r"DistributedDataParallel\(mixed_precision=...\) is not planned",
        ),
        (
            "nn.parallel.DistributedDataParallel(model).register_comm_hook(None, None)",
            "with a communication hook is not planned",
        ),
        ("fsdp.FullyShardedDataParallel(model)", r"FullyShardedDataParallel \(FSDP1\) .*; use fully_shard"),
        (
            "fsdp.fully_shard(model, offload_policy=fsdp.CPUOffloadPolicy())",
            "with CPUOffloadPolicy in a file is not",
        ),
    ],
)
def test_what_the_recorder_does_not_see_is_refused(tmp_path: Path, made: str, message: str) -> None:
    """What is not planned would be left out of the answer."""
    lines = (
        "from torch import distributed, nn",
        "from torch.distributed import fsdp",
        "def build():",
        "    distributed.init_process_group('nccl')",
        "    model = nn.Linear(64, 64).cuda()",
        f"    return {made}",
    )
    file = tmp_path / "wrapped.py"
    file.write_text("\n".join(lines), encoding="utf-8")
    options = {"inputs": [TensorSpec((64,))], "world_size": 2, "loss": "sum"}
    with pytest.raises(UsageError, match=message):
        record(resolve_job(f"{file}:build", {}, **options), 8, AMPERE)


@pytest.mark.slow
def test_ranks_that_are_planned_one_after_another_do_not_disturb_each_other(tmp_path: Path) -> None:
    """A rank's trace is the same after another rank's, whose groups have other names."""
    first, third = planned(tmp_path), planned(tmp_path, 2)
    assert planned(tmp_path).events == first.events
    assert planned(tmp_path, 2).events == third.events


@pytest.mark.parametrize(
    "line",
    [
        "distributed.init_process_group('nccl')",
        "os.environ['LOCAL_RANK']",
        "distributed.get_rank()",
    ],
)
@pytest.mark.parametrize("at_import", [False, True])
def test_a_file_of_several_ranks_says_which_option_is_missing(
    tmp_path: Path, line: str, at_import: bool
) -> None:
    """Without --world-size the message names it, where the import or the constructor asks for the rank."""
    own = [line] if at_import else []
    lines = ("import os", "from torch import distributed, nn", *own, "def build():", f"    {line}")
    file = tmp_path / "launched.py"
    file.write_text("\n".join((*lines, "    return nn.Linear(64, 64)")), encoding="utf-8")
    job = resolve_job(f"{file}:build", {}, inputs=[TensorSpec((64,))], loss="sum")
    with pytest.raises(ModelError, match="give their number, such as --world-size 2"):
        record(job, 8, AMPERE)
