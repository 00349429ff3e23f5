"""``prorl-env demo`` and ``prorl-env rollout``: episodes of many tasks, a table, trajectories and a report."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from prorl_env._version import __version__
from prorl_env.config import Paths, SandboxSpec
from prorl_env.envs.handler import TaskHandler
from prorl_env.envs.services import Services
from prorl_env.envs.tasks import load_tasks, sample_tasks
from prorl_env.errors import ConfigError
from prorl_env.llm import SamplingParams, TransformersBackend
from prorl_env.policies import ModelPolicy, Policy, ReferencePolicy
from prorl_env.registration import ENVIRONMENTS, TO_COME
from prorl_env.rollout import RolloutConfig, rollout
from prorl_env.trajectories import TrajectoryWriter
from prorl_env.types import Task, Trajectory
from prorl_env.viewer.report import write_report

__all__ = ["RunOptions", "load", "run_tasks", "sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the command line asks for."""

    env_id: str
    policy: str
    model: str | None
    runtime: str
    image: str
    concurrency: int
    max_turns: int
    max_tokens: int
    temperature: float
    examples: bool
    seed: int
    name: str | None
    label: str
    out: Path
    as_json: bool


def sample(count: int) -> tuple[Task, ...]:
    """``count`` of the sample tasks, spread evenly over their difficulties."""
    tasks = sample_tasks()
    return tuple(tasks[index * len(tasks) // count] for index in range(count))


def load(path: Path | None, limit: int | None) -> tuple[Task, ...]:
    """The tasks of a file, or the sample."""
    tasks = sample_tasks() if path is None else load_tasks(path)
    return tasks[:limit]


def run_tasks(tasks: tuple[Task, ...], options: RunOptions) -> int:
    """Run them all; prints a table or JSON lines, writes ``trajectories.jsonl`` and ``report.html``.

    Returns 1 if no episode at all came to a valid reward, else 0.

    Raises:
        UsageError, SetupError: If something that was asked for cannot be.
    """
    console = Console(stderr=options.as_json)
    handler = _handler(options.env_id, examples=options.examples)
    config = RolloutConfig(
        runtime=options.runtime,
        spec=SandboxSpec(image=options.image),
        max_turns=options.max_turns,
        concurrency=options.concurrency,
        seed=options.seed,
    )
    _check_policy(options)
    folder = _folder(options)
    began = time.monotonic()
    done: list[Trajectory] = []

    async def work() -> None:
        async with Services() as services, _policy(options, console) as policy:
            with TrajectoryWriter(folder / "trajectories.jsonl") as writer, _progress(console, len(tasks)) as progress:
                episodes = rollout(tasks, policy, handler=handler, services=services, config=config)
                async with contextlib.aclosing(episodes):
                    async for trajectory in episodes:
                        writer.write(trajectory)
                        done.append(trajectory)
                        if options.as_json:
                            print(json.dumps(_summary(trajectory)), flush=True)
                        progress.advance(progress.task_ids[0])

    try:
        asyncio.run(work())
    except BaseException:
        if done:
            _conclude(done, tasks, options, folder, console)
        else:
            with contextlib.suppress(OSError):
                (folder / "trajectories.jsonl").unlink(missing_ok=True)
                folder.rmdir()
        raise
    _conclude(done, tasks, options, folder, console)
    if not options.as_json:
        console.print(_verdict(done, time.monotonic() - began))
    return 0 if any(trajectory.reward is not None for trajectory in done) else 1


def _conclude(
    done: list[Trajectory], tasks: tuple[Task, ...], options: RunOptions, folder: Path, console: Console
) -> None:
    """Report what has been done, also when that is not all since something came in between."""
    order = {task.task_id: index for index, task in enumerate(tasks)}
    done.sort(key=lambda trajectory: order[trajectory.task_id])
    meta = {
        "Environment": options.env_id,
        "Sampling": f"temperature {options.temperature:g}, {options.max_tokens} tokens a turn, seed {options.seed}",
        "Turns": f"at most {options.max_turns}",
        "Version": f"prorl-env {__version__}",
    }
    if options.policy == "reference":
        del meta["Sampling"]
    created = datetime.now().astimezone().isoformat(" ", "seconds")
    write_report(folder / "report.html", done, title=folder.name, created=created, meta=meta)
    if not options.as_json:
        console.print(_table(done))
        for trajectory in done:
            if trajectory.reward is None:
                console.print(f"{trajectory.task_id}: {trajectory.detail}", markup=False)
    console.print(f"{folder / 'trajectories.jsonl'}\n{folder / 'report.html'}", highlight=False, soft_wrap=True)


def _handler(env_id: str, *, examples: bool) -> TaskHandler:
    entry = ENVIRONMENTS.get(env_id)
    if entry is None:
        known = ", ".join(ENVIRONMENTS)
        if env_id in TO_COME:
            raise ConfigError(f"{env_id} is not in version {__version__}; there is {known}.")
        raise ConfigError(f"There is no environment {env_id!r}; there is {known}.")
    module, _, name = entry.handler.partition(":")
    handler: TaskHandler = getattr(import_module(module), name)(examples=examples)
    return handler


def _check_policy(options: RunOptions) -> None:
    if options.policy not in ("model", "reference"):
        raise ConfigError(f"--policy is model or reference, not {options.policy!r}")


def _folder(options: RunOptions) -> Path:
    if options.name is not None and (
        not options.name or options.name != Path(options.name).name or options.name == ".."
    ):
        raise ConfigError(f"--name must be a plain folder name, not {options.name!r}")
    stem = options.name or f"{options.label}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        folder = options.out / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if options.name is not None or not options.out.is_dir():
                raise ConfigError(f"{folder} exists already; choose another --name or --out") from None
        except OSError as error:
            raise ConfigError(f"cannot make {folder}: {error.strerror}") from None
        else:
            return folder
    raise AssertionError


@contextlib.asynccontextmanager
async def _policy(options: RunOptions, console: Console) -> AsyncIterator[Policy]:
    if options.policy == "reference":
        yield ReferencePolicy()
        return
    from prorl_env.llm.demo_model import ensure_demo_model

    with console.status("Loading the model") as status:
        model = options.model
        if model is None:
            home = Paths.from_env().home
            model = str(await asyncio.to_thread(ensure_demo_model, home, progress=status.update))
        backend = await asyncio.to_thread(TransformersBackend.load, model, max_batch=options.concurrency)
    async with backend:
        params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature)
        yield ModelPolicy(backend, params, name=Path(model).name)


def _progress(console: Console, total: int) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty() and console.stderr)
    progress.add_task("Episodes", total=total)
    return progress


