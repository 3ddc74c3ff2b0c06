"""Whole models as ONNX: every road by which a model calls attention, the forms, the checks, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

from attn_dispatch import dispatch, export_onnx, masks, nn
from attn_dispatch.backends.ort_probes import proven
from attn_dispatch.cli import export as cli_export
from attn_dispatch.errors import ExportError, ExportWarning, InputError
from attn_dispatch.export import place
from attn_dispatch.export.read import read_model
from attn_dispatch.export.verify import open_session, run_session
from attn_dispatch.lowering import standard

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

STEP = ({0: "batch", 1: "seq"}, {0: "batch", 2: "past"}, {0: "batch", 2: "past"})


class Block(torch.nn.Module):
    """One attention over a past, ``[B, S, 32]`` in and out; options as `dispatch.attention` takes them."""

    def __init__(self, hq: int = 4, hkv: int = 2, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hq, self.hkv, self.options = hq, hkv, options
        self.project = torch.nn.Linear(32, (hq + 2 * hkv) * 8)

    def forward(self, x: torch.Tensor, past_key: torch.Tensor, past_value: torch.Tensor) -> Any:
        b, rows, _ = x.shape
        heads = self.project(x).view(b, rows, -1, 8).transpose(1, 2)
        q, k, v = heads.split([self.hq, self.hkv, self.hkv], 1)
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
        options = dict(self.options)
        if options.get("q_offset") == "past":
            options["q_offset"] = past_key.shape[2]
        out = dispatch.attention(q, k, v, enable_gqa=True, **options)
        return out.transpose(1, 2).flatten(2), k, v


class Blocks(torch.nn.Module):
    """Several of them, so that one export serves many options."""

    def __init__(self, *options: dict[str, Any], **common: Any) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(**common, **one) for one in options])

    def forward(self, x: torch.Tensor, past_key: torch.Tensor, past_value: torch.Tensor) -> Any:
        return [block(x, past_key, past_value)[0] for block in self.blocks]


def inputs(b: int = 2, rows: int = 5, past: int = 4, hkv: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return tuple(torch.randn(s).to(dtype) for s in ((b, rows, 32), (b, hkv, past, 8), (b, hkv, past, 8)))


# --- what a call may be ----------------------------------------------------------------------------------------------

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal from the past": {"window": (None, 0)},
    "causal at an offset": {"is_causal": True, "q_offset": "past"},
    "causal from key 0": {"is_causal": True},
    "window": {"window": (3, 0)},
    "window both ways": {"window": (2, 1)},
    "strided": {"attn_mask": masks.strided(3)},
    "blocks from the past": {"attn_mask": masks.block_table(4, TABLE), "q_offset": "past"},
    "chunked": {"attn_mask": masks.chunked(4)},
    "prefix": {"attn_mask": masks.prefix_lm(3)},
    "blocks": {"attn_mask": masks.block_table(4, TABLE)},
    "softcap": {"softcap": 2.0, "window": (None, 0)},
    "scale < 0": {"scale": -0.3, "window": (None, 0)},
    "scale 0": {"scale": 0.0},
    "alibi": {"bias": SLOPES, "window": (None, 0)},
    "alibi alone": {"bias": SLOPES},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0]), "window": (3, 0)},
    "sinks alone": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "a mask and its complement": {"attn_mask": masks.causal() & ~masks.sliding_window(2)},
}


@pytest.mark.parametrize("form", ["standard", "decomposed", "function"])
def test_every_kind_of_call_is_right_at_sizes_it_was_not_traced_with(form, tmp_path):
    model = Blocks(*CALLS.values()).eval()
    report = export_onnx(model, inputs(), tmp_path / "m.onnx", form=form, dynamic_shapes=STEP)
    assert len(report.calls) == len(CALLS)
    assert len([check for check in report.checks if not check.skipped]) >= 4  # as given, 1, odd, past 0
    assert all(max(check.errors.values()) < 1e-5 for check in report.checks)
    if form == "standard":
        assert report.nodes["Attention"] == len(CALLS)
        assert set(report.domains) == {""}


@pytest.mark.parametrize("opset", [18, 20, 22, 23, 24, 25, 26])
def test_the_opset_asked_for_is_the_one_in_the_file(opset, tmp_path):
    form = "decomposed" if opset < 23 else "standard"
    report = export_onnx(Block(window=(3, 0)).eval(), inputs(), tmp_path / "m.onnx", opset=opset, form=form)
    proto = onnx.load(tmp_path / "m.onnx")
    assert {x.domain: x.version for x in proto.opset_import}[""] == opset == report.opset
    assert report.nodes["Attention"] == (1 if form == "standard" else 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["standard", "decomposed"])
@pytest.mark.parametrize("options", [{}, {"window": (None, 0)}, {"bias": SLOPES}], ids=["plain", "causal", "alibi"])
def test_other_dtypes_keep_their_budget(dtype, form, options, tmp_path):
    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return dispatch.attention(q, k, v, enable_gqa=True, **options)

    torch.manual_seed(0)
    given = tuple(torch.randn(2, h, s, 16).to(dtype) for h, s in ((4, 5), (2, 7), (2, 7)))
    shapes = ({2: "sq"}, {2: "skv"}, {2: "skv"})
    export = lambda: export_onnx(Attend().eval(), given, tmp_path / "m.onnx", form=form, dynamic_shapes=shapes)
    if form == "standard" and dtype == torch.float64 and "float64" not in proven("cpu"):
        with pytest.raises(ExportError, match="float64 is wrong or missing on onnxruntime"):
            export()  # what the onnxruntime here gets wrong is refused with its reason
        return
    assert all(check.ok for check in export().checks)


def test_a_model_for_another_runtime_holds_what_the_specification_says(tmp_path):
    class Half(torch.nn.Module):
        def forward(self, q):
            return dispatch.attention(q, q, q)

    q = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16)
    here = export_onnx(Half().eval(), (q,), tmp_path / "a.onnx")
    there = export_onnx(Half().eval(), (q,), tmp_path / "b.onnx", runtime="specification", verify=False)
    assert ("Cast" in here.nodes) == ("bfloat16" not in proven("cpu"))
    assert set(there.nodes) == {"Attention", "Identity"}
    assert there.checks == ()
    with pytest.raises(ExportError, match="runtime must be 'installed' or 'specification', got 'tensorrt'"):
        export_onnx(Half().eval(), (q,), tmp_path / "c.onnx", runtime="tensorrt")


@pytest.mark.parametrize("window", [(None, 0), (3, 0)], ids=["causal", "window"])
def test_the_contrib_form_decodes_one_sequence(window, tmp_path):
    model = Block(window=window).eval()
    shapes = ({1: "seq"}, {2: "past"}, {2: "past"})
    report = export_onnx(model, inputs(b=1), tmp_path / "m.onnx", form="contrib", dynamic_shapes=shapes)
    assert report.nodes["GroupQueryAttention"] == 1
    assert report.domains["com.microsoft"] == 1
    assert len([check for check in report.checks if not check.skipped]) >= 4


# --- how a model comes to call it ------------------------------------------------------------------------------------


def test_a_module_of_ours_with_padding(tmp_path):
    module = nn.MultiheadAttention(32, 4, batch_first=True).eval()

    class Padded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = module

        def forward(self, x, lengths):
            return self.attend(x, lengths=lengths)

    given = (torch.randn(3, 6, 32), torch.tensor([6, 2, 4]))
    shapes = ({0: "batch", 1: "seq"}, {0: "batch"})
    more = [(torch.randn(2, 9, 32), torch.tensor([9, 1]))]
    report = export_onnx(Padded().eval(), given, tmp_path / "m.onnx", dynamic_shapes=shapes, verify=more)
    assert [call.layer for call in report.calls] == ["attend"]
    assert report.nodes["Attention"] == 1


def tiny_llama(implementation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    from attn_dispatch.integrations.transformers import register

    register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation=implementation,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("implementation", ["attn_dispatch", "sdpa"])
def test_a_decoder_of_transformers_prefills_and_decodes(implementation, tmp_path):
    from attn_dispatch.export.transformers import decoder

    exportable = decoder(tiny_llama(implementation))
    report = export_onnx(**exportable._asdict(), path=tmp_path / "m.onnx", replace_sdpa=implementation == "sdpa")
    assert report.nodes["Attention"] == len(report.calls) == 2
    assert [call.layer for call in report.calls] == [f"model.model.layers.{i}.self_attn" for i in range(2)]
    sizes = [dict(check.sizes) for check in report.checks if not check.skipped]
    assert {size["past"] for size in sizes} >= {0, 1, 4}
    # the mask is made once for all layers; laying it out for the kernel is all that may be repeated
    assert set(report.calls[1].nodes) <= {"Attention", "Shape", "Concat", "Expand"}


class StaticDecoder(torch.nn.Module):
    """A ragged batch over a cache of fixed size: each sequence writes and counts from its own place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(32, 8 * 8)

    def forward(self, x, past_key, past_value, lengths):
        b, rows, _ = x.shape
        q, k, v = self.project(x).view(b, rows, 8, 8).transpose(1, 2).split([4, 2, 2], 1)
        keys, values = (nn.tensor_scatter(cache, new, lengths) for cache, new in ((past_key, k), (past_value, v)))
        out = dispatch.attention(
            q, keys, values, masks.causal(), enable_gqa=True, key_lengths=lengths + rows, q_offset=lengths
        )
        return out.transpose(1, 2).flatten(2), keys, values


