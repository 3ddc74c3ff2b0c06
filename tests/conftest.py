"""What every test file shares: one hypothesis profile. No deadline, since the machine is shared; the same examples
every time, so that a failure on one machine is a failure on all. What was measured on this machine decides nothing in a
test that does not ask for it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

os.environ["ATTN_DISPATCH_AUTOTUNE"] = "off"
os.environ["ATTN_DISPATCH_CACHE"] = tempfile.mkdtemp(prefix="attn-dispatch-tests-")
os.environ["XDG_CONFIG_HOME"] = os.environ["ATTN_DISPATCH_CACHE"]  # nor what the developer has pinned

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "attn_dispatch", deadline=None, max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("attn_dispatch")


@pytest.fixture(params=["python", "compiled"])
def each_lookup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test runs with the lookup in Python and, where it is built, with that in C++."""
    from attn_dispatch import dispatch, native, routes

    module = native.lookup().module
    if request.param == "compiled" and module is None:
        pytest.skip(native.lookup().why)
    is_compiled = request.param == "compiled"
    monkeypatch.setattr(routes, "_compiled", module if is_compiled else None)
    monkeypatch.setattr(dispatch, "_find", module.find if is_compiled else routes.find_in_python)
    monkeypatch.setattr(dispatch, "_answer", module.answer if is_compiled else None)
    routes.routes.clear()
    yield
    monkeypatch.undo()  # so that the compiled lookup is told, too
    routes.routes.clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is about ONNX by its file's name, for `make test-onnxruntime`; single tests elsewhere say so."""
    for item in items:
        if item.path.name.startswith(("test_onnx", "test_export")):
            item.add_marker(pytest.mark.onnx)
