"""Run one rank's pipeline stages without the other ranks.

The stages are of `torch.distributed.pipelining`. Before its first step a stage receives from the previous
stage the metadata of its inputs, and from the next stage the metadata of the gradients of its outputs. In a
plan the rank of the previous stage is traced first, until it sends its metadata. Gradients have the shapes of
the tensors that were sent.
"""

import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from planner.capture.cuda.names import Replacement
from planner.capture.distributed.other_ranks import OtherRanks


def replacements(ranks: OtherRanks) -> Iterator[Replacement]:
    """Yield replacements for the methods by which pipeline stages set a device and exchange metadata."""
    from torch.distributed.pipelining import schedules, stage as stages

    yield stages._PipelineStageBase, "__init__", _on_meta(stages._PipelineStageBase.__init__)
    yield stages.PipelineStage, "_send_meta", _sending(ranks)
    yield stages.PipelineStage, "_recv_meta", _receiving(ranks)
    yield schedules._PipelineSchedule, "_warmup_p2p", _vote(schedules._PipelineSchedule._warmup_p2p)


def _sending(ranks: OtherRanks) -> Callable[..., None]:
    def send(stage: Any, meta: Any, to: int) -> None:
        _message(stage, meta)
        if to > stage.stage_index:
            ranks.send(f"the outputs of stage {stage.stage_index}", meta)

    return send


def _receiving(ranks: OtherRanks) -> Callable[..., Any]:
    def receive(stage: Any, source: int) -> Any:
        from torch.distributed.pipelining._utils import _derive_grad_metas, _StageBackwardMeta

        if source > stage.stage_index:
            meta = _StageBackwardMeta(_derive_grad_metas(stage._stage_meta.outputs))
        else:
            meta = ranks.receive(f"the outputs of stage {source}", stage._resolve_peer_global_rank(source))
        _message(stage, meta)
        return meta

    return receive


def _message(stage: Any, meta: Any) -> None:
    """Allocate and free the two tensors that carry an object between ranks.

    The tensors hold the object's size and bytes.
    """
    size = torch.empty(1, dtype=torch.int64, device=stage.device)
    content = torch.empty(len(pickle.dumps(meta)), dtype=torch.uint8, device=stage.device)
    del size, content


def _on_meta(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a version of a stage's constructor that replaces a CUDA device by the meta device."""

    @functools.wraps(plain)
    def make(
        self: Any, submodule: Any, stage_index: int, num_stages: int, device: Any, *args: Any, **kwargs: Any
    ) -> None:
        of_gpu = torch.device(device).type == "cuda"
        plain(
            self,
            submodule,
            stage_index,
            num_stages,
            torch.device("meta") if of_gpu else device,
            *args,
            **kwargs,
        )

    return make


def _vote(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a version of `_warmup_p2p` in which this rank's stages alone vote how to infer metadata."""

    @functools.wraps(plain)
    def vote(self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        from torch.distributed.pipelining._utils import InferenceMode
        from torch.distributed.pipelining.stage import PipelineStage

        if not all(isinstance(stage, PipelineStage) for stage in stages):
            plain(self, stages, has_backward, p2p_done)
            return
        sums: Any = None
        for stage in stages:
            sums = stage._warmup_forward_vote(has_backward, received_acc=sums)
        for stage in reversed(stages):
            sums = stage._warmup_backward_result(received_result=sums)
        dynamic = any(InferenceMode.needs_dynamic(stage._user_meta, has_backward) for stage in stages)
        for stage in stages:
            stage._inference_mode = InferenceMode.DYNAMIC if dynamic else InferenceMode.STATIC

    return vote
