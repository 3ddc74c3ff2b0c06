"""Plugins that break in every way: each is set aside or named, and everything else works."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from attn_dispatch import BackendError, NoBackendError, UnknownBackendError, dispatch, plugin, reference, registry
from attn_dispatch.cli import app
from attn_dispatch.errors import ConfigWarning, PluginWarning
from attn_dispatch.plugin import (
    ALL_FEATURES,
    AttentionOp,
    Backend,
    Capability,
    Executable,
    Raw,
    TensorDesc,
    hookimpl,
)
from attn_dispatch.registry import Registry
from attn_dispatch.registry.discover import discover
from attn_dispatch.selection.decide import ranked
from attn_dispatch.selection.store import Record
from attn_dispatch.selection.tuned import stale
from attn_dispatch.selection.tuner import version_of
from attn_dispatch.settings import settings
from attn_dispatch.testing import BY_ID
from attn_dispatch.testing.conformance import Outcome, attempt, conform

FACTS = Capability(frozenset({"cpu"}), frozenset({"float32"}), ALL_FEATURES - {"score:SoftCap", "higher_order"})


class Toy(Backend):
    """A stranger's backend that is right."""

    name = "toy"
    capabilities = (FACTS,)

    def compile(self, op: Any) -> Any:
        def run(q, k, v, t) -> Any:
            raw = reference.attention(op, q, k, v, t)
            return raw if op.outputs.lse or op.outputs.weights else raw.out

        return Executable(run)


def module(**hooks: Callable[[], Any]) -> Any:
    """A plugin module with these hooks."""
    made = types.ModuleType("toy_plugin")
    for name, hook in hooks.items():
        setattr(made, name, hookimpl(specname=name)(hook))
    return made


def offering(*backends: Any) -> Any:
    return module(attn_dispatch_backends=lambda: list(backends))


def found_with(*plugins: Any) -> Registry:
    with pytest.warns(PluginWarning):
        return discover(extra=[(f"plugin{n}", made) for n, made in enumerate(plugins)])


@pytest.fixture
def install() -> Iterator[Callable[..., Registry]]:
    """Discover with these plugins given in code and use that registry until the test ends."""
    before = registry.current()

    def put(*plugins: Any) -> Registry:
        made = discover(extra=[(f"plugin{n}", given) for n, given in enumerate(plugins)])
        registry.reset(made)
        return made

    yield put
    registry.reset(before)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (1, 2, 4, 8)))


# --- discovery: what is set aside, and why ---------------------------------------------------------------------------


def _raises(error: BaseException) -> Any:
    raise error


class Nameless(Toy):
    name = ""


class Odd(Toy):
    name = "not an identifier"


class Factless(Toy):
    capabilities = ()


class WrongFacts(Toy):
    capabilities = ({"devices": {"cpu"}},)


class OneFact(Toy):
    capabilities = FACTS  # the comma is missing


class ListedOptions(Toy):
    options = ("tile",)


class SpacedOption(Toy):
    options = MappingProxyType({"tile size": 64})


class TypelessOption(Toy):
    options = MappingProxyType({"tile": None})


class OwnConfigure(Toy):
    def configure(self, given):
        raise RuntimeError("not now")


class Explosive(Toy):
    @property
    def name(self):
        raise RuntimeError("no name today")