@pytest.mark.parametrize("form", ["standard", "decomposed"])
def test_a_cache_of_fixed_size_with_a_ragged_batch(form, tmp_path):
    torch.manual_seed(0)
    model = StaticDecoder().eval()
    given = (torch.randn(3, 2, 32), torch.randn(3, 2, 16, 8), torch.randn(3, 2, 16, 8), torch.tensor([9, 0, 4]))
    shapes = ({0: "batch", 1: "seq"}, {0: "batch"}, {0: "batch"}, {0: "batch"})
    report = export_onnx(model, given, tmp_path / "m.onnx", form=form, dynamic_shapes=shapes)
    assert report.nodes["TensorScatter"] == 2
    assert len([check for check in report.checks if not check.skipped]) >= 3
    # and it is the attention of each sequence alone
    out = model(*given)[0]
    for i, length in enumerate(given[3].tolist()):
        alone = model(*(x[i : i + 1] for x in given))[0]
        past = [x[i : i + 1, :, :length] for x in given[1:3]]
        q, k, v = model.project(given[0][i : i + 1]).view(1, 2, 8, 8).transpose(1, 2).split([4, 2, 2], 1)
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        want = dispatch.attention(q, k, v, masks.causal(), enable_gqa=True).transpose(1, 2).flatten(2)
        torch.testing.assert_close(out[i : i + 1], want)
        torch.testing.assert_close(alone, want)
    with pytest.raises(ExportError, match="TensorScatter, of opset 24; asked for opset 23"):
        export_onnx(model, given, tmp_path / "n.onnx", opset=23)


