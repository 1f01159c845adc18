"""Trackers of services, with the real libraries on this disk, and the effect on training if one fails or hangs."""

from __future__ import annotations

import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError
from rayapp.runs.tracking import background
from rayapp.runs.tracking import trackers as module
from rayapp.runs.tracking.background import MAX_WAITING, BackgroundTracker, remembered_id
from rayapp.runs.tracking.trackers import RunTracker, flattened, make_trackers

METRICS = {"reward/mean": 0.5, "learner/entropy": float("nan")}


class Recording:
    """Records its calls; waits or fails when told to."""

    def __init__(self, first_step: int = 1) -> None:
        self.first_step = first_step
        self.steps: list[int] = []
        self.fails = False
        self.is_closed = False

    def log(self, step: int, metrics: object) -> None:
        if self.fails:
            raise ConnectionError("the service is away")
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


def chosen(*names: str, **settings: object) -> Config:
    return Config.model_validate({"tracking": {"trackers": list(names), **settings}})


def log_steps(config: Config, folder: Path, *steps: int) -> RunTracker:
    with make_trackers(config, SimpleNamespace(path=folder)) as tracker:  # type: ignore[arg-type]
        for step in steps:
            tracker.log(step, METRICS | {"step_is": float(step)})
    return tracker


def test_a_service_is_made_in_its_thread_for_the_first_step_and_closed_at_the_end() -> None:
    made: list[Recording] = []
    threads: list[str] = []

    def make(first_step: int) -> Recording:
        threads.append(threading.current_thread().name)
        made.append(Recording(first_step))
        return made[0]

    tracker = BackgroundTracker("fake", make)
    tracker.log(7, METRICS)
    tracker.log(8, METRICS)
    tracker.close()

    assert (len(made), made[0].first_step, made[0].steps, made[0].is_closed) == (1, 7, [7, 8], True)
    assert threads == ["tracker-fake"]


def test_a_service_that_hangs_makes_nobody_wait_and_is_told_at_the_end() -> None:
    answers = threading.Event()

    def hang(first_step: int) -> Recording:
        answers.wait()
        return Recording()

    tracker = BackgroundTracker("slow", hang, close_timeout_s=0.05)
    tracker.log(1, METRICS)
    tracker.log(2, METRICS)

    with pytest.raises(TimeoutError, match="slow did not record the last 2 steps"):  # the second record and the end
        tracker.close()
    answers.set()


def test_a_service_that_is_slow_but_works_is_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    may_write = threading.Semaphore(0)

    class Slow(Recording):
        def log(self, step: int, metrics: object) -> None:
            may_write.acquire()
            written.append(step)

    tracker = BackgroundTracker("slow", Slow, close_timeout_s=60.0)
    for step in range(10):
        tracker.log(step, METRICS)

    def join(timeout: float) -> None:
        """One record takes the whole deadline of a wait."""
        num_taken = tracker._num_taken
        may_write.release()
        while tracker._num_taken == num_taken and len(written) < 10:
            time.sleep(0.001)
        wait_for_end(timeout if len(written) == 10 else 0.0)

    wait_for_end = tracker._thread.join
    monkeypatch.setattr(tracker._thread, "join", join)
    tracker.close()

    assert written == list(range(10))


def test_records_that_nobody_takes_are_bounded() -> None:
    answers, begun = threading.Event(), threading.Event()

    def hang(first_step: int) -> Recording:
        begun.set()
        answers.wait()
        return Recording()

    tracker = BackgroundTracker("slow", hang, close_timeout_s=0.05)
    tracker.log(0, METRICS)
    begun.wait(30)
    for step in range(MAX_WAITING):
        tracker.log(step, METRICS)

    with pytest.raises(Exception, match=f"slow is too slow or hangs: .*because {MAX_WAITING} steps already wait"):
        tracker.log(MAX_WAITING, METRICS)
    answers.set()


def test_a_service_that_fails_is_told_once_counted_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    service, beside = Recording(), Recording()
    service.fails = True
    tracker = RunTracker({"fake": BackgroundTracker("fake", lambda _: service), "beside": beside}, None)

    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            tracker.log(step, METRICS)
        tracker.close()

    assert beside.steps == [1, 2, 3]
    assert [record.message for record in caplog.records] == [
        "tracker fake failed and may miss steps from now on: ConnectionError: the service is away"
    ]


def test_a_service_that_can_not_be_made_is_made_when_it_is_back() -> None:
    tries: list[int] = []

    def make(first_step: int) -> Recording:
        tries.append(first_step)
        if len(tries) == 1:
            raise ConnectionError("not yet")
        return Recording(first_step)

    tracker = BackgroundTracker("fake", make)
    tracker.log(1, METRICS)
    # The first record's failure is raised at the second, or at the end.
    try:
        tracker.log(2, METRICS)
        tracker.close()
    except ConnectionError:
        tracker.close()

    assert tries == [1, 2]


def test_a_missing_package_is_told_before_training_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "wandb" else object())

    with pytest.raises(ConfigError, match="pip install wandb, or remove these trackers"):
        module.check_packages(("console", "mlflow", "wandb"))


def test_the_configuration_is_flat_for_services() -> None:
    flat = flattened(chosen("jsonl").model_dump(mode="json"))

    assert flat["tracking.trackers"] == '["jsonl"]'
    assert flat["train.num_steps"] == "100"


def test_two_services_that_store_their_ids_at_once_are_both_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_write, write_text = threading.Event(), threading.Event(), background.write_text

    def slow(file: Path, text: str) -> None:
        if not is_writing.is_set():
            is_writing.set()
            may_write.wait(60)
        write_text(file, text)

    monkeypatch.setattr(background, "write_text", slow)
    with ThreadPoolExecutor(2) as threads:
        threads.submit(remembered_id, tmp_path, "a", lambda: "1")
        assert is_writing.wait(60)
        second = threads.submit(remembered_id, tmp_path, "b", lambda: "2")
        wait([second], timeout=0.2)  # without a lock it would be done now
        may_write.set()

    assert json.loads((tmp_path / background.FILE).read_text()) == {"a": "1", "b": "2"}


def test_tensorboard_has_every_step_and_those_of_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_steps(chosen("tensorboard"), tmp_path, 1, 2, 3)
    log_steps(chosen("tensorboard"), tmp_path, 2, 3, 4)

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("step_is")] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert "learner/entropy" not in events.Tags()["scalars"]  # not a number


@pytest.mark.slow
def test_mlflow_keeps_one_run_over_a_resume_with_the_settings_as_parameters(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    config = chosen("mlflow", project="my-project")
    log_steps(config, tmp_path, 1, 2)
    log_steps(config, tmp_path, 3)

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("my-project")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert (run.info.status, run.info.run_name) == ("FINISHED", tmp_path.name)
    assert run.data.params["train.num_steps"] == "100"


@pytest.mark.slow
def test_wandb_writes_offline_files_that_hold_the_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")

    tracker = log_steps(chosen("wandb"), tmp_path, 1, 2)

    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"reward/mean" in file.read_bytes()
    assert tracker._num_failed == {}
