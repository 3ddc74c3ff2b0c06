"""The exported demo models at work: equal to torch, and timed beside torch and torch's own ONNX export."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_dispatch.errors import InputError

if TYPE_CHECKING:
    import torch

    from attn_dispatch.export.transformers import Exportable

__all__ = ["Compared", "compare"]

_ROUNDS = 9
_PLAIN_OPSETS = (24, 20)  # ours, and torch's default: the first that onnxruntime runs
_MAX_ERROR = 1e-5


@dataclass
class Compared:
    """What the exported model does, beside torch.

    Args:
        parity: ``(what, result, right)``. times: medians in milliseconds, by job and contender.
        notes: what the contenders are.
    """

    parity: list[tuple[str, str, bool]] = field(default_factory=list)
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything is equal."""
        return all(right for _, _, right in self.parity)

    def __str__(self) -> str:
        lines = [f"{'equal' if right else 'WRONG':<9} {what}: {text}" for what, text, right in self.parity]
        for job, times in self.times.items():
            ours = times["exported"]
            others = [
                f"{time_ms / ours:.2f}x over {name} ({time_ms:.2f})"
                for name, time_ms in times.items()
                if name != "exported"
            ]
            lines.append(f"time      {job}: {ours:.2f} ms, {', '.join(others)}")
        return "\n".join([*lines, *(f"note      {note}" for note in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for ``--json``."""
        return asdict(self)


def compare(name: str, exportable: Exportable, path: Path, tokens: int) -> Compared:
    """Run an exported demo model beside torch.

    Raises:
        InputError: it is not one of the demo's models.
    """
    if name not in ("minilm", "smollm2"):
        raise InputError(f"--compare knows what minilm and smollm2 must give, not {name}", remedy="leave it out")
    found = Compared()
    with tempfile.TemporaryDirectory() as folder:
        plain = _plain(exportable, Path(folder) / "plain.onnx", found)
        (_embeddings if name == "minilm" else _generation)(exportable, path, plain, tokens, found)
    return found


def _plain(exportable: Exportable, path: Path, found: Compared) -> Any:
    """A session on the same model as torch exports it from its SDPA path; None when there is none that runs."""
    import torch

    from attn_dispatch.export.sizes import torch_shapes
    from attn_dispatch.export.verify import open_session, run_session

    model: Any = exportable.model
    model.model.set_attn_implementation("sdpa")
    try:
        for opset in _PLAIN_OPSETS:
            try:
                program = torch.onnx.export(
                    model, exportable.args, dynamic_shapes=torch_shapes(exportable.dynamic_shapes), dynamo=True,
                    opset_version=opset, verbose=False, input_names=exportable.input_names,
                    output_names=exportable.output_names,
                )  # fmt: skip
                assert program is not None
                program.save(str(path))
                session = open_session(path)
                run_session(session, _tensors(exportable.args))
            except Exception as error:  # noqa: BLE001 - a peer that fails is a finding
                text = str(error).strip().splitlines()[-1][:160]
                found.notes.append(f"torch.onnx.export at opset {opset}: {type(error).__name__}: {text}")
                continue
            found.notes.append(f"torch.onnx is torch.onnx.export of the SDPA path at opset {opset}")
            return session
        return None
    finally:
        model.model.set_attn_implementation("attn_dispatch")


def _tensors(tree: Any) -> list[torch.Tensor]:
    from attn_dispatch.export.sizes import tensors_of

    return tensors_of(tree)


# --- MiniLM ----------------------------------------------------------------------------------------------------------


def _embeddings(exportable: Exportable, path: Path, plain: Any, tokens: int, found: Compared) -> None:
    import torch

    from attn_dispatch.cli.models import SENTENCES, load_minilm
    from attn_dispatch.export.verify import open_session, run_session

    batch = load_minilm().tokenizer(list(SENTENCES), padding=True, truncation=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    model: Any = exportable.model

    def embed(hidden: torch.Tensor) -> torch.Tensor:
        real = mask[..., None].to(hidden.dtype)
        return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)

    def in_torch(implementation: str) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            model.model.config._attn_implementation = implementation  # what set_attn_implementation sets, untimed
            with torch.inference_mode():
                return embed(model(ids, mask))

        return run

    session = open_session(path)
    jobs = {"exported": lambda: embed(run_session(session, [ids, mask])[0]), "torch eager": in_torch("eager")}
    jobs |= {"attn_dispatch": in_torch("attn_dispatch")}
    jobs |= {"torch.onnx": lambda: embed(run_session(plain, [ids, mask])[0])} if plain is not None else {}
    want = in_torch("eager")()
    for name in [name for name in jobs if "onnx" in name or name == "exported"]:
        error = float((jobs[name]() - want).abs().max())
        text = f"{len(SENTENCES)} embeddings, max abs error {error:.1e} (limit {_MAX_ERROR:.0e})"
        found.parity.append((f"MiniLM {name}", text, error <= _MAX_ERROR or name != "exported"))
    found.times["MiniLM, padded batch"] = _time(jobs)


# --- SmolLM2 ---------------------------------------------------------------------------------------------------------


def _generation(exportable: Exportable, path: Path, plain: Any, tokens: int, found: Compared) -> None:
    import torch

    from attn_dispatch.cli.demo import generate
    from attn_dispatch.cli.models import PROMPTS, Loaded, load_smollm2
    from attn_dispatch.export.verify import open_session

    writer: Any = exportable.model
    tokenizer = load_smollm2().tokenizer
    session = open_session(path)
    layers = writer.model.config.num_hidden_layers
    for label, prompts in (("one prompt", PROMPTS[:1]), ("two prompts, left-padded", PROMPTS)):
        want = generate(Loaded(writer.model, tokenizer), prompts, "eager", tokens)
        batch = tokenizer(list(prompts), padding=True, return_tensors="pt")
        got = _greedy(session, batch["input_ids"], batch["attention_mask"], layers, tokens)
        same = torch.equal(got, want)
        words = " ".join(tokenizer.decode(got[0, -tokens:], skip_special_tokens=True).split())[:60]
        found.parity.append(
            (f"SmolLM2, {label}", f"{tokens} greedy tokens {'equal' if same else 'DIFFER'}: ...{words}", same)
        )
    ids = torch.arange(256)[None] % 1000
    shape = tuple(exportable.args[2][0][0].shape)
    for job, rows, past in (("SmolLM2 prefill of 256", 256, 0), ("SmolLM2 decode at 256", 1, 256)):
        cache = [torch.zeros(1, shape[1], past, shape[3]) for _ in range(2 * layers)]
        mask = torch.ones(1, past + rows, dtype=torch.int64)
        given = [ids[:, :rows].contiguous(), mask, *cache]
        found.times[job] = _time(_decoders(writer, session, plain, given))


def _decoders(writer: Any, session: Any, plain: Any, given: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    import torch

    def in_torch(implementation: str) -> Callable[[], Any]:
        pairs = list(zip(given[2::2], given[3::2], strict=True))

        def run() -> Any:
            writer.model.config._attn_implementation = implementation  # what set_attn_implementation sets, untimed
            with torch.inference_mode():
                return writer(given[0], given[1], pairs)

        return run

    jobs = {
        "exported": _bound(session, given),
        "torch eager": in_torch("eager"),
        "attn_dispatch": in_torch("attn_dispatch"),
    }
    return jobs | ({"torch.onnx": _bound(plain, given)} if plain is not None else {})


def _bound(session: Any, given: list[torch.Tensor]) -> Callable[[], Any]:
    """A run with inputs bound once and outputs left to onnxruntime, as a decode loop would have it."""
    from onnxruntime import OrtValue

    binding = session.io_binding()
    for info, x in zip(session.get_inputs(), given, strict=True):
        binding.bind_ortvalue_input(info.name, OrtValue.ortvalue_from_numpy(x.numpy()))
    for info in session.get_outputs():
        binding.bind_output(info.name)
    return lambda: session.run_with_iobinding(binding)


def _greedy(session: Any, ids: torch.Tensor, mask: torch.Tensor, layers: int, tokens: int) -> torch.Tensor:
    """Greedy decoding on onnxruntime: every present becomes the next past, without a copy."""
    import torch
    from onnxruntime import OrtValue

    inputs = [x.name for x in session.get_inputs()]
    outputs = [x.name for x in session.get_outputs()]
    _, heads, _, size = (x if isinstance(x, int) else 0 for x in session.get_inputs()[2].shape)
    past = [OrtValue.ortvalue_from_numpy(torch.zeros(ids.shape[0], heads, 0, size).numpy()) for _ in range(2 * layers)]
    step = ids
    for _ in range(tokens):
        feed = [OrtValue.ortvalue_from_numpy(x.contiguous().numpy()) for x in (step, mask)]
        logits, *past = session.run_with_ort_values(outputs, dict(zip(inputs, [*feed, *past], strict=True)))
        step = torch.from_numpy(logits.numpy())[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, step], 1)
        mask = torch.cat([mask, torch.ones_like(step)], 1)
    return ids


def _time(jobs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Medians in milliseconds of interleaved rounds, after two runs of each."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for round_ in range(_ROUNDS + 2):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if round_ >= 2:
                taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}
