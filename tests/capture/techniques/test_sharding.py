"""Models sharded by FSDP2: one rank's parts, the blocks that are gathered, and their streams."""

from math import ceil

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

from planner.capture.session import record
from planner.errors import UsageError
from planner.jobs import FIELD_OPTIONS, Loss, Mode, Optimizer, TensorSpec, resolve_job
from planner.program.events import Alloc, Category, Fact, Free, Phase, PhaseStart, Trace, validate
from tests.helpers.models import AMPERE, job_of, on_meta

WIDE = 512
BLOCK_NUMBERS = 2 * WIDE * WIDE + 2 * WIDE  # parameters of a block


class Block(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of input and branch."""
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """Four blocks and a head of 11 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDE, 11)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.blocks(x))  # type: ignore[no-any-return]


def sharded(ranks: int, *arguments: str, **fields: object) -> Trace:
    """The trace of the first rank's two steps with SGD."""
    loop = {"mode": Mode.TRAIN, "loss": Loss.SUM, "steps": 2, **fields}
    given = FIELD_OPTIONS["fsdp_arg"].read(arguments)
    job = job_of(str(WIDE), fsdp=ranks, fsdp_arg=given, **loop)
    return record(job, 4, AMPERE, on_meta(Net))


def sizes(trace: Trace, category: Category) -> list[int]:
    """Bytes of the blocks of a category."""
    return [e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category is category]


def gathers(trace: Trace) -> int:
    """Count the buffers into which the parameters of a block are gathered."""
    return sum(
        e.stream > 0 and e.size_bytes == 4 * BLOCK_NUMBERS for e in trace.events if isinstance(e, Alloc)
    )


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_rank_holds_its_part_of_each_parameter(ranks: int) -> None:
    """Rows are dealt out evenly, each part as large as the largest."""
    trace = sharded(ranks)
    validate(trace)
    rows = ceil(WIDE / ranks)
    block = [4 * rows * WIDE, 4 * rows] * 2
    head = [4 * ceil(11 / ranks) * WIDE, 4 * ceil(11 / ranks)]
    assert sizes(trace, Category.PARAMETER) == [*block * 4, *head]


def test_without_resharding_blocks_are_gathered_once_a_step() -> None:
    """By default each of four blocks is gathered for the forward pass and again for the backward pass."""
    assert gathers(sharded(2)) == 2 * 2 * 4
    assert gathers(sharded(2, "reshard_after_forward=false")) == 2 * 4


def test_gathered_blocks_are_freed() -> None:
    """After the last step only the parts of this rank, their gradients and the loop's names are left."""
    trace = sharded(4)
    freed = {event.block for event in trace.events if isinstance(event, Free)}
    left = [e for e in trace.events if isinstance(e, Alloc) and e.block not in freed]
    of_rank = sum(e.size_bytes for e in left if e.category in (Category.PARAMETER, Category.GRADIENT))
    parts = 4 * (4 * BLOCK_NUMBERS // 4 + 3 * WIDE + 3)
    assert of_rank == 2 * parts
    others = [
        e for e in left if e.category not in (Category.PARAMETER, Category.GRADIENT, Category.WORKSPACE)
    ]
    assert max(e.size_bytes for e in others) == 4 * 4 * WIDE  # the input


def test_gathering_runs_on_streams_of_its_own() -> None:
    """The buffers of all-gathers and reduced gradients belong to two streams besides the default one."""
    trace = sharded(2)
    streams = {e.stream for e in trace.events if isinstance(e, Alloc)}
    assert len(streams) == 3
    reduced = [e for e in trace.events if isinstance(e, Alloc) and e.category is Category.GRADIENT]
    assert len({e.stream for e in reduced}) == 1 and reduced[0].stream


def test_the_policy_decides_the_types() -> None:
    """Parameters are gathered in bfloat16, gradients reduced in float32; the parts stay in float32."""
    trace = sharded(2, "param_dtype=bf16", "reduce_dtype=fp32")
    assert sizes(trace, Category.PARAMETER) == sizes(sharded(2), Category.PARAMETER)
    every = [e.size_bytes for e in trace.events if isinstance(e, Alloc)]
    assert 2 * BLOCK_NUMBERS in every  # the buffer of an all-gather
    assert 4 * BLOCK_NUMBERS in every  # the input of a reduce-scatter
    assert 4 * BLOCK_NUMBERS // 2 in every  # its output


def test_replicas_share_the_parts() -> None:
    """Four ranks in two groups hold what two ranks hold."""
    replicated = sharded(4, "replicas=2")
    assert sizes(replicated, Category.PARAMETER) == sizes(sharded(2), Category.PARAMETER)


def test_frozen_blocks_have_no_gradients() -> None:
    """A block's part of the gradients is missing from each step."""
    all_trained, one_frozen = sharded(2), sharded(2, freeze=("blocks.0.*",))
    missing = sum(sizes(all_trained, Category.GRADIENT)) - sum(sizes(one_frozen, Category.GRADIENT))
    assert missing == 2 * 4 * BLOCK_NUMBERS // 2
    validate(one_frozen)


def test_frozen_ranks_gather_what_they_do_not_need() -> None:
    """Gathers of the first block for a backward pass that never comes end with that pass."""
    frozen = sharded(2, "reshard_after_forward=true", freeze=("blocks.0.*",))
    gathered = {e.block for e in frozen.events if isinstance(e, Alloc) and e.size_bytes == 4 * BLOCK_NUMBERS}
    freed = {e.block for e in frozen.events if isinstance(e, Free)}
    assert gathered and gathered <= freed


def test_the_answer_names_the_blocks() -> None:
    """The blocks that were found, and operators all of which are known."""
    trace = sharded(2)
    assert trace.notes == ("FSDP: sharded block by block (Block), then the rest together",)
    assert not trace.unknown_ops


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("shard_size=2", "--fsdp-arg shard_size: unknown key; known are reshard_after_forward, replicas"),
        ("param_dtype=int3", "--fsdp-arg param_dtype: expected one of bf16, fp16, fp32 or null, got 'int3'"),
        ("reshard_after_forward=3", "--fsdp 4: fully_shard refuses: "),
    ],
)
def test_arguments_that_are_not_planned_are_refused(argument: str, words: str) -> None:
    """One line names what is taken; no process group stays behind."""
    with pytest.raises(UsageError) as caught:
        sharded(4, argument)
    assert str(caught.value).startswith(words)
    assert not distributed.is_initialized()


