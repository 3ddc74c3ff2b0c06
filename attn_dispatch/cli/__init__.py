"""The command line, ``attn-dispatch``: one module per command, each imported when its command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attn_dispatch.cli import cache, pins

__all__ = ["main"]

app = typer.Typer(
    name="attn-dispatch",
    help="Which attention runs here, and why.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def main() -> None:
    """The entry point; an error raised on purpose, or one of the file system, is one message and exit code 2."""
    from attn_dispatch.errors import AttnDispatchError

    try:
        app()
    except (AttnDispatchError, OSError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise SystemExit(2) from None


def _version(wanted: bool) -> None:
    from attn_dispatch import __version__

    if wanted:
        typer.echo(f"attn-dispatch {__version__}")
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _typed(context: typer.Context, *others: str) -> list[str]:
    """The flags that stand on the command line, but for those of some parameters and for arguments."""
    return [
        param.opts[0]
        for param in context.command.params
        if param.name not in others and param.opts[0].startswith("-") and _is_typed(context, param.name or "")
    ]


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


@app.command("doctor")
def doctor_command(as_json: AsJson = False) -> None:
    """What is installed here and whether it works."""
    from attn_dispatch.cli.doctor import run

    run(as_json)


@app.command("build")
def build_command(
    force: Annotated[bool, typer.Option("--force", help="Compile it anew where it was built already.")] = False,
) -> None:
    """Compile what is in C++ for the torch that is here, which takes a C++ compiler: a lookup that spares each call a
    microsecond, and a kernel that halves decode steps on the CPU."""
    from attn_dispatch.cli.build import run

    run(force)


@app.command("backends")
def backends_command(
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print what docs/support_matrix.md holds.")] = False,
) -> None:
    """What each backend can do, from its declared facts."""
    from attn_dispatch.cli.backends import run

    run(as_json, markdown)


@app.command("explain")
def explain_command(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="An op (YAML, JSON), a workload file, or an .onnx.")] = None,
    q: Annotated[str, typer.Option("--q", help="Query shape B,Hq,Sq,D.")] = "1,8,1024,64",
    kv: Annotated[str, typer.Option("--kv", help="Hkv,Skv of key and value; as the query when left out.")] = "",
    dv: Annotated[int, typer.Option("--dv", help="Head size of value; as D when 0.")] = 0,
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 (or f32, bf16) ...")] = "float32",
    device: Annotated[str, typer.Option("--device", help="cpu, cuda ...")] = "cpu",
    mask: Annotated[str, typer.Option("--mask", help='A mask in text form, "Causal & Window(255, 0)".')] = "",
    causal: Annotated[bool, typer.Option("--causal", help="Causal, counted from key 0.")] = False,
    window: Annotated[str, typer.Option("--window", help="L,R distances; none or -1 is unbounded.")] = "",
    q_offset: Annotated[int | None, typer.Option("--q-offset", help="Key position of query 0.")] = None,
    scale: Annotated[float | None, typer.Option("--scale", help="Factor of the scores.")] = None,
    softcap: Annotated[float | None, typer.Option("--softcap", help="Soft cap of the scores.")] = None,
    dropout: Annotated[float, typer.Option("--dropout", help="Dropout probability.")] = 0.0,
    lse: Annotated[bool, typer.Option("--lse", help="The log-sum-exp is wanted.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="The weights are wanted.")] = False,
    grad: Annotated[bool, typer.Option("--grad", help="Gradients of query, key and value are wanted.")] = False,
    backend: Annotated[list[str] | None, typer.Option("--backend", help="Backend or chain; may be repeated.")] = None,
    as_json: AsJson = False,
) -> None:
    """What would run an attention, and why; runs nothing."""
    from attn_dispatch.cli.explain import Flags, run
    from attn_dispatch.errors import InputError

    if file is not None and (typed := _typed(context, "backend", "as_json")):
        problem = f"{', '.join(typed)} would describe an op, and {file} does already"
        raise InputError(problem, remedy="leave out the file or the flags; --backend and --json go with a file")
    flags = Flags(q, kv, dv, dtype, device, mask, causal, window, q_offset, scale, softcap, dropout, lse, weights, grad)
    run(file, flags, tuple(backend or ()), as_json)


@app.command("demo")
def demo_command(
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to generate per prompt.")] = 32,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Timed rounds, interleaved.")] = 5,
) -> None:
    """MiniLM and SmolLM2 through the dispatcher: parity with eager, what ran and why, time against SDPA."""
    from attn_dispatch.cli.demo import run

    raise typer.Exit(run(tokens, rounds))


@app.command("export")
def export_command(
    model: Annotated[str, typer.Argument(help="minilm, smollm2, a transformers folder, or module:function.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")] = Path("model.onnx"),
    opset: Annotated[int, typer.Option("--opset", help="Version of ai.onnx, 18 to 28.")] = 24,
    form: Annotated[list[str] | None, typer.Option("--form", help="standard, decomposed, contrib, function.")] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Run it on onnxruntime beside torch.")] = True,
    replace_sdpa: Annotated[bool, typer.Option("--replace-sdpa", help="Lower F.scaled_dot_product_attention.")] = False,
    runtime: Annotated[str, typer.Option("--runtime", help="Write for: installed, specification.")] = "installed",
    external: Annotated[bool, typer.Option("--external-data", help="Weights in a file of their own.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="minilm, smollm2: parity, time beside torch.")] = False,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Greedy tokens to compare.")] = 32,
    as_json: AsJson = False,
) -> None:
    """Write a model as ONNX, and check it on onnxruntime at other sizes than the example's."""
    from attn_dispatch.cli.export import Wanted, run

    forms = tuple(form or ("standard",))
    wanted = Wanted(model, out, opset, forms, verify, replace_sdpa, external, runtime, compare, tokens, as_json)
    raise typer.Exit(run(wanted))


