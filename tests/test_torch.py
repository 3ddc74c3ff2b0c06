"""Torch around the dispatcher: compile, export, autocast, functorch, gradients, dropout, threads."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from attn_dispatch import InputError, NoBackendError, dispatch, masks, variants
from attn_dispatch.routes import routes

sdpa = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def qkv(sq: int = 5, skv: int = 7, hq: int = 4, hkv: int = 2, d: int = 8, **options: Any) -> list[torch.Tensor]:
    return [torch.randn(2, h, n, d, **options) for h, n in ((hq, sq), (hkv, skv), (hkv, skv))]


# --- torch.compile ---------------------------------------------------------------------------------------------------

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool mask": {"attn_mask": torch.ones(5, 7, dtype=torch.bool).tril(2)},
    "float mask": {"attn_mask": torch.linspace(-1, 1, 35).reshape(5, 7)},
    "window": {"window": (2, 0)},
    "softcap": {"softcap": 3.0},
    "sliding window": {"attn_mask": masks.sliding_window(3)},
    "longformer": {"attn_mask": masks.longformer(2)},
    "prefix or documents": {"attn_mask": masks.prefix_lm(2) | masks.Window(1, 1)},
    "held columns": {"attn_mask": masks.causal() & masks.columns(keep=torch.tensor([True] * 5 + [False] * 2))},
    "key_lengths": {"key_lengths": torch.tensor([7, 4])},
    "both lengths": {"key_lengths": torch.tensor([7, 4]), "query_lengths": torch.tensor([5, 2])},
    "offset": {"is_causal": True, "q_offset": 2},
    "offset per batch": {"is_causal": True, "q_offset": torch.tensor([2, 1])},
    "bias": {"bias": torch.linspace(-1, 1, 35).reshape(5, 7)},
    "alibi": {"bias": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "is_causal": True},
    "sinks": {"sinks": torch.tensor([0.5, 0.0, -0.5, 1.0])},
    "lse": {"return_lse": True},
    "weights": {"return_weights": True},
    "pinned": {"backend": "sdpa_math"},
    "pinned chain": {"backend": "fold_groups > sdpa_flash"},
    "bshd": {"layout": "bshd"},
}  # fmt: skip


def parts(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_is_the_eager_call(name):
    options = {"enable_gqa": True, **CALLS[name]}
    inputs = qkv()
    if options.get("layout") == "bshd":
        inputs = [x.transpose(1, 2).contiguous() for x in inputs]
    compiled = torch.compile(
        lambda q, k, v: dispatch.attention(q, k, v, **options), backend="aot_eager", fullgraph=True
    )
    want = parts(dispatch.attention(*inputs, **options))
    for _ in range(2):
        for got, wanted in zip(parts(compiled(*inputs)), want, strict=True):
            torch.testing.assert_close(got, wanted)


def test_inductor_compiles_a_layer_with_plain_and_opaque_calls():
    def layer(q, k, v, lengths):
        plain = dispatch.attention(q, k, v, is_causal=True, enable_gqa=True)
        near = dispatch.attention(plain, k, v, window=(2, 0), enable_gqa=True)
        return dispatch.attention(near.relu(), k, v, key_lengths=lengths, enable_gqa=True) * 2

    inputs = [*qkv(), torch.tensor([7, 4])]
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    out = torch.compile(layer, backend="inductor", fullgraph=True)(*leaves, inputs[3])
    want = [x.clone().requires_grad_() for x in inputs[:3]]
    wanted = layer(*want, inputs[3])
    torch.testing.assert_close(out, wanted)
    out.sum().backward()
    wanted.sum().backward()
    for got, expected in zip(leaves, want, strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (3, 0)}, {"softcap": 2.0}], ids=str)
def test_growing_lengths_compile_a_few_times_only(options):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: dispatch.attention(q, k, v, **options), backend=counter, fullgraph=True)
    for n in range(5, 41):
        inputs = qkv(n, n, 2, 2)
        torch.testing.assert_close(compiled(*inputs), dispatch.attention(*inputs, **options))
    assert counter.frame_count <= 4


def test_a_compiled_decode_with_offsets_that_are_numbers_is_one_graph():
    """Each offset was written into the graph, and after eight of them torch gave up."""
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k, v):
        return dispatch.attention(q, k, v, is_causal=True, q_offset=k.shape[2] - q.shape[2])

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for n in range(5, 25):
        inputs = qkv(2, n, 2, 2)
        torch.testing.assert_close(compiled(*inputs), step(*inputs))
    assert counter.frame_count <= 4


@pytest.mark.parametrize(
    ("options", "words"),
    [({"scale": math.nan}, "scale"), ({"softcap": math.nan}, "softcap"), ({"dropout_p": -0.1}, "dropout_p"),
     ({"scale": math.inf, "window": (2, 0)}, "scale"), ({"dropout_p": math.nan}, "dropout_p")],
    ids=str,
)  # fmt: skip
def test_a_number_that_is_none_is_named_in_a_compiled_call_too(options, words):
    torch._dynamo.reset()
    with pytest.raises(InputError, match=words):
        torch.compile(lambda x: dispatch.attention(x, x, x, **options), backend="aot_eager")(torch.randn(1, 2, 5, 8))


def test_nan_in_keys_that_a_compiled_calls_mask_excludes_does_not_leak():
    q, k, v = qkv(4, 4, 2, 2)
    k[..., 3, :] = v[..., 3, :] = math.nan
    keep = torch.tensor([[True, True, True, False]])
    compiled = torch.compile(lambda *x: dispatch.attention(*x[:3], attn_mask=x[3]), backend="aot_eager", fullgraph=True)
    want = dispatch.attention(q, k[..., :3, :], v[..., :3, :])
    for mask in (keep, keep.expand(q.shape[0], 1, 1, 4)):
        torch.testing.assert_close(compiled(q, k, v, mask), want)


@pytest.mark.filterwarnings("ignore")  # of torch.jit, which is on its way out
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (2, 0)}, {"softcap": 2.0}], ids=str)
def test_a_call_can_be_traced_by_torch_jit(options):
    traced = torch.jit.trace(lambda q, k, v: dispatch.attention(q, k, v, **options), qkv(5, 5, 2, 2), check_trace=False)
    inputs = qkv(5, 5, 2, 2)
    torch.testing.assert_close(traced(*inputs), dispatch.attention(*inputs, **options))
    with pytest.raises(NoBackendError, match=r"cannot be honoured by torch\.jit\.trace"):
        torch.jit.trace(lambda x: dispatch.attention(x, x, x, backend="blocked"), inputs[0], check_trace=False)


def test_dispatch_use_around_a_compiled_call_is_honoured_and_left_again():
    seen = []
    compiled = torch.compile(
        lambda q, k, v: dispatch.attention(q, k, v, enable_gqa=True), backend="aot_eager", fullgraph=True
    )
    inputs = qkv()
    want = sdpa(*inputs, enable_gqa=True)
    torch.testing.assert_close(compiled(*inputs), want)
    with dispatch.use("eager"), dispatch.capture() as workload:
        torch.testing.assert_close(compiled(*inputs), want)
    seen += [entry.candidate for entry in workload]
    torch.testing.assert_close(compiled(*inputs), want)
    assert seen == ["eager"]


def test_a_pinned_backend_that_refuses_raises_inside_a_compiled_call_too():
    compiled = torch.compile(
        lambda q, k, v: dispatch.attention(q, k, v, softcap=2.0, backend="sdpa_flash", enable_gqa=True)
    )
    with pytest.raises(Exception, match="no softcap"):
        compiled(*qkv())


GRAD_CALLS = ["plain", "causal", "bool mask", "window", "softcap", "sliding window", "key_lengths", "lse", "alibi"]


@pytest.mark.parametrize("name", GRAD_CALLS)
def test_gradients_under_compile_are_the_eager_gradients(name):
    options = {"enable_gqa": True, **CALLS[name]}
    grads = []
    base = qkv()
    for compile_it in (False, True):
        leaves = [x.clone().requires_grad_() for x in base]

        def call(q, k, v):
            return dispatch.attention(q, k, v, **options)

        run: Callable[..., Any] = torch.compile(call, backend="aot_eager", fullgraph=True) if compile_it else call
        sum(part.sin().sum() for part in parts(run(*leaves))).backward()
        grads.append([x.grad for x in leaves])
    for eager, compiled in zip(*grads, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("argument", ["attn_mask", "bias", "sinks"])
@pytest.mark.parametrize("more", [{}, {"window": (3, 0)}], ids=["plain", "window"])
def test_gradients_of_masks_and_biases_under_compile_are_the_eager_ones(argument, more):
    base = qkv()
    value = torch.randn(4) if argument == "sinks" else torch.randn(5, 7)
    grads = []
    for compile_it in (False, True):
        leaf = value.clone().requires_grad_()

        def call(q, k, v, x):
            return dispatch.attention(q, k, v, enable_gqa=True, **more, **{argument: x})

        run = torch.compile(call, backend="aot_eager", fullgraph=True) if compile_it else call
        run(*base, leaf).sin().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[1], grads[0])
    assert grads[0].abs().sum() > 0


def test_dropout_in_a_compiled_call_follows_the_seed():
    compiled = torch.compile(
        lambda q, k, v: dispatch.attention(q, k, v, dropout_p=0.5, softcap=3.0), backend="aot_eager"
    )
    inputs = qkv(hq=2)
    torch.manual_seed(3)
    first = compiled(*inputs)
    torch.manual_seed(3)
    assert torch.equal(compiled(*inputs), first)
    assert not torch.equal(compiled(*inputs), first)


def test_the_gradient_of_dropout_in_a_compiled_call_drops_what_the_forward_dropped():
    q, k, v = (x.requires_grad_() for x in qkv(hq=2))
    compiled = torch.compile(
        lambda q, k, v: dispatch.attention(q, k, v, dropout_p=0.5, softcap=3.0), backend="aot_eager"
    )
    state = torch.random.get_rng_state()
    out = compiled(q, k, v)
    (found,) = torch.autograd.grad(out.sum(), v)
    # the output is linear in v: with the weights that the forward kept, moving v by h moves it by grad . h
    step = torch.randn_like(v)
    torch.random.set_rng_state(state)
    with torch.no_grad():
        moved = compiled(q, k, v + step)
    torch.testing.assert_close((moved - out).sum(), (found * step).sum(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", [None, "eager"])
def test_results_have_their_names_in_a_compiled_and_an_exported_call(backend):
    """They were plain tuples there, and `result.lse` failed."""

    class Both(torch.nn.Module):
        def forward(self, x):
            both = dispatch.attention(x, x, x, return_lse=True, return_weights=True, backend=backend)
            one = dispatch.attention(x, x, x, return_weights=True, backend=backend)
            return both.out + both.lse[..., None], one.weights

    q = torch.randn(1, 2, 6, 8)
    want = Both()(q)
    exported = torch.export.export(Both(), (q,), strict=False).module()
    for run in (torch.compile(Both(), backend="aot_eager"), exported):
        for x, y in zip(run(q), want, strict=True):
            torch.testing.assert_close(x, y)


def test_a_program_that_returns_named_results_can_be_saved(tmp_path):
    class Sums(torch.nn.Module):
        def forward(self, x):
            return dispatch.attention(x, x, x, return_lse=True)

    q = torch.randn(1, 2, 6, 8)
    torch.export.save(torch.export.export(Sums(), (q,), strict=False), tmp_path / "sums.pt2")
    got = torch.export.load(tmp_path / "sums.pt2").module()(q)
    torch.testing.assert_close(got.lse, Sums()(q).lse)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("rank", [None, 3, 4])
def test_replace_sdpa_takes_what_torch_takes(kv_heads, rank):
    """A single kv head, which torch broadcasts without enable_gqa, and masks of rank 3: models have both."""
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, kv_heads, 5, 8)
    keep = None if rank is None else (torch.rand(*([1] * (rank - 3)), 4, 5, 5) < 0.7) | torch.eye(5, dtype=torch.bool)
    want = F.scaled_dot_product_attention(q, k, k, keep)
    with dispatch.replace_sdpa():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k, keep), want)
    with pytest.raises(InputError, match="query has 4 heads and key 2"), dispatch.replace_sdpa():
        F.scaled_dot_product_attention(q, q[:, :2], q[:, :2])


@pytest.mark.parametrize("call", [{"return_lse": True}, {"return_weights": True}, {"window": (2, 0)}], ids=str)
@pytest.mark.parametrize("shapes", [((3, 2, 4, 5, 8), (3, 2, 4, 7, 8)), ((1, 4, 5, 8), (2, 4, 7, 8))], ids=str)
def test_a_compiled_call_knows_the_shapes_of_its_results(call, shapes):
    q, k = (torch.randn(*shape) for shape in shapes)
    seen = []

    def run(q, k):
        results = dispatch.attention(q, k, k, **call)
        results = results if isinstance(results, tuple) else (results,)
        seen.append([tuple(x.shape) for x in results])
        return results

    got = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k)
    want = run(q, k)
    assert seen[0] == seen[-1]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"window": (2, 0)}], ids=str)
@pytest.mark.parametrize("value_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_compiled_call_is_cast_by_autocast_as_an_eager_one(options, value_dtype):
    q, k, v = qkv(hq=2)
    v = v.to(value_dtype)

    def run(q, k, v):
        return dispatch.attention(q, k, v, **options)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v), run(q, k, v)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_a_compiled_call_takes_lengths_as_a_list():
    q, k, v = qkv(hq=2)
    call = torch.compile(lambda q, k, v: dispatch.attention(q, k, v, key_lengths=[7, 4]), backend="aot_eager")
    torch.testing.assert_close(call(q, k, v), dispatch.attention(q, k, v, key_lengths=[7, 4]))


@pytest.mark.parametrize("backend", ["sdpa_flash", "sdpa_math"])
@pytest.mark.parametrize("made", ["the same", "of another"])
def test_gradients_of_gradients_count_a_tensor_in_several_places_once(backend, made):
    x = torch.randn(1, 2, 5, 8, requires_grad=True)

    def grads(create_graph, backend):
        key = x if made == "the same" else x * 2
        out = dispatch.attention(x, key, key, backend=backend)
        return torch.autograd.grad(out.sin().sum(), x, create_graph=create_graph)[0]

    want = grads(False, "eager")
    torch.testing.assert_close(grads(True, backend), want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(grads(False, backend), want, atol=1e-5, rtol=1e-4)


# --- torch.export ----------------------------------------------------------------------------------------------------


class Attend(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return dispatch.attention(q, k, v, enable_gqa=True, **self.options)


EXPORTED = {"plain": {}, "causal": {"is_causal": True}, "window": {"window": (2, 0)}, "softcap": {"softcap": 2.0},
            "mask object": {"attn_mask": masks.sliding_window(3)}, "lse": {"return_lse": True}}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.parametrize("backend", [None, "eager", "sdpa_math"], ids=str)
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_an_exported_call_serves_all_lengths(name, backend, strict):
    if backend == "sdpa_math" and name != "plain":
        backend = "blocked"
    module = Attend(**EXPORTED[name], backend=backend)
    sq, skv = torch.export.Dim("sq", min=2, max=512), torch.export.Dim("skv", min=2, max=512)
    shapes = ({2: sq}, {2: skv}, {2: skv})
    program = torch.export.export(module, tuple(qkv()), dynamic_shapes=shapes, strict=strict)
    operators = [n for n in program.graph.nodes if "attn_dispatch" in str(n.target)]
    # plain ATen ops only where somebody asked for the specification, which runs without this package
    assert len(operators) == (0 if backend == "eager" else 1)
    for lengths in ((5, 7), (3, 11), (9, 9), (30, 40)):
        inputs = qkv(*lengths)
        for got, want in zip(parts(program.module()(*inputs)), parts(module(*inputs)), strict=True):
            torch.testing.assert_close(got, want)


FIRST = torch.arange(6) < 1
TRACED_MASKS: dict[str, Callable[[], masks.Mask]] = {
    "atom": lambda: masks.sliding_window(3),
    "and": lambda: masks.sliding_window(3) & masks.prefix_lm(2),
    "not": lambda: ~masks.sliding_window(1),
    "nested": lambda: ~((masks.sliding_window(1) | masks.prefix_lm(2)) & masks.strided(2)) | masks.dilated(3, 2),
    "two that read the same": lambda: masks.columns(keep=FIRST) | masks.columns(keep=~FIRST),
    "table": lambda: masks.block_table(2, torch.ones(3, 3).tril().bool()),
    "packed": lambda: masks.documents(torch.tensor([0, 2, 6], dtype=torch.int32)) & masks.causal(),
}


@pytest.mark.parametrize("name", TRACED_MASKS)
@pytest.mark.parametrize("how", ["compile", "strict export", "strict export of eager"])
def test_dynamo_traces_masks_that_nobody_used_before(name, how):
    """A mask caches what it was asked, and the cache itself cannot be traced: each case makes its own mask."""
    inputs, make = qkv(6, 6), TRACED_MASKS[name]
    backend = "eager" if how.endswith("eager") else None
    module = Attend(attn_mask=make(), backend=backend)
    if how == "compile":
        call = torch.compile(module, backend="eager", fullgraph=True)
    else:
        call = torch.export.export(module, tuple(inputs), strict=True).module()
    want = dispatch.attention(*inputs, attn_mask=make(), enable_gqa=True, backend="eager")
    torch.testing.assert_close(call(*inputs), want)


def test_an_exported_call_honours_a_backend_and_refuses_as_the_call_does():
    program = torch.export.export(Attend(backend="sdpa_flash", softcap=2.0), tuple(qkv()))
    with pytest.raises(NoBackendError, match="no softcap"):
        program.module()(*qkv())


# --- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_autocast_is_torchs_autocast(options):
    inputs = qkv(hkv=4)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            want = sdpa(*inputs, **options)
            got = dispatch.attention(*inputs, **options)
        assert got.dtype == want.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
    outside = dispatch.attention(*inputs, **options)
    assert outside.dtype == torch.float32
    torch.testing.assert_close(outside, sdpa(*inputs, **options))


def test_autocast_unites_mixed_dtypes_as_torch_does():
    q, k, v = qkv(hkv=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert dispatch.attention(q.bfloat16(), k, v).dtype == torch.bfloat16
    disabled = torch.autocast("cpu", enabled=False)
    with torch.autocast("cpu", dtype=torch.bfloat16), disabled:
        assert dispatch.attention(q, k, v).dtype == torch.float32


def test_gradients_pass_through_autocast_in_the_inputs_dtype():
    leaves = [x.requires_grad_() for x in qkv(hkv=4)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dispatch.attention(*leaves).sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in leaves)


# --- functorch and higher derivatives --------------------------------------------------------------------------------

HIGHER = {"plain": {}, "causal": {"is_causal": True}, "window": {"window": (2, 0)}, "softcap": {"softcap": 2.0}}


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """The same attention in a few lines of torch, for what torch's SDPA cannot do or differentiate."""
    sq, skv = q.shape[-2], k.shape[-2]
    scores = q @ k.repeat_interleave(q.shape[-3] // k.shape[-3], -3).mT * q.shape[-1] ** -0.5
    scores = options["softcap"] * torch.tanh(scores / options["softcap"]) if "softcap" in options else scores
    keep = torch.ones(sq, skv, dtype=torch.bool)
    keep = keep.tril() if options.get("is_causal") else keep
    if "window" in options:
        keep = keep.tril(skv - sq) & keep.triu(skv - sq - options["window"][0])
    keep = options.get("attn_mask", keep)
    scores = scores.masked_fill(~keep, -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)


@pytest.mark.parametrize("name", HIGHER)
def test_vmap_grad_jvp_and_hessian_are_those_of_plain_torch(name):
    options = HIGHER[name]
    q, k, v = (x.double() for x in qkv(3, 4, 2, 2, 4))
    ours = lambda q, k, v: dispatch.attention(q, k, v, **options)
    plain = lambda q, k, v: dense(q, k, v, **options)
    stacked = [torch.stack([x, x * 2, x - 1]) for x in (q, k, v)]
    torch.testing.assert_close(torch.vmap(ours)(*stacked), torch.vmap(plain)(*stacked))
    loss = lambda f: lambda *x: f(*x).sin().sum()
    for got, want in zip(
        torch.func.grad(loss(ours), argnums=(0, 1, 2))(q, k, v),
        torch.func.grad(loss(plain), (0, 1, 2))(q, k, v),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    tangents = tuple(torch.randn_like(x) for x in (q, k, v))
    for got, want in zip(
        torch.func.jvp(ours, (q, k, v), tangents), torch.func.jvp(plain, (q, k, v), tangents), strict=True
    ):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.func.hessian(loss(ours))(q, k, v), torch.func.hessian(loss(plain))(q, k, v))
    torch.testing.assert_close(ours(q, k, v), plain(q, k, v))  # and an ordinary call afterwards is an ordinary call


def test_per_sample_gradients_by_vmap_of_grad():
    q, k, v = (x.double() for x in qkv(3, 4, 2, 2, 4))
    per_sample = lambda f: torch.vmap(torch.func.grad(lambda q, k, v: f(q[None], k[None], v[None]).pow(2).sum()))
    torch.testing.assert_close(per_sample(dispatch.attention)(q, k, v), per_sample(dense)(q, k, v))


def test_forward_mode_with_dual_tensors():
    import torch.autograd.forward_ad as fwd

    q, k, v = (x.double() for x in qkv(3, 4, 2, 2, 4))
    tangent = torch.randn_like(q)
    for _ in range(2):
        with fwd.dual_level():
            got = fwd.unpack_dual(dispatch.attention(fwd.make_dual(q, tangent), k, v)).tangent
        want = torch.func.jvp(lambda q: dense(q, k, v), (q,), (tangent,))[1]
        torch.testing.assert_close(got, want)
        dispatch.attention(q, k, v)  # a route of the plain call must not serve the dual one


KEEP = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize("backend", ["sdpa_flash", "fold_groups > sdpa_flash", None])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": KEEP}], ids=["plain", "causal", "masked"])
@pytest.mark.parametrize("hkv", [2, 1], ids=["mha", "gqa"])
def test_gradients_of_gradients_are_those_of_plain_torch(backend, options, hkv):
    if backend == "fold_groups > sdpa_flash" and (hkv == 2 or options):
        return  # the rewrite has nothing to do there, or declines
    leaves = [x.double().requires_grad_() for x in qkv(3, 4, 2, hkv, 4)]

    def second(f: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        first = torch.autograd.grad(f(*leaves).sin().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves))

    got = second(lambda *x: dispatch.attention(*x, enable_gqa=True, backend=backend, **options))
    for ours, theirs in zip(got, second(lambda *x: dense(*x, **options)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradcheck_and_gradgradcheck_pass():
    leaves = [x.double().requires_grad_() for x in qkv(2, 3, 2, 1, 3)]
    call = lambda *x: dispatch.attention(*x, enable_gqa=True)
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


@pytest.mark.parametrize(
    "needs", [c for n in (1, 2) for c in itertools.combinations(("q", "k", "v", "mask"), n)], ids="".join
)
def test_only_what_needs_a_gradient_gets_one_and_it_is_right(needs):
    values = dict(zip("qkv", qkv(hkv=4), strict=True)) | {"mask": torch.randn(4, 5, 7)[None]}
    found = []
    for call in (lambda q, k, v, mask: dispatch.attention(q, k, v, mask), lambda q, k, v, mask: sdpa(q, k, v, mask)):
        leaves = {name: x.clone().requires_grad_(name in needs) for name, x in values.items()}
        call(**leaves).sin().sum().backward()
        assert [name for name, x in leaves.items() if x.grad is not None] == [n for n in values if n in needs]
        found.append([leaves[name].grad for name in needs])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_route_made_without_gradients_does_not_serve_a_call_with_them():
    inputs = qkv(hkv=4)
    for _ in range(2):
        dispatch.attention(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        assert not dispatch.attention(*leaves).requires_grad
    assert dispatch.attention(*leaves).requires_grad
    with torch.inference_mode():
        assert dispatch.attention(*leaves).is_inference()
    dispatch.attention(*leaves).sum().backward()
    assert leaves[1].grad is not None


# --- determinism and dropout -----------------------------------------------------------------------------------------


def test_the_deterministic_flag_is_part_of_the_op_and_of_the_route():
    leaves = [x.requires_grad_() for x in qkv(hkv=4)]
    dispatch.attention(*leaves)
    torch.use_deterministic_algorithms(True)
    try:
        assert dispatch.plan(*leaves).op.deterministic
        first = torch.autograd.grad(dispatch.attention(*leaves).sum(), leaves)
        again = torch.autograd.grad(dispatch.attention(*leaves).sum(), leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not dispatch.plan(*leaves).op.deterministic
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_dropout_with_a_seed_is_equal_cold_and_warm():
    inputs = qkv(hkv=4)
    results = []
    for _ in range(3):
        torch.manual_seed(7)
        results.append(dispatch.attention(*inputs, dropout_p=0.5))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], dispatch.attention(*inputs, dropout_p=0.5))


def test_dropout_drops_the_share_it_is_told_and_keeps_the_mean():
    v = torch.ones(1, 1, 400, 2)
    q = k = torch.zeros(1, 1, 400, 2)
    out = dispatch.attention(q, k, v, dropout_p=0.25)
    assert abs(float(out.mean()) - 1.0) < 0.02
    assert float(out.std()) > 0.01
    assert float(dispatch.attention(q, k, v, dropout_p=1.0).abs().sum()) == 0.0


# --- threads ---------------------------------------------------------------------------------------------------------


def test_threads_with_different_calls_get_their_own_results():
    cases = [(qkv(n, n + 2, 4, hkv), {"enable_gqa": True, "is_causal": causal})
             for n, hkv, causal in itertools.product((3, 17, 40), (2, 4), (False, True))]  # fmt: skip
    wants = [sdpa(*inputs, **options) for inputs, options in cases]
    wrong: list[str] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        start.wait()
        for turn in range(30):
            n = (turn * 5 + seed) % len(cases)
            inputs, options = cases[n]
            if seed % 2:
                with dispatch.use(("eager", "sdpa_math")[seed % 4 // 2]):
                    out = dispatch.attention(*inputs, **options)
            else:
                out = dispatch.attention(*inputs, **options)
            if not torch.allclose(out, wants[n], rtol=1e-4, atol=1e-5):
                wrong.append(f"thread {seed}, case {n}")

    routes.clear()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


# --- mistakes and variants inside a traced program -------------------------------------------------------------------


class _Call(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, mask=None):
        return dispatch.attention(q, k, k, attn_mask=mask, **self.options)


@pytest.mark.parametrize(
    ("options", "heads", "mask", "words"),
    [
        ({}, 2, None, "enable_gqa"),
        ({"layout": "bshd"}, 2, None, "enable_gqa"),
        ({}, 4, torch.ones(6, 6, dtype=torch.int64), "attn_mask has dtype int64"),
        ({}, 4, torch.ones(4, 6, 6, dtype=torch.bool), "ambiguous"),
    ],
    ids=["gqa", "gqa bshd", "integer mask", "rank-3 mask"],
)
def test_a_mistake_is_named_in_an_export_and_in_a_compiled_graph_as_in_a_plain_call(options, heads, mask, words):
    bshd = options.get("layout") == "bshd"
    q = torch.randn(1, 6, 4, 8) if bshd else torch.randn(1, 4, 6, 8)
    k = torch.randn(1, 6, heads, 8) if bshd else torch.randn(1, heads, 6, 8)
    module = _Call(**options)
    torch._dynamo.reset()
    for run in (
        module,
        torch.compile(module, backend="eager", fullgraph=True),
        lambda *inputs: torch.export.export(module, inputs),
    ):
        with pytest.raises(ValueError, match=words):
            run(q, k, mask)


def test_the_linear_variants_run_inside_a_compiled_graph():
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 4, 6, 8)
    for variant in (variants.LinearAttention("identity", None), variants.Retention(variants.retention_decay(4))):
        module = _Call(variant=variant, is_causal=True)
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, k), module(q, k))


@pytest.mark.parametrize("how", ["eager", "compiled", "exported"])
def test_a_variant_that_is_none_is_named_however_the_call_runs(how):
    """Inside a graph it was taken for softmax."""

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return dispatch.attention(q, k, v, variant="linear", enable_gqa=True, window=(2, 0))

    layer, inputs = Layer(), tuple(qkv())
    calls = {
        "eager": lambda: layer(*inputs),
        "compiled": lambda: torch.compile(layer, backend="eager")(*inputs),
        "exported": lambda: torch.export.export(layer, inputs),
    }
    with pytest.raises(Exception, match="variant") as caught:
        calls[how]()
    assert "linear" in str(caught.value) or "str" in str(caught.value)


def test_empty_segments_under_autocast_have_the_dtype_of_the_others():
    x = torch.randn(7, 2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = [
            dispatch.varlen_attention(x, x, x, torch.tensor(cuts)) for cuts in ([0, 3, 7], [0, 3, 3, 7], [0, 0, 3, 7])
        ]
    assert {x.dtype for x in outs} == {torch.bfloat16}
    assert all(torch.equal(x, outs[0]) for x in outs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_finite_bias_stays_finite_beside_half_precision(dtype):
    x, bias = torch.randn(1, 2, 20, 8).to(dtype), torch.zeros(20, 20)
    bias[3] = torch.finfo(torch.float32).min
    got = dispatch.attention(x, x, x, bias, backend="sdpa_math")
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, dispatch.attention(x, x, x, bias, backend="eager"), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    "options",
    [{"window": (3, 0)}, {"key_lengths": [5, 8]}, {"is_causal": True}, {"attn_mask": masks.sliding_window(3)}],
    ids=str,
)
def test_a_call_on_fake_tensors_gives_fake_results(options):
    """Its output was looked at for NaN, which a stand-in has no values for."""
    with FakeTensorMode():
        q = torch.empty(2, 2, 8, 16)
        made = dispatch.attention(q, q, q, **options)
        assert isinstance(made, FakeTensor)
        assert made.shape == q.shape
    q = torch.randn(2, 2, 8, 16)  # and leaves nothing behind
    want = dispatch.attention(q, q, q, backend="eager", **options)
    torch.testing.assert_close(dispatch.attention(q, q, q, **options), want)