def test_arguments_without_ranks_are_refused() -> None:
    """They say nothing of a model on one GPU."""
    with pytest.raises(UsageError, match="--fsdp-arg without --fsdp"):
        sharded(0, "replicas=2")


def test_a_process_of_a_group_plans_as_any_other() -> None:
    """In a process of torchrun the plan is the same; its groups and meshes work afterwards, by name too."""
    alone = sharded(2)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        part, mesh = distributed.new_group([0]), init_device_mesh("cpu", (1,))
        assert sharded(2).events == alone.events
        with pytest.raises(UsageError, match="fully_shard refuses"):
            sharded(2, "reshard_after_forward=3")
        summed = torch.ones(3)
        for group in (None, part, mesh.get_group()):
            distributed.all_reduce(summed, group=group)
        assert funcol.all_reduce(summed, "sum", part).tolist() == [1, 1, 1]
        assert (distributed.get_world_size(), distributed.get_rank(part)) == (1, 0)
    finally:
        distributed.destroy_process_group()
    assert not distributed.is_initialized()


def live_at_second_batch(trace: Trace) -> int:
    """Bytes that are allocated when the second micro-batch of the first step is loaded."""
    starts = [n for n, e in enumerate(trace.events) if isinstance(e, PhaseStart) and e.phase is Phase.INPUTS]
    before = trace.events[: starts[1]]
    size_of = {event.block: event.size_bytes for event in before if isinstance(event, Alloc)}
    freed = {event.block for event in before if isinstance(event, Free)}
    return sum(size for block, size in size_of.items() if block not in freed)


def test_gradients_stay_whole_until_the_last_micro_batch() -> None:
    """`gradient_sync=last` keeps the sums of all parameters, not of the rank's half."""
    last, each = sharded(2, "gradient_sync=last", accumulate=2), sharded(2, accumulate=2)
    validate(last)
    whole = 4 * 4 * BLOCK_NUMBERS
    assert live_at_second_batch(last) - live_at_second_batch(each) == pytest.approx(whole / 2, rel=0.02)


def test_gradients_are_reduced_in_each_steps_last_micro_batch_after_an_evaluation_too() -> None:
    trace = sharded(2, "gradient_sync=last", accumulate=3, evaluate=True)
    batches, reducing = 0, []
    for event in trace.events:
        if isinstance(event, PhaseStart):
            batches += event.phase is Phase.FORWARD
        elif isinstance(event, Alloc) and "chunk_cat" in trace.sites[event.site].op:
            reducing.append(batches)
    assert reducing == 5 * [3] + 5 * [6]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("gradient_sync=never", "--fsdp-arg gradient_sync: expected one of each, last, got 'never'"),
        ("by=hand", "--fsdp-arg by: expected one of accelerate, torchtitan or null, got 'hand'"),
        ("min_num_params=1", "--fsdp-arg min_num_params: has an effect only with by=accelerate"),
    ],
)
def test_arguments_of_libraries_are_checked(argument: str, words: str) -> None:
    """One line names what is planned."""
    with pytest.raises(UsageError, match=words):
        sharded(2, argument)


