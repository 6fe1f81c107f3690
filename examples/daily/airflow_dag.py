"""The day as an Airflow DAG: every step of ``day.sh`` is a task, which runs in the directory RECPO_DAILY.

The gate refuses by its exit status: ``compare`` fails, and ``swap`` does not run.
"""

import os
from datetime import datetime
from pathlib import Path

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, CronDataIntervalTimetable, chain

SCRIPT = Path(__file__).with_name("day.sh")
STEPS = ("extend", "warm_start", "evaluate", "export", "compare", "swap")

#: An hour after midnight the server has published the day before (--outcome_window_s); `ds` is that day.
SCHEDULE = CronDataIntervalTimetable("0 1 * * *", timezone="UTC")

with DAG("recpo_day", schedule=SCHEDULE, start_date=datetime(2025, 1, 1), catchup=False, max_active_runs=1):
    tasks = [
        BashOperator(
            task_id=step,
            bash_command=f"bash '{SCRIPT}' {step}",
            cwd=os.environ.get("RECPO_DAILY"),
            env={"DAY": "{{ ds }}", "LOG": "impressions/{{ ds_nodash }}T*.parquet"},
            append_env=True,
        )
        for step in STEPS
    ]
    chain(*tasks)
