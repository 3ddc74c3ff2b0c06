"""A bad day for each plugin: the host survives, names the culprit with its distribution and version, and works on."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attn_dispatch import BackendError, NoBackendError, capability, dispatch, plugin, registry
from attn_dispatch.capability import compare
from attn_dispatch.errors import PluginWarning
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.tensors import TensorDesc
from attn_dispatch.registry import Registry
from attn_dispatch.registry.discover import discover

GOOD = """
import torch
from attn_dispatch.plugin import Backend, Capability, Executable, dense_cost, hookimpl

FACTS = Capability(frozenset({"cpu"}), frozenset({"float32"}), frozenset({"weight:Softmax", "mask:Full", "gqa"}))

# AT IMPORT


class Mine(Backend):
    name = "NAME"
    capabilities = (FACTS,)

    def compile(self, op):
        # AT COMPILE
        def run(q, k, v, t):
            # AT RUN
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, scale=op.effective_scale, enable_gqa=q.shape[1] != k.shape[1])

        return Executable(run)


@hookimpl
def attn_dispatch_backends():
    # AT REGISTRATION
    return [Mine()]
"""
PLACES = ("IMPORT", "REGISTRATION", "COMPILE", "RUN")


def source(name: str = "mine", **lines: str) -> str:
    """The good plugin with a line at a place, ``import_=...``, ``run=...``."""
    text = GOOD.replace("NAME", name)
    for place, line in lines.items():
        text = text.replace(f"# AT {place.rstrip('_').upper()}", line)
    return text


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Registry]]:
    """Put distributions where an installer would, ``install(module=source)``, and discover them."""
    before = registry.current()
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(**modules: str) -> Registry:
        for module, text in modules.items():
            _distribution(tmp_path, module, text)
            sys.modules.pop(module, None)
        importlib.invalidate_caches()
        made = discover()
        registry.reset(made)
        return made

    yield put
    registry.reset(before)


def _distribution(folder: Path, module: str, text: str, dist: str = "", value: str = "", version: str = "2.7") -> None:
    (folder / f"{module}.py").write_text(text, encoding="utf-8")
    name = dist or f"{module}-dist"
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[attn_dispatch]\n{module} = {value or module}\n", encoding="utf-8")


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (1, 2, 4, 8)))


def works() -> None:
    inputs = x()
    torch.testing.assert_close(
        dispatch.attention(inputs, inputs, inputs), F.scaled_dot_product_attention(*[inputs] * 3)
    )


# --- broken at each place --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_a_plugin_that_raises_is_named_with_distribution_and_version_and_the_rest_works(install, place):
    text = source(**{f"{place.lower()}{'_' if place == 'IMPORT' else ''}": "raise OSError('no licence')"})
    if place in ("IMPORT", "REGISTRATION"):
        with pytest.warns(PluginWarning, match=r"'vendor' \(vendor-dist 2\.7\) is not used: OSError: no licence"):
            found = install(vendor=text)
        assert [(q.name, q.distribution) for q in found.quarantined] == [("vendor", "vendor-dist 2.7")]
    else:
        install(vendor=text)
        with pytest.raises(BackendError, match=r"backend 'mine' \(vendor-dist 2\.7\) raised OSError when"):
            dispatch.attention(x(), x(), x(), backend="mine")
    works()


def test_a_broken_capability_names_its_cause(install):
    install(
        vendor=source().replace(
            "    def compile", "    def unavailable(self):\n        return 1 / 0\n\n    def compile"
        )
    )
    with pytest.raises(NoBackendError, match="ZeroDivisionError: division by zero"):
        dispatch.attention(x(), x(), x(), backend="mine")
    works()


CHANGES = {
    "prints": ("print('buy a licence')", "printed 'buy a licence'"),
    "random numbers": ("torch.manual_seed(0)", "moved torch's random number generator"),
    "python's random numbers": ("__import__('random').random()", "moved Python's random number generator"),
    "threads": ("torch.set_num_threads(torch.get_num_threads() + 1)", "changed torch's number of threads"),
    "dtype": ("torch.set_default_dtype(torch.float64)", "changed torch's default dtype"),
    "device": ("torch.set_default_device('meta')", "changed torch's default device"),
    "grad mode": ("torch.set_grad_enabled(False)", "changed torch's grad mode"),
    "determinism": ("torch.use_deterministic_algorithms(True)", "changed torch's deterministic mode"),
    "folder": ("__import__('os').chdir('/')", "changed the working directory"),
}


def state() -> tuple[Any, ...]:
    import os
    import random

    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        *(torch.get_num_threads(), torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        *(torch.are_deterministic_algorithms_enabled(), os.getcwd()),
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_plugin_does_to_the_process_is_put_back_and_has_its_name(install, change, place, capsys, monkeypatch):
    from attn_dispatch.registry import guarding

    monkeypatch.setattr(guarding.threading, "active_count", lambda: 1)  # a thread of another test may still live
    line, words = CHANGES[change]
    inputs = x()
    want = F.scaled_dot_product_attention(inputs, inputs, inputs)
    before = state()
    text = source(**{f"{place.lower()}{'_' if place == 'IMPORT' else ''}": line})

    def install_and_run() -> tuple[Registry, torch.Tensor]:
        return install(vendor=text), dispatch.attention(inputs, inputs, inputs, backend="mine")

    with pytest.warns(PluginWarning) as caught:
        found, out = install_and_run()
    assert state() == before
    assert capsys.readouterr().out == ""
    torch.testing.assert_close(out, want)
    told = [str(w.message) for w in caught]
    assert any(words in text and "vendor-dist 2.7" in text for text in told), told
    if place in ("IMPORT", "REGISTRATION"):
        (vendor,) = [s for s in found.sources if s.name == "vendor"]
        assert any(words in note for note in vendor.notes)


def test_random_numbers_are_left_alone_while_other_threads_draw(install, monkeypatch):
    from attn_dispatch.registry import guarding

    monkeypatch.setattr(guarding.threading, "active_count", lambda: 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        install(vendor=source(import_="torch.rand(1)"))


def test_what_other_threads_print_while_a_plugin_loads_is_not_kept_from_them(capsys):
    import threading

    from attn_dispatch.registry.guarding import Watch

    with Watch() as watch:
        other = threading.Thread(target=lambda: print("theirs"))
        other.start()
        other.join()
        print("mine")
    assert capsys.readouterr().out == "theirs\n"
    assert watch.changes == ["printed 'mine'"]


def test_watches_of_two_threads_that_overlap_leave_the_hosts_stdout(capsys):
    import threading

    from attn_dispatch.registry.guarding import Watch

    host, first_in, second_in, first_out = sys.stdout, threading.Event(), threading.Event(), threading.Event()
    found: dict[str, list[str]] = {}

    def first() -> None:
        with Watch() as watch:
            first_in.set()
            second_in.wait(5)
            print("first")
        found["first"] = watch.changes
        first_out.set()

    def second() -> None:
        first_in.wait(5)
        with Watch() as watch:
            second_in.set()
            first_out.wait(5)
            print("second")
        found["second"] = watch.changes

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.stdout is host
    assert found == {"first": ["printed 'first'"], "second": ["printed 'second'"]}
    assert capsys.readouterr().out == ""


def test_the_stream_of_a_watch_has_what_the_hosts_has_and_other_threads_flush_it(monkeypatch):
    import io
    import threading

    from attn_dispatch.registry.guarding import Watch

    host = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", host)
    with Watch():
        assert sys.stdout.buffer is host.buffer
        assert sys.stdout.encoding == "utf-8"
        other = threading.Thread(target=lambda: print("theirs", flush=True))
        other.start()
        other.join()
        assert host.buffer.getvalue() == b"theirs\n"


def test_a_stdout_that_a_plugin_put_in_its_place_is_taken_out(monkeypatch):
    import io

    from attn_dispatch.registry import guarding

    monkeypatch.setattr(guarding.threading, "active_count", lambda: 1)
    host = sys.stdout
    with guarding.Watch() as watch:
        sys.stdout = io.StringIO()
    assert (sys.stdout is host, watch.changes) == (True, ["replaced sys.stdout"])


def test_a_working_directory_that_is_gone_is_no_trouble(tmp_path, monkeypatch):
    from attn_dispatch.registry import guarding

    monkeypatch.setattr(guarding.threading, "active_count", lambda: 1)
    host, gone = sys.stdout, tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with guarding.Watch() as watch:
        pass
    assert (watch.changes, sys.stdout is host) == ([], True)


def test_what_cannot_be_put_back_is_said_and_does_not_hide_what_was_raised(tmp_path, monkeypatch):
    from attn_dispatch.registry import guarding

    monkeypatch.setattr(guarding.threading, "active_count", lambda: 1)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    watch = guarding.Watch()

    def body() -> None:
        with watch:
            __import__("os").chdir("/")
            gone.rmdir()
            raise KeyError("the plugin's own")

    with pytest.raises(KeyError, match="the plugin's own"):
        body()
    (change,) = watch.changes
    assert "cannot be put back (FileNotFoundError" in change
    assert not watch.put_back


def test_what_the_process_shares_is_told_and_left_while_other_threads_live(monkeypatch):
    from attn_dispatch.registry import guarding

    monkeypatch.setattr(guarding.threading, "active_count", lambda: 2)
    threads = torch.get_num_threads()
    try:
        with guarding.Watch() as watch:
            torch.set_num_threads(threads + 1)
            torch.set_grad_enabled(False)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert torch.is_grad_enabled(), "the mode of this thread is put back"
    told = sorted(watch.changes)
    assert told[0] == "changed torch's grad mode from True to False"
    assert "which was left so since other threads live" in told[1]


def test_a_slow_import_is_measured_and_shown(install):
    found = install(vendor=source(import_="import time; time.sleep(0.05)"))
    (vendor,) = [s for s in found.sources if s.name == "vendor"]
    assert vendor.load_ms >= 50
    assert vendor.entry_point == "vendor = vendor"
    assert vendor.offers == ("mine",)


# --- versions that do not fit ----------------------------------------------------------------------------------------


OLD = {
    "a hook with an argument that is gone": (
        source().replace("def attn_dispatch_backends():", "def attn_dispatch_backends(registry):"),
        "PluginValidationError",
    ),
    "a hook that is gone": (
        source().replace("def attn_dispatch_backends():", "def attn_dispatch_get_backends():"),
        "PluginValidationError",
    ),
    "a name that plugin.py no longer has": (
        source().replace("import Backend,", "import AttentionBackend, Backend,"),
        "ImportError: cannot import name 'AttentionBackend'",
    ),
    "a field that Capability no longer has": (
        source().replace('"gqa"}))', '"gqa"}), sm="90")'),
        "TypeError: Capability.__init__() got an unexpected keyword argument 'sm'",
    ),
}


@pytest.mark.parametrize("kind", OLD)
def test_a_plugin_for_another_version_is_set_aside_with_the_cause(install, kind):
    text, words = OLD[kind]
    with pytest.warns(PluginWarning, match=r"vendor-dist 2\.7"):
        found = install(vendor=text)
    assert words in found.quarantined[0].error
    works()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def compile(self, op):", "def compile(self, op, device):"),
        ("def run(q, k, v, t):", "def run(q, k, v):"),
    ],
)
def test_an_old_signature_of_a_backends_method_is_a_named_error(install, old, new):
    install(vendor=source().replace(old, new))
    with pytest.raises(BackendError, match=r"backend 'mine' \(vendor-dist 2\.7\) raised TypeError"):
        dispatch.attention(x(), x(), x(), backend="mine")
    works()


@dataclass(frozen=True)
class Tomorrow(AttentionOp):
    """The op of a later version: it has a field that backends of today have never heard of."""

    temperature: float = 1.0

    @property
    def features(self) -> frozenset[str]:
        return super().features | ({"temperature"} if self.temperature != 1.0 else set())


def test_a_field_that_an_old_backend_does_not_know_is_refused_and_never_dropped(install):
    found = install(vendor=source())
    desc = TensorDesc.of(x())
    old = found.backends["mine"]
    assert old.reasons_against(Tomorrow(desc, desc, desc)) == []
    (reason,) = old.reasons_against(Tomorrow(desc, desc, desc, temperature=0.5))
    assert (reason.code, reason.field) == ("feature", "temperature")


def test_all_features_of_a_plugin_are_those_of_its_api_and_never_grow():
    words = " ".join(sorted(plugin.ALL_FEATURES))
    assert hashlib.sha256(words.encode()).hexdigest()[:16] == "c7a1acdee70e2a14", "a plugin would claim a new word"
    assert plugin.ALL_FEATURES <= capability.ALL_FEATURES
    greedy = capability.Capability(frozenset({"cpu"}), frozenset({"float32"}), plugin.ALL_FEATURES)
    desc = TensorDesc.of(x())
    assert [r.field for r in compare(greedy, Tomorrow(desc, desc, desc, temperature=0.5))] == ["temperature"]


# --- names and copies ------------------------------------------------------------------------------------------------


def test_two_distributions_with_one_name_both_lose_it_and_both_are_named(install):
    with pytest.warns(PluginWarning):
        found = install(vendor_a=source("fast"), vendor_b=source("fast"))
    assert "fast" not in found.backends
    assert {q.distribution for q in found.quarantined} == {"vendor_a-dist 2.7", "vendor_b-dist 2.7"}
    assert "is also taken by vendor_b-dist 2.7" in found.quarantined[0].error
    works()


def test_one_plugin_listed_twice_is_loaded_once(install, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    _distribution(copy, "vendor", source())
    sys.path.append(str(copy))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = install(vendor=source())
    finally:
        sys.path.remove(str(copy))
    assert "mine" in found.backends
    assert [s.name for s in found.sources].count("vendor") == 1


def test_a_distribution_whose_entry_points_cannot_be_read_is_set_aside_alone(install, tmp_path):
    info = tmp_path / "torn-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[attn_dispatch]\na line without a sign\n", encoding="utf-8")
    with pytest.warns(PluginWarning, match="torn"):
        found = install(vendor=source())
    (torn,) = [q for q in found.quarantined if q.name == "torn"]
    assert "entry points cannot be read" in torn.error
    assert "mine" in found.backends
    works()


def test_another_distribution_of_the_same_module_is_set_aside_by_name(install, tmp_path):
    _distribution(tmp_path, "vendor", source(), dist="vendor-fork", version="3.0")
    with pytest.warns(
        PluginWarning, match=r"vendor-fork 3\.0\) is not used: its module vendor is the plugin of vendor-dist"
    ):
        found = install(vendor=source())
    assert found.origins["mine"] == "vendor-dist 2.7"


def test_a_backend_and_a_rewrite_of_strangers_with_one_name_both_lose_it():
    class Twin(plugin.Rewrite):
        name, order = "twin", 950

        def apply(self, op):
            return plugin.not_useful("never")

    class Mine(plugin.Backend):
        name = "twin"
        capabilities = (capability.Capability(frozenset({"cpu"}), frozenset({"float32"}), frozenset()),)

    def offering(hook: str, thing: Any) -> Any:
        import types

        made = types.ModuleType("twins")
        setattr(made, hook, plugin.hookimpl(specname=hook)(lambda: [thing]))
        return made

    pair = [("a", offering("attn_dispatch_rewrites", Twin())), ("b", offering("attn_dispatch_backends", Mine()))]
    for order in (pair, pair[::-1]):
        with pytest.warns(PluginWarning):
            found = discover(order)
        assert "twin" not in {*found.backends, *found.rewrites}
        assert {q.distribution.split()[0] for q in found.quarantined} == {"a", "b"}


# --- the order of loading --------------------------------------------------------------------------------------------


def seen_of(found: Registry) -> tuple[Any, ...]:
    """All that may depend on the order in which plugins came."""
    registry.reset(found)
    q, k = x(1, 4, 8, 16), x(1, 2, 8, 16)
    chosen = [dispatch.plan(q, k, k, enable_gqa=True, is_causal=causal).name for causal in (False, True)]
    report = dispatch.explain(q, k, k, enable_gqa=True)
    asides = [(aside.name, aside.distribution, aside.error) for aside in found.quarantined]
    return (*chosen, report.legal, list(report.refused), list(found.backends), list(found.rewrites), asides)


def test_the_choice_does_not_depend_on_the_order_in_which_plugins_load(install):
    import types

    def made(name: str) -> Any:
        module = types.ModuleType(name)
        exec(compile(source(name), name, "exec"), module.__dict__)
        return module

    given = [("one", made("alpha")), ("two", made("beta")), ("three", made("alpha")), ("four", made("gamma"))]
    answers = []
    before = registry.current()
    try:
        for order in itertools.permutations(given):
            with pytest.warns(PluginWarning):
                answers.append(seen_of(discover(order)))
    finally:
        registry.reset(before)
    assert all(answer == answers[0] for answer in answers)
    assert "beta" in answers[0][4]
    assert "alpha" not in answers[0][4]


_DOCTOR = """
import sys
sys.path[:0] = {folders!r}
from attn_dispatch.cli import main
sys.argv = ["attn-dispatch", "doctor", "--json"]
main()
"""


def test_doctor_says_where_each_backend_came_from_whatever_the_order_of_the_path(tmp_path):
    for name in ("alpha", "beta"):
        (tmp_path / name).mkdir()
        _distribution(tmp_path / name, f"vendor_{name}", source(name))
    said = []
    for order in (("alpha", "beta"), ("beta", "alpha")):
        script = _DOCTOR.format(folders=[str(tmp_path / name) for name in order])
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
        found = json.loads(done.stdout)
        said.append([(b["name"], b["distribution"], b["entry_point"]) for b in found["backends"]])
    assert said[0] == said[1]
    assert ("alpha", "vendor_alpha-dist 2.7", "vendor_alpha = vendor_alpha") in said[0]
    assert said[0][0] == ("sdpa_flash", *said[0][0][1:])
