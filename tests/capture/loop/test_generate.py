"""Generation with a key-value cache, beside that of transformers itself."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import planner.capture.loop.generate
from planner.capture.loop.generate import run_generation
from planner.capture.loop.runtime import LoopRuntime
from planner.capture.models.torchvision.shim import prepare_torchvision
from planner.errors import ModelError
from planner.jobs import Job, Mode
from planner.program.events import Alloc, Category, Free, PhaseStart, Trace, validate
from tests.helpers.models import job_of, trace_of

prepare_torchvision()
transformers = pytest.importorskip("transformers")

PROMPT, WIDTH, HEADS, LAYERS, BATCH = 5, 8, 2, 2, 3
ONE_TOKEN = BATCH * HEADS * WIDTH * 4  # bytes of its keys in one layer


def llama() -> Any:
    """Two layers with two heads of keys and values for four of queries."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=4 * WIDTH,
            intermediate_size=40,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=HEADS,
            eos_token_id=None,
            bos_token_id=None,
        )
    )


def gemma() -> Any:
    """One layer that sees four tokens and one that sees all."""
    return transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            vocab_size=50,
            hidden_size=4 * WIDTH,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=HEADS,
            head_dim=WIDTH,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            eos_token_id=None,
            bos_token_id=None,
        )
    )


def job(new_tokens: int, **fields: object) -> Job:
    return job_of(f"input_ids={PROMPT}:int64", mode=Mode.GENERATE, new_tokens=new_tokens, **fields)


class Shapes(TorchDispatchMode):  # type: ignore[misc]
    """Writes down what products, attention and concatenations make, and how large the tensors are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        if name in ("mm", "bmm", "argmax", "cat") or "attention" in name:
            first = out if isinstance(out, Tensor) else out[0]
            self.lines.append(f"{name} {tuple(first.shape)}")
        return out


@pytest.mark.slow
@pytest.mark.parametrize("build", [llama, gemma])
@pytest.mark.parametrize("padded", [True, False])
def test_the_loop_is_that_of_transformers(
    build: Callable[[], Any], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators, their shapes and order, and the tokens are those of transformers."""
    torch.manual_seed(0)
    model = build().eval()
    prompt = torch.randint(0, 50, (BATCH, PROMPT))
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0 if padded else 1
    theirs, ours = Shapes(), Shapes()
    with theirs, torch.no_grad():
        expected = model.generate(prompt, attention_mask=mask, max_new_tokens=7, do_sample=False)
    given: list[Tensor] = []
    generate = planner.capture.loop.generate._generate

    def keep(*args: Any) -> Tensor:
        given.append(generate(*args))
        return given[-1]

    monkeypatch.setattr("planner.capture.loop.generate._generate", keep)
    plan = job(7, model="hf:llama", model_args=(("padded", padded),))
    with ours:
        inputs = {"input_ids": prompt, "attention_mask": mask}
        run_generation(model, plan, lambda: ((), inputs, None), lambda *_: None, LoopRuntime())
    assert ours.lines == theirs.lines
    assert sum(line.startswith("argmax") for line in ours.lines) == 7
    assert given[0].tolist() == expected.tolist()


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of tokens of the first layer's keys each time they grow."""
    counts: list[int] = []
    update = transformers.DynamicCache.update

    def append(cache: Any, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        outcome = update(cache, keys, values, layer, *args, **kwargs)
        if layer == 0:
            counts.append(cache.layers[0].keys.shape[-2])
        return outcome

    monkeypatch.setattr(transformers.DynamicCache, "update", append)
    return counts


def test_the_cache_grows_by_one_token_at_a_time(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty tokens need keys of the prompt and nineteen, whether the model runs for each or not."""
    trace = trace_of(llama, job(20), BATCH)
    validate(trace)
    assert lengths == list(range(PROMPT, PROMPT + 20))
    assert trace.notes == (
        "of the tokens between the first 4 and the last 4, only the growth of the key-value cache is traced",
    )
    monkeypatch.setattr("planner.capture.loop.generate.WHOLE_TOKENS", 10)
    whole = trace_of(llama, job(20), BATCH)
    assert lengths[20:] == lengths[:20]
    assert whole.notes == ()
    assert largest_cache_bytes(trace) == largest_cache_bytes(whole)


def test_a_long_text_grows_by_several_tokens_at_a_time(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the four tokens at either end, three strides are enough, and the note names their length."""
    monkeypatch.setattr("planner.capture.loop.generate.MOST_GROWTHS", 3)
    trace = trace_of(llama, job(16), BATCH)
    assert lengths == [5, 6, 7, 8, 11, 14, 16, 17, 18, 19, 20]
    assert trace.notes == (
        "of the tokens between the first 4 and the last 4, only the growth of the key-value cache is traced, "
        "by up to 3 tokens at once",
    )


def largest_cache_bytes(trace: Trace) -> int:
    """The most that keys and values of more than twice the prompt's length take together."""
    alive: dict[int, int] = {}
    most = 0
    for event in trace.events:
        if isinstance(event, Free):
            alive.pop(event.block, None)
        if not isinstance(event, Alloc) or event.size_bytes <= 2 * PROMPT * ONE_TOKEN:
            continue
        if "cat" in trace.sites[event.site].op:
            alive[event.block] = event.size_bytes
        most = max(most, sum(alive.values()))
    assert not alive  # the cache goes with the call
    return most


def test_old_keys_go_as_soon_as_the_longer_ones_are_made() -> None:
    """When the last of the four tensors grows to 24 tokens, its old one of 23 is alive, and no other."""
    assert largest_cache_bytes(trace_of(llama, job(20), BATCH)) == (4 * 24 + 23) * ONE_TOKEN


def test_what_is_left_at_the_end_is_the_model_and_the_text() -> None:
    """Prompt and text, and no category but those of inference."""
    trace = trace_of(llama, job(9, steps=2), BATCH)
    freed = {e.block for e in trace.events if not isinstance(e, Alloc | PhaseStart)}
    left = [e for e in trace.events if isinstance(e, Alloc) and e.block not in freed]
    sizes = [e.size_bytes for e in left if e.category not in (Category.PARAMETER, Category.WORKSPACE)]
    assert sizes == [BATCH * PROMPT * 8, BATCH * (PROMPT + 9) * 8]
    assert {e.category for e in trace.events if isinstance(e, Alloc)} == {
        *(Category.PARAMETER, Category.INPUT, Category.TEMPORARY, Category.WORKSPACE)
    }


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [
        ({}, "is no causal language model of transformers"),
        (
            {"config": SimpleNamespace(), "can_generate": lambda: False},
            "is no causal language model of transformers",
        ),
        (
            {"config": SimpleNamespace(is_encoder_decoder=True), "can_generate": lambda: True},
            "has an encoder and a decoder, whose generation is not modelled",
        ),
        (
            {"config": SimpleNamespace(), "can_generate": lambda: True, "_is_stateful": True},
            "keeps a state in place of a key-value cache, which is not modelled",
        ),
    ],
)
def test_other_models_are_refused_in_one_line(attributes: dict[str, Any], problem: str) -> None:
    """The line states what the model is and what to do."""
    model = nn.Linear(3, 3)
    for name, value in attributes.items():
        setattr(model, name, value)
    with pytest.raises(ModelError) as caught:
        trace_of(lambda: model, job(2), 1)
    assert str(caught.value) == f"test: {problem}; use --mode infer, or a model such as hf:LlamaForCausalLM"
