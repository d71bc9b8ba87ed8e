"""Telemetry: files that survive kills and resumes, trackers that cannot stop a run, lines fit for 80 columns."""

from __future__ import annotations

import io
import json
import math
import sys
import types

import pytest
from rich.console import Console

from loopscale.config import Config
from loopscale.train.console import ConsoleLine, root_mean_square
from loopscale.train.sinks import Journal, MetricsLog, Sink, TensorBoard, Tracker, scalars
from loopscale.train.telemetry import Telemetry, new_run_id


def record(step: int, **changes) -> dict:
    return {
        "step": step,
        "loss": 5.214,
        "perplexity": 183.8,
        "lr": 1e-3,
        "tokens": step * 2048,
        "tokens_per_s": 2912.0,
        "matmul_share": 0.81,
        "elapsed": step * 0.7,
        "depths": [5, 3, 7, 4],
        "grad_norm": 0.91,
        "state_norm": [11.0, 11.5],
        "state_norm_p99": [14.0, 14.5],
        "state_change": [None, 0.3],
        "state_converged": [None, 0.1],
        "skipped": 0,
        "busy": [0.61, 0.64],
        "memory": {"parameters": [2**28, 2**29], "peak": [2**30, 3 * 2**28]},
    } | changes


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def shown(console: Console) -> str:
    return console.file.getvalue()


@pytest.fixture
def wandb_stub(monkeypatch):
    """An offline stand-in for wandb: keeps what it is given, as one service would."""

    class Run:
        def __init__(self):
            self.logged, self.metrics, self.finished = [], [], False

        def define_metric(self, name, step_metric=None):
            self.metrics.append((name, step_metric))

        def log(self, values):
            self.logged.append(values)

        def finish(self):
            self.finished = True

    stub = types.ModuleType("wandb")
    stub.runs, stub.arguments = {}, []

    class Settings:
        model_fields = ("finish_timeout",)

        def __init__(self, **values):
            self.values = values

    def init(**arguments):
        stub.arguments.append(arguments)
        return stub.runs.setdefault(arguments["id"], Run())

    stub.Settings, stub.init = Settings, init
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return stub


def test_resume_below_the_last_logged_step_is_one_run_without_duplicates(tmp_path, wandb_stub):
    config, run_id = Config(), new_run_id()
    first = Telemetry.open(tmp_path, config, run_id=run_id, console=quiet())
    for step in range(10, 60, 10):
        first.log(record(step))
    first.event("saved", 30, "checkpoints/step-30")
    del first  # killed: nothing is closed

    second = Telemetry.open(tmp_path, config, run_id=run_id, resumed_step=30, console=quiet())
    second.event("resumed", 30, "from step-30")
    for step in range(40, 80, 10):
        second.log(record(step, loss=4.0))
    second.close()

    metrics = lines(tmp_path / "metrics.jsonl")
    assert [each["step"] for each in metrics] == [10, 20, 30, 40, 50, 60, 70]
    assert [each["loss"] for each in metrics[3:]] == [4.0] * 4
    assert [each["kind"] for each in lines(tmp_path / "journal.jsonl")] == ["saved", "resumed"]
    assert list(wandb_stub.runs) == [run_id]
    assert {arguments["resume"] for arguments in wandb_stub.arguments} == {"allow"}
    run = wandb_stub.runs[run_id]
    assert ("*", "step") in run.metrics and run.finished
    assert run.logged[-1]["step"] == 70 and run.logged[-1]["state_norm/last"] == 11.5


def test_real_wandb_offline_and_tensorboard_write_into_the_run_folder(tmp_path):
    telemetry = Telemetry.open(tmp_path, Config(), run_id="abc12345", console=quiet())
    telemetry.log(record(10, validation={"1": 5.5, "5": 5.2}))
    telemetry.close()
    assert not (tmp_path / "journal.jsonl").read_text()
    assert list((tmp_path / "wandb").glob("offline-run-*-abc12345/run-abc12345.wandb"))
    assert list((tmp_path / "events").glob("events.out.tfevents.*"))


def test_tensorboard_purges_what_was_after_the_resumed_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, steps, loss in ((0, (10, 20, 30), 5.0), (20, (30, 40), 4.0)):
        sink = TensorBoard(tmp_path, resumed)
        sink.start()
        for step in steps:
            sink.log(record(step, loss=loss))
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(10, 5.0), (20, 5.0), (30, 4.0), (40, 4.0)]


