"""Layers that are compiled, or recompute activations: the same gradients, whatever the rows."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from tests.cuda.pretend import pretend_gpus
from tests.models.support import forward, titan_model
from torchtitan_rl.batching.documents import Document, positions, segments
from torchtitan_rl.models.cpu.attention import AttentionPlan
from torchtitan_rl.models.cuda.attention import PackedFlashAttention, VarlenPlan, varlen_plan
from torchtitan_rl.models.parallel import allow_recompiles, compile_layers_on_cpu
from torchtitan_rl.models.router_replay import replay_routing
from torchtitan_rl.models.spec import build_on_meta, model_spec

ROWS = ([Document(9), Document(11)], [Document(4, (3, 5)), Document(21)], [Document(1)])
"""Rows of other lengths, with a shared prompt and without; the last is a cell of padding."""
DRAW = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, 265, (3, 47), generator=DRAW)


@pytest.fixture(autouse=True)
def undone():
    """What compiling sets for the whole process is set back."""
    import torch._dynamo

    with torch._dynamo.config.patch(
        recompile_limit=8,
        capture_scalar_outputs=False,
        skip_fwd_side_effects_in_bwd_under_checkpoint=False,
    ):
        yield
    torch._dynamo.reset()


def gradients(model: nn.Module, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits.log_softmax(-1)[..., 7].sum().backward()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def packed(model: nn.Module, documents: list[Document]) -> torch.Tensor:
    """Logits of a packed row."""
    row = segments(documents)
    tokens = TOKENS.view(1, -1)[:, : row[-1].stop]
    return model(tokens, positions(row).unsqueeze(0), AttentionPlan(row))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    whole = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        # A token without another to attend to leaves nothing but rounding to the norm of q.
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6 * whole, name


@pytest.mark.parametrize("policy", [FullAC, SelectiveAC])
def test_layers_that_recompute_have_the_same_gradients(tiny_model, policy):
    plain, recomputing = titan_model(tiny_model), titan_model(tiny_model)
    calls = []
    for layer in recomputing.layers.values():
        layer.ffn_norm.register_forward_hook(lambda *_: calls.append(1))
    policy.Config().build(dump_folder="").apply(recomputing)
    for documents in ROWS:
        found, expected = (gradients(m, packed(m, documents)) for m in (recomputing, plain))
        for name, gradient in expected.items():
            assert torch.equal(found[name], gradient), name
    assert len(calls) == len(ROWS) * len(plain.layers) * 2


def test_compiled_layers_have_the_same_gradients(moe_model):
    """Layers compiled as on a CPU, with eager operations in place of compiled kernels."""
    plain, compiled = titan_model(moe_model), titan_model(moe_model)
    compile_layers_on_cpu(compiled, backend="eager")
    for documents in ROWS:
        found, expected = (gradients(m, packed(m, documents)) for m in (compiled, plain))
        assert_same(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_so_has_one_with_compiled_kernels(tiny_model):
    plain, compiled = titan_model(tiny_model), titan_model(tiny_model)
    del compiled.layers["0"], compiled.layers["2"], plain.layers["0"], plain.layers["2"]
    compile_layers_on_cpu(compiled)
    for documents in ROWS[:2]:
        found, expected = (gradients(m, packed(m, documents)) for m in (compiled, plain))
        assert_same(found, expected)


def compile_as_torchtitan_does(model: nn.Module) -> None:
    """Compile each layer whole, with eager operations in place of kernels."""
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.compile import apply_compile

    alone = ParallelDims(1, 1, 1, 1, 1, 1, 1, spmd_backend="partial_dtensor")
    allow_recompiles()
    apply_compile(
        model, compile_config=CompileConfig(enable=True, backend="eager"), parallel_dims=alone
    )


def test_torchtitan_compiles_our_layers_whole(moe_model):
    """Layers compiled as on a GPU, but for attention and kernels: a graph break or too many
    programs would raise. Dense layers and experts, rows of any length, routing replayed and
    not, with gradient and without."""
    plain, compiled = titan_model(moe_model), titan_model(moe_model)
    compile_as_torchtitan_does(compiled)
    for length in (47, 20, 1):
        tokens = TOKENS[:1, :length]
        routing = torch.rand(length, 2, 8, generator=DRAW).argsort(-1)[..., :2]
        for replayed in (None, routing):
            with replay_routing(plain, replayed), replay_routing(compiled, replayed):
                with torch.no_grad():
                    torch.testing.assert_close(forward(compiled, tokens), forward(plain, tokens))
                found, expected = (gradients(m, forward(m, tokens)) for m in (compiled, plain))
            assert_same(found, expected)


def test_torchtitan_compiles_the_layers_of_a_gpu_whole(moe_model):
    """Attention by FlashAttention, shared prompts or none, and grouped experts, on fake tensors: a
    graph break would raise."""
    trace = FakeTensorMode(allow_non_fake_inputs=True)
    with pretend_gpus((9, 0)):
        model = build_on_meta(model_spec(moe_model)).to(torch.bfloat16)
    compile_as_torchtitan_does(model)
    with trace:
        model.to_empty(device="cpu")
        for documents in ROWS[:2]:
            tokens, places, plan = inputs_of_a_gpu(trace, documents)
            model(tokens, places, plan).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_gpus_attention_has_a_few_programs_for_all_rows():
    """With the sizes of the first row, with any number of tokens, and with any number of documents;
    with shared prompts twice more."""
    draw, made = random.Random(0), []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable:
        made.append(graph)
        return graph.forward

    trace = FakeTensorMode(allow_non_fake_inputs=True)
    with pretend_gpus((9, 0)):
        attention = PackedFlashAttention.Config().build()
    attend = torch.compile(attention, backend=backend, fullgraph=True)
    for branches in ((), (3, 2)):
        for _ in range(8):
            others = [Document(draw.randrange(1, 40)) for _ in range(draw.randrange(4))]
            documents = [Document(draw.randrange(1, 40), branches), *others]
            tokens, _, plan = inputs_of_a_gpu(trace, documents)
            with trace:
                q, k, v = (torch.empty(*tokens.shape, heads, 16) for heads in (4, 2, 2))
                attend(q, k, v, attention_masks=plan)
    assert len(made) <= 5


def inputs_of_a_gpu(
    trace: FakeTensorMode, documents: list[Document]
) -> tuple[torch.Tensor, torch.Tensor, VarlenPlan]:
    """Tokens, positions and plan of a packed row."""
    row = segments(documents)
    plan, places = varlen_plan(row, "cpu"), positions(row).unsqueeze(0)
    fake = (trace.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in plan)
    tokens = torch.zeros_like(places)
    return trace.from_tensor(tokens), trace.from_tensor(places), VarlenPlan(*fake)