BROKEN: dict[str, tuple[Any, str]] = {
    "hook raises": (module(attn_dispatch_backends=lambda: _raises(ValueError("no licence"))), "ValueError: no licence"),
    "hook exits": (module(attn_dispatch_backends=lambda: _raises(SystemExit(3))), "SystemExit: 3"),
    "hook returns a backend, no list": (
        module(attn_dispatch_backends=lambda: Toy()),
        "TypeError: 'Toy' object is not iterable",
    ),
    "hook returns a number": (module(attn_dispatch_backends=lambda: 3), "TypeError"),
    "hook returns a string": (module(attn_dispatch_backends=lambda: "toy"), "TypeError: 't' is not a Backend"),
    "hook returns classes": (offering(Toy), "is not a Backend"),
    "hook returns another type": (offering(object()), "is not a Backend"),
    "no name": (offering(Nameless()), "ValueError: Nameless.name must be an identifier, got ''"),
    "a name that is none": (offering(Odd()), "ValueError: Odd.name must be an identifier, got 'not an identifier'"),
    "a name that raises": (offering(Explosive()), "RuntimeError: no name today"),
    "no facts": (offering(Factless()), "ValueError: backend 'toy' declares no capabilities"),
    "facts of a wrong type": (offering(WrongFacts()), "TypeError: backend 'toy': capabilities must be a tuple of"),
    "facts without a tuple": (offering(OneFact()), "TypeError"),
    "options that are no mapping": (offering(ListedOptions()), "options must map names to defaults, got ('tile',)"),
    "an option that is no word": (offering(SpacedOption()), "must be an identifier, got 'tile size'"),
    "an option without a type": (
        offering(TypelessOption()),
        "the default of option 'tile' must be one of bool, int, float, str, got None",
    ),
    "configure overridden": (offering(OwnConfigure()), "configure is how options reach it, and may not be overridden"),
    "rewrites of a wrong type": (module(attn_dispatch_rewrites=lambda: [Toy()]), "is not a Rewrite"),
    "known-bad of a wrong type": (
        module(attn_dispatch_known_bad=lambda: ["x"]),
        "TypeError: a known-bad entry must be a dict, or the path of a YAML file, got 'x'",
    ),
    "no hook": (types.SimpleNamespace(attn_dispatch_backends=lambda: [Toy()]), "ValueError: it implements no hook"),
    "a hook that does not exist": (module(attn_dispatch_backend=lambda: []), "PluginValidationError"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_set_aside_with_its_cause_and_the_others_work(kind):
    broken, words = BROKEN[kind]
    healthy = Toy()
    healthy.name = "healthy"
    found = found_with(broken, offering(healthy))
    (aside,) = found.quarantined
    assert (aside.name, aside.distribution) == ("plugin0", "plugin0 (given in code)")
    assert words in aside.error
    assert "Traceback" in aside.details
    assert "toy" not in found.backends
    assert {"healthy", "eager", "sdpa_flash"} <= set(found.backends)


def test_a_hook_that_returns_none_offers_nothing():
    assert discover(extra=[("empty", module(attn_dispatch_backends=lambda: None))]).quarantined == ()


def test_an_interrupt_of_the_person_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        discover(extra=[("slow", module(attn_dispatch_backends=lambda: _raises(KeyboardInterrupt())))])


def test_of_two_strangers_with_one_name_both_lose_it_and_so_does_a_third():
    for count in (2, 3):
        found = found_with(*(offering(Toy()) for _ in range(count)))
        assert "toy" not in found.backends
        assert len(found.quarantined) == count
        assert "plugin0 (given in code)" in str(found.quarantined)
        assert "plugin1 (given in code)" in str(found.quarantined)
        with pytest.raises(UnknownBackendError, match=r"'toy' is quarantined .*the name toy is"):
            found.backend("toy")


@pytest.mark.parametrize("name", ["eager", "sdpa_flash", "fold_groups"])
def test_a_built_in_keeps_its_name(name):
    stranger = Toy()
    stranger.name = name
    found = found_with(offering(stranger))
    assert found.backends.get(name) is not stranger
    assert found.is_builtin(name)
    assert f"the name {name} is already taken by attn-dispatch" in found.quarantined[0].error


# --- capability checks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda op: _raises(KeyError("arch")), "its capability check raised KeyError: 'arch'"),
        (lambda op: None, "must return a list of Reason, got None"),
        (lambda op: "no", "must return a list of Reason, got 'no'"),
        (lambda op: ["no"], "must return a list of Reason, got ['no']"),
        (lambda op: True, "must return a list of Reason, got True"),
    ],
)
def test_a_capability_check_that_breaks_is_a_refusal_with_that_reason(install, answer, words):
    toy = Toy()
    toy.reasons_against = answer
    install(offering(toy))
    inputs = x()
    want = F.scaled_dot_product_attention(inputs, inputs, inputs)
    torch.testing.assert_close(dispatch.attention(inputs, inputs, inputs), want)
    with pytest.raises(NoBackendError) as caught:
        dispatch.attention(inputs, inputs, inputs, backend="toy")
    assert words in str(caught.value)
    assert words in str(dispatch.explain(inputs, inputs, inputs))