@pytest.mark.parametrize("tail", ['{"step": 40, "lo', "\0\0\0\0", '[1]\n{"loss": 3}\n', '{"step": 40}'])
def test_metrics_are_cut_at_the_resumed_step_whatever_a_kill_left(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (10, 20, 30)) + tail)
    log = MetricsLog(path, resumed_step=20)
    log.start()
    log.log({"step": 30, "loss": 1.0})
    log.close()
    assert lines(path) == [{"step": 10}, {"step": 20}, {"step": 30, "loss": 1.0}]
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_forgets_a_file_of_an_older_one_and_a_whole_file_is_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10}\n')
    before = path.stat().st_ino
    log = MetricsLog(path, resumed_step=10)
    log.start()
    log.close()
    assert path.stat().st_ino == before
    log = MetricsLog(path)
    log.start()
    log.close()
    assert path.read_text() == ""


def test_every_line_is_on_disk_at_once(tmp_path):
    telemetry = Telemetry([MetricsLog(tmp_path / "metrics.jsonl"), Journal(tmp_path / "journal.jsonl")])
    telemetry.log(record(10))
    telemetry.event("warning", 10, "grösser\nwith a remedy")
    assert lines(tmp_path / "metrics.jsonl")[0]["step"] == 10
    event = lines(tmp_path / "journal.jsonl")[0]
    assert event | {"time": ""} == {"time": "", "kind": "warning", "step": 10, "message": "grösser\nwith a remedy"}
    telemetry.close()


