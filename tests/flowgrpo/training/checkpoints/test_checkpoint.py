"""Checkpoints that are damaged are one sentence, and a run that diverges keeps those from before it did."""

import hashlib
import json
import math

import pytest
import torch
from in_checkpoints import taken

from flowgrpo.errors import InputError
from flowgrpo.training.checkpoints import checkpoint, snapshot
from flowgrpo.training.run import random_states
from flowgrpo.training.weights.old_policies import Bank
from flowgrpo.training.weights.trained_weights import Weights

FILES = ["weights.safetensors", "optimizer.pt", "random.pt", "state.json"]


def parts():
    """Small weights with what moves them."""
    weights = Weights({"net": torch.nn.Linear(3, 2)}, None)
    return weights, torch.optim.AdamW(weights.parameters), torch.amp.GradScaler("cpu", enabled=False)


def saved(folder, step=1, keep=2, fill=0.5, *, sound=True):
    weights, optimizer, _ = parts()
    weights.parameters[0].data.fill_(fill)
    weights.parameters[0].grad = torch.ones(2, 3)
    optimizer.step()
    shot = taken(weights, optimizer, None, step=step)
    shot.state["history"] = {"3": [1.0, 0.5, 0]}
    return snapshot.write(folder, shot, keep=keep, sound=lambda: sound)


def load(place):
    return checkpoint.load(place, **dict(zip(("weights", "optimizer", "scaler"), parts(), strict=True)))


def without_digests(place):
    """A checkpoint as earlier versions wrote it; returns its state."""
    state = json.loads((place / "state.json").read_text())
    earlier = {key: value for key, value in state.items() if key not in ("files", "digest")}
    (place / "state.json").write_text(json.dumps(earlier))
    return earlier


def flip(path, at=None):
    """Change a bit in the middle of a file, or elsewhere."""
    written = bytearray(path.read_bytes())
    written[len(written) // 2 if at is None else at] ^= 1
    path.write_bytes(written)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [None, 0, 0.5, 0.99])
@pytest.mark.parametrize("digests", [True, False])
def test_a_file_that_is_missing_or_cut_off_is_one_sentence_without_a_model_and_with_one(tmp_path, name, share, digests):
    place = saved(tmp_path)
    if not digests:
        without_digests(place)
    checkpoint.check(place)
    whole = (place / name).read_bytes()
    (place / name).unlink()
    if share is not None:
        (place / name).write_bytes(whole[: int(len(whole) * share)])
    for read in (checkpoint.check, load):
        with pytest.raises(InputError, match="step-000001") as error:
            read(place)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changed",
    [
        *({"step": step} for step in ("1", 2, 1.5, None)),
        *({"updates": updates} for updates in (0.5, math.nan)),
        {"sound": "no"},
        {"beta": []},
        *({"memory": memory} for memory in (3, ["1"], [[1]])),
        *(
            {"history": history}
            for history in (
                [],
                {"a": [1, 2, 3]},
                {"1": [1, 2]},
                {"1": [1, 2, 3, 4, 5]},
                {"1": [1, 2, "3"]},
                {"odometer": []},
            )
        ),
    ],
)
def test_a_state_that_no_run_writes_is_one_sentence(tmp_path, changed):
    place = saved(tmp_path)
    (place / "state.json").write_text(json.dumps(without_digests(place) | changed))
    with pytest.raises(InputError, match=r"step-000001 cannot be loaded \(.*take it away to go on from the one before"):
        checkpoint.check(place)


def test_an_optimizer_or_generators_of_something_else_are_one_sentence(tmp_path):
    place = saved(tmp_path)
    torch.save({"optimizer": {"state": {}, "param_groups": []}}, place / "optimizer.pt")
    with pytest.raises(InputError, match=r"step-000001 cannot be loaded \(ValueError: "):
        load(place)
    saved(tmp_path, step=2)
    torch.save([{**random_states.random_state(), "torch": 3}], tmp_path / "step-000002" / "random.pt")
    with pytest.raises(InputError, match="step-000002 cannot be loaded"):
        load(tmp_path / "step-000002")


@pytest.mark.parametrize("name", FILES[:3])
@pytest.mark.parametrize("written", [3, {}, [3], {"optimizer": {}, "scaler": {}}, [{"torch": 3}]])
def test_a_file_of_another_kind_is_one_sentence_without_a_model(tmp_path, name, written):
    place = saved(tmp_path)
    without_digests(place)
    torch.save(written, place / name)
    with pytest.raises(InputError, match=r"step-000001 cannot be loaded|weights\.safetensors cannot be read"):
        checkpoint.check(place)


