"""`flowgrpo serve`."""

import importlib.util
import signal
import socket

import pytest
from runs import background

import rewards
from flowgrpo.cli import main
from rewards import RewardError


@pytest.mark.parametrize(("arguments", "said"), [
    (["shape"], "there is no reward 'shape', did you mean 'shapes'"),
    (["shapes", "shapes"], "'shapes' needs another name"),
    (["{use: shapes, only: {task: ocr}}"], "shapes: only belongs into the config of the run"),
    (["{use: shapes, weight: 2}"], "shapes: weight belongs into the config of the run"),
    (["{use: shapes, weihgt: 2}"], "rewards.0.weihgt: unknown key, did you mean 'weight'"),
    (["shapes", "--host", "0.0.0.0"], "--host: 0.0.0.0 can be reached from other machines"),
    (["shapes", "--host", "0.0.0.0", "--token-env", "NOT_SET"], "--token-env: the environment variable NOT_SET is"),
    (["shapes", "--host", "192.0.2.1", "--token-env", "PATH"], "--host: cannot listen on 192.0.2.1"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused(arguments, said, capsys):
    assert main(["serve", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_token_that_no_header_can_have_is_refused(capsys, monkeypatch):
    for token in ("secret\n", "sec\r\nret", "geheim\u00df", " "):
        monkeypatch.setenv("SERVED_TOKEN", token)
        assert main(["serve", "shapes", "--token-env", "SERVED_TOKEN"]) == 2
        assert "SERVED_TOKEN holds a character that no header can have" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["uvicorn", "starlette", "h11"])
def test_without_its_packages_nothing_is_served(package, capsys, monkeypatch):
    found = importlib.util.find_spec
    patched = "flowgrpo.commands.scores.serve.find_spec"
    monkeypatch.setattr(patched, lambda name: None if name == package else found(name))
    assert main(["serve", "shapes"]) == 2
    said = f"flowgrpo serve needs the package {package}: pip install 'flowgrpo[serve]'"
    assert capsys.readouterr().err.splitlines() == [f"flowgrpo: {said}"]


def test_a_port_in_use_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "shapes", "--port", str(taken.getsockname()[1])]) == 2
    assert "--port: cannot listen on 127.0.0.1:" in capsys.readouterr().err


def test_a_server_with_a_token_lives_until_it_is_interrupted(monkeypatch):
    monkeypatch.setenv("SERVED_TOKEN", "secret")
    process = background("serve", "shapes", "--port", "0", "--token-env", "SERVED_TOKEN")
    url = process.lines(1)[0].split()[1]
    with pytest.raises(RewardError, match="401: the token is missing or wrong"):
        rewards.load(url)
    assert rewards.load(url, options={"token_env": "SERVED_TOKEN"}).name == "shapes"
    with pytest.raises(RewardError, match="variable NOT_SET, which should hold the token"):
        rewards.load(url, options={"token_env": "NOT_SET"})
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate(10)[1]
    assert process.returncode == 130
