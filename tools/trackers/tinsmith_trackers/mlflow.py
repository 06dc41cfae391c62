"""MLflow: a run with the same steps and times, found again by a tag. `MLFLOW_TRACKING_URI` says where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tinsmith_trackers.tracker import Destination, Run, RunLog, Tracker

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

_RUN_TAG: Final = "tinsmith.run_id"
_MOST_METRICS: Final = 1000  # of one request


class MlflowTracker(Tracker):
    def __init__(self, destination: Destination) -> None:
        from mlflow import MlflowClient

        super().__init__(destination)
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(destination.project)
        self._experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(destination.project)
        )

    @property
    def place(self) -> str:
        return f"{self._client.tracking_uri} {self.destination.project}"

    def open(self, run: Run) -> RunLog:
        return _MlflowRun(self._client, self._continued(run) or self._created(run))

    def _continued(self, run: Run) -> str | None:
        found = self._client.search_runs([self._experiment_id], f"tags.`{_RUN_TAG}` = '{run.run_id}'", max_results=1)
        if not found:
            return None
        mlflow_id = str(found[0].info.run_id)
        self._client.update_run(mlflow_id, status="RUNNING")
        return mlflow_id

    def _created(self, run: Run) -> str:
        tags = {_RUN_TAG: run.run_id, **{f"tinsmith.tag.{tag}": "true" for tag in run.tags}}
        created = self._client.create_run(
            self._experiment_id, start_time=round(run.created_s * 1000), tags=tags, run_name=run.name
        )
        mlflow_id = str(created.info.run_id)
        for name, value in run.about.items():
            self._client.log_param(mlflow_id, name, value)
        return mlflow_id


class _MlflowRun(RunLog):
    def __init__(self, client: MlflowClient, mlflow_id: str) -> None:
        self._client = client
        self._id = mlflow_id
        self._waiting: list[Metric] = []

    def log(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        time_ms = round(time_s * 1000)
        self._waiting += [Metric(name, value, time_ms, step) for name, value in values.items()]

    def flush(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:_MOST_METRICS])
            del self._waiting[:_MOST_METRICS]

    def close(self, *, ended: bool) -> None:
        self.flush()
        if ended:
            self._client.set_terminated(self._id)
