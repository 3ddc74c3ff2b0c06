"""transformers models through the dispatcher: tiny models with random weights, eager as the oracle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_dispatch import dispatch, masks
from attn_dispatch.errors import InputError
from attn_dispatch.integrations import transformers as integration
from attn_dispatch.integrations.transformers import ModelMask
from attn_dispatch.ir.atoms import Causal, Columns, Full, KeyLengths, SameBlock, Segments, Window
from attn_dispatch.ir.masks import Mask

hf = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")

VOCAB = 60
PADDING = {"none": None, "right": [9, 4], "left": [-9, -5]}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    integration.register()


def small(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {**sizes, "num_key_value_heads": 2, "vocab_size": VOCAB, "pad_token_id": 0, **changes}


def llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**small()))


def mistral() -> Any:
    return hf.MistralForCausalLM(hf.MistralConfig(**small(sliding_window=4)))


def gemma2() -> Any:
    config = hf.Gemma2Config(**small(sliding_window=4, attn_logit_softcapping=3.0, head_dim=8, query_pre_attn_scalar=8))
    return hf.Gemma2ForCausalLM(config)


def gpt_oss() -> Any:
    config = hf.GptOssConfig(**small(sliding_window=4, head_dim=8, num_local_experts=2, num_experts_per_tok=1))
    model = hf.GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


def llama4() -> Any:
    config = hf.Llama4TextConfig(
        **small(
            attention_chunk_size=4, head_dim=8, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=48
        )
    )
    return hf.Llama4ForCausalLM(config)


CAUSAL = {"llama": llama, "mistral": mistral, "gemma2": gemma2, "gpt_oss": gpt_oss, "llama4_chunked": llama4}


def make(build: Callable[[], Any]) -> Any:
    """The model, with weights that are the same every time and large enough for attention to matter."""
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.3)
            assert torch.isfinite(parameter).all(), name
    return model


def batch(padding: list[int] | None, length: int = 9) -> dict[str, torch.Tensor]:
    """Two rows of tokens; a positive length is padded on the right, a negative one on the left."""
    ids = torch.randint(1, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    keep = torch.ones_like(ids)
    for row, real in enumerate(padding or []):
        keep[row, real:] = 0 if real > 0 else keep[row, real:]
        if real < 0:
            keep[row, : length + real] = 0
    return {"input_ids": ids * keep, "attention_mask": keep}


def outputs(model: Any, implementation: str, **inputs: Any) -> Any:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs)


def assert_parity(model: Any, inputs: dict[str, torch.Tensor], field: str = "logits", atol: float = 2e-5) -> None:
    """Real tokens agree with eager; the rows of padding tokens mean nothing."""
    want, got = (outputs(model, name, **inputs)[field] for name in ("eager", "attn_dispatch"))
    real = inputs["attention_mask"].bool()
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[real], want[real], atol=atol, rtol=1e-4)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_gives_what_eager_gives(name: str, padding: str) -> None:
    assert_parity(make(CAUSAL[name]), batch(PADDING[padding]))


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", CAUSAL)
def test_generation_with_a_cache_gives_the_tokens_of_eager(name: str, padding: str) -> None:
    model, inputs = make(CAUSAL[name]), batch(PADDING[padding])
    tokens = []
    for implementation in ("eager", "attn_dispatch"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            tokens.append(model.generate(**inputs, max_new_tokens=10, min_new_tokens=10, do_sample=False))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("padding", PADDING)
def test_bert_gives_what_eager_gives(padding: str) -> None:
    config = {k: v for k, v in small().items() if k != "num_key_value_heads"}
    model = make(lambda: hf.BertModel(hf.BertConfig(**config)))
    assert_parity(model, batch(PADDING[padding]), "last_hidden_state")


def test_t5_gives_what_eager_gives_with_its_position_bias() -> None:
    config = hf.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCAB, decoder_start_token_id=0
    )
    model, inputs = make(lambda: hf.T5ForConditionalGeneration(config)), batch(PADDING["right"])
    inputs["decoder_input_ids"] = batch(None, 5)["input_ids"]
    want, got = (outputs(model, name, **inputs).logits for name in ("eager", "attn_dispatch"))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_bart_gives_what_eager_gives_through_cross_attention() -> None:
    config = hf.BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=VOCAB, max_position_embeddings=32,
    )  # fmt: skip
    model, inputs = make(lambda: hf.BartForConditionalGeneration(config)), batch(PADDING["right"])
    inputs["decoder_input_ids"] = batch(None, 5)["input_ids"]
    want, got = (outputs(model, name, **inputs).logits for name in ("eager", "attn_dispatch"))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_static_cache_gives_the_tokens_of_eager() -> None:
    model, inputs, tokens = make(llama), batch(PADDING["left"]), []
    for implementation in ("eager", "attn_dispatch"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            given = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
            tokens.append(model.generate(**inputs, **given))
    assert torch.equal(*tokens)


def test_a_prompt_in_chunks_gives_what_one_prompt_gives() -> None:
    model, inputs = make(mistral), batch(None)
    whole = outputs(model, "eager", **inputs).logits
    ids = inputs["input_ids"]
    first = outputs(model, "attn_dispatch", input_ids=ids[:, :5], use_cache=True)
    second = outputs(model, "attn_dispatch", input_ids=ids[:, 5:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, atol=2e-5, rtol=1e-4)


def test_packed_sequences_stay_apart() -> None:
    model = make(llama)
    ids = batch(None)["input_ids"][:1]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    want, got = (outputs(model, name, **given).logits for name in ("eager", "attn_dispatch"))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_a_four_dimensional_mask_of_the_user_is_honoured() -> None:
    model, inputs = make(llama), batch(None)
    allowed = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(2)) > 0.4
    allowed |= torch.eye(9, dtype=torch.bool)
    bias = torch.zeros(2, 1, 9, 9).masked_fill(~allowed, torch.finfo(torch.float32).min)
    want = outputs(model, "eager", input_ids=inputs["input_ids"], attention_mask=bias).logits
    for mask in (allowed, bias):
        got = outputs(model, "attn_dispatch", input_ids=inputs["input_ids"], attention_mask=mask).logits
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_training_gives_the_gradients_of_eager() -> None:
    model, inputs, grads = make(gpt_oss), batch(PADDING["right"]), []
    for implementation in ("eager", "attn_dispatch"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(**inputs).logits[inputs["attention_mask"].bool()].square().mean().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 0
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


def test_output_attentions_gives_the_weights_of_eager() -> None:
    for build in (llama, mistral):
        model, inputs = make(build), batch(PADDING["right"])
        want, got = (
            outputs(model, name, **inputs, output_attentions=True).attentions for name in ("eager", "attn_dispatch")
        )
        real = inputs["attention_mask"].bool()[:, None, :, None]
        for w, g in zip(want, got, strict=True):
            torch.testing.assert_close(g * real, w * real, atol=2e-5, rtol=1e-4)


# --- masks -----------------------------------------------------------------------------------------------------------


def asked(**changes: Any) -> Any:
    given = {"batch_size": 2, "q_length": 8, "kv_length": 8, "q_offset": 0, "kv_offset": 0, "device": "cpu"}
    return integration.make_mask(**{**given, **changes})


def padding_of(*lengths: int, size: int = 8, left: bool = False) -> torch.Tensor:
    keep = torch.arange(size) < torch.tensor(lengths)[:, None]
    return keep.flip(1) if left else keep


CHUNKED = masking.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long))
WINDOWED = masking.sliding_window_causal_mask_function(3)
BOTH_SIDES = masking.sliding_window_bidirectional_mask_function(2)
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 1, 1]])
STARTS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 0, 1]])
PACKED = masking.and_masks(
    masking.remap_positions_for_packed_sequence(masking.causal_mask_function, STARTS),
    masking.packed_sequence_mask_function(IDS),
)
BIDIRECTIONAL = masking.bidirectional_mask_function
KNOWN: dict[str, tuple[dict[str, Any], set[type[Mask]]]] = {
    "causal": ({}, {Causal}),
    "causal, all real": ({"attention_mask": padding_of(8, 8)}, {Causal}),
    "causal, right-padded": ({"attention_mask": padding_of(8, 5)}, {Causal, KeyLengths}),
    "causal, left-padded": ({"attention_mask": padding_of(8, 5, left=True)}, {Causal, Columns}),
    "bidirectional": ({"mask_function": BIDIRECTIONAL}, {Full}),
    "bidirectional, right-padded": ({"mask_function": BIDIRECTIONAL, "attention_mask": padding_of(3, 8)}, {KeyLengths}),
    "window": ({"mask_function": WINDOWED}, {Causal, Window}),
    "window, both sides": ({"mask_function": BOTH_SIDES}, {Window}),
    "window wider than the keys": ({"mask_function": masking.sliding_window_causal_mask_function(9)}, {Causal}),
    "window, decode": ({"mask_function": WINDOWED, "q_length": 1, "q_offset": 7}, {Window}),
    "window, decode, cut cache": (
        {"mask_function": WINDOWED, "q_length": 1, "q_offset": 20, "kv_length": 3, "kv_offset": 18},
        {Full},
    ),
    "window, cut cache, padded": (
        {"mask_function": WINDOWED, "q_length": 2, "q_offset": 6, "kv_length": 4, "kv_offset": 4,
         "attention_mask": padding_of(8, 6)}, {Causal, Window, KeyLengths},
    ),
    "chunks": ({"mask_function": CHUNKED}, {Causal, SameBlock}),
    "chunks longer than the keys": ({"mask_function": CHUNKED, "q_length": 3, "kv_length": 3}, {Causal}),
    "decode": ({"q_length": 1, "q_offset": 7}, {Full}),
    "decode, all real": ({"q_length": 1, "q_offset": 7, "attention_mask": padding_of(8, 8)}, {Full}),
    "decode, left-padded": ({"q_length": 1, "q_offset": 7, "attention_mask": padding_of(8, 5, left=True)}, {Columns}),
    "second chunk of a prompt": ({"q_length": 3, "q_offset": 5}, {Causal}),
    "padding shorter than the keys": ({"attention_mask": padding_of(5, 4, size=5)}, {Causal, KeyLengths}),
    "packed": ({"mask_function": PACKED}, {Causal, Segments}),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_rule_becomes_a_mask_that_allows_the_same_pairs(name: str) -> None:
    changes, kinds = KNOWN[name]
    made = asked(**changes)
    assert isinstance(made, ModelMask)
    assert {type(atom) for atom in made.mask.atoms()} == kinds
    given = {"batch_size": 2, "q_length": 8, "kv_length": 8, **changes}
    want = masking.sdpa_mask(**given, allow_is_causal_skip=False)
    got = made.mask.dense(given["q_length"], given["kv_length"], made.q_offset)
    assert torch.equal(got.expand(want.shape), want)


def overlay(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx % 3 != 1) | (q_idx == kv_idx)


SHIFTED = masking.chunked_causal_mask_function(3, torch.tensor([0, 2]))
UNKNOWN = {
    "user's and": {"mask_function": masking.and_masks(masking.causal_mask_function, overlay), "use_vmap": True},
    "user's or": {"mask_function": masking.or_masks(masking.causal_mask_function, overlay), "use_vmap": True},
    "user's alone": {"mask_function": overlay},
    "chunks that start elsewhere": {"mask_function": SHIFTED},
    "blocks": {"mask_function": masking.or_masks(masking.causal_mask_function, masking.blockwise_overlay(IDS))},
    "offset in a tensor": {"q_offset": torch.tensor(0)},
}


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("padded", [False, True])
def test_an_unknown_rule_goes_the_dense_way_and_is_exact(name: str, padded: bool) -> None:
    changes: dict[str, Any] = {**UNKNOWN[name], **({"attention_mask": padding_of(8, 5)} if padded else {})}
    want = masking.sdpa_mask(batch_size=2, **{"q_length": 8, "kv_length": 8, **changes}, allow_is_causal_skip=False)
    got = asked(**changes)
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, want)


def test_a_packed_rule_whose_positions_jump_is_not_taken_for_a_causal_one() -> None:
    jumping = torch.tensor([[0, 2, 1, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 0, 1]])
    rule = masking.and_masks(
        masking.remap_positions_for_packed_sequence(masking.causal_mask_function, jumping),
        masking.packed_sequence_mask_function(IDS),
    )
    got = asked(mask_function=rule)
    want = masking.sdpa_mask(batch_size=2, q_length=8, kv_length=8, mask_function=rule, allow_is_causal_skip=False)
    assert torch.equal(got, want)


class _Module(torch.nn.Module):
    is_causal = True
    layer_idx = 3


def test_an_unknown_argument_is_refused_by_name() -> None:
    x = torch.ones(1, 2, 4, 8)
    with pytest.raises(InputError, match="_Module hands telepathy to attention"):
        integration.attention_forward(_Module(), x, x, x, None, telepathy=1)
    integration.attention_forward(_Module(), x, x, x, None, telepathy=None, use_cache=True)


def test_a_mask_of_heads_is_refused_and_not_dropped() -> None:
    x = torch.ones(1, 2, 4, 8)
    with pytest.raises(InputError, match="_Module hands head_mask to attention") as error:
        integration.attention_forward(_Module(), x, x, x, None, head_mask=torch.ones(2))
    assert error.value.remedy == 'attn_implementation="eager" for this model'  # torch's SDPA has none either
    integration.attention_forward(_Module(), x, x, x, None, head_mask=None)


def test_a_mask_for_other_sizes_is_refused() -> None:
    x = torch.ones(1, 2, 4, 8)
    with pytest.raises(InputError, match="has 4 queries and 4 keys, its mask is for 8 queries and 8 keys"):
        integration.attention_forward(_Module(), x, x, x, asked(batch_size=1))


def test_a_causal_module_without_a_mask_is_causal() -> None:
    x = torch.randn(1, 2, 4, 8)
    out, _ = integration.attention_forward(_Module(), x, x, x, None)
    torch.testing.assert_close(out.transpose(1, 2), F.scaled_dot_product_attention(x, x, x, is_causal=True))


def test_captured_ops_carry_the_layer_and_the_mask() -> None:
    model = make(mistral)
    with dispatch.capture() as workload:
        outputs(model, "attn_dispatch", **batch(PADDING["right"]))
    assert [entry.layer for entry in workload] == ["MistralAttention.0", "MistralAttention.1"]
    kinds = {type(atom) for atom in workload.entries[0].op.mask.atoms()}
    assert kinds == {Causal, Window, KeyLengths}


def test_decode_without_padding_makes_no_plan_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(llama)
    model.set_attn_implementation("attn_dispatch")
    ids = batch(None, 40)["input_ids"]
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    model.generate(ids, **given)
    made: list[Any] = []
    real = dispatch.make_plan
    monkeypatch.setattr(dispatch, "make_plan", lambda *a, **k: made.append(a) or real(*a, **k))
    model.generate(ids, **given)
    assert not made


# --- unmodified models -----------------------------------------------------------------------------------------------


def test_an_unmodified_model_goes_through_the_dispatcher() -> None:
    for build in (llama, mistral):
        model, inputs = make(build), batch(PADDING["left"])
        want = outputs(model, "sdpa", **inputs).logits
        with dispatch.replace_sdpa(), dispatch.capture() as workload:
            got = outputs(model, "sdpa", **inputs).logits
        assert sum(entry.count for entry in workload) == 2
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(got[real], want[real], atol=2e-5, rtol=1e-4)


def calls_inside(work: Callable[[], Any]) -> int:
    with dispatch.capture() as workload:
        work()
    return sum(entry.count for entry in workload)


X = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(3))


def sdpa() -> torch.Tensor:
    return F.scaled_dot_product_attention(X, X, X, is_causal=True)


def test_replace_sdpa_nests_and_counts_each_call_once() -> None:
    with dispatch.replace_sdpa():
        with dispatch.replace_sdpa():
            assert calls_inside(sdpa) == 1
        assert calls_inside(sdpa) == 1
    assert calls_inside(sdpa) == 0


def test_replace_sdpa_is_undone_by_an_exception() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), dispatch.replace_sdpa():
        raise RuntimeError("on purpose")
    assert calls_inside(sdpa) == 0


def test_a_wrong_call_inside_replace_sdpa_leaves_the_next_one_right() -> None:
    with dispatch.replace_sdpa():
        with pytest.raises(InputError):
            F.scaled_dot_product_attention(X, X[..., :4], X)
        torch.testing.assert_close(sdpa(), dispatch.attention(X, X, X, is_causal=True))
        assert calls_inside(sdpa) == 1


def test_replace_sdpa_belongs_to_its_thread() -> None:
    inside, seen = threading.Event(), {}
    release = threading.Event()

    def replaced() -> None:
        with dispatch.replace_sdpa():
            inside.set()
            release.wait(10)
            seen["replaced"] = calls_inside(sdpa)

    thread = threading.Thread(target=replaced)
    thread.start()
    assert inside.wait(10)
    seen["other"] = calls_inside(sdpa)
    release.set()
    thread.join(10)
    assert seen == {"other": 0, "replaced": 1}


def test_replace_sdpa_serves_many_threads_at_once() -> None:
    want, wrong = sdpa(), []

    def work() -> None:
        for _ in range(20):
            with dispatch.replace_sdpa():
                if calls_inside(sdpa) != 1 or not torch.allclose(sdpa(), want, atol=1e-6):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


@pytest.mark.parametrize("masked", [False, True])
def test_multihead_attention_goes_through_inside_replace_sdpa(masked: bool) -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True)  # in training mode: in eval torch fuses it whole
    x = torch.randn(2, 5, 16)
    hidden = torch.tensor([[False] * 5, [False, False, False, True, True]]) if masked else None
    want, _ = module(x, x, x, key_padding_mask=hidden, need_weights=False)
    with dispatch.replace_sdpa(), dispatch.capture() as workload:
        got, _ = module(x, x, x, key_padding_mask=hidden, need_weights=False)
    assert len(workload) == 1
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_a_transformer_encoder_layer_is_right_inside_replace_sdpa(training: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).train(training)
    x, causal = torch.randn(2, 5, 16), torch.nn.Transformer.generate_square_subsequent_mask(5)
    want = layer(x, src_mask=causal)
    with dispatch.replace_sdpa(), dispatch.capture() as workload:
        got = layer(x, src_mask=causal)
    assert len(workload) == 1
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_masks_of_the_package_can_be_given_to_the_attention_function() -> None:
    made = ModelMask(masks.sliding_window(3), 0, (1, 1, 4, 4))
    out, _ = integration.attention_forward(_Module(), X, X, X, made)
    torch.testing.assert_close(out.transpose(1, 2), dispatch.attention(X, X, X, masks.sliding_window(3)))