def test_a_write_into_a_cache_fits_it():
    cache, new, at = torch.zeros(3, 2, 8, 4), torch.ones(3, 2, 2, 4), torch.tensor([0, 3, 6])
    assert nn.tensor_scatter(cache, new, at).sum() == new.sum()
    for wrong in ((cache, new[:2], at), (cache, new, at[:1]), (cache, new[..., :2], at), (cache, new, at.int())):
        with pytest.raises(InputError):
            nn.tensor_scatter(*wrong)
    with pytest.raises(InputError, match=r"rows 0 .. 8 do not fit into a cache of 8"):
        nn.tensor_scatter(cache, new, at + torch.tensor([0, 0, 1]))


def test_attention_outside_the_dispatcher_is_named(tmp_path):
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theirs = Theirs()

        def forward(self, q):
            return dispatch.attention(q, q, q) + self.theirs(q)

    class Theirs(torch.nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q)

    q = torch.randn(2, 2, 5, 8)
    with pytest.warns(ExportWarning, match="theirs call torch's scaled_dot_product_attention"):
        report = export_onnx(Mixed().eval(), (q,), tmp_path / "m.onnx")
    assert report.warnings
    assert len(report.calls) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", ExportWarning)
        report = export_onnx(Mixed().eval(), (q,), tmp_path / "m.onnx", replace_sdpa=True)
    assert len(report.calls) == 2