@app.command("bench")
def bench_command(
    context: typer.Context,
    suite: Annotated[str, typer.Argument(help="main, core, variants, a workload file or folder.")] = "main",
    only: Annotated[str | None, typer.Option("--only", help="Run rows whose name contains this.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Interleaved rounds per row.")] = 15,
    seconds: Annotated[float, typer.Option("--seconds", help="About so long for each of two timings of a row.")] = 30.0,
    peers: Annotated[str, typer.Option("--peers", help="all, none, or of flex,onnxruntime,openvino.")] = "all",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every number as JSON here.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the table as Markdown here.")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw the ratios here (PNG, SVG).")] = None,
    device: Annotated[str, typer.Option("--device", help="Run the ops on this device type instead.")] = "",
) -> None:
    """Ours beside torch's SDPA, its best forms by hand and other libraries, verified and interleaved in one run.

    Exit code 1: ours was wrong or failed, or a row could not be measured.
    """
    if suite in ("core", "variants"):
        from attn_dispatch.bench.suite import run_bench
        from attn_dispatch.errors import InputError

        if typed := _typed(context, "only", "rounds", "json_path"):
            meant = "; ".join(f"{flag} {_OF_WORKLOADS[flag]}" for flag in typed)
            problem = f"suite {suite} is of cases written by hand, and takes no {', '.join(typed)}: {meant}"
            raise InputError(problem, remedy="--only, --rounds and --json; or main, a workload file or folder")
        raise typer.Exit(run_bench(json_path, only, rounds, suite))
    from attn_dispatch.bench.main import Wanted, run_suite
    from attn_dispatch.bench.measure import Effort

    wanted = Wanted(json_path, markdown, picture)
    raise typer.Exit(run_suite(suite, only, Effort(rounds, seconds), peers, wanted, device))


_OF_WORKLOADS = {
    "--seconds": "limits the time of a workload's row",
    "--peers": "names the other libraries that run a workload's ops",
    "--markdown": "writes the table of a workload",
    "--picture": "draws the ratios of a workload",
    "--device": "moves the ops of a workload",
}


@app.command("tune")
def tune_command(
    workloads: Annotated[list[Path], typer.Argument(help="Workload files (dispatch.capture()), or folders of them.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Lock file to write, or to bring up to date.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure what the store has too.")] = False,
    device: Annotated[str, typer.Option("--device", help="Tune the ops for this device type instead.")] = "",
    compile_s: Annotated[float, typer.Option("--compile", help="Try backends that compile for so many seconds.")] = 0.0,
    limit_s: Annotated[float, typer.Option("--limit", help="Seconds for a candidate in its own process.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Measure the ops of workloads on this machine; Ctrl-C keeps what is done. Exit code 1: nothing was tuned."""
    from attn_dispatch.cli.tune import run
    from attn_dispatch.selection.tuner import Effort

    raise typer.Exit(run(workloads, out, Effort(limit_s=limit_s, compile_s=compile_s), force, device, as_json))


@app.command("conformance")
def conformance_command(
    name: Annotated[str, typer.Argument(help="The backend to prove.")],
    plugin: Annotated[str, typer.Option("--plugin", help="File or module of a plugin that is not installed.")] = "",
    only: Annotated[str, typer.Option("--only", help="Run cases whose id contains this.")] = "",
    attempts: Annotated[bool, typer.Option("--try/--no-try", help="Try what it refuses, to find hints.")] = True,
    as_json: AsJson = False,
) -> None:
    """The contract suite over one backend. Exit code 1: something is wrong or a lie; 3: nothing could be proven."""
    from attn_dispatch.cli.conformance import run

    raise typer.Exit(run(name, plugin, only, attempts, as_json))


app.add_typer(cache.app, name="cache")
app.add_typer(pins.app, name="pins")


if __name__ == "__main__":
    main()
