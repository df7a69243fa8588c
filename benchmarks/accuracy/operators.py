"""The operators that Liger measured against its own, as small modules in plain PyTorch.

Each function builds one on meta from the setting of a published row. What a script makes beside, such as the
weights of Liger's own module, is made here too. kernels.py builds Liger's over the same inputs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.accuracy.operator_loop import Operator, Outputs

Sizes = Mapping[str, int]
BF16 = torch.bfloat16
META = torch.device("meta")


class Setting(NamedTuple):
    """How a published row was measured."""

    mode: str
    sizes: Sizes  # of its `cfg`, and the swept one
    dtype: torch.dtype


def leaf(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> Tensor:
    """Return a tensor without values."""
    return torch.empty(shape, dtype=dtype, device=META, requires_grad=grad)


def ids(*shape: int) -> Tensor:
    """Return integers without values."""
    return torch.randint(2, shape, device=META)


def random_gradients(outputs: Outputs) -> Outputs:
    """Return random gradients of all outputs."""
    return tuple(torch.randn_like(output) for output in outputs)


def held_gradients(*gradients: Tensor) -> Callable[[Outputs], Outputs]:
    """Return gradients that were made before."""
    return lambda outputs: gradients


# ---- layers


def gated_mlp(activation: Callable[[Tensor], Tensor], sizes: Sizes) -> Callable[[Tensor], Tensor]:
    """Return the gated MLP of Llama."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    gate, up, down = (
        nn.Linear(n, m, bias=False, device=META, dtype=BF16)
        for n, m in ((hidden, inner), (hidden, inner), (inner, hidden))
    )
    return lambda x: down(activation(gate(x)) * up(x))


def over_texts(make: Callable[[Sizes], Callable[[Tensor], Tensor]], setting: Setting) -> Operator:
    """Return a layer that `make` builds, over the activations of texts."""
    mode, sizes, _ = setting
    x = leaf(sizes.get("bsz") or sizes["B"], sizes["T"], sizes["hidden_size"])
    layer = make(sizes)
    gradients = held_gradients(torch.randn_like(x)) if mode == "backward" else random_gradients
    return Operator(lambda: layer(x), gradients, mode, keeps_graph=True)


GELU = partial(F.gelu, approximate="tanh")
geglu = partial(over_texts, partial(gated_mlp, GELU))
swiglu = partial(over_texts, partial(gated_mlp, F.silu))


