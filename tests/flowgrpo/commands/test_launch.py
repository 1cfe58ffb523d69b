"""Several processes of one command, and what accelerate would set for them."""

import json
import subprocess
import sys
from pathlib import Path

import forked
import meeting
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from runs import background, interpreter, metrics, weights

from flowgrpo.cli import main
from flowgrpo.commands import launch
from flowgrpo.errors import InputError
from flowgrpo.training.reports.tree_store import TreeFolder

ROOT = Path(__file__).parents[3]


def test_processes_meet_on_loopback_alone(tmp_path):
    process = forked.Command([], {}, tmp_path, run=meeting.launcher)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 0, said
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [total for total, _ in found] == [3.0, 3.0]  # 1 + 2
    for _, listening in found:
        assert {ip for ip, _ in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        assert len(listening) > 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("MIXED_PRECISION=bf16", "mixed precision ({}; set model.dtype)"),
        ("GRADIENT_ACCUMULATION_STEPS=4", "gradient accumulation ({}; set train.micro_batch)"),
        ("MIXED_PRECISION=fp16 USE_FSDP=true", "mixed precision ({}; set model.dtype) and FSDP ({}; set "),
        ("USE_DEEPSPEED=true", "DeepSpeed ({}; there is run.sharding instead)"),
        ("USE_MEGATRON_LM=true", "Megatron-LM ({}; there is run.sharding instead)"),
        ("USE_PARALLELISM_CONFIG=true", "a parallelism config ({}; "),
        ("DYNAMO_BACKEND=INDUCTOR", "compilation ({}; flow models have mo"),
    ],
)
def test_what_accelerate_s_environment_asks_for_in_vain_is_refused(workplace, refused, monkeypatch, asked, said):
    settings = [f"ACCELERATE_{setting}" for setting in asked.split()]
    for setting in settings:
        monkeypatch.setenv(*setting.split("="))
    told = refused("train", "tiny.yaml")
    assert told.startswith(f"accelerate's environment asks for {said.format(*settings)}")
    assert not (workplace / "runs").exists()


