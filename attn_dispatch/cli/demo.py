"""``attn-dispatch demo``: two real models through the dispatcher. Parity, what ran and why, time against SDPA."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_dispatch.cli.models import LONG_PROMPT, PROMPTS, SENTENCES, Loaded, load_minilm, load_smollm2

if TYPE_CHECKING:
    import torch

    from attn_dispatch.capture import Entry

__all__ = ["Kind", "compress", "embed", "generate", "run", "summarise"]

MAX_ERROR = 1e-5  # of a unit-length embedding, in fp32
_TIMED_TOKENS = 16  # enough for decode to dominate, and more rounds fit
_TIMING_BUDGET_S = 35.0  # on a busy machine fewer rounds are timed, so that the demo ends in time


@dataclass
class _Findings:
    parity: list[tuple[str, str, bool]] = field(default_factory=list)
    ran: list[tuple[str, Iterable[Entry]]] = field(default_factory=list)
    timed: list[tuple[str, float, float, int]] = field(default_factory=list)


def run(tokens: int, rounds: int) -> int:
    """Run the demo; the exit code is 1 when parity fails."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(width=None if sys.stdout.isatty() else 150)  # a pipe would be cut at 80 columns
    found = _Findings()
    columns = (TextColumn("{task.description:<44}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    started = time.perf_counter()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("loading MiniLM", total=len(_STEPS))
        state = _State(tokens, rounds, found)
        for name, step in _STEPS:
            progress.update(task, description=name)
            step(state)
            progress.advance(task)
        progress.update(task, description="done")
    _print(console, found)
    failed = [what for what, _, good in found.parity if not good]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "all equal"
    console.print(f"{verdict}   {time.perf_counter() - started:.0f} s", markup=False)
    return 1 if failed else 0


@dataclass
class _State:
    tokens: int
    rounds: int
    found: _Findings
    encoder: Loaded = field(init=False)
    writer: Loaded = field(init=False)
    expected: dict[str, Any] = field(default_factory=dict)


# --- what is run -----------------------------------------------------------------------------------------------------


def embed(loaded: Loaded, sentences: Iterable[str], implementation: str) -> torch.Tensor:
    """Sentence embeddings ``[n, 384]`` of unit length: the mean over real tokens of one padded batch."""
    import torch

    model, tokenizer = loaded
    model.set_attn_implementation(implementation)
    batch = tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    real = batch["attention_mask"][..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def generate(loaded: Loaded, prompts: Iterable[str], implementation: str, tokens: int) -> torch.Tensor:
    """Greedy tokens ``[n, prompt + tokens]`` of one left-padded batch, always the full number."""
    import torch

    model, tokenizer = loaded
    model.set_attn_implementation(implementation)
    batch = tokenizer(list(prompts), padding=True, return_tensors="pt")
    with torch.inference_mode():
        return model.generate(
            **batch, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )


def _load_encoder(state: _State) -> None:
    from attn_dispatch.integrations import transformers

    state.encoder = load_minilm()
    transformers.register()


def _load_writer(state: _State) -> None:
    state.writer = load_smollm2()


_GENERATIONS = {"one prompt": PROMPTS[:1], "two prompts, left-padded": PROMPTS, "a long prompt": (LONG_PROMPT,)}


def _embed_parity(state: _State) -> None:
    from attn_dispatch import dispatch

    expected = embed(state.encoder, SENTENCES, "eager")
    with dispatch.capture() as workload:
        got = embed(state.encoder, SENTENCES, "attn_dispatch")
    error = float((got - expected).abs().max())
    cosine = float((got * expected).sum(-1).min())
    text = f"cosine {cosine:.7f} (lowest), max abs error {error:.1e}"
    state.found.parity.append((f"MiniLM embeddings, {len(SENTENCES)} sentences", text, error <= MAX_ERROR))
    state.found.ran.append(("MiniLM", workload))


def _generate_parity(state: _State) -> None:
    import torch

    from attn_dispatch import dispatch

    for name, prompts in _GENERATIONS.items():
        expected = state.expected[name] = generate(state.writer, prompts, "eager", state.tokens)
        with dispatch.capture() as workload:
            got = generate(state.writer, prompts, "attn_dispatch", state.tokens)
        same = torch.equal(got, expected)
        words = state.writer.tokenizer.decode(got[0, -state.tokens :], skip_special_tokens=True)
        text = f"{state.tokens} greedy tokens {'equal' if same else 'DIFFER'}: ...{' '.join(words.split())[:60]}"
        state.found.parity.append((f"SmolLM2, {name}", text, same))
        state.found.ran.append((f"SmolLM2, {name}", workload))


def _unmodified_parity(state: _State) -> None:
    import torch

    from attn_dispatch import dispatch

    name = "two prompts, left-padded"
    with dispatch.replace_sdpa(), dispatch.capture() as workload:
        got = generate(state.writer, _GENERATIONS[name], "sdpa", state.tokens)
    same = torch.equal(got, state.expected[name])
    calls = sum(entry.count for entry in workload)
    text = f"{state.tokens} greedy tokens {'equal' if same else 'DIFFER'}, {calls} calls of SDPA went through"
    state.found.parity.append(("SmolLM2 unmodified, dispatch.replace_sdpa()", text, same and calls > 0))


def _generate_with(state: _State, prompts: Iterable[str], implementation: str) -> Any:
    return generate(state.writer, prompts, implementation, min(state.tokens, _TIMED_TOKENS))


def _time(state: _State) -> None:
    deadline = time.perf_counter() + _TIMING_BUDGET_S
    jobs: dict[str, Callable[[str], Any]] = {"MiniLM, padded batch": lambda name: embed(state.encoder, SENTENCES, name)}
    for what, prompts in _GENERATIONS.items():
        jobs[f"SmolLM2, {what}"] = functools.partial(_generate_with, state, prompts)
    times: dict[str, dict[str, list[float]]] = {job: {"attn_dispatch": [], "sdpa": []} for job in jobs}
    for turn in range(state.rounds + 1):  # the first round warms up both, and is not counted
        for job, work in jobs.items():
            if turn > 1 and time.perf_counter() > deadline:
                continue
            order = list(times[job]) if turn % 2 else list(reversed(times[job]))
            for name in order:
                start = time.perf_counter()
                work(name)
                if turn:
                    times[job][name].append(time.perf_counter() - start)
    for job, measured in times.items():
        ours, theirs = (statistics.median(measured[name]) for name in ("attn_dispatch", "sdpa"))
        state.found.timed.append((job, ours, theirs, len(measured["sdpa"])))


_STEPS: tuple[tuple[str, Callable[[_State], None]], ...] = (
    ("loading MiniLM", _load_encoder),
    ("embedding sentences", _embed_parity),
    ("loading SmolLM2-135M from GGUF", _load_writer),
    ("generating, eager and attn_dispatch", _generate_parity),
    ("generating, unmodified with replace_sdpa", _unmodified_parity),
    ("timing against transformers' sdpa", _time),
)


# --- what is said ----------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """Calls that differ in layer and key length alone."""

    phase: str
    mask: str
    candidate: str
    layers: str
    keys: str
    calls: int
    why: str


def summarise(entries: Iterable[Entry]) -> list[Kind]:
    """The kinds of call of a workload, in the order of the first."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.phase, str(entry.op.mask), entry.candidate), []).append(entry)
    kinds = []
    for (phase, mask, candidate), group in groups.items():
        lengths = [entry.op.Skv for entry in group]
        keys = str(lengths[0]) if min(lengths) == max(lengths) else f"{min(lengths)}..{max(lengths)}"
        why = f"{group[0].source}: {group[0].why}"
        calls = sum(entry.count for entry in group)
        kinds.append(Kind(phase, mask, candidate, compress(entry.layer for entry in group), keys, calls, why))
    return kinds


def compress(layers: Iterable[str]) -> str:
    """Layer names with their numbers as ranges.

    Example:
        >>> compress(["A.0", "A.1", "A.2", "A.5", "B"])
        'A 0-2,5; B'
    """
    numbers: dict[str, set[int]] = {}
    for layer in layers:
        kind, _, number = layer.rpartition(".")
        if number.isdigit():
            numbers.setdefault(kind, set()).add(int(number))
        else:
            numbers.setdefault(layer or "(unnamed)", set())
    return "; ".join(f"{kind} {_ranges(sorted(found))}".rstrip() for kind, found in numbers.items())


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in runs)


def _print(console: Any, found: _Findings) -> None:
    from rich.markup import escape
    from rich.table import Table

    parity = Table("what", "attn_dispatch against eager", "", title="parity", title_justify="left")
    for what, text, good in found.parity:
        parity.add_row(escape(what), escape(text), "ok" if good else "FAILED")
    console.print(parity)
    ran = Table("model", *Kind._fields, title="what ran", title_justify="left")
    for model, entries in found.ran:
        for kind in summarise(entries):
            ran.add_row(model, *(escape(str(cell)) for cell in kind))
    console.print(ran)
    title = "time, medians of interleaved rounds"
    timed = Table("what", "attn_dispatch", "sdpa", "sdpa / attn_dispatch", "rounds", title=title, title_justify="left")
    for what, ours, theirs, rounds in found.timed:
        timed.add_row(what, f"{ours * 1e3:.0f} ms", f"{theirs * 1e3:.0f} ms", f"{theirs / ours:.2f}", str(rounds))
    console.print(timed)