def test_an_exported_program_of_torch_is_taken_too(tmp_path):
    model = Block(window=(2, 0)).eval()
    program = torch.export.export(model, inputs())
    report = export_onnx(program, inputs(), tmp_path / "m.onnx")
    assert len(report.calls) == 1


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_model_says_what_its_attention_is(tmp_path):
    file = tmp_path / "m.onnx"
    report = export_onnx(Block(window=(3, 0)).eval(), inputs(), file, dynamic_shapes=STEP)
    read = read_model(file)
    assert read.calls == report.calls
    assert "Window(3, 0)" in str(read)
    assert read.here[0].startswith(report.calls[0].decision.partition(" ")[0])
    nodes = onnx.load(file).graph.node
    assert sum(1 for n in nodes for p in n.metadata_props if p.key == "attn_dispatch.call") >= 1


def test_weights_may_lie_in_a_file_of_their_own(tmp_path):
    report = export_onnx(Block().eval(), inputs(), tmp_path / "m.onnx", external_data=True)
    files = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert set(files) == {"m.onnx", "m.onnx.data"}
    assert report.file_bytes == sum(files.values())
    assert files["m.onnx.data"] >= 32 * 64 * 4


def test_names_of_inputs_outputs_and_sizes(tmp_path):
    names = ["x", "past_key", "past_value"]
    outputs = ["y", "present_key", "present_value"]
    file = tmp_path / "m.onnx"
    export_onnx(Block().eval(), inputs(), file, dynamic_shapes=STEP, input_names=names, output_names=outputs)
    graph = onnx.load(file).graph
    assert [x.name for x in graph.input] == names
    assert [x.name for x in graph.output] == outputs
    assert [d.dim_param for d in graph.input[1].type.tensor_type.shape.dim] == ["batch", "", "past", ""]


class Twice(torch.nn.Module):
    """Attention as a result itself, and twice the same."""

    def forward(self, q):
        return dispatch.attention(q, q, q), dispatch.attention(q, q, q)


@pytest.mark.parametrize("form", ["standard", "decomposed", "function"])
def test_results_that_are_an_attentions_keep_their_names(form, tmp_path):
    q = torch.randn(2, 2, 5, 8)
    report = export_onnx(Twice().eval(), (q,), tmp_path / "m.onnx", form=form, output_names=["y", "z"])
    assert [x.name for x in onnx.load(tmp_path / "m.onnx").graph.output] == ["y", "z"]
    assert set(report.checks[0].errors) == {"y", "z"}


def test_sizes_are_named_by_argument_whatever_the_order_of_keywords(tmp_path):
    class Cross(torch.nn.Module):
        def forward(self, x, a, b):
            return dispatch.attention(x, a, a) + dispatch.attention(x, b, b)

    x, a, b = (torch.randn(2, 2, n, 8) for n in (3, 5, 7))
    shapes = {"x": {2: "rows"}, "a": {2: "akeys"}, "b": {2: "bkeys"}}
    file = tmp_path / "m.onnx"
    export_onnx(Cross().eval(), (x,), file, kwargs={"b": b, "a": a}, dynamic_shapes=shapes)
    dims = {i.name: i.type.tensor_type.shape.dim[2].dim_param for i in onnx.load(file).graph.input}
    assert dims == {"x": "rows", "a": "akeys", "b": "bkeys"}


def test_a_strict_program_means_what_its_call_says(tmp_path):
    class Rows(torch.nn.Module):
        def forward(self, q, k):
            offset = k.shape[1] - q.shape[1]
            return dispatch.attention(q, k, k, layout="bshd", is_causal=True, q_offset=offset)

    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 7, 4, 8)
    dims = ({1: torch.export.Dim.DYNAMIC}, {1: torch.export.Dim.DYNAMIC})
    program = torch.export.export(Rows().eval(), (q, k), dynamic_shapes=dims, strict=True)
    export_onnx(program, (q, k), tmp_path / "m.onnx", verify=False)
    session = open_session(tmp_path / "m.onnx")
    for rows, keys in ((3, 7), (5, 5), (2, 11)):
        given = [torch.randn(2, rows, 4, 8), torch.randn(2, keys, 4, 8)]
        torch.testing.assert_close(run_session(session, given)[0], Rows()(*given))
    assert "'call'" not in str(program.graph)  # the caller's program is as it was


