"""The day as a Dagster graph: every step of ``day.sh`` is an op, which runs in the directory RECPO_DAILY.

The gate refuses by its exit status: ``compare`` fails, and ``swap`` does not run.
"""

import os
import subprocess
from datetime import datetime
from pathlib import Path

from dagster import (
    DailyPartitionsDefinition,
    Definitions,
    In,
    Nothing,
    OpDefinition,
    OpExecutionContext,
    Out,
    build_schedule_from_partitioned_job,
    graph,
    op,
)

SCRIPT = Path(__file__).with_name("day.sh")
STEPS = ("extend", "warm_start", "evaluate", "export", "compare", "swap")


def op_of(step: str) -> OpDefinition:
    """The op that runs a step; every op but the first waits for the one before it."""

    @op(name=step, ins={} if step == STEPS[0] else {"before": In(Nothing)}, out=Out(Nothing))
    def run(context: OpExecutionContext) -> None:
        day = context.partition_key
        variables = {"DAY": day, "LOG": f"impressions/{day.replace('-', '')}T*.parquet"}
        command = ["bash", str(SCRIPT), step]
        subprocess.run(command, check=True, cwd=os.environ.get("RECPO_DAILY"), env=os.environ | variables)

    return run


@graph
def recpo_day() -> None:
    """Each step after the one before it."""
    done = op_of(STEPS[0])()
    for step in STEPS[1:]:
        done = op_of(step)(done)


job = recpo_day.to_job(partitions_def=DailyPartitionsDefinition(start_date=datetime(2025, 1, 1)))
#: An hour after midnight the server has published the day before (--outcome_window_s), which is the partition.
schedule = build_schedule_from_partitioned_job(job, hour_of_day=1)
definitions = Definitions(jobs=[job], schedules=[schedule])
