"""The run folder: one owner, and no incomplete file that looks complete."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rayapp.config.config import Config, with_number_formats
from rayapp.core import timing
from rayapp.core.errors import RunFolderError, StorageFullError
from rayapp.core.files import explain_unwritable, write_text
from rayapp.core.timing import Profile, read_trace
from rayapp.runs.folder import RunFolder, note_machine
from rayapp.runs.profiles import write_profile
from rayapp.storage.folders import MANIFEST


def config(path: Path, **overrides: object) -> Config:
    sections: dict[str, object] = {"run": {"output_dir": str(path), "name": "r"}}
    for key, value in overrides.items():
        section, _, name = key.partition("__")
        sections[section] = {**sections.get(section, {}), name: value}  # type: ignore[dict-item]
    return Config.model_validate(sections)


def save(folder: RunFolder, version: int) -> Path:
    pending = folder.checkpoints.begin(version)
    (pending / "weights").write_bytes(b"w" * 100)
    folder.checkpoints.commit(version, next_group_id=2 * version)
    return folder.path / "checkpoints" / f"step={version:06d}"


def latest_version(folder: RunFolder) -> int | None:
    checkpoint = folder.checkpoints.latest()
    return checkpoint.version if checkpoint else None


def refused(config: Config, words: str) -> None:
    with pytest.raises(RunFolderError, match=words), RunFolder.open(config):
        pass


def test_a_second_run_in_the_same_folder_is_refused_with_the_first_ones_process_id(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from rayapp.config.config import Config; from rayapp.runs.folder import RunFolder\n"
        "with RunFolder.open(Config.model_validate({'run': {'output_dir': sys.argv[1], 'name': 'r'}})):\n"
        "    print('open', flush=True); sys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "open\n"
    with pytest.raises(RunFolderError, match=f"in use by the run with process id {first.pid}"):
        RunFolder.open(config(tmp_path)).__enter__()
    first.kill()  # the lock dies with its process
    first.communicate()
    with RunFolder.open(config(tmp_path)):
        pass


@pytest.mark.parametrize("damage", ["no manifest", "short file", "missing file", "torn manifest"])
def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    with RunFolder.open(config(tmp_path)) as folder:
        save(folder, 2)
        newest = save(folder, 4)
        match damage:
            case "no manifest":
                (newest / MANIFEST).unlink()
            case "short file":
                (newest / "weights").write_bytes(b"w")
            case "missing file":
                (newest / "weights").unlink()
            case "torn manifest":
                (newest / MANIFEST).write_text((newest / MANIFEST).read_text()[:20])
        assert latest_version(folder) == 2


def damaged(checkpoint: Path) -> None:
    """Replace bytes, keeping the length."""
    (checkpoint / "weights").write_bytes(b"x" * 100)


def test_a_damaged_checkpoint_is_refused_aloud_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunFolder.open(config(tmp_path)) as folder:
        save(folder, 4)
        damaged(save(folder, 6))
    for _ in range(2):  # the second start still says so
        caplog.clear()
        with RunFolder.open(config(tmp_path)) as folder:
            found = folder.checkpoints.verified()
            assert found is not None
            assert found.version == 4
            assert latest_version(folder) == 4  # no other run continues from it either
        (line,) = caplog.messages
        assert re.fullmatch(
            r"checkpoint .*step=000006 is refused: the checksum of weights is wrong; step=000004 is "
            "used instead",
            line,
        )


def test_a_refused_checkpoint_counts_neither_as_the_newest_nor_for_ever(tmp_path: Path) -> None:
    with RunFolder.open(config(tmp_path, checkpoint__keep_last=1)) as folder:
        save(folder, 4)
        (folder.path / "checkpoints" / "step=000004").rename(tmp_path / "four")
        damaged(save(folder, 6))
        (tmp_path / "four").rename(folder.path / "checkpoints" / "step=000004")
    with RunFolder.open(config(tmp_path, checkpoint__keep_last=1)) as folder:
        save(folder, 5)
        assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["step=000005"]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    with RunFolder.open(config(tmp_path)) as folder:
        (folder.path / "metrics.jsonl").write_text('{"step": 6}\n')
        damaged(save(folder, 6))
    refused(config(tmp_path), r"no checkpoint in .* can be used, and starting over would delete")
    assert (tmp_path / "r" / "metrics.jsonl").read_text() == '{"step": 6}\n'


def test_resume_must_needs_a_checkpoint_and_never_refuses_one(tmp_path: Path) -> None:
    refused(config(tmp_path, run__resume="must"), "has no complete checkpoint")
    with RunFolder.open(config(tmp_path)) as folder:
        save(folder, 1)
    refused(config(tmp_path, run__resume="never"), r"run\.resume is never")


@pytest.mark.parametrize(
    ("before", "changed", "words"),
    [
        ({}, {"learner__optimizer": {"lr": 0.5}}, r"learner\.optimizer\.lr: 1e-06 before, 0\.5 now"),
        ({}, {"distillation__teacher": "larger"}, r"distillation\.teacher: '' before, 'larger' now"),
        *(
            # The learning rate follows from the number of steps.
            (
                {"learner__optimizer": {"schedule": schedule}},
                {"train__num_steps": 999},
                rf"train\.num_steps: 100 before, 999 now \(learner\.optimizer\.schedule is {schedule}",
            )
            for schedule in ("cosine", "linear")
        ),
    ],
)
def test_going_on_with_another_training_names_the_key_and_both_values(
    tmp_path: Path, before: dict[str, object], changed: dict[str, object], words: str
) -> None:
    with RunFolder.open(config(tmp_path, **before)) as folder:
        save(folder, 1)
    refused(config(tmp_path, **before, **changed), words)


def test_a_resumed_run_forgets_the_steps_it_takes_again_and_a_line_that_was_cut_short(tmp_path: Path) -> None:
    with RunFolder.open(config(tmp_path)) as folder:
        lines = [json.dumps({"step": step, "reward/mean": 0.1}) for step in (1, 2, 3)]
        (folder.path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "rew')
        (folder.path / "trajectories").mkdir()
        for step in (1, 2, 3):
            (folder.path / "trajectories" / f"step={step:06d}.parquet").touch()
        folder.truncate_after(2)
        assert (folder.path / "metrics.jsonl").read_text() == "\n".join(lines[:2]) + "\n"
        assert len(list((folder.path / "trajectories").iterdir())) == 2

        # A last line that lost only its end is kept, and the next one is not glued to it.
        (folder.path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
        folder.truncate_after(2)
        assert (folder.path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_full_disk_gives_one_message_and_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    with RunFolder.open(config(tmp_path)) as folder:
        save(folder, 1)
        pending = folder.checkpoints.begin(2)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        # A limit on file sizes stands in for a disk without room: the same write fails at the same place.
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        try:
            with (
                pytest.raises(
                    StorageFullError, match=r"no space left to write .*step=000001, which is intact.* Free some"
                ),
                folder.explain_full_disk(pending),
            ):
                write_text(pending / "weights", "w" * 100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert latest_version(folder) == 1
        assert list(pending.iterdir()) == []  # the files that were begun are deleted too


def test_a_full_disk_before_the_first_checkpoint_promises_nothing(tmp_path: Path) -> None:
    words = "No space left on device.*There is no complete checkpoint yet: the next run starts over"
    with pytest.raises(StorageFullError, match=words), RunFolder.open(config(tmp_path)):
        Path("/dev/full").write_text("x")


def test_what_killed_writers_left_is_gone_when_the_run_starts_again(tmp_path: Path) -> None:
    left = [
        "checkpoints/.pending-000002/learner/weights", ".pending-final/model.safetensors", ".metrics.jsonl.pending",
        "trajectories/.pending-12ab-step=000003.parquet", "trajectories/.step=000002.parquet.pending",
        ".tmp-12ab-config.yaml", "trajectories/.tmp-12ab-step=000004.parquet",
    ]  # fmt: skip
    for name in left:
        (tmp_path / "r" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "r" / name).write_text("half")
    with RunFolder.open(config(tmp_path)) as folder:
        hidden = [path.name for path in folder.path.rglob(".*")]
    assert hidden == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EEXIST])
def test_a_folder_that_may_not_be_written_is_one_clear_error(number: int) -> None:
    with (
        pytest.raises(RunFolderError, match=r"can't be written: .* Choose a folder that this user may write"),
        explain_unwritable(Path("/somewhere")),
    ):
        raise OSError(number, os.strerror(number), "/somewhere/run.lock")


def test_a_run_is_finished_when_its_last_step_is_saved_and_exported(tmp_path: Path) -> None:
    with RunFolder.open(config(tmp_path, train__num_steps=4)) as folder:
        assert not folder.is_finished
        save(folder, 4)
        assert not folder.is_finished  # it died before the export
        with folder.pending_final() as pending:
            (pending / "model.safetensors").write_bytes(b"m")
        assert folder.is_finished
    with RunFolder.open(config(tmp_path, train__num_steps=6)) as folder:  # more steps are the same training
        assert latest_version(folder) == 4
        assert not folder.is_finished
        save(folder, 6)
        assert not folder.is_finished  # final/ is the model of step 4
        with folder.pending_final():
            pass
        assert folder.is_finished


def test_a_run_goes_on_with_other_servers_workers_and_learners_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunFolder.open(config(tmp_path)) as folder:
        save(folder, 2)
    with RunFolder.open(config(tmp_path, server__num_servers=2, rollout__num_workers=3, learner__num_learners=4)):
        assert "resumes with a changed server.num_servers: 1 before, 2 now" in caplog.text
        assert len(caplog.records) == 3


def test_another_learning_rate_is_refused_unless_it_is_meant(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunFolder.open(config(tmp_path)) as folder:
        save(folder, 2)
    new = {"learner__optimizer": {"lr": 3e-6}}
    refused(config(tmp_path, **new), r"run\.allow_changed='\[learner\.optimizer\.lr\]'")
    with RunFolder.open(config(tmp_path, **new, run__allow_changed=("learner.optimizer.lr",))):
        assert "a changed learner.optimizer.lr: 1e-06 before, 3e-06 now" in caplog.text


def test_a_run_that_goes_on_on_another_processor_says_that_its_bits_differ(tmp_path: Path) -> None:
    wide, narrow = (with_number_formats(Config.model_validate({"learner": {"compute_dtype": each}}), on_gpu=False)
                    for each in ("bfloat16", "float32"))  # fmt: skip
    notes: list[str] = []

    for config, processor in ((wide, "avx512_bf16"), (wide, "avx512_bf16"), (narrow, "avx2"), (narrow, "avx2")):
        note_machine(tmp_path, config, processor, note=notes.append)

    assert len(notes) == 1
    assert "processor avx512_bf16 before, avx2 now" in notes[0]
    assert "learner.compute_dtype bfloat16 before, float32 now" in notes[0]


def test_the_traces_of_a_step_are_in_its_folder(tmp_path: Path) -> None:
    write_profile(tmp_path, 7, [Profile(process=name, trace=name.encode(), covers="") for name in ("a", "b")])
    folder = tmp_path / "profiles" / "step=000007"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a.json.gz": b"a", "b.json.gz": b"b"}


def test_a_trace_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_MAX_TRACE_BYTES", 3)
    (file := tmp_path / "trace").write_bytes(b"abcd")
    with pytest.raises(ValueError, match="too large"):
        read_trace(file)
