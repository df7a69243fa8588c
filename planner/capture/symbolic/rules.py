"""Evaluate workspace rules for the kernel signatures of a program."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from planner.capture.symbolic.kernel_calls import KernelSignature, TensorMeta, at_batch, from_meta
from planner.capture.symbolic.sym_int import ShapeEnv, SymInt
from planner.capture.symbolic.sym_tensor import SymTensor, UnsupportedSymTensorOpError, trace_rule
from planner.capture.workspaces.ops import kind_and_size
from planner.capture.workspaces.registry import rule_of
from planner.jobs import Job
from planner.program import (
    LARGEST_BATCH,
    Affine,
    GuardedOps,
    Program,
    Quadratic,
    Target,
    Variants,
    constant_ops,
    first_matching,
    sample_batches,
    torch_version_of,
    workspace_bytes,
)

MOST_VARIANTS = 128  # limit for one signature; if it needs more, batch sizes in between are captured
# Numbers of multiprocessors from small to large GPUs; a number in between mostly takes the same branches.
SM_COUNTS = (14, 20, 24, 28, 34, 40, 46, 58, 68, 72, 80, 84, 108, 128, 132, 142, 148, 170, 188)
_ALWAYS = GuardedOps(1, LARGEST_BATCH, (), (), ())


@dataclass(frozen=True, slots=True)
class SignatureRules:
    """The workspace rules of a program's kernel signatures; implements `planner.program.WorkspaceRules`."""

    job: Job
    signatures: tuple[KernelSignature, ...]

    def variants(self, target: Target, min_batch: int, max_batch: int) -> Variants:
        """Return a `Variants` object for a target and a range of batch sizes, without variants as yet.

        It has the size of cuBLAS's workspace on GPUs of the target's compute capability.
        """
        config, torch = (
            self.job.environment.cublas_workspace_config,
            torch_version_of(self.job.environment.torch),
        )
        cublas_bytes = workspace_bytes(target.capability, config, torch)
        return Variants(cublas_bytes, min_batch, max_batch, [[] for _ in self.signatures])

    def evaluate(self, signature: int, batch: int, target: Target) -> GuardedOps:
        """Return a variant of a signature's workspaces that holds at one batch size.

        `signature` is an index. The batch size is in the program's units. If symbolic integers can follow the
        rule, the variant holds for other batch sizes too.
        """
        with suppress(UnsupportedSymTensorOpError):
            return self._trace(signature, batch, target)
        func, args, out = self.signatures[signature]
        rule = rule_of(func)
        if rule is None:
            return _ALWAYS
        ops = rule(from_meta(at_batch(args, batch)), from_meta(at_batch(out, batch)), self._of_job(target))
        return constant_ops(tuple(map(kind_and_size, ops)), batch, target.sm_count)

    def enumerate(self, program: Program, target: Target) -> None:
        """Add variants to a program by evaluating rules at selected batch sizes and multiprocessor counts.

        A rule that symbolic integers cannot follow gets no further variants.
        """
        known = program.targets[target.capability]
        least, most = known.min_batch // program.unit, known.max_batch // program.unit
        for signature, variants in enumerate(known.by_signature):
            try:
                for batch in sample_batches(least, most):
                    self._add(signature, variants, batch, target)
            except UnsupportedSymTensorOpError:
                continue

    def _add(self, signature: int, variants: list[GuardedOps], batch: int, target: Target) -> None:
        for sm_count in (target.sm_count, *SM_COUNTS):
            if len(variants) >= MOST_VARIANTS:
                return
            if sm_count != target.sm_count and not any(ops.depends_on_sm_count for ops in variants):
                return
            if first_matching(reversed(variants), batch, sm_count) is None:
                variants.append(self._trace(signature, batch, Target(target.capability, sm_count)))

    def _trace(self, signature: int, batch: int, target: Target) -> GuardedOps:
        func, args, out = self.signatures[signature]
        rule = rule_of(func)
        if rule is None:
            return _ALWAYS
        env = ShapeEnv(batch)
        return trace_rule(rule, _symbolic(args, env), _symbolic(out, env), self._of_job(target), env)

    def _of_job(self, target: Target) -> Target:
        """Return the target with the version of torch that the job names."""
        return replace(target, torch=torch_version_of(self.job.environment.torch))


def _symbolic(value: Any, env: ShapeEnv) -> Any:
    """Return arguments with polynomials and `TensorMeta` replaced by symbolic integers and tensors.

    Raises UnsupportedSymTensorOpError for a tensor on the CPU.
    """
    if isinstance(value, Affine):
        return SymInt(env, value.fixed + value.slope * env.batch, (value.fixed, value.slope))
    if isinstance(value, Quadratic):
        batch = SymInt(env, env.batch, (0, 1))
        return (batch * value.square + value.slope) * batch + value.fixed
    if isinstance(value, TensorMeta):
        if value.on_cpu:
            raise UnsupportedSymTensorOpError("a tensor of the CPU")
        return SymTensor(_symbolic(value.sizes, env), _symbolic(value.strides, env), value.dtype)
    if isinstance(value, tuple):
        return tuple(_symbolic(item, env) for item in value)
    return value