def test_more_processes_than_gpus_are_refused_before_any_starts(workplace, refused, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    said = "run.processes: 2 need a GPU each, and this machine has 1; set run.processes=1"
    assert refused("train", "tiny.yaml", "run.processes=2").startswith(said)
    assert not Path("runs/t").exists()


@pytest.mark.parametrize(("gpus", "cpu"), [(2, "false"), (3, "false"), (0, "false"), (1, "true")])
def test_processes_that_have_a_gpu_each_or_none_may_start(monkeypatch, gpus, cpu):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    monkeypatch.setenv("ACCELERATE_USE_CPU", cpu)
    launch.check_gpus(2)


@pytest.mark.parametrize("environment", [{"CUDA_VISIBLE_DEVICES": ""}, {"ACCELERATE_USE_CPU": "true"}])
def test_a_gpu_that_pytorch_cannot_use_may_be_hidden(monkeypatch, environment):
    monkeypatch.setattr(launch, "GPU", ROOT)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    launch.check_usable(environment)
    with pytest.raises(InputError, match="cannot use the GPU of this machine"):
        launch.check_usable({})


def test_what_accelerate_launch_sets_for_nothing_is_let_through():
    """What accelerate 1.15 puts into the environment of `accelerate launch` without a config."""
    plain = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_FSDP": "false"}
    launch.check_environment({**plain, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_CPU_AFFINITY": "1"})


@pytest.mark.parametrize(
    ("environment", "begins"),
    [
        ({}, "flowgrpo"),
        ({"WORLD_SIZE": "8"}, "accelerate launch --multi_gpu --num_processes 8 -m flowgrpo"),
        ({"WORLD_SIZE": "1"}, "accelerate launch --num_processes 1 -m flowgrpo"),
        ({"WORLD_SIZE": "8", launch.OURS: "1"}, "flowgrpo"),
    ],
)
def test_how_to_go_on_begins_as_the_command_did(monkeypatch, environment, begins):
    for name in ("WORLD_SIZE", launch.OURS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launch.command() == begins.split()


CPU = {"ACCELERATE_USE_CPU": "True", "ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}
LAUNCH = ["/usr/bin/python", "/usr/bin/accelerate", "launch"]
TRAIN = ["-m", "flowgrpo", "train", "tiny.yaml", "--num_processes", "5"]  # the last words are not the launcher's


@pytest.fixture
def cpus(tmp_path, monkeypatch):
    """A config of three processes on a CPU, which is no default."""
    for module in ("config.config_args", "launch"):
        monkeypatch.setattr(f"accelerate.commands.{module}.default_config_file", str(tmp_path / "none.yaml"))
    written = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_CPU", "num_processes": 3}
    written |= {"num_machines": 1, "machine_rank": 0, "mixed_precision": "no", "use_cpu": True}
    (tmp_path / "cpus.yaml").write_text(json.dumps(written | {"main_training_function": "main"}))
    return tmp_path / "cpus.yaml"


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("{accelerate} --cpu --num_processes 2 {train}", (2, 1)),
        ("{accelerate} --num_processes=4 {train}", (4, 1)),
        ("{accelerate} --config_file {cpus} {train}", (3, 1)),
        ("{accelerate} --config_file {cpus} --num_processes 2 {train}", (2, 1)),
        ("{accelerate} --num_processes 8 --num_machines 2 {train}", (8, 2)),
        ("{accelerate} --cpu {train}", (1, 1)),  # as many as there are GPUs, which nobody asked for
        ("python /usr/bin/accelerate-launch --num_processes 2 {train}", (2, 1)),
        ("python -m accelerate.commands.launch --num_processes 2 {train}", (2, 1)),
        ("python -m accelerate.commands.accelerate_cli launch --num_processes 2 {train}", (2, 1)),
        ("bash run.sh --num_processes 2", None),
        ("/usr/bin/accelerate launch", None),
        ("python launch.py --num_processes 2", None),
        ("", None),
    ],
)
def test_what_accelerate_was_asked_for_stands_in_its_command_line_and_config(cpus, words, asked):
    words = words.format(accelerate=" ".join(LAUNCH), cpus=cpus, train=" ".join(TRAIN))
    assert launch.accelerate_asked(words.split()) == asked


@pytest.mark.parametrize(
    ("asked", "processes", "way"),
    [
        ("--cpu --num_processes 2", 2, "flowgrpo train ... run.processes=2"),
        ("--num_processes 4", 4, "flowgrpo train ... run.processes=4"),
        ("--config_file cpus.yaml", 3, "flowgrpo train ... run.processes=3"),
        (
            "--num_processes 8 --num_machines 2 --main_process_ip node1 --main_process_port 29500",
            8,
            "torchrun --nnodes 2 --nproc-per-node 4 ... -m flowgrpo train ...",
        ),
    ],
)
def test_one_process_of_several_that_accelerate_was_asked_for_is_refused(
    workplace, cpus, unloaded, monkeypatch, refused, *, asked, processes, way
):
    words = [*asked.split(), *TRAIN]
    monkeypatch.setattr(launch, "_ancestors", lambda: iter([["bash", "run.sh"], [*LAUNCH, *words], ["init"]]))
    chosen, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert not chosen.multi_gpu  # on a machine with a GPU for each it would start all
    for name, value in prepare_simple_launcher_cmd_env(chosen)[1].items():
        monkeypatch.setenv(name, value)
    assert refused("train", "tiny.yaml") == (
        f"accelerate launch was asked for {processes} processes and has started this one alone, as it does "
        f"without a GPU for each; {way} starts them"
    )
    assert not (workplace / "runs").exists()


@pytest.mark.parametrize(
    ("environment", "ancestor", "warned"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "2", False),  # of one process it is told no address
        ({**CPU, "WORLD_SIZE": "2"}, "2", False),  # the others are there
        ({**CPU, "OMPI_COMM_WORLD_SIZE": "2"}, "2", False),
        ({**CPU, "PMI_SIZE": "2"}, "2", False),
        ({"MASTER_ADDR": "node1"}, "2", False),  # not accelerate's
        (CPU, "1", False),  # the address is another's
        (CPU, None, True),
    ],
)
def test_a_process_that_is_alone_by_right_is_let_through(cpus, monkeypatch, caplog, environment, ancestor, warned):
    words = ["cron"] if ancestor is None else [*LAUNCH, "--num_processes", ancestor, *TRAIN]
    monkeypatch.setattr(launch, "_ancestors", lambda: iter([words]))
    launch.check_alone(environment)
    assert ("flowgrpo train ... run.processes=N starts N" in caplog.text) is warned


EDGES = ["train.split=edges", "train.updates=3"]
VGPO = ["algorithm.preset=vgpo", "algorithm.tree.root=true", "algorithm.kernel.calibrate={rounds: 2}"]
BRANCHES = ["algorithm.preset=branch_grpo", "algorithm.tree.prune={rule: extremes}", "model.call.num_inference_steps=4"]


@pytest.mark.parametrize(
    ("method", "drift"),
    [
        pytest.param(["algorithm.preset=flow_grpo"], 0.0, marks=pytest.mark.zoo),
        pytest.param([*VGPO, "train.split=samples"], 0.0, marks=pytest.mark.zoo),
        pytest.param([*BRANCHES, *EDGES], 1e-6, marks=pytest.mark.zoo),
        ([*VGPO, *EDGES], 1e-6),
    ],
)
def test_two_processes_give_the_weights_of_one(workplace, method, drift):
    kept = "run.trees={every: 1, prompts: 3}"  # on both processes
    options = ["train.groups=4", "train.micro_batch=4", "eval={every: 2, prompts: 1, save: 0}", kept, *method]
    assert main(["train", "tiny.yaml", *options, "run.name=one"]) == 0
    begin = interpreter if "algorithm.preset=flow_grpo" in method else background
    process = begin("train", "tiny.yaml", *options, "run.name=two", "run.processes=2")
    _, said = process.communicate(timeout=180)
    assert process.returncode == 0, said
    one, two = (workplace / "runs" / name for name in ("one", "two"))
    of_two = weights(two, 2)
    for name, tensor in weights(one, 2).items():
        torch.testing.assert_close(of_two[name], tensor, rtol=1e-3, atol=2e-5)
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert b["policy/max_abs_log_ratio"] <= drift
        for key in ("reward/mean", "reward/std", "cost/model_evaluations", "cost/trained_edges", "cost/decoded"):
            assert b[key] == pytest.approx(a[key], abs=1e-4), key
    assert calibration(two) == calibration(one)
    for a, b in zip(TreeFolder(one).read(), TreeFolder(two).read(), strict=True):
        assert (a.step, a.group, a.prompt, a.sigmas) == (b.step, b.group, b.prompt, b.sigmas)
        assert [(n.parent, n.step, n.seed, n.kernel, n.compared) for n in a.nodes] == [
            (n.parent, n.step, n.seed, n.kernel, n.compared) for n in b.nodes
        ]
        assert [n.total for n in b.nodes] == pytest.approx([n.total for n in a.nodes], abs=1e-4)
    assert len(calibration(one)) == ("algorithm.preset=vgpo" in method)


def calibration(folder):
    """Levels and counts of each round, and the cost that was told; nothing for a run without."""
    return [
        (json.loads((folder / "calibration.json").read_text())["rounds"], line["cost/model_evaluations"])
        for line in metrics(folder, "calibration")
    ]


def test_wrong_input_in_several_processes_is_still_status_2(workplace):
    process = background("train", "tiny.yaml", "train.groups=4", "run.processes=2", "model.path=./nowhere")
    _, said = process.communicate(timeout=180)
    assert process.returncode == 2
    assert said.count("there is no folder") == 1
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("statuses", "failed"),
    [
        (((0, 0), (0.1, 0)), None),
        (((30, 0), (0, 7)), 1),  # the first is still waiting for the second
        (((0, launch.LOST), (0.2, 1)), 1),  # the first only lost the second, which takes longer to end
        (((0, launch.LOST), (0, launch.LOST)), 0),
    ],
)
def test_the_process_that_failed_is_the_one_that_is_to_blame(monkeypatch, statuses, failed):
    """Processes end with a status after some seconds each."""
    monkeypatch.setattr(launch, "GRACE", 0.5)
    code = "import sys, time; time.sleep(float(sys.argv[1])); sys.exit(int(sys.argv[2]))"
    children = [subprocess.Popen([sys.executable, "-S", "-c", code, *map(str, each)]) for each in statuses]
    assert launch._first_failure(children) == failed
    assert all(child.returncode is not None for child in children)


HUNGRY = """
import os
from pathlib import Path
import torch
from flowgrpo.training.distributed.gpu_layout import of_machine
def redness(images, prompts):
    Path("here-" + os.environ["RANK"]).write_text(str(of_machine(3)))
    if os.environ["RANK"] == "1" and Path("runs/t/metrics.jsonl").exists():
        torch.empty(10**15)
    return images[:, 0].mean((1, 2))
"""


def test_what_one_process_says_of_its_memory_is_shown_and_the_others_end(workplace):
    (workplace / "mine.py").write_text(HUNGRY)
    process = background("train", "tiny.yaml", "train.groups=4", "run.processes=2", "eval.prompts=1")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "Traceback" not in said
    lost, failed, memory = said.splitlines()[-3:]
    assert lost == "flowgrpo: another process of this run has ended, so this one ends too"
    assert failed == "process 1 of 2 failed:"
    assert memory.startswith("stopped, out of memory in the rewards phase, by the reward 'redness' (3725290.30 GiB ")
    assert memory.endswith("train.replay=always run.resume=true")  # its rollouts kept graphs
    assert [(workplace / f"here-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]  # share the memory of the host


@pytest.mark.parametrize(
    ("name", "machines", "each"), [("one", 1, None), ("two", 1, 2), ("eight", 1, 8), ("nodes", 4, 8)]
)
def test_a_launch_config_asks_for_nothing_that_a_run_does_not_get(name, machines, each):
    words = ["--config_file", str(ROOT / "configs" / "launch" / f"{name}.yaml"), "-m", "flowgrpo"]
    asked, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    environment = prepare_multi_gpu_env(asked) if asked.multi_gpu else prepare_simple_launcher_cmd_env(asked)[1]
    launch.check_environment(environment)
    assert asked.num_machines == machines
    assert getattr(asked, "nproc_per_node", None) in (each, str(each))


@pytest.mark.parametrize(("restarts", "shares", "said"), [(3, True, True), (3, False, False), (0, True, False)])
def test_a_store_that_attempts_share_is_told(restarts, shares, said):
    environment = {"TORCHELASTIC_MAX_RESTARTS": f"{restarts}", "TORCHELASTIC_USE_AGENT_STORE": f"{shares}"}
    assert launch.shares_store(environment) is said
    assert launch.shares_store({}) is False
