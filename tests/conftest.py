import atexit
import gc
import importlib.util
import os
import shutil
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # tiny tensors: more threads only wait for each other
sys.path.insert(0, str(Path(__file__).parent))  # for `import tiny`

import pytest
import typer

ROOT = Path(__file__).parents[1]

# Else each call of `main` makes all commands anew.
typer.main.get_command = cache(typer.main.get_command)

os.fsync = lambda handle: None  # what only a loss of power would show; a checkpoint waits three times for the disk

# All imports are frozen below, and each plan of memory would count them anew, for a tenth of a second.
if not hasattr(gc, "count_frozen"):  # tests import this file, too
    gc.count_frozen, gc.get_freeze_count = gc.get_freeze_count, lambda: 1


def pytest_configure(config):
    """Hide GPUs from the tests unless `-m gpu` asks for them."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection():
    """Import all files without garbage collection: they make a million objects, most of which stay."""
    gc.disable()


def pytest_collection_finish():
    """Collect garbage once, freeze the rest, and run the tests with garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """Send what a test printed as UTF-8, which has no half characters."""
    return _encodable((yield))


def _encodable(value):
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_encodable(key): _encodable(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(_encodable(each) for each in value)
    return value


@pytest.fixture(scope="session", autouse=True)
def _a_doctor_in_no_hurry():
    """No spectrum takes the half minute that it is given by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowgrpo.flow.diagnostics.spectrum.SECONDS", 0)
        yield


@pytest.fixture(scope="module", autouse=True)
def _a_clean_desk():
    """Freeze what other files imported: each collection would go through those millions of objects again."""
    gc.collect()
    gc.freeze()


# With frozen objects, libraries print what they take for leaks as the interpreter ends; before, pytest looks for garbage.
atexit.register(gc.unfreeze)


@pytest.fixture
def cudnn_attention():
    """Let PyTorch take cuDNN's attention, as in a new process."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Save a tiny SD3 pipeline as diffusers does."""
    import tiny

    folder = tmp_path_factory.mktemp("models") / "sd3"
    tiny.sd3().save_pretrained(folder)
    return folder


def furnish(folder, model):
    """Write a config of a very small run on a model, and what it names."""
    (folder / "prompts.txt").write_text("a red circle\ntwo blue square\na green circle\na blue circle\n")
    (folder / "mine.py").write_text("def redness(images, prompts):\n    return images[:, 0].mean((1, 2))\n")
    (folder / "tiny.yaml").write_text(
        f"model: {{path: {model}, lora: {{rank: 2, alpha: 4}},"
        " call: {num_inference_steps: 3, guidance_scale: 1.0, height: 16, width: 16, max_sequence_length: 1}}\n"
        "prompts: {train: prompts.txt, eval: prompts.txt}\n"
        "rewards: [{use: './mine.py:redness'}]\n"
        "algorithm: {preset: flow_grpo}\n"
        "train: {iterations: 2, groups: 2, group_size: 4, micro_batch: 4, learning_rate: 0.01}\n"
        "eval: {every: 1, prompts: 3, save: 2}\n"
        "run: {name: t, checkpoint: {every: 1, keep: 2}}\n"
    )


@contextmanager
def furnished(folder, model):
    """Furnish a folder and work in it inside this context, for runs that several tests share."""
    furnish(folder, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture
def workplace(tiny_model, tmp_path, monkeypatch):
    """Work in an empty folder with a config of a very small run on the tiny model."""
    furnish(tmp_path, tiny_model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def finished(tiny_model, tmp_path_factory):
    """Make a folder with the finished run `runs/t` of that config."""
    from flowgrpo.cli import main

    with furnished(tmp_path_factory.mktemp("finished"), tiny_model) as folder:
        assert main(["train", "tiny.yaml"]) == 0
    return folder


def copy_run(source, folder):
    """Copy the run `runs/t` of one folder into another, as if it had begun there."""
    shutil.copytree(source / "runs" / "t", folder / "runs" / "t")
    environment = folder / "runs" / "t" / "environment.json"  # the paths of the config are relative to where it began
    environment.write_text(environment.read_text().replace(str(source), str(folder)))


@pytest.fixture
def trained(workplace, finished):
    """Put the finished run `runs/t` into the workplace."""
    copy_run(finished, workplace)
    return workplace


@pytest.fixture
def exact_convolutions(monkeypatch):
    """Let a GPU's convolutions use float32; otherwise torch rounds the factors to ten bits."""
    import torch

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(name="few_objects")
def _few_objects():
    """Put imports aside: a plan of memory collects garbage a dozen times."""
    from flowgrpo.training.planning.meta_networks import few_objects

    with few_objects():
        yield


@pytest.fixture
def script(monkeypatch):
    """Load a script as a module by its name; it finds those beside it."""

    def load(name):
        (place,) = (path for top in ("research", "scripts") if (path := ROOT / top / f"{name}.py").is_file())
        monkeypatch.syspath_prepend(str(place.parent))
        spec = importlib.util.spec_from_file_location(name, place)
        found = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, found)  # where dataclasses look
        spec.loader.exec_module(found)
        return found

    return load


@pytest.fixture
def unloaded(monkeypatch):
    """Fail if a model is loaded."""
    # The set-up first: it would keep a patched loader if it were imported after.
    for place in ("setup.policy_and_weights", "setup.load_policy", "pipeline.loading.load.load_policy"):
        monkeypatch.setattr(f"flowgrpo.flow.{place}", lambda *a, **k: pytest.fail("the model was loaded"))