def test_a_form_is_not_chosen_for_lengths_that_are_equal_in_the_example_alone(tmp_path):
    class Causal(torch.nn.Module):
        def forward(self, q, k):
            return dispatch.attention(q, k, k, is_causal=True)

    q = torch.randn(1, 2, 5, 8)
    options = {"dynamic_shapes": ({2: "rows"}, {2: "keys"}), "form": ("contrib", "decomposed")}
    report = export_onnx(Causal().eval(), (q, q.clone()), tmp_path / "m.onnx", **options)
    assert [call.form for call in report.calls] == ["decomposed"]
    assert len([check for check in report.checks if not check.skipped]) == 3


def test_numbers_and_lists_of_other_libraries_are_taken_as_eager_takes_them(tmp_path):
    class Attend(torch.nn.Module):
        def forward(self, q):
            scale = np.float64(0.3)
            return dispatch.attention(q, q, q, scale=scale, window=(3, 0), key_lengths=[5, 2])

    export_onnx(Attend().eval(), (torch.randn(2, 2, 5, 8),), tmp_path / "m.onnx")


# --- where inputs come from ------------------------------------------------------------------------------------------


class Past(NamedTuple):
    """A cache as many models have it."""

    key: torch.Tensor
    value: torch.Tensor


class WithPast(torch.nn.Module):
    def forward(self, x: torch.Tensor, past: Past) -> torch.Tensor:
        key, value = (torch.cat([old, x], 2) for old in past)
        return dispatch.attention(x, key, value, window=(None, 0))


def test_inputs_may_be_named_tuples_with_sizes_of_their_own(tmp_path):
    x, past = torch.randn(2, 3, 5, 8), Past(torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8))
    shapes = ({0: "batch", 2: "seq"}, Past({0: "batch", 2: "past"}, {0: "batch", 2: "past"}))
    report = export_onnx(WithPast().eval(), (x, past), tmp_path / "m.onnx", dynamic_shapes=shapes)
    assert {check.sizes["past"] for check in report.checks if not check.skipped} >= {0, 1, 4}


MODULE = """
import torch
from attn_dispatch import dispatch

class Model(torch.nn.Module):
    def forward(self, x, *, keys):
        return dispatch.attention(x, keys, keys)

def make():
    return {"model": Model().eval(), "args": (torch.randn(2, 3, 5, 8),), "kwargs": {"keys": torch.randn(2, 3, 7, 8)}}
"""


