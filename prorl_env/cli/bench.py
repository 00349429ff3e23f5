"""``prorl-env bench``: run a benchmark and print its figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import import_module

from rich.console import Console
from rich.table import Table

from prorl_env.errors import ConfigError

__all__ = ["BENCHMARKS", "run_bench"]

BENCHMARKS = ("step",)


def run_bench(name: str, *, runtime: str, image: str, as_json: bool) -> None:
    """Run one benchmark.

    Raises:
        ConfigError: If there is none of that name.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"there is no benchmark {name!r}; there is {', '.join(BENCHMARKS)}")
    measurements = import_module(f"prorl_env.benchmarks.{name}").run(runtime=runtime, image=image)
    if as_json:
        for measurement in measurements:
            print(json.dumps(asdict(measurement)), flush=True)
        return
    table = Table("metric", "value", "floor", "unit", "note", box=None, pad_edge=False)
    for measurement in measurements:
        floor = "" if measurement.floor is None else f"{measurement.floor:.3f}"
        table.add_row(measurement.metric, f"{measurement.value:.3f}", floor, measurement.unit, measurement.note)
    Console().print(table)