def test_accelerate_shards_from_the_cpu() -> None:
    """Each unit is on the GPU whole, before it is sharded; what no unit has is sharded with the root."""
    pytest.importorskip("accelerate")
    trace = sharded(2, "by=accelerate", "transformer_cls_names_to_wrap=[Block]")
    validate(trace)
    parameters = sizes(trace, Category.PARAMETER)
    assert 4 * WIDE * WIDE // 2 in parameters
    assert any(
        "sharded as accelerate's plugin does" in note and note.endswith(", Block") for note in trace.notes
    )


def test_torchtitan_shards_the_ends_by_themselves() -> None:
    """The head is gathered with the last norm, not with the embeddings."""
    pytest.importorskip("transformers")
    config = {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 1000, "use_cache": False,
    }  # fmt: skip

    def gathered_together(*arguments: str) -> bool:
        options = {"model_args": tuple(config.items()), "inputs": [TensorSpec((16,), "int64")]}
        job = resolve_job("hf:LlamaForCausalLM", {}, **options, fsdp=2, fsdp_arg=arguments)
        sizes = [e.size_bytes for e in record(job, 1, AMPERE).events if isinstance(e, Alloc)]
        both = 2 * 4 * 64 * 1000
        return any(both <= size < 2 * both for size in sizes)

    assert gathered_together("reshard_after_forward=true")
    assert not gathered_together("by=torchtitan")


def test_torchtitan_shards_language_models_alone() -> None:
    """Another model has no embeddings to shard."""
    with pytest.raises(UsageError, match="by=torchtitan: is for causal language models without tied weights"):
        sharded(2, "by=torchtitan")


def test_the_last_rank_holds_the_rows_that_are_left() -> None:
    """Of 11 rows on 4 ranks the last has 2 of the 3 that the first has, and as much memory, for padding."""
    rows = [
        sizes(sharded(4, rank=rank, optimizer=Optimizer.MOMENTUM), Category.OPTIMIZER)[-2:] for rank in (0, 3)
    ]
    assert rows == [[3 * WIDE * 4, 3 * 4], [2 * WIDE * 4, 2 * 4]]


def test_the_last_rank_pads_its_parts_in_the_first_forward_pass() -> None:
    """The 2 of 11 rows that it moves to the GPU are copied into blocks of 3, once, and then freed."""
    events = sharded(4, rank=3).events
    ends = [2 * WIDE * 4, 2 * 4, 3 * WIDE * 4, 3 * 4]
    allocated = [e for e in events if isinstance(e, Alloc) and e.category is Category.PARAMETER]
    assert [e.size_bytes for e in allocated][-4:] == ends
    freed = [event.block for event in events if isinstance(event, Free)]
    assert [e.block in freed for e in allocated[-4:]] == [True, True, False, False]


def test_only_parts_that_divide_evenly_are_alike_on_all_ranks() -> None:
    """The 11 rows of the head divide over 11 ranks and not over 2; 512 divide over 2 alone."""
    assert Fact.EQUAL_PARTS not in sharded(2).facts
    even = record(job_of(str(WIDE), fsdp=2, mode=Mode.TRAIN), 4, AMPERE, on_meta(Block))
    assert Fact.EQUAL_PARTS in even.facts


def test_offloaded_parts_are_gathered_from_pinned_memory() -> None:
    """With offload neither parameters, gradients nor moments lie on the GPU; parts are pinned on the host."""
    trace = sharded(2, "offload=true", optimizer=Optimizer.ADAM)
    kept = {Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER}
    assert not [event for event in trace.events if isinstance(event, Alloc) and event.category in kept]
    whole = 4 * (4 * BLOCK_NUMBERS + 12 * WIDE + 12)  # of float32, the head's 11 rows padded to 12
    assert sum(trace.pinned) >= whole // 2
    assert Category.PARAMETER in {e.category for e in sharded(2).events if isinstance(e, Alloc)}


def test_offload_is_a_switch() -> None:
    """Any other value is refused, and so is offload beside another way of sharding."""
    with pytest.raises(UsageError, match="--fsdp-arg offload: expected true or false, got 'cpu'"):
        sharded(2, "offload=cpu")
    with pytest.raises(UsageError, match="--fsdp-arg offload=true: is planned only without by="):
        sharded(2, "offload=True", "by=torchtitan")
