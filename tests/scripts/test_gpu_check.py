"""The check of a GPU: how a session measures its parts, and the parts at a tiny size."""

import json
import os
import signal
import sys
import time
import weakref
import zipfile

import checked_gpu
import forked
import pytest
import torch

REAL = ("sd35-medium", "flux1-dev", "wan21-1.3b", "llada-8b")


@pytest.fixture
def check(script):
    return script("gpu_check")


@pytest.fixture
def session(check):
    """Measure parts in a folder; return what the file then holds."""

    def measured(file, parts, *, minutes=1.0, **options):
        every = [check.Part(name, seconds, measure, gpu=False) for name, (seconds, measure) in parts.items()]
        check.run(every, check.Results(file), minutes=minutes, **options)
        return json.loads(file.read_text())["parts"]

    return measured


def counting(place, value):
    """A measurement that tells in a file how often it was made."""

    def measure():
        place.write_text(place.read_text() + "x" if place.exists() else "x")
        return {"value": value}

    return measure


def raising():
    raise ValueError("this model\n  has no rows")


def test_results_are_kept_and_not_measured_again(session, tmp_path):
    file, counts = tmp_path / "found.json", [tmp_path / name for name in ("a", "b", "c")]
    first = {"a": (1, counting(counts[0], 1)), "b": (1, raising), "c": (1, counting(counts[2], 3))}
    told = session(file, first)
    assert {name: each.get("found") for name, each in told.items()} == {"a": {"value": 1}, "b": None, "c": {"value": 3}}
    assert told["b"]["error"] == "ValueError: this model has no rows"
    later = {**first, "b": (1, counting(counts[1], 2))}
    assert session(file, later) == told
    assert session(file, later, again=True)["b"]["found"] == {"value": 2}
    assert [place.read_text() for place in counts] == ["x", "x", "x"]


def test_a_part_begins_only_if_its_time_fits(session, tmp_path, capfd):
    file = tmp_path / "found.json"
    told = session(file, {"long": (61, dict), "short": (1, dict)}, minutes=1.0)
    assert list(told) == ["short"]
    assert "long: left for the next call, 61 seconds do not fit" in capfd.readouterr().out
    assert list(session(file, {"long": (61, dict)}, minutes=2.0)) == ["short", "long"]


def test_the_end_of_the_time_cuts_a_part_off_and_the_next_call_measures_it(session, tmp_path):
    file, count = tmp_path / "found.json", tmp_path / "count"

    def slow_once():
        if not count.exists():
            count.write_text("x")
            time.sleep(60)
        return {"value": 1}

    begun = time.monotonic()
    assert session(file, {"slow": (0, slow_once)}, minutes=1 / 60) == {}
    assert time.monotonic() - begun < 20
    assert session(file, {"slow": (0, slow_once)})["slow"]["found"] == {"value": 1}


def test_the_others_go_on_after_a_part_that_ends_its_process(session, tmp_path):
    told = session(
        tmp_path / "found.json",
        {"bad": (1, lambda: os.kill(os.getpid(), signal.SIGKILL)), "good": (1, lambda: {"value": 1})},
    )
    assert told["bad"]["error"] == "its process ended with status -9"
    assert told["good"]["found"] == {"value": 1}