def test_other_folders_are_no_checkpoints(tmp_path):
    saved(tmp_path, step=3)
    for name in ("step-1", "step-1abc", "step-000004.old", "step-²²²²²²"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    assert checkpoint.steps(tmp_path) == [3]


def test_weights_that_are_not_finite_are_one_sentence(tmp_path):
    for step, fill in enumerate((0.1, math.nan, math.inf), start=1):
        saved(tmp_path, step, keep=3, fill=fill)
    for step in (2, 3):
        said = f"step-00000{step} cannot be loaded .*not finite.* to go on from the one before"
        with pytest.raises(InputError, match=said):
            checkpoint.load_weights(tmp_path / f"step-00000{step}", parts()[0])
    assert checkpoint.load_weights(tmp_path / "step-000001", parts()[0]) == 1


def test_checkpoints_without_rewards_do_not_push_others_out_and_go_when_there_are_rewards_again(tmp_path):
    for step in range(1, 6):
        saved(tmp_path, step, keep=1, sound=step < 3)
    assert checkpoint.steps(tmp_path) == [2, 5]
    load(tmp_path / "step-000005")  # when the reward is back
    saved(tmp_path, 6, keep=1)
    assert checkpoint.steps(tmp_path) == [6]
    (tmp_path / "step-000006" / "state.json").write_text("{")  # as a full disk leaves it
    saved(tmp_path, 7, keep=1)
    assert checkpoint.steps(tmp_path) == [7]


def test_the_state_has_the_keys_that_earlier_versions_wrote_and_one_of_them_still_loads(tmp_path):
    """So that their runs resume here."""
    earlier = without_digests(saved(tmp_path))
    assert earlier == {"step": 1, "updates": 0, "beta": 0.0, "history": {"3": [1.0, 0.5, 0]}, "sound": True}
    checkpoint.check(tmp_path / "step-000001")
    assert load(tmp_path / "step-000001") == (1, 0.0, {"3": [1.0, 0.5, 0]})
    assert checkpoint.choose(tmp_path) == checkpoint.Choice(1, [])


@pytest.mark.parametrize("name", FILES)
def test_a_changed_bit_of_any_byte_is_noticed(tmp_path, name):
    place = saved(tmp_path)
    for at in range(0, (place / name).stat().st_size, 3 if name == "state.json" else 389):
        flip(place / name, at)
        with pytest.raises(InputError, match="step-000001"):
            checkpoint.check(place)
        flip(place / name, at)
    checkpoint.check(place)


def test_the_digests_are_those_of_sha256sum(tmp_path):
    place = saved(tmp_path)
    files = json.loads((place / "state.json").read_text())["files"]
    assert files.keys() == {*FILES[:3]}
    for name, digest in files.items():
        assert hashlib.sha256((place / name).read_bytes()).hexdigest() == digest


def test_a_resume_passes_over_what_is_damaged_and_says_why(tmp_path):
    for step in (1, 2, 3, 4):
        saved(tmp_path, step, keep=4)
    flip(tmp_path / "step-000003" / "optimizer.pt")
    (tmp_path / "step-000004" / "state.json").unlink()
    choice = checkpoint.choose(tmp_path)
    assert choice.step == checkpoint.step_to_resume(tmp_path) == 2
    assert "step-000004/state.json" in choice.damaged[0]
    assert choice.damaged[1] == (
        f"{tmp_path}/step-000003 cannot be loaded (ValueError: its optimizer.pt is not as it was written)"
    )
    assert choice.warning == "; ".join([*choice.damaged, "the run goes on from step 2"])
    checkpoint.forget_after(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


@pytest.mark.parametrize(
    ("sounds", "done", "rest"),
    [
        ([], 3, "there is no checkpoint, begin again"),
        ([True, True], 2, "a checkpoint is written, go on"),
        ([True, False], 3, "go on from step 1, the last that was sound,"),
        ([False, False], 3, "go on from step 2, the last,"),
    ],
)
def test_what_a_run_leaves_is_told_as_sound_only_if_it_is(tmp_path, sounds, done, rest):
    for step, sound in enumerate(sounds, start=1):
        saved(tmp_path, step, sound=sound)
    assert checkpoint.describe_rest(tmp_path, done) == rest


def test_a_sound_checkpoint_that_is_whole_goes_before_a_later_one_that_is_not_sound(tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step, keep=3, sound=step < 3)
    assert checkpoint.choose(tmp_path) == checkpoint.Choice(2, [])
    for step in (1, 2):
        flip(tmp_path / f"step-00000{step}" / "weights.safetensors")
    assert checkpoint.choose(tmp_path) == checkpoint.Choice(3, [])


def test_without_a_whole_checkpoint_a_resume_is_refused_in_one_sentence(tmp_path):
    assert checkpoint.choose(tmp_path) == checkpoint.Choice(None, [])
    for step in (1, 2):
        flip(saved(tmp_path, step) / "random.pt")
    with pytest.raises(InputError) as error:
        checkpoint.choose(tmp_path)
    assert str(error.value) == (
        f"run.resume: no checkpoint is whole ({tmp_path}/step-000002 cannot be loaded (ValueError: its random.pt is not as "
        "it was written), and 1 more); put back a copy, or begin again with another run.name"
    )


def test_a_checkpoint_with_snapshots_gives_back_the_trained_weights_alone(tmp_path):
    """As an export reads it, which keeps no bank; and a bank of the run finds the snapshots that there were."""

    def begun(bank):
        return Weights({"net": torch.nn.Linear(3, 2)}, None, bank=bank)

    bank = Bank(every=1, keep=2)
    weights = begun(bank)
    for number in range(1, 4):
        weights.parameters[0].data.fill_(float(number))
        weights.after_update()
        weights.after_iteration()
    shot = taken(weights, torch.optim.AdamW(weights.parameters), None, step=3)
    place = snapshot.write(tmp_path, shot, keep=1)
    exported = begun(None)
    assert checkpoint.load_averaged(place, exported) == 3
    assert (exported.parameters[0] == 3).all()
    resumed = begun(bank)
    assert checkpoint.load_weights(place, resumed) == 3
    kept = {name: float(t[0, 0]) for name, t in resumed.tensors().items() if name.endswith("weight")}
    assert kept == {"net.weight": 3, "bank.2.net.weight": 2, "bank.3.net.weight": 3}