def test_the_journal_mends_a_half_written_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"kind": "saved"}\n{"kind": "sav')
    telemetry = Telemetry([Journal(path)])
    telemetry.event("resumed", 1, "")
    telemetry.close()
    assert [each["kind"] for each in lines(path)] == ["saved", "resumed"]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    telemetry = Telemetry([MetricsLog(tmp_path / "metrics.jsonl")])
    telemetry.log(record(10, loss=math.nan, state_norm=[1.0, math.inf], validation={"1": math.nan}))
    telemetry.close()
    (written,) = lines(tmp_path / "metrics.jsonl")
    assert written["loss"] is None and written["state_norm"] == [1.0, None] and written["validation"] == {"1": None}


class Failing(Sink):
    """Fails at one of its methods."""

    def __init__(self, method: str):
        self.calls = 0

        def fail(*arguments):
            self.calls += 1
            raise OSError("the service is gone\nlong story")

        setattr(self, method, fail)


@pytest.mark.parametrize("method", ["start", "log", "event", "advance", "close"])
def test_a_failing_tracker_is_switched_off_with_one_warning(tmp_path, method):
    failing, console = Failing(method), quiet()
    telemetry = Telemetry([Journal(tmp_path / "journal.jsonl"), ConsoleLine(console, 100, 4), failing])
    for step in (1, 2):
        telemetry.advance(step)
        telemetry.log(record(step))
        telemetry.event("saved", step, "checkpoint")
    telemetry.close()
    warnings = [each["message"] for each in lines(tmp_path / "journal.jsonl") if each["kind"] == "warning"]
    assert warnings == ["Failing is off for the rest of this run; metrics.jsonl goes on (the service is gone)"]
    assert failing.calls == 1 and "! Failing is off" in shown(console)


def test_a_missing_or_broken_wandb_does_not_stop_a_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes `import wandb` fail
    telemetry = Telemetry([Journal(tmp_path / "journal.jsonl"), Tracker(tmp_path, "id", "offline", "p", {})])
    telemetry.log(record(1))
    telemetry.close()
    assert "Tracker is off" in lines(tmp_path / "journal.jsonl")[0]["message"]


def test_failing_to_write_the_truth_is_a_failure_of_the_run(tmp_path):
    with pytest.raises(FileNotFoundError):
        Telemetry([MetricsLog(tmp_path / "missing" / "metrics.jsonl")])


def test_ranks_that_do_not_log_say_nothing(capsys):
    silent = Telemetry()
    silent.log(record(1))
    silent.event("saved", 1, "")
    silent.advance(1)
    silent.close()
    assert capsys.readouterr() == ("", "")


def test_trackers_follow_the_config(tmp_path, wandb_stub):
    config = Config.model_validate({"log": {"wandb": "disabled", "tensorboard": False}})
    telemetry = Telemetry.open(tmp_path, config, run_id="id", console=quiet())
    telemetry.close()
    assert not wandb_stub.arguments and not (tmp_path / "events").exists()


def test_scalars_are_flat_and_hold_no_gaps():
    flat = scalars({"step": 3, "loss": None, "depths": [1, 2], "state_norm": [], "skipped": 0, "validation": {"5": 2.0}})
    assert flat == {"depth": 1.5, "skipped": 0, "validation/depth_5": 2.0}
    assert scalars({"prior": {"mean": 5.0, "entropy": 2.25, "probabilities": [0.5, 0.5]}}) == {
        "prior/mean": 5.0,
        "prior/entropy": 2.25,
    }
    assert scalars({"state_norm": [1.0, None]}) == {"state_norm/first": 1.0}
    assert scalars({"busy": [0.3, 0.9, 0.2]}) == {"busy/least": 0.2, "busy/most": 0.9}
    assert scalars({"memory": {"peak": [3, 7, 5], "buffers": [0, 0, 0]}}) == {"memory/peak": 7, "memory/buffers": 0}
    found = {"depth": 5, "truncation": {"1": {"error": 0.15, "cosine": 0.99}}, "change": [None, 0.1], "converged": [None, 0.9]}
    told = {"equilibrium/error_1": 0.15, "equilibrium/converged": 0.9}
    assert scalars({"equilibrium": found}) == told
    assert scalars({"equilibrium": found | {"contraction": 0.8}}) == told | {"equilibrium/contraction": 0.8}
    seen = {"depth": 2, "norms": {"mean": [1.0, 2.0]}, "depth_gap": 1.5, "token_correlation": 0.25, "loss": 3.0}
    told = {"scale/depth_gap": 1.5, "scale/token_correlation": 0.25}
    assert scalars({"scale": seen}) == told
    more = {"radial_fraction": [0.1, 0.2], "clamp": {"rms": 0.01, "radial": 0.02}}
    told |= {"scale/radial_fraction": 0.2, "scale/clamp_rms": 0.01, "scale/clamp_radial": 0.02}
    assert scalars({"scale": seen | more}) == told


# --- console ---------------------------------------------------------------------------------------------------------


def test_the_piped_line():
    console = Console(file=io.StringIO(), width=80)
    sink = ConsoleLine(console, 500, 128)
    sink.start()
    sink.log(record(100))
    assert shown(console) == (
        " step   100/500  20%  loss 5.214  ppl 183.8  depth 4.8  |h| 1.02  grad 0.91"
        "  2.91k tok/s  mm 81%  0:01:10 elapsed  0:04:40 left\n"
    )


def test_time_left_is_at_the_pace_since_the_resume():
    console = quiet()
    sink = ConsoleLine(console, 500, 128)
    sink.log(record(100, elapsed=1000.0))
    sink.log(record(200, elapsed=1100.0))
    assert shown(console).splitlines()[1].endswith("0:05:00 left")


def test_missing_values_validation_skips_and_events():
    console = quiet()
    sink = ConsoleLine(console, 500, 128)
    sink.log({"step": 1, "loss": None})
    sink.log(record(2, skipped=3, matmul_share=None, validation={"1": math.log(231), "10": None, "64": 1e4}))
    sink.event({"kind": "saved", "message": "checkpoints/step-2 (22 MB) [bold]"})
    sink.event({"kind": "warning", "message": "blind spot"})
    sink.event({"kind": "start", "message": "data     sotu"})
    first, second, validation, saved, warning, banner = shown(console).splitlines()
    assert "loss –" in first and "– left" in first
    assert "skipped 3" in second and "mm" not in second
    assert validation.startswith(" val      2  ppl@1 231.0  @10 –  @64 1.0e+304")
    assert saved == " saved  checkpoints/step-2 (22 MB) [bold]" and warning == "! blind spot"
    assert banner == "data     sotu"


def test_a_terminal_of_80_columns_keeps_the_essential_and_a_live_bar(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard", record=True)
    sink = ConsoleLine(console, 500, 128)
    sink.start()
    sink.log(record(100))
    sink.advance(101)
    sink.close()
    line = next(line for line in console.export_text().splitlines() if "step" in line)
    assert line[line.index(" step") :].rstrip() == " step   100/500  20%  loss 5.214  ppl 183.8  depth 4.8  |h| 1.02  grad 0.91"
    assert "100/500" in shown(console) and "0:04:40 left" in shown(console)


def test_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    sink = ConsoleLine(console, 500, 128)
    sink.event({"kind": "warning", "message": "careful"})
    assert "\x1b[3" not in shown(console)


def test_root_mean_square():
    assert root_mean_square(8.0, 16) == 2.0
    assert root_mean_square(None, 16) is None