@pytest.mark.parametrize("hook", ["unavailable", "extra_reasons"])
def test_a_hook_of_the_capability_check_that_raises_is_a_refusal(install, hook):
    toy = Toy()
    setattr(toy, hook, lambda *a: _raises(ImportError("libtoy.so")))
    install(offering(toy))
    with pytest.raises(NoBackendError, match=r"ImportError: libtoy\.so"):
        dispatch.attention(x(), x(), x(), backend="toy")


def test_a_feature_that_is_not_declared_is_refused(install):
    install(offering(Toy()))
    inputs = x()
    with pytest.raises(NoBackendError, match="no softcap") as caught:
        dispatch.attention(inputs, inputs, inputs, softcap=2.0, backend="toy")
    assert [(r.code, r.field) for r in caught.value.refusals["toy"]] == [("feature", "score:SoftCap")]
    assert dispatch.attention(inputs, inputs, inputs, softcap=2.0).shape == inputs.shape


# --- what a stranger's backend does when it runs ---------------------------------------------------------------------


def running(run: Callable[..., Any]) -> Any:
    toy = Toy()
    toy.compile = lambda op: Executable(run)
    return offering(toy)


def compiling(answer: Callable[[Any], Any]) -> Any:
    toy = Toy()
    toy.compile = answer
    return offering(toy)