def test_a_gpu_that_answers_no_more_gets_a_new_process(session, tmp_path):
    place = tmp_path / "pid"

    def broken():
        place.write_text(str(os.getpid()))
        torch.cuda.is_available, torch.cuda.synchronize = lambda: True, raising_in_cuda
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def raising_in_cuda():
        raise RuntimeError("CUDA error")

    told = session(tmp_path / "found.json", {"bad": (1, broken), "good": (1, lambda: {"pid": os.getpid()})})
    assert told["bad"]["error"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert told["good"]["found"]["pid"] != int(place.read_text())


def test_a_part_that_hangs_is_ended(session, tmp_path, monkeypatch):
    monkeypatch.setattr("gpu_parts.session.MORE", 1)
    told = session(tmp_path / "found.json", {"bad": (0, lambda: time.sleep(60)), "good": (0, dict)})
    assert told["bad"]["error"] == "it took longer than 1 seconds"
    assert "found" in told["good"]


def test_a_part_under_way_when_all_was_killed_has_failed(session, check, tmp_path):
    file = tmp_path / "found.json"
    check.Results(file).begin("bad")
    told = session(file, {"bad": (1, dict), "good": (1, dict)})
    assert told["bad"]["error"] == "the command was killed while this was measured"
    assert "found" in told["good"]


def test_what_needs_a_gpu_is_left_out_without_one(check, tmp_path, capfd):
    file = tmp_path / "found.json"
    assert check.main(["--only", "machine", "--json", str(file)]) == 0
    assert "machine: left out, it needs a GPU" in capfd.readouterr().out
    assert not check.Results(file).read()["parts"]


def test_the_small_form_has_the_parts_of_the_real_one(check):
    real, small = ([part.name for part in check.parts(shrunk=shrunk)] for shrunk in (False, True))
    assert {part.gpu for part in check.parts(shrunk=False) if "plan" not in part.name} == {True}
    assert {"CUDA graphs" in part.name for part in check.parts(shrunk=True) if part.gpu} == {True}
    assert len(set(real)) == len(real)
    assert real[:3] == ["machine", "shapes, float32: log ratio", "shapes, bfloat16: log ratio"]
    levers = {f"{name}: {lever}" for name in REAL[:3] for lever in ("eager", "kept graphs", "CUDA graphs", "compiled")}
    levers |= {"sd35-medium: compiled", "llada-8b: eager", "llada-8b: dual cache"}
    for names in (real, small):
        assert {name.partition(",")[0] for name in names if name.endswith("rows") and "attention" not in name} == levers
        assert [name for name in names if name.endswith(": plan")] == [f"{name}: plan" for name in REAL]
        finishes = [f"{name}: finish{compiled}" for name in REAL[:3] for compiled in ("", " compiled")]
        assert [name for name in names if ": finish" in name] == finishes
    assert "flux1-dev: attention _native_cudnn, 8 rows" in real


def measured(only, folder):
    """Measure parts at a tiny size; return the file of the results, and what was printed."""
    file, said = folder / "found.json", folder / "said"
    process = forked.process(checked_gpu.measured, ["--shrunk", "--only", only, "--json", str(file)], str(said))
    process.join()
    assert process.exitcode == 0
    return file, said.read_text()


def test_correctness_at_a_tiny_size(check, tmp_path):
    file, said = measured("small SD3", tmp_path)
    told = {name: each["found"] for name, each in check.Results(file).read()["parts"].items()}
    ratios = told["small SD3, float32: log ratio"]
    assert ratios["same_calls"] == 0
    assert ratios["other_calls"] < 1e-6
    assert told["small SD3, bfloat16: log ratio"]["same_calls"] == 0
    resumed = told["small SD3, float32: killed and resumed"]
    assert (resumed["equal"], resumed["largest_difference"]) == (True, 0)
    assert told["small SD3, float32: compiled"]["velocity"] == 0
    assert "| small SD3 | float32 | killed and resumed | equal True, largest difference 0 |" in said


def test_cuda_graphs_at_a_tiny_size(tmp_path):
    process = forked.process(checked_gpu.captured, str(tmp_path / "found"))
    process.join()
    assert process.exitcode == 0
    correct, fast = json.loads((tmp_path / "found").read_text())
    assert correct["same_calls"] == 0
    assert fast["log_ratio"] == 0


@pytest.mark.parametrize("model", ["sd35-medium", "llada-8b"])
def test_speed_and_plan_at_a_tiny_size(check, tmp_path, model):
    file, said = measured(model, tmp_path)
    flow = model != "llada-8b"
    told = {name: each["found"] for name, each in check.Results(file).read()["parts"].items()}
    plan = told.pop(f"{model}: plan")
    assert plan["samples"] == 2
    for finish in (told.pop(name) for name in list(told) if "finish" in name):
        whole, *low = finish["layers"].values()
        assert list(finish["layers"]) == ["float32", "int8", "fp8"]
        assert (whole["drift"], whole["gib"]) == (0, None)
        assert all(0 < each["drift"] < 0.2 and each["seconds"] > 0 for each in low)
    for name, found in told.items():
        phases = {"rollout", "update"} | ({"decode"} if flow else set())
        phases |= set() if "cache" in name else {"forward", "backward"}
        phases |= {"beside"} if flow else set()
        assert found.keys() == {"kind", "model", "lever", "rows", "warm_up", "log_ratio", *phases}
        assert all(found[phase].keys() == {"seconds", "host", "gib"} for phase in phases)
        assert all(found[phase]["seconds"] > 0 and found[phase]["gib"] is None for phase in phases)
        assert found["log_ratio"] == (0 if flow else None)
    one, two = plan["rows"]["1"], plan["rows"]["2"]
    assert one["operations"] == two["operations"]  # of the same samples, in more calls
    assert one["seconds"]["h200"]["update"] == 2 * two["seconds"]["h200"]["update"]  # launches take it
    assert f"| eager | 2 | {told[f'{model}: eager, 2 rows']['rollout']['seconds']:.3f} |  |" in said


def test_the_page_has_shares_and_ratios(check, tmp_path, capsys):
    timed = {"seconds": 2.0, "host": 0.5, "gib": 30.0}
    phases = dict.fromkeys(("rollout", "update", "decode", "forward", "backward", "beside"), timed)
    speed = {
        "kind": "speed",
        "model": "m",
        "lever": "kept graphs",
        "rows": 4,
        "warm_up": 9.0,
        "log_ratio": 1e-4,
        **phases,
    }
    counted = {"rollout": 989e12, "update": 2 * 989e12, "decode": 98.9e12}
    seconds = {"h200": {"rollout": 1.0, "update": 4.0, "decode": 1.0}}
    rows = {"4": {"operations": counted, "launches": 5000, "seconds": seconds, "gib": 20.0, "graphs_gib": 5.0}}
    plan = {"kind": "plan", "model": "m", "dtype": "bfloat16", "rows": rows}
    parts = {
        "machine": {"found": {"kind": "machine", "gpu": "NVIDIA H200", "type": "h200"}},
        "speed": {"found": speed},
        "plan": {"found": plan},
        "bad": {"error": "ValueError: no rows"},
    }
    layers = {"bfloat16": {**timed, "drift": 0.0}, "int8": {**timed, "seconds": 1.5, "drift": 0.01}}
    layers["fp8"] = {"error": "no fp8 here"}
    finish = {"kind": "finish", "model": "m", "rows": 8, "compiled": True, "layers": layers}
    parts["finish"] = {"found": finish}
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"parts": parts, "under_way": None}))
    assert check.main(["--show", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gpu NVIDIA H200, type h200"
    # 989e12 operations in 2 s are half of 989 TFLOP/s; 30 GiB are 1.2 of 20 and 5.
    assert (
        "| kept graphs | 4 | 2.000 | 50% | 2.00 | 2.000 | 100% | 0.50 | 2.000 | 5% | 30.0 | 1.20 | 1.0e-04 |" in lines
    )
    assert "| m, kept graphs, 4 | 2000.0 | 500.0 | 100.0 | 2000.0 | 500.0 | 500.0 | 0.50 | 9.0 |" in lines
    assert "| m, 8, compiled | int8 | 1.500 | 0.75 | 0.500 | 30.0 | 1.0e-02 |" in lines
    assert "| m, 8, compiled | fp8 | no fp8 here |  |  |  |  |" in lines
    assert lines[-1] == "- bad: ValueError: no rows"


def test_a_model_is_built_once_and_freed_before_another_is_built(check):
    from gpu_parts import iteration

    class Model:
        pass

    model = iteration.build_once("one", Model)
    one = weakref.ref(model)
    assert iteration.build_once("one", Model) is model
    model = None
    assert isinstance(iteration.build_once("other", lambda: one() or Model()), Model)
    assert one() is None
    iteration.forget()


def test_packages_and_wheels_come_first(check, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "carried_folder.py").write_text("")
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_wheel/__init__.py", "")
    with check.packages(tmp_path):
        assert check.importlib.util.find_spec("carried_folder")
        assert check.importlib.util.find_spec("carried_wheel")


@pytest.mark.parametrize(
    ("device", "known"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_a_gpu_is_known_by_a_word_of_its_name(check, monkeypatch, device, known):
    from gpu_parts import iteration

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    assert iteration.gpu_type() == known


@pytest.mark.parametrize("words", [["--only", "nothing"], ["--show", "missing.json"], ["--packages", "missing"]])
def test_wrong_arguments_are_refused(check, words, capsys):
    with pytest.raises(SystemExit) as ended:
        check.main(words)
    assert ended.value.code == 2
    assert words[1] in capsys.readouterr().err