def test_the_command_takes_a_function_of_the_working_directory_with_keywords(tmp_path, monkeypatch):
    (tmp_path / "a_model_of_the_user.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(tmp_path))])
    before = list(sys.path)
    assert cli_export.run(cli_export.Wanted("a_model_of_the_user:make", tmp_path / "m.onnx")) == 0
    assert sys.path == before
    assert [x.name for x in onnx.load(tmp_path / "m.onnx").graph.input] == ["x", "keys"]


def test_a_decoder_whose_config_has_names_of_its_own(tmp_path):
    """GPT-2 says n_head and n_embd, and has no heads of keys."""
    transformers = pytest.importorskip("transformers")
    from attn_dispatch.export.transformers import decoder
    from attn_dispatch.integrations.transformers import register

    register()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, attn_implementation="attn_dispatch"
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    report = export_onnx(**decoder(model)._asdict(), path=tmp_path / "m.onnx")
    assert report.nodes["Attention"] == len(report.calls) == 2
    assert {check.sizes["past"] for check in report.checks if not check.skipped} >= {0, 1, 4}


class OwnTable(torch.nn.Module):
    """Its pattern is made while it runs, so that it has no values when it is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = torch.arange(3, device=x.device)
        table = (blocks[:, None] - blocks).abs() <= 1
        return dispatch.attention(x, x, x, attn_mask=masks.block_table(4, table))


@pytest.mark.parametrize("form", ["standard", "decomposed", "function"])
def test_a_block_table_made_inside_forward(form, tmp_path):
    shapes = ({0: "batch", 2: "seq"},)
    report = export_onnx(OwnTable().eval(), (torch.randn(2, 3, 11, 8),), tmp_path / "m.onnx", form=form,
                         dynamic_shapes=shapes)  # fmt: skip
    assert max(max(check.errors.values()) for check in report.checks if not check.skipped) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: example inputs there are untested here")
def test_a_model_on_cuda_is_exported_and_checked_on_the_cpu(tmp_path):
    given = tuple(x.cuda() for x in inputs())
    report = export_onnx(Block().eval().cuda(), given, tmp_path / "m.onnx", dynamic_shapes=STEP)
    assert max(max(check.errors.values()) for check in report.checks if not check.skipped) < 1e-3


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(match: str, file: Path, model: torch.nn.Module | None = None, **options: Any) -> None:
    with pytest.raises(ExportError, match=match):
        export_onnx(model or Block().eval(), inputs(), file, **options)
    assert list(file.parent.iterdir() if file.parent.is_dir() else []) == []  # nothing half-written


def test_what_cannot_be_exported_is_named_and_leaves_no_file(tmp_path):
    file = tmp_path / "m.onnx"
    refused("opset must be 18 to 28, got 17", file, opset=17)
    refused("opset must be 18 to 28, got 99", file, opset=99)
    refused("form must be of standard, decomposed, contrib, function, got 'fast'", file, form="fast")
    refused("Attention is there from opset 23 on", file, opset=20)
    refused("no log-sum-exp", file, Lse().eval())
    refused("dropout 0.5: a model runs without it", file, Block(dropout_p=0.5).eval(), form=("standard", "decomposed"))
    refused("the model writes to count, which an ONNX graph cannot", file, Counts().eval())
    refused("inside torch.cond, a loop, torch.autocast", file, InAutocast().eval())
    refused("the size 'past [+] rows' is a sum with 'past'", file, dynamic_shapes=({1: "past + rows"}, None, None))
    refused("torch does not run the arguments number 1", file, verify=[inputs()[:1]])
    refused("there is no folder", tmp_path / "nowhere" / "m.onnx")
    refused("torch.export cannot trace Branches", file, Branches().eval())


class Lse(torch.nn.Module):
    def forward(self, x, past_key, past_value):
        out, lse = dispatch.attention(past_key, past_key, past_value, return_lse=True)
        return out, lse


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, past_key, past_value):
        self.count.add_(1)
        return dispatch.attention(past_key, past_key, past_value) + self.count


class InAutocast(torch.nn.Module):
    def forward(self, x, past_key, past_value):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return dispatch.attention(past_key, past_key, past_value)


class Branches(torch.nn.Module):
    def forward(self, x, past_key, past_value):
        return dispatch.attention(past_key, past_key, past_value) if x.sum() > 0 else past_value


def test_a_folder_and_a_program_with_options_of_a_model_are_refused(tmp_path):
    with pytest.raises(ExportError, match="is a folder; path is the file to write"):
        export_onnx(Block().eval(), inputs(), tmp_path)
    program = torch.export.export(Block().eval(), inputs())
    with pytest.raises(ExportError, match="replace_sdpa means nothing for a program"):
        export_onnx(program, inputs(), tmp_path / "m.onnx", replace_sdpa=True)
    with pytest.raises(ExportError, match="dynamic_shapes means nothing for a program"):
        export_onnx(program, inputs(), tmp_path / "m.onnx", dynamic_shapes=STEP)


def test_forms_in_order_of_preference(tmp_path):
    report = export_onnx(Lse().eval(), inputs(), tmp_path / "m.onnx", form=("standard", "decomposed"))
    assert [call.form for call in report.calls] == ["decomposed"]


def test_a_wrong_lowering_is_caught_and_nothing_is_written(tmp_path, monkeypatch):
    lower = standard.lower

    def forgets_the_scale(call):
        return lower(type(call)(call.op.with_(scale=1.0), *(getattr(call, n) for n in ("query", "key", "value")),
                                call.operands, call.nodes, call.target))  # fmt: skip

    monkeypatch.setattr(standard, "lower", forgets_the_scale)
    refused("computes something else than torch", tmp_path / "m.onnx", Block(scale=0.05).eval())


def test_a_file_that_is_there_survives_a_failed_export(tmp_path):
    file = tmp_path / "m.onnx"
    file.write_text("precious")
    with pytest.raises(ExportError):
        export_onnx(Lse().eval(), inputs(), file)
    assert file.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


def test_reading_a_file_that_is_not_ours(tmp_path):
    corrupt = tmp_path / "corrupt.onnx"
    corrupt.write_bytes(b"\x08\x07not a model at all")
    with pytest.raises(ExportError, match=r"corrupt.onnx is not an ONNX model"):
        read_model(corrupt)
    with pytest.raises(ExportError, match=r"missing.onnx cannot be read: No such file"):
        read_model(tmp_path / "missing.onnx")
    file = tmp_path / "m.onnx"
    export_onnx(Block().eval(), inputs(), file, verify=False)
    proto = onnx.load(file)
    (kept,) = [p for p in proto.metadata_props if p.key == place.METADATA]
    kept.value = json.dumps([{"layer": "x"}])
    onnx.save(proto, file)
    with pytest.raises(ExportError, match=r"m.onnx: its metadata 'attn_dispatch.calls' cannot be read: KeyError"):
        read_model(file)
    proto.metadata_props.remove(kept)
    onnx.save(proto, file)
    with pytest.raises(ExportError, match="export_onnx did not write it"):
        read_model(file)


def test_mistakes_of_the_caller_are_the_frontends_words(tmp_path):
    class Ambiguous(torch.nn.Module):
        def forward(self, q, mask):
            return dispatch.attention(q, q, q, mask)

    q = torch.randn(2, 2, 5, 8)
    with pytest.raises(ExportError, match="rank 3 is ambiguous"):
        export_onnx(Ambiguous().eval(), (q, torch.ones(2, 5, 5, dtype=torch.bool)), tmp_path / "m.onnx")
    assert issubclass(InputError, ValueError)


_WITHOUT = """
import sys
for name in {missing}:
    sys.modules[name] = None  # as where it is not installed
sys.argv = ["attn-dispatch", *{arguments}]
from attn_dispatch.cli import main
main()
"""


@pytest.mark.parametrize(
    ("missing", "arguments", "words"),
    [
        (
            ["onnx"],
            ["export", "minilm"],
            "ExportError: exporting to ONNX needs onnx: pip install 'attn-dispatch[onnx]'",
        ),
        (["onnxscript"], ["export", "minilm"], "exporting to ONNX needs onnxscript: pip install 'attn-dispatch[onnx]'"),
        (["onnx"], ["explain", "a.onnx"], "reading an ONNX file needs onnx: pip install 'attn-dispatch[onnx]'"),
        (["transformers"], ["export", "minilm"], "InputError: transformers cannot be imported"),
        (["transformers"], ["export", "."], "pip install 'attn-dispatch[transformers]'"),
    ],
)
def test_what_is_not_installed_is_named_with_how_to_get_it(missing, arguments, words, tmp_path):
    code = _WITHOUT.format(missing=missing, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_function_says_so_too_and_no_other_error_is_hidden(monkeypatch):
    import attn_dispatch.export as package

    monkeypatch.delitem(sys.modules, "attn_dispatch.export.main")
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    with pytest.raises(ExportError, match=r"needs onnx_ir: pip install 'attn-dispatch\[onnx\]'"):
        package.export_onnx  # noqa: B018 - the import is what is tested
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "attn_dispatch.export.main")
    monkeypatch.setitem(sys.modules, "attn_dispatch.export.verify", None)
    with pytest.raises(ModuleNotFoundError, match=r"attn_dispatch\.export\.verify"):
        package.export_onnx  # noqa: B018