def group_norm(setting: Setting) -> Operator:
    """Return GroupNorm, whose script makes the whole pass in every mode."""
    sizes = setting.sizes
    channels = sizes["C"]
    norms = [nn.GroupNorm(channels // sizes["channels_per_group"], channels, device=META) for _ in range(2)]
    x = leaf(sizes["M"], channels, sizes["H"], dtype=torch.float32)
    return Operator(lambda: norms[0](x), held_gradients(torch.randn_like(x)), keeps_graph=True)


def add_rms_norm(setting: Setting) -> Operator:
    """Return a sum and its RMS norm, in elementwise steps."""
    sizes = setting.sizes
    weights = [
        leaf(sizes["H"], dtype=torch.float32) for _ in range(4)
    ]  # two modules of Liger's, one with two
    x, residual = (leaf(sizes["M"], sizes["H"], dtype=torch.float32) for _ in range(2))

    def forward() -> Outputs:
        total = x + residual
        scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weights[0] * (total * scale), total

    return Operator(forward, held_gradients(torch.randn_like(x), torch.randn_like(residual)))


def rms_norm(setting: Setting) -> Operator:
    """Return torch's RMSNorm, and the sum of its output."""
    sizes = setting.sizes
    norm = nn.RMSNorm(sizes["H"], eps=1e-6, device=META, dtype=BF16)
    x = leaf(sizes["S"], sizes["B"], sizes["H"])
    return Operator(summed(lambda: norm(x)))


def summed(forward: Callable[[], Tensor]) -> Callable[[], Outputs]:
    """Return the sum of an output, which is held beside it as by a script's variable."""
    held: list[Tensor] = []

    def run() -> Outputs:
        held.clear()
        held.append(forward())
        return (held[0].sum(),)

    return run


def cleared(x: Tensor, forward: Callable[[], Tensor]) -> Operator:
    """Return the sum of an output, before which the script clears the gradient of x."""
    run = summed(forward)

    def clear_and_run() -> Outputs:
        x.grad = None
        return run()

    return Operator(clear_and_run)


def halves(sizes: Sizes) -> Tensor:
    """Return Megatron's input of SwiGLU, whose halves are multiplied."""
    return leaf(sizes["S"], sizes["B"], 2 * sizes["ffn_local"])


def megatron_swiglu(setting: Setting) -> Operator:
    """Return SiLU of one half times the other."""
    x = halves(setting.sizes)

    def forward() -> Tensor:
        first, second = torch.chunk(x, 2, -1)
        return F.silu(first) * second

    return cleared(x, forward)


def sparsemax(setting: Setting) -> Operator:
    """Return sparsemax by sorting."""
    sizes = setting.sizes
    x = leaf(sizes["B"] * sizes["T"], sizes["V"], dtype=torch.float32)

    def forward() -> Tensor:
        ordered, _ = torch.sort(x, dim=-1, descending=True)
        sums = torch.cumsum(ordered, dim=-1)
        places = torch.arange(1, x.shape[-1] + 1, device=META, dtype=x.dtype).view(1, -1)
        bound = 1 + places * ordered
        support = bound > sums
        count = support.sum(dim=-1, keepdim=True).clamp(min=1)
        support_sum = (ordered * support).sum(dim=-1, keepdim=True)
        return torch.clamp(x - (support_sum - 1) / count, min=0)

    return Operator(forward, held_gradients(torch.randn_like(x)), keeps_graph=True)


def of_vector(make: Callable[[], Callable[[Tensor], Tensor | Outputs]], setting: Setting) -> Operator:
    """Return a function of a vector: the script takes the swept size as the whole shape."""
    function, x = make(), leaf(setting.sizes["N"], dtype=setting.dtype)
    return Operator(
        lambda: function(x), lambda outputs: tuple(torch.ones_like(one) for one in outputs), keeps_graph=True
    )


# ---- losses over probabilities


def _distributions(sizes: Sizes, first: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return an input that hangs on random logits, and a target."""
    shape = (sizes["B"] * sizes["T"], sizes["V"])
    return first(leaf(*shape, dtype=torch.float32)), leaf(*shape, dtype=torch.float32, grad=False).softmax(-1)


def kl_div(setting: Setting) -> Operator:
    """Return KLDivLoss over rows."""
    logs, target = _distributions(setting.sizes, lambda logits: logits.log_softmax(-1))
    return Operator(lambda: F.kl_div(logs, target, reduction="batchmean"), keeps_graph=True)


def tvd(setting: Setting) -> Operator:
    """Return the total variation distance over rows."""
    p, q = _distributions(setting.sizes, lambda logits: logits.softmax(-1))

    def forward() -> Tensor:
        halves = torch.abs(p - q) / 2.0
        return torch.sum(halves) / p.size(0)

    return Operator(forward, keeps_graph=True)


# ---- losses over logits, with the layer that makes them


Loss = Callable[..., Tensor]


def with_head(loss: Callable[[], Loss], setting: Setting) -> Operator:
    """Return a loss of a head's weight, activations and labels, beside another head."""
    sizes, function = setting.sizes, loss()
    head, twin = (leaf(sizes["V"], sizes["H"]) for _ in range(2))
    x, target = leaf(sizes["BT"], sizes["H"]), ids(sizes["BT"])

    def forward(twin: Tensor = twin) -> Tensor:
        return function(head, x, target)

    return Operator(forward)


def _cross_entropy(head: Tensor, x: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(x, head)
    return F.cross_entropy(logits, target)


def _jensen_shannon(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the divergence of two tensors of log probabilities from their mixture."""
    teacher, student = teacher.float(), student.float()
    mixture = torch.lerp(torch.exp(teacher), torch.exp(student), 0.5)

    def divergence(of: Tensor) -> Tensor:
        return F.kl_div(torch.log(mixture), of, reduction="batchmean", log_target=True)

    return (0.5 * divergence(teacher) + 0.5 * divergence(student)).to(BF16)


def linear_jsd(setting: Setting) -> Operator:
    """Return two heads, whose weights Liger's module shares, and the divergence of their logits."""
    sizes = setting.sizes
    student, teacher = (leaf(sizes["V"], sizes["H"]) for _ in range(2))
    x, y = leaf(sizes["BT"], sizes["H"]), leaf(sizes["BT"], sizes["H"], grad=False)

    def forward() -> Tensor:
        first, second = F.linear(x, student), F.linear(y, teacher)
        logs = torch.log_softmax(first / 1.0, dim=-1)
        return _jensen_shannon(logs, torch.log_softmax(second / 1.0, dim=-1))

    return Operator(forward)


def _log_probabilities(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean log probability of each text's labels."""
    mask = target != -100
    labels = torch.where(mask, target, 0)
    logs = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (logs * mask).sum(-1) / mask.sum(-1)


def over_pairs(loss: Callable[[], Loss], setting: Setting) -> Operator:
    """Return a loss of activations, a head's weight and labels over pairs of texts, beside another head."""
    sizes, function = setting.sizes, loss()
    head, twin = (leaf(sizes["V"], sizes["H"]) for _ in range(2))
    x, target = leaf(sizes["B"], sizes["T"], sizes["H"]), ids(sizes["B"], sizes["T"])

    def forward(twin: Tensor = twin) -> Tensor:
        return function(x, head, target)

    return Operator(forward)


def _preference(has_odds: bool, x: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Return ORPO's loss, or SimPO's without odds, beside cross entropy of the chosen texts."""
    chosen = len(x) // 2

    def of_logits() -> tuple[Tensor, Tensor, Tensor]:
        products = x @ head.t()
        logits = products.float()
        nll = F.cross_entropy(logits[:chosen].view(-1, len(head)), target[:chosen].view(-1))
        return logits, _log_probabilities(logits, target), nll

    logits, logs, nll = of_logits()
    good, bad = logs[:chosen], logs[chosen:]
    difference = good - bad
    if has_odds:
        difference = difference - (torch.log1p(-torch.exp(good)) - torch.log1p(-torch.exp(bad)))
    return nll - (0.1 * F.logsigmoid(difference)).mean()


def distilled(loss: Callable[[], Loss], setting: Setting) -> Operator:
    """Return a loss of a student's and a teacher's activations and heads, and labels."""
    sizes, function = setting.sizes, loss()
    student, student_twin = (leaf(sizes["V"], sizes["H"] // 2) for _ in range(2))
    teacher, teacher_twin = (leaf(sizes["V"], sizes["H"]) for _ in range(2))
    x, *beside = (leaf(sizes["BT"], sizes["H"] // 2) for _ in range(3))
    y, target = leaf(sizes["BT"], sizes["H"], grad=False), ids(sizes["BT"])
    held = (student_twin, teacher_twin, *beside)

    def forward(held: Outputs = held) -> Tensor:
        return function(x, student, y, teacher, target)

    return Operator(forward)


def _distillation(
    distance: Loss, x: Tensor, student: Tensor, y: Tensor, teacher: Tensor, target: Tensor
) -> Tensor:
    """Return cross entropy beside a distance of the logits."""

    def of_logits() -> tuple[Tensor, Tensor, Tensor]:
        products = x @ student.t()
        with torch.no_grad():
            others = y @ teacher.t()
        first, second = products.float(), others.float()
        return first, second, F.cross_entropy(first, target)

    first, second, hard = of_logits()
    first /= 1.0
    second /= 1.0
    soft = distance(first, second)
    return 0.5 * hard + 0.5 * soft


def _jsd(first: Tensor, second: Tensor) -> Tensor:
    student, teacher = F.log_softmax(first, dim=-1), F.log_softmax(second, dim=-1)
    mean = 0.5 * student.exp() + (1 - 0.5) * teacher.exp()
    log_mean = mean.log()
    of_student = F.kl_div(log_mean, student, reduction="batchmean", log_target=True)
    of_teacher = F.kl_div(log_mean, teacher, reduction="batchmean", log_target=True)
    return 0.5 * of_teacher + (1 - 0.5) * of_student


def _cosine(first: Tensor, second: Tensor) -> Tensor:
    student, teacher = F.normalize(first, dim=-1), F.normalize(second, dim=-1)
    similarity = F.cosine_similarity(student, teacher, dim=-1)
    return (1.0 * (1 - similarity)).mean()


def grpo(setting: Setting) -> Operator:
    """Return a policy's and a reference's head, and GRPO's loss with ratios of whole sequences."""
    sizes = setting.sizes
    heads = [leaf(sizes["V"], sizes["H"]) for _ in range(4)]  # two of Liger's
    batch, length = sizes["B"], sizes["T"]
    x, y = leaf(batch, length, sizes["H"]), leaf(batch, length, sizes["H"], grad=False)
    tokens = ids(batch, length).unsqueeze(-1)
    mask = leaf(batch, length, dtype=torch.float32, grad=False)
    advantages = leaf(batch, grad=False)

    def forward() -> Tensor:
        logits = x @ heads[0].t()
        logs = F.log_softmax(logits.float(), dim=-1)
        own = logs.gather(dim=-1, index=tokens).squeeze(-1)
        with torch.no_grad():
            reference_logits = y @ heads[1].t()
            reference_logs = F.log_softmax(reference_logits.float(), dim=-1)
            reference = reference_logs.gather(dim=-1, index=tokens).squeeze(-1)
        ratios = ((own - own.detach()) * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
        ratio = torch.exp(ratios.unsqueeze(-1))
        gains = advantages.unsqueeze(1)
        losses = -torch.min(ratio * gains, torch.clamp(ratio, 0.8, 1.2) * gains)
        divergence = torch.exp(reference - own) - (reference - own) - 1.0
        losses = losses + 0.1 * divergence
        return (losses * mask).sum() / torch.clamp(mask.sum(), min=1.0)

    return Operator(forward)


def kto(setting: Setting) -> Operator:
    """Return a policy's and a reference's head with biases, and KTO's loss; half the texts are preferred."""
    sizes = setting.sizes
    vocabulary, hidden, batch = sizes["V"], sizes["H"], sizes["B"]
    heads = [leaf(vocabulary, hidden) for _ in range(4)]  # two of Liger's
    biases = [leaf(vocabulary) for _ in range(4)]
    x, y = (leaf(batch, sizes["T"], hidden, grad=False) for _ in range(2))
    target, kl = ids(batch, sizes["T"]), leaf(1, grad=False)
    chosen, rejected = ids(batch // 2), ids(batch - batch // 2)

    def policy() -> Outputs:
        products = x @ heads[0].t()
        products = products + biases[0]
        logits = products.float()
        logs = _log_probabilities(logits, target)
        return logs[chosen], logs[rejected], logits[chosen], logits[rejected]

    def reference() -> Outputs:
        with torch.no_grad():
            logits = y @ heads[1].t()
            logits = logits + biases[1]
            logs = _log_probabilities(logits, target)
            return logs[chosen], logs[rejected]

    def forward() -> Tensor:
        good, bad, good_logits, bad_logits = policy()
        good_reference, bad_reference = reference()
        gains = 1 - F.sigmoid(0.1 * (good - good_reference - kl))
        losses = 1 - F.sigmoid(0.1 * (kl - (bad - bad_reference)))
        good_logits.detach().sum(), bad_logits.detach().sum()
        return torch.cat((gains, losses), 0).mean()

    return Operator(forward)


# ---- experts


def experts(run: Callable[[], Loss], setting: Setting) -> Operator:
    """Return a function of activations, the weights of experts, and the experts of each token."""
    mode, sizes, _ = setting
    tokens, count, hidden, inner, top = (sizes[name] for name in ("T", "E", "H", "intermediate_dim", "K"))
    x, function = leaf(tokens, hidden), run()
    up, down = leaf(count, 2 * inner, hidden) * 0.02, leaf(count, hidden, inner) * 0.02
    chosen = torch.empty((tokens, top), dtype=torch.int32, device=META)
    weights = leaf(tokens, top)
    return Operator(lambda: function(x, up, down, chosen, weights), random_gradients, mode, keeps_graph=True)


def _loop_over_experts(x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Give each expert as many tokens as the others; the script draws its tokens, together as many."""
    (tokens, top), count = chosen.shape, len(up)
    final = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(chosen.long(), count).permute(2, 1, 0)
        mask.sum(dim=(-1, -2))
    for expert in range(count):
        place, token = ids(tokens * top // count, 2).unbind(1)
        rows = x[token]
        gate, value = F.linear(rows, up[expert]).chunk(2, dim=-1)
        rows = F.silu(gate) * value
        rows = F.linear(rows, down[expert])
        rows = rows * weights[token, place, None]
        final.index_add_(0, token, rows.to(final.dtype))
    return final


# By the operator of a row.
OPERATORS: Mapping[str, Callable[[Setting], Operator]] = {
    "geglu": geglu,
    "swiglu": swiglu,
    "tiled_geglu": geglu,
    "tiled_swiglu": swiglu,
    "group_norm": group_norm,
    "fused_add_rms_norm": add_rms_norm,
    "megatron_rms_norm": rms_norm,
    "megatron_swiglu": megatron_swiglu,
    "sparsemax": sparsemax,
    "kl_div": kl_div,
    "tvd": tvd,
    "fused_linear_cross_entropy": partial(with_head, lambda: _cross_entropy),
    "fused_linear_jsd": linear_jsd,
    "fused_linear_orpo_loss": partial(over_pairs, lambda: partial(_preference, True)),
    "fused_linear_simpo_loss": partial(over_pairs, lambda: partial(_preference, False)),
    "distill_jsd_loss": partial(distilled, lambda: partial(_distillation, _jsd)),
    "distill_cosine_loss": partial(distilled, lambda: partial(_distillation, _cosine)),
    "fused_linear_grpo_loss_sequence": grpo,
    "kto_loss": kto,
    "fused_moe": partial(experts, lambda: _loop_over_experts),
    "softmax": partial(of_vector, lambda: partial(F.softmax, dim=-1)),
}
