"""The node tests of ONNX as one model that calls `attention` 93 times, exported whole and run on onnxruntime."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from attn_dispatch import dispatch
from attn_dispatch.backends.ort_sessions import bind, make_session
from attn_dispatch.export import export_onnx
from attn_dispatch.testing.onnx_nodes import NodeCase, answer, call, error_of, load


class AllCases(torch.nn.Module):
    """Every node test as a call in one graph: each tensor is an input of it, each Y an output."""

    def __init__(self, cases: tuple[NodeCase, ...]) -> None:
        super().__init__()
        self.parts: list[tuple[int, tuple[str, ...], dict[str, Any]]] = []
        self.inputs: list[torch.Tensor] = []
        for case in cases:
            *main, options = call(case)
            tensors = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
            self.parts.append(
                (len(self.inputs), tuple(tensors), {n: x for n, x in options.items() if n not in tensors})
            )
            self.inputs += [x.contiguous() for x in (*main, *tensors.values())]

    def forward(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        outputs = []
        for at, names, options in self.parts:
            query, key, value, *rest = tensors[at : at + 3 + len(names)]
            outputs.append(dispatch.attention(query, key, value, **dict(zip(names, rest, strict=True)), **options))
        return tuple(outputs)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "opset"), [("standard", 24), ("decomposed", 18)])
def test_every_node_test_survives_the_export_of_a_model(form, opset, tmp_path):
    cases = load()
    model = AllCases(cases).eval()
    report = export_onnx(model, (model.inputs,), tmp_path / "all.onnx", form=form, opset=opset)
    assert Counter(made.form for made in report.calls) == {form: len(cases)}
    assert report.nodes.get("Attention", 0) == (len(cases) if form == "standard" else 0)
    assert [check.ok and not check.skipped for check in report.checks] == [True]  # beside torch, at the one size
    session = make_session((tmp_path / "all.onnx").read_bytes(), "cpu", 1)
    results = [torch.full(out.shape, torch.nan, dtype=out.dtype) for out in model(model.inputs)]
    names = [[x.name for x in puts] for puts in (session.get_inputs(), session.get_outputs())]
    session.run_with_iobinding(bind(session.io_binding(), "cpu", names[0], model.inputs, names[1], results))
    errors = {case.name: error_of(case, answer(case, out)) for case, out in zip(cases, results, strict=True)}
    assert {name: error for name, error in errors.items() if not error <= 1.0} == {}
    assert len(errors) == 93
