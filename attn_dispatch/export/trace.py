"""From a torch model to an ONNX graph in which every attention is still one node of our own, and its op."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnxscript import values

from attn_dispatch import torch_op, torch_select
from attn_dispatch.errors import ExportError
from attn_dispatch.export.sizes import Sizes, sizes_of, torch_shapes
from attn_dispatch.ir.mask_text import parse_mask
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.select_op import SelectOp
from attn_dispatch.ir.tensors import Ref, TensorDesc, dtype_name
from attn_dispatch.ir.weights import Linear
from attn_dispatch.nn import static_cache
from attn_dispatch.tracing import describe_traced

__all__ = ["DOMAIN", "Traced", "TracedCall", "to_onnx_graph", "trace"]

DOMAIN = "attn_dispatch"
_TENSOR_SCATTER = 24
_SELECT: Any = torch_select.OPERATOR
_OPERATORS: tuple[Any, ...] = (torch_op.OPERATOR, _SELECT)  # both take three tensors, more of them, and a string


@dataclass(frozen=True)
class TracedCall:
    """One attention, or one selection of keys, of a traced model.

    Args:
        op: described without looking at lengths; sizes are those of the example. layer: the module that made it.
        names: of the op's operands, in the order of the node's inputs behind query, key and value.
        dims: sizes of all inputs; a dynamic one is a sum or product of names, the same text for the same size.
        backend: what the call asked for.
    """

    op: AttentionOp | SelectOp
    layer: str
    names: tuple[str, ...]
    dims: tuple[tuple[int | str, ...], ...] = ()
    backend: Any = None


@dataclass(frozen=True)
class Traced:
    """A traced program and what is known of it.

    Args:
        program: torch's. calls: by the index that its operator carries. others: layers whose attention is torch's own.
        sizes: of the inputs, and what the caller calls them.
        marked: the nodes that carry an index, and the arguments that they had before.
    """

    program: torch.export.ExportedProgram
    calls: tuple[TracedCall, ...]
    others: tuple[str, ...]
    sizes: Sizes
    marked: tuple[tuple[torch.fx.Node, Any], ...] = ()

    def unmark(self) -> None:
        """Take the marks out of the program again: it may be the caller's."""
        for node, args in self.marked:
            node.args = args


def trace(
    model: torch.nn.Module | torch.export.ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any],
    dynamic_shapes: Any, replace_sdpa: bool,
) -> Traced:  # fmt: skip
    """Trace a model with `torch.export`, each attention as one operator.

    Raises:
        ExportError: torch cannot trace it; the message is torch's.
    """
    if isinstance(model, torch.export.ExportedProgram):
        if replace_sdpa or dynamic_shapes is not None:
            name = "replace_sdpa" if replace_sdpa else "dynamic_shapes"
            raise ExportError(f"{name} means nothing for a program that torch.export has traced: give the model itself")
        program = model
    else:
        from attn_dispatch.integrations.sdpa import replace_sdpa as replacing

        around: AbstractContextManager[Any] = replacing() if replace_sdpa else nullcontext()
        try:
            with around, torch.no_grad():
                shapes = torch_shapes(dynamic_shapes)
                program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            name = type(model).__name__
            raise ExportError(f"torch.export cannot trace {name}: {type(error).__name__}: {error}") from error
    _refuse(program)
    sizes = sizes_of(program, model, args, kwargs, dynamic_shapes)
    calls, others, marked = [], [], []
    for node in program.graph.nodes:
        if node.target in _OPERATORS:
            *tensors, spec = node.args
            calls.append(_described(node, tensors, spec, sizes))
            marked.append((node, node.args))
            # the index stands in the string that the operator takes: it survives every retracing
            bare = re.sub(r"^\{'call': \d+, ", "{", spec)
            node.args = (*node.args[:4], f"{{'call': {len(calls) - 1}, {bare[1:]}")
        elif "scaled_dot_product" in str(node.target):
            others.append(_layer(node))
    return Traced(program, tuple(calls), tuple(dict.fromkeys(others)), sizes, tuple(marked))


def _refuse(program: torch.export.ExportedProgram) -> None:
    """What an ONNX graph has no place for.

    Raises:
        ExportError: which buffers or arguments the model writes to; attention in a part of its own.
    """
    if changed := _written(program):
        names = ", ".join(changed)
        raise ExportError(f"the model writes to {names}, which an ONNX graph cannot: make it an input and an output")
    for module in program.graph_module.modules():
        if module is program.graph_module or not isinstance(module, torch.fx.GraphModule):
            continue
        if any(node.target in _OPERATORS for node in module.graph.nodes):
            where = "torch.cond, a loop, torch.autocast or torch.no_grad"
            raise ExportError(f"an attention call stands inside {where}: export the model without that around it")


def _written(program: torch.export.ExportedProgram) -> list[str]:
    """The buffers and arguments that a program writes to, in place or by its signature."""
    signature = program.graph_signature
    names = {**signature.inputs_to_buffers, **{name: name for name in signature.user_inputs if isinstance(name, str)}}
    found = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        target = node.args[0] if node.args else None
        while isinstance(target, torch.fx.Node) and target.op == "call_function":  # back through views of it
            aliased = getattr(target.target, "_schema", None)
            is_view = aliased is not None and aliased.arguments and aliased.arguments[0].alias_info is not None
            target = target.args[0] if is_view else None
        if isinstance(target, torch.fx.Node) and target.op == "placeholder":
            found.append(names.get(target.name, target.name))
    return list(dict.fromkeys(found))