WRONG: dict[str, tuple[Any, str]] = {
    "compile raises": (compiling(lambda op: _raises(OSError("no nvcc"))), "raised OSError when compiled: no nvcc"),
    "compile returns None": (compiling(lambda op: None), "compile must return an Executable, got None"),
    "compile returns a function": (compiling(lambda op: lambda q, k, v, t: q), "must return an Executable"),
    "an executable without a run": (compiling(lambda op: Executable(None)), "must return an Executable"),
    "run raises": (
        running(lambda q, k, v, t: _raises(RuntimeError("misaligned"))),
        "RuntimeError when run: misaligned",
    ),
    "run returns None": (running(lambda q, k, v, t: None), "out must be a tensor, got NoneType"),
    "run returns a tuple": (running(lambda q, k, v, t: (q, k)), "out must be a tensor, got tuple"),
    "run returns Raw unasked": (running(lambda q, k, v, t: Raw(q + 0)), "out must be a tensor, got Raw"),
    "a wrong shape": (running(lambda q, k, v, t: q.transpose(1, 2) + 0), "shape [1, 2, 4, 8], got [1, 4, 2, 8]"),
    "a wrong dtype": (running(lambda q, k, v, t: q.double()), "dtype torch.float32, got torch.float64"),
    "a wrong device": (running(lambda q, k, v, t: torch.empty_like(q, device="meta")), "must be on cpu, got meta"),
    "an exit": (running(lambda q, k, v, t: sys.exit("no licence")), "raised SystemExit when run: no licence"),
    "its own input": (running(lambda q, k, v, t: q), "out shares its memory with query"),
    "a view of an input": (running(lambda q, k, v, t: v[:]), "out shares its memory with value"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_strangers_backend_that_breaks_its_contract_is_named_with_its_distribution(install, kind):
    made, words = WRONG[kind]
    install(made)
    inputs = (x(), x(), x())
    copies = [i.clone() for i in inputs]
    for _ in range(2):
        with pytest.raises(BackendError) as caught:
            dispatch.attention(*inputs, backend="toy")
        assert "backend 'toy' (plugin0 (given in code))" in str(caught.value)
        assert words in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
    torch.testing.assert_close(dispatch.attention(*inputs, backend="eager"), F.scaled_dot_product_attention(*inputs))


def test_a_strangers_backend_that_writes_to_its_inputs_is_named(install):
    install(running(lambda q, k, v, t: torch.zeros(*q.shape[:3], v.shape[3]) + 0 * k.mul_(1.5).sum()))
    with pytest.raises(BackendError, match="it changes its input key; work on a copy"):
        dispatch.attention(x(), x(), x(), backend="toy")


@pytest.mark.parametrize("kind", ["compile raises", "run raises"])
def test_the_strangers_own_exception_is_the_cause(install, kind):
    install(WRONG[kind][0])
    with pytest.raises(BackendError) as caught:
        dispatch.attention(x(), x(), x(), backend="toy")
    assert type(caught.value.__cause__) in (OSError, RuntimeError)


@pytest.mark.parametrize(
    ("run", "options", "words"),
    [
        (lambda q, k, v, t: q + 0, {"return_lse": True}, "run must return Raw(out, lse, weights)"),
        (lambda q, k, v, t: Raw(q + 0), {"return_lse": True}, "lse must be a tensor, got NoneType"),
        (lambda q, k, v, t: Raw(q + 0, q[..., 0].double()), {"return_lse": True}, "lse must have dtype torch.float32"),
        (lambda q, k, v, t: Raw(q + 0, q + 0), {"return_lse": True}, "lse must have shape [1, 2, 4], got [1, 2, 4, 8]"),
        (lambda q, k, v, t: Raw(q + 0), {"return_weights": True}, "weights must be a tensor"),
    ],
)
def test_lse_and_weights_of_a_stranger_are_checked_too(install, run, options, words):
    install(running(run))
    with pytest.raises(BackendError) as caught:
        dispatch.attention(x(), x(), x(), backend="toy", **options)
    assert words in str(caught.value)


def test_running_out_of_memory_is_not_the_backends_fault(install):
    install(running(lambda q, k, v, t: _raises(torch.OutOfMemoryError("40 GiB"))))
    with pytest.raises(torch.OutOfMemoryError):
        dispatch.attention(x(), x(), x(), backend="toy")


def test_a_stranger_that_is_right_runs_alone_and_behind_a_rewrite(install):
    install(offering(Toy()))
    q, k = x(1, 4, 3, 8), x(1, 2, 5, 8)
    want = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    for name in ("toy", "fold_groups > toy"):
        for _ in range(2):
            torch.testing.assert_close(dispatch.attention(q, k, k, enable_gqa=True, backend=name), want)
    out, lse = dispatch.attention(q, k, k, enable_gqa=True, backend="toy", return_lse=True)
    torch.testing.assert_close(out, want)
    assert lse.shape == (1, 4, 3)


def test_a_built_in_backend_runs_bare():
    made = dispatch.plan(x(), x(), x(), backend="sdpa_flash")
    assert made.run.__module__ == "attn_dispatch.backends.sdpa_flash"


def test_the_check_looks_at_the_first_result_alone(install):
    results = iter([True, False])
    install(running(lambda q, k, v, t: q + 0 if next(results) else None))
    made = dispatch.plan(x(), x(), x(), backend="toy")
    assert made(x(), x(), x()) is not None
    assert made(x(), x(), x()) is None  # a plan that was seen to be right costs nothing more


# --- options ---------------------------------------------------------------------------------------------------------


class Vendor(Toy):
    """Remembers the options that it found whenever it was asked something."""

    name = "vendor"
    options = MappingProxyType({"opt": 1, "fast": False, "mode": "auto"})

    def __init__(self):
        self.seen = []

    def unavailable(self):
        self.seen.append(dict(self.configured))

    def compile(self, op):
        self.seen.append(dict(self.configured))
        return super().compile(op)


@dataclass(frozen=True)
class Frozen(Toy):
    name: str = "frozen"
    options = MappingProxyType({"opt": 1})


DEFAULTS = dict(Vendor.options)


@pytest.fixture
def configure(tmp_path, monkeypatch) -> Iterator[Callable[..., Path]]:
    """Make files of these texts those of the process, from its next reset on."""

    def put(*texts: str) -> None:
        paths = [tmp_path / f"{n}.yaml" for n in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(f"schema: 1\n{text}\n", encoding="utf-8")
        monkeypatch.setenv("ATTN_DISPATCH_CONFIG", ":".join(map(str, paths)))
        settings.cache_clear()

    monkeypatch.chdir(tmp_path)
    yield put
    monkeypatch.undo()
    settings.cache_clear()


def test_options_of_a_file_reach_a_backend_before_it_is_asked_anything(install, configure):
    configure("backends: {vendor: {opt: 3}}", "backends: {vendor: {opt: 4, mode: slow}}")
    vendor = Vendor()
    install(offering(vendor))
    inputs = x()
    want = F.scaled_dot_product_attention(inputs, inputs, inputs)
    torch.testing.assert_close(dispatch.attention(inputs, inputs, inputs, backend="vendor"), want)
    assert len(vendor.seen) >= 2
    assert all(seen == {"opt": 3, "fast": False, "mode": "slow"} for seen in vendor.seen)


@pytest.mark.parametrize("ask", ["rank", "conform", "attempt"])
def test_options_hold_wherever_a_backend_is_asked_first(configure, ask):
    before, vendor = registry.current(), Vendor()
    configure("backends: {vendor: {opt: 3}}")
    registry.reset(Registry({"vendor": vendor, "eager": before.backends["eager"]}, {}, {}))
    try:
        if ask == "rank":
            ranked(AttentionOp(*[TensorDesc((1, 2, 4, 8), "float32")] * 3), registry.current())
        elif ask == "conform":
            assert conform("vendor", cases=[BY_ID["causal"]]).lines[0].outcome is Outcome.VERIFIED
        else:
            assert attempt("vendor", BY_ID["causal"], registry.current()) == ""
        assert vendor.seen
        assert all(seen["opt"] == 3 for seen in vendor.seen)
    finally:
        registry.reset(before)


def test_a_wrong_option_is_told_with_its_place_and_key_path_and_the_call_works(install, configure):
    configure("backends:\n  vendor: {opt: 3, opts: 1}\npins:\n  - use: vendor")
    vendor = Vendor()
    install(offering(vendor))
    words = (
        r"0\.yaml:3:20: backends\.vendor\.opts: there is no option 'opts'; did you mean 'opt'\? There are: opt, fast"
    )
    with pytest.warns(ConfigWarning, match=words):
        assert dispatch.plan(x(), x(), x()).name == "vendor"
    assert vendor.configured == {**DEFAULTS, "opt": 3}


def test_a_reset_reads_the_options_anew_and_takes_back_those_that_are_gone(install, configure):
    vendor = Vendor()
    configure("backends: {vendor: {opt: 3, fast: true}}")
    made = install(offering(vendor))
    dispatch.plan(x(), x(), x())
    assert vendor.configured == {**DEFAULTS, "opt": 3, "fast": True}
    configure("backends: {vendor: {opt: 4}}")
    dispatch.plan(x(), x(), x())
    assert vendor.configured["opt"] == 3  # an executable may have been compiled with it
    registry.reset(made)
    dispatch.plan(x(), x(), x(), backend="vendor")
    assert vendor.configured == vendor.seen[-1] == {**DEFAULTS, "opt": 4}
    configure("")
    registry.reset(made)
    assert vendor.configured == DEFAULTS
    dispatch.plan(x(), x(), x(), backend="vendor")
    assert vendor.seen[-1] == DEFAULTS


def test_the_options_of_one_registry_do_not_reach_the_objects_of_another(install, configure):
    configure("backends: {vendor: {opt: 3}}")
    mine, other = Vendor(), Vendor()
    elsewhere = discover(extra=[("elsewhere", offering(other))])
    install(offering(mine))
    dispatch.plan(x(), x(), x(), backend="vendor")
    op = AttentionOp(*[TensorDesc((1, 2, 4, 8), "float32")] * 3)
    ranked(op, elsewhere)
    assert (mine.seen[-1]["opt"], other.seen[-1]["opt"]) == (3, 1)
    registry.reset(elsewhere)
    dispatch.plan(x(), x(), x(), backend="vendor")
    assert (mine.configured["opt"], other.configured["opt"]) == (1, 3)


def test_what_was_measured_with_other_options_is_stale(install, configure):
    configure("")
    install(offering(Vendor()))
    dispatch.plan(x(), x(), x())
    plain = version_of("vendor", registry.current())
    assert plain.endswith(f"vendor {torch.__version__}")
    configure("backends: {vendor: {opt: 3, fast: false, mode: slow}}")
    made = install(offering(Vendor()))
    dispatch.plan(x(), x(), x())
    assert version_of("fold_groups > vendor", made).endswith(f"vendor {torch.__version__} (opt=3, mode='slow')")
    record = Record("vendor", "ok", 1.0, 0.1, version=plain)
    assert stale((record,), made) == f"vendor was measured with {plain}, here is {plain} (opt=3, mode='slow')"
    assert stale((replace(record, version=version_of("vendor", made)),), made) == ""


def test_options_go_along_where_a_backend_is_tried_in_a_process_of_its_own():
    vendor = Vendor()
    vendor.configure({"opt": 3})
    assert pickle.loads(pickle.dumps(vendor)).configured == {**DEFAULTS, "opt": 3}


def test_options_are_set_as_a_whole_checked_and_read_only():
    for backend in (Vendor(), Frozen()):
        backend.configure({"opt": 3})
        assert backend.configured["opt"] == 3
        with pytest.raises(TypeError):
            backend.configured["opt"] = 4
        with pytest.raises(ValueError, match=f"{backend.name} has no option 'typo'. It has: opt"):
            backend.configure({"typo": 1})
        backend.configure({})
        assert backend.configured["opt"] == 1


def test_doctor_shows_the_options_that_are_not_at_their_defaults(install, configure):
    configure("backends: {vendor: {opt: 3, fast: false}}")
    install(offering(Vendor()))
    text = CliRunner().invoke(app, ["doctor"]).stdout
    (line,) = (line for line in text.splitlines() if line.startswith("  vendor "))
    assert line.endswith("ready, with opt=3")
    assert text.count(", with ") == 1


# --- plugin.py -------------------------------------------------------------------------------------------------------


def test_plugin_exports_what_it_says_and_all_that_the_design_names():
    assert len(set(plugin.__all__)) == len(plugin.__all__)
    assert all(hasattr(plugin, name) for name in plugin.__all__)
    named = {
        "Backend",
        "Capability",
        "Limit",
        "Reason",
        "Executable",
        "Cost",
        "Raw",
        "Rewrite",
        "Rewritten",
        "hookimpl",
    }
    assert named | {"AttentionOp", "ALL_FEATURES", "dense_cost"} <= set(plugin.__all__)


def test_plugin_exports_the_whole_ir_and_every_mask_atom():
    from attn_dispatch import ir
    from attn_dispatch.ir import atoms

    assert set(ir.__all__) <= set(plugin.__all__)
    classes = {n for n, c in vars(atoms).items() if isinstance(c, type) and issubclass(c, plugin.Mask)}
    assert {n for n in classes if not n.startswith("_")} <= set(plugin.__all__)


SOURCE = """
import torch
from attn_dispatch.plugin import (
    AttentionOp, Backend, Capability, Causal, Cost, Executable, Full, Limit, Raw, Reason, Rewrite, Rewritten,
    dense_cost, hookimpl, not_useful,
)


class Textbook(Backend):
    name = "textbook"
    capabilities = (
        Capability(
            frozenset({"cpu"}),
            frozenset({"float32"}),
            frozenset({"weight:Softmax", "mask:Full", "mask:Causal", "lse"}),
            (Limit("D", maximum=128), Limit("Skv", minimum=1)),
        ),
    )

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        return [Reason("limit", "Sq", op.Sq, 1000, text="Sq > 1000")] if op.Sq > 1000 else []

    def estimate(self, op: AttentionOp) -> Cost:
        return dense_cost(op, materialised=4)

    def compile(self, op: AttentionOp) -> Executable:
        scale, causal = op.effective_scale, isinstance(op.mask, Causal)

        def run(q, k, v, t):
            scores = q @ k.mT * scale
            if causal:
                scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
            out = scores.softmax(-1) @ v
            return Raw(out, scores.logsumexp(-1)) if op.outputs.lse else out

        return Executable(run)


class Negate(Rewrite):
    name, order = "negate", 900

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        if not isinstance(op.mask, Full):
            return not_useful("only for full masks")
        return Rewritten(op, lambda run: lambda q, k, v, t: run(-q, -k, v, t))


@hookimpl
def attn_dispatch_backends():
    return [Textbook()]


@hookimpl
def attn_dispatch_rewrites():
    return [Negate()]
"""


def test_a_toy_plugin_needs_nothing_but_plugin_py(install):
    tree = ast.parse(SOURCE)
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.startswith("attn_dispatch")} == {"attn_dispatch.plugin"}
    made = types.ModuleType("textbook_plugin")
    exec(compile(SOURCE, "textbook_plugin.py", "exec"), made.__dict__)
    install(made)
    q, k = x(1, 2, 4, 8), x(1, 2, 6, 8)
    for name, options in (("textbook", {"is_causal": True}), ("negate > textbook", {})):
        out = dispatch.attention(q, k, k, backend=name, **options)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, k, **options))


