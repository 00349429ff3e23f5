"""The commands and their options. What they do lies in the modules beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prorl_env._version import __version__
from prorl_env.config import Paths

__all__ = ["app", "run"]

app = typer.Typer(
    name="prorl-env",
    help="Gymnasium environments for LLM agents, with every tool call in a rootless sandbox.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
image_app = typer.Typer(help="Images: the root directories that sandboxes run on.", no_args_is_help=True)
app.add_typer(image_app, name="image")

Runtime = Annotated[
    str, typer.Option(help="auto, apptainer, singularity, bubblewrap, or the address of a node server.")
]
Image = Annotated[str, typer.Option(help="A name in the image store, the path of a root directory, or auto.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line on standard output.")]
Model = Annotated[str | None, typer.Option(help="A local model folder or a hub name; by default the small demo model.")]
Concurrency = Annotated[int, typer.Option(help="Episodes that run at the same time.", min=1)]
MaxTurns = Annotated[int, typer.Option(help="Turns until an episode is cut off and graded with what there is.", min=1)]
MaxTokens = Annotated[int, typer.Option(help="Tokens that the model may write in one turn.", min=1)]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0.0)]
Examples = Annotated[
    bool, typer.Option(help="Show the tools by two solved problems instead of by schemas; small models need that.")
]
Seed = Annotated[int, typer.Option(help="Seed of the first episode; the others follow.", min=0)]
Name = Annotated[str | None, typer.Option(help="Name of the run; by default one with the time in it.")]
Out = Annotated[Path, typer.Option(help="Folder for runs.")]
PolicyName = Annotated[str, typer.Option(help="model, or reference: a script that computes the answer with the tools.")]


def run() -> int:
    """Run the command line and return its exit code.

    Raises:
        ProrlError: What a command raises; ``main`` prints it.
    """
    try:
        app()
    except SystemExit as end:
        if end.code == 130:
            raise KeyboardInterrupt from None
        return end.code if isinstance(end.code, int) else 1
    return 0


def _end(code: int) -> None:
    if code:
        raise typer.Exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"prorl-env {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    tasks: Annotated[int, typer.Option(help="How many of the sample tasks.", min=1, max=48)] = 16,
    policy: PolicyName = "model",
    model: Model = None,
    runtime: Runtime = "bubblewrap",
    image: Image = "auto",
    concurrency: Concurrency = 16,
    max_turns: MaxTurns = 4,
    max_tokens: MaxTokens = 96,
    temperature: Temperature = 0.3,
    examples: Examples = True,
    seed: Seed = 0,
    name: Name = None,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Let a small language model solve mathematics problems with real tools, and write a report."""
    from prorl_env.cli.run import RunOptions, run_tasks, sample

    options = RunOptions(
        env_id="ProRL/Math-v0",
        policy=policy,
        model=model,
        runtime=runtime,
        image=image,
        concurrency=concurrency,
        max_turns=max_turns,
        max_tokens=max_tokens,
        temperature=temperature,
        examples=examples,
        seed=seed,
        name=name,
        label="demo",
        out=out,
        as_json=as_json,
    )
    _end(run_tasks(sample(tasks), options))


@app.command()
def rollout(
    tasks: Annotated[Path | None, typer.Option(help="A JSON Lines file; by default the sample tasks.")] = None,
    env: Annotated[str, typer.Option(help="The environment's id.")] = "ProRL/Math-v0",
    limit: Annotated[int | None, typer.Option(help="Only the first so many tasks.", min=1)] = None,
    policy: PolicyName = "model",
    model: Model = None,
    runtime: Runtime = "auto",
    image: Image = "auto",
    concurrency: Concurrency = 8,
    max_turns: MaxTurns = 10,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 1.0,
    examples: Examples = False,
    seed: Seed = 0,
    name: Name = None,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Run one episode of each task of a file, and write trajectories and a report."""
    from prorl_env.cli.run import RunOptions, load, run_tasks

    options = RunOptions(
        env_id=env,
        policy=policy,
        model=model,
        runtime=runtime,
        image=image,
        concurrency=concurrency,
        max_turns=max_turns,
        max_tokens=max_tokens,
        temperature=temperature,
        examples=examples,
        seed=seed,
        name=name,
        label="rollout",
        out=out,
        as_json=as_json,
    )
    _end(run_tasks(load(tasks, limit), options))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Tell what works on this machine, what does not, and what to do about it."""
    from prorl_env.cli.doctor import diagnose

    _end(diagnose(Paths.from_env(), as_json=as_json))


@app.command()
def node(
    address: Annotated[
        str | None, typer.Option(help="ipc:///PATH or tcp://127.0.0.1:PORT; by default a socket in the run folder.")
    ] = None,
) -> None:
    """Run a node server until it is stopped; prints its address."""
    import asyncio

    from prorl_env.remote.node import run_node

    asyncio.run(run_node(Paths.from_env(), address=address, announce=lambda text: typer.echo(text)))


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="Which benchmark: step.")],
    as_json: Json = False,
    runtime: Runtime = "auto",
    image: Image = "auto",
) -> None:
    """Measure something beside the floor of the same run."""
    from prorl_env.cli.bench import run_bench

    run_bench(name, runtime=runtime, image=image, as_json=as_json)


@image_app.command("build")
def image_build(
    name: Annotated[
        str,
        typer.Argument(help="base (a small Debian with Python), or host (the host's /usr and a virtual environment)."),
    ],
    rebuild: Annotated[bool, typer.Option(help="Build it anew even if it is there.")] = False,
) -> None:
    """Build an image into the store; at once done if it is there."""
    from prorl_env.remote.images import ImageStore

    info = ImageStore(Paths.from_env().home).build(
        name, progress=lambda text: typer.echo(text, err=True), rebuild=rebuild
    )
    typer.echo(f"{info.name}: {info.path}")


@image_app.command("list")
def image_list(as_json: Json = False) -> None:
    """List the images of the store."""
    from prorl_env.cli.images import show_images

    show_images(Paths.from_env(), as_json=as_json)