def _layer(node: torch.fx.Node) -> str:
    """The innermost module that a node comes from."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack and stack[-1][0] else "the model itself"


def _described(node: torch.fx.Node, tensors: Sequence[Any], spec: str, sizes: Sizes) -> TracedCall:
    query, key, value, others = tensors
    options = ast.literal_eval(spec)
    names = tuple(options.pop("names"))
    dims = tuple(tuple(_dim(size, sizes) for size in x.meta["val"].shape) for x in (query, key, value, *others))
    if node.target is _SELECT:
        described = (_desc(query), _desc(key), _desc(value), [_desc(x) for x in others])
        selection = torch_select.describe_traced_select(*described, spec).with_(traced=True)
        return TracedCall(selection, _layer(node), names, dims)
    descs = {name: _desc(x) for name, x in zip(names, others, strict=True)}
    backend = options.pop("backend")
    mask = options.pop("mask")
    kept = {name: options[name] for name in ("dropout_p", "is_causal", "scale", "window", "softcap", "q_offset")}
    kept |= {name: options[name] for name in ("return_lse", "return_weights", "return_state")}
    q, k, v = (_desc(x) for x in (query, key, value))
    if k.shape[2] == q.shape[2] and dims[0][2] != dims[1][2]:  # equal in the example alone: let nothing rest on it
        k, v = (x.with_shape(*x.shape[:2], x.shape[2] + 1, x.shape[3]) for x in (k, v))
    op = describe_traced(
        q, k, v, descs, mask=parse_mask(mask) if mask else None,
        weight=_weight(names, options["linear"]), **kept,
    )  # fmt: skip
    return TracedCall(op, _layer(node), names, dims, backend)


def _weight(names: Sequence[str], linear: tuple[str, float | None] | None) -> Linear | None:
    """The linear family of a spec; None for softmax."""
    if linear is None and "decay" not in names:
        return None
    state = [Ref(name) if name in names else None for name in ("state", "state_z", "state_length")]
    if linear is None:
        return Linear("identity", Ref("decay"), None, *state)
    return Linear(linear[0], None, linear[1], *state)


def _desc(node: torch.fx.Node) -> TensorDesc:
    """A traced tensor at the example's sizes."""
    x = node.meta["val"]
    return TensorDesc(tuple(_hint(size) for size in x.shape), dtype_name(x.dtype), x.device.type)


def _dim(size: int | torch.SymInt, sizes: Sizes) -> int | str:
    return size if isinstance(size, int) else sizes.renamed(str(size.node.expr))


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


# --- to ONNX ---------------------------------------------------------------------------------------------------------


def to_onnx_graph(traced: Traced, opset: int, input_names: Any = None, output_names: Any = None) -> ir.Model:
    """Torch's ONNX exporter on the traced program, with ``attn_dispatch::Call`` for each attention.

    Args:
        opset: as torch's exporter takes it, 18 to 25.

    Raises:
        ExportError: torch's exporter fails, or gives another opset than it was asked for.
    """
    table: dict[Any, Any] = dict.fromkeys(_OPERATORS, _translate)
    table[static_cache.OPERATOR] = _translate_scatter
    if opset < _TENSOR_SCATTER and any(node.target is static_cache.OPERATOR for node in traced.program.graph.nodes):
        raise ExportError(f"nn.tensor_scatter is TensorScatter, of opset {_TENSOR_SCATTER}; asked for opset {opset}")
    said = logging.getLogger("torch.onnx._internal.exporter._registration")  # it says that torchvision is missing
    level = said.level
    said.setLevel(logging.ERROR)
    try:
        program = torch.onnx.export(
            traced.program, (), opset_version=opset, custom_translation_table=table, dynamo=True, verbose=False,
            input_names=input_names, output_names=output_names,
        )  # fmt: skip
    except Exception as error:
        raise ExportError(f"torch's ONNX exporter failed: {type(error).__name__}: {error}") from error
    finally:
        said.setLevel(level)
    assert program is not None
    model = program.model
    got = model.opset_imports.get("")
    if got != opset:  # torch 2.13 writes opset 18 for what it does not know
        raise ExportError(f"torch's exporter was asked for opset {opset} and wrote {got}")
    return model


def _translate(query: Any, key: Any, value: Any, tensors: Sequence[Any], spec: str) -> Any:
    """The node that stands for a call until `lowering` replaces it."""
    options = ast.literal_eval(spec)
    count = 1 + sum(bool(options.get(name)) for name in ("return_lse", "return_weights", "scores"))
    if options.get("return_state"):
        normalised = options["linear"] is not None and options["linear"][1] is not None
        count += 3 if normalised else 2
    made = _operator(count)(query, key, value, *tensors, call=options["call"])
    return [made] if count == 1 else list(made)


def _translate_scatter(past_cache: Any, update: Any, write_indices: Any) -> Any:
    from onnxscript.onnx_opset import opset24

    return opset24.TensorScatter(past_cache, update, write_indices, axis=-2, mode="linear")


def _operator(count: int) -> values.Op:
    """An operator of our own with so many outputs."""
    schemas = onnx.defs.OpSchema
    any_type = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)", "tensor(int64)",
                "tensor(int32)", "tensor(bool)"]  # fmt: skip
    option = schemas.FormalParameterOption.Variadic
    schema = schemas(
        "Call", DOMAIN, 1,
        inputs=[schemas.FormalParameter("tensors", "T", param_option=option, is_homogeneous=False, min_arity=3)],
        outputs=[schemas.FormalParameter(f"result{i}", f"R{i}") for i in range(count)],
        type_constraints=[("T", any_type, ""), *((f"R{i}", any_type, "") for i in range(count))],
        attributes=[schemas.Attribute("call", schemas.AttrType.INT, "", required=True)],
    )  # fmt: skip
    return values.Op(values.Opset(DOMAIN, 1), "Call", schema)