# --- real entry points, in processes of their own --------------------------------------------------------------------


def distribution(folder: Path, name: str, source: str) -> None:
    """A distribution as an installer leaves it: a module and a dist-info folder with an entry point."""
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    info = folder / f"{name}_dist-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.5\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[attn_dispatch]\n{name} = {name}\n", encoding="utf-8")


RAISES = """
from attn_dispatch.plugin import hookimpl


@hookimpl
def attn_dispatch_backends():
    raise OSError('no driver')
"""

SCRIPT = """
import json, sys, warnings
sys.path.insert(0, {folder!r})
warnings.simplefilter("ignore")
import torch
from attn_dispatch import dispatch
from attn_dispatch.registry import current
x = torch.randn(1, 2, 4, 8)
found = current()
print(json.dumps({{
    "quarantined": {{q.name: [q.distribution, q.error, q.details] for q in found.quarantined}},
    "origins": found.origins,
    "shape": list(dispatch.attention(x, x, x).shape),
    "chosen": dispatch.plan(x, x, x, backend="textbook").name,
}}))
"""


def test_real_entry_points_are_loaded_one_by_one_and_the_broken_ones_set_aside(tmp_path):
    import json

    distribution(tmp_path, "a_missing", "import no_such_module_at_all\n")
    distribution(tmp_path, "b_syntax", "def broken(:\n")
    distribution(tmp_path, "c_exits", "raise SystemExit('go away')\n")
    distribution(tmp_path, "d_hook", RAISES)
    distribution(tmp_path, "z_textbook", SOURCE)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(folder=str(tmp_path))],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    causes = {name: (origin, error) for name, (origin, error, _) in said["quarantined"].items()}
    assert causes["a_missing"] == ("a_missing-dist 1.5", "ModuleNotFoundError: No module named 'no_such_module_at_all'")
    assert causes["b_syntax"][1].startswith("SyntaxError")
    assert causes["c_exits"][1] == "SystemExit: go away"
    assert causes["d_hook"][1] == "OSError: no driver"
    assert all("Traceback" in details for _, _, details in said["quarantined"].values())
    assert said["origins"]["textbook"] == "z_textbook-dist 1.5"
    assert (said["shape"], said["chosen"]) == ([1, 2, 4, 8], "textbook")


def test_plugins_are_not_loaded_by_importing_the_package(tmp_path):
    distribution(tmp_path, "noisy", "import os\nos.write(1, b'loaded\\n')\n")
    script = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from attn_dispatch import dispatch, masks, variants
        print("imported", flush=True)
        import torch
        dispatch.plan(*[torch.ones(1, 1, 2, 8)] * 3)
        dispatch.plan(*[torch.ones(1, 1, 3, 8)] * 3)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["imported", "loaded"], done.stderr