def _summary(trajectory: Trajectory) -> dict[str, object]:
    return {
        "task_id": trajectory.task_id,
        "reward": trajectory.reward,
        "outcome": str(trajectory.outcome),
        "turns": len(trajectory.turns),
        "tool_calls": trajectory.num_tool_calls,
        "detail": trajectory.detail,
        "seconds": {phase: round(seconds, 4) for phase, seconds in trajectory.seconds.items()},
    }


def _table(done: list[Trajectory]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("task", "turns", "tool calls", "reward", "outcome", "queued", "init", "run", "policy", "eval"):
        table.add_column(name, justify="left" if name in ("task", "outcome") else "right")
    for trajectory in done:
        seconds = [f"{trajectory.seconds.get(phase, 0.0):.1f}" for phase in ("queued", "init", "run", "policy", "eval")]
        reward = "-" if trajectory.reward is None else f"{trajectory.reward:g}"
        colour = {None: "yellow", 0.0: "red"}.get(trajectory.reward, "green")
        table.add_row(
            trajectory.task_id,
            str(len(trajectory.turns)),
            str(trajectory.num_tool_calls),
            f"[{colour}]{reward}[/]",
            str(trajectory.outcome),
            *seconds,
        )
    return table


def _verdict(done: list[Trajectory], seconds: float) -> str:
    solved = sum(trajectory.reward == 1.0 for trajectory in done)
    broken = sum(trajectory.reward is None for trajectory in done)
    text = f"{solved} of {len(done)} solved in {seconds:.0f} s"
    return text + (f"; {broken} without a valid reward" if broken else "")
