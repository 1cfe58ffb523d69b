"""Embeddings of prompts: each is computed once and sent once, however many calls share it."""

import tiny
import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.inputs import call_cache, prompt_embeddings
from flowgrpo.flow.pipeline.policy import DiffusersPolicy

ROWS = [Row(prompt, seed) for seed, prompt in enumerate(["a red circle", "two blue square", "a red circle"])]


def sent_in(policy, monkeypatch):
    """How often embeddings of a prompt go to the device, and are assembled, in the calls of a rollout."""
    sent, real = [], prompt_embeddings._to
    with monkeypatch.context() as patch:
        patch.setattr(prompt_embeddings, "_to", lambda output, to: sent.append(to) or real(output, to))
        state = policy.start(ROWS)
        for sigma in policy.sigmas[:-1]:
            policy.velocity(state, sigma, ROWS)
    return [to for to in sent if to != "cpu"]


@torch.no_grad()
def test_a_prompt_goes_to_the_device_once(monkeypatch):
    policy = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"])
    policy.prepare(ROWS)
    first = sent_in(policy, monkeypatch)
    assert len(first) <= 2
    assert not sent_in(policy, monkeypatch)


@torch.no_grad()
def test_embeddings_beyond_the_room_are_sent_again_and_are_the_same(monkeypatch):
    policy = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"])
    state = policy.start(ROWS)
    before = policy.velocity(state, policy.sigmas[0], ROWS)[0]
    monkeypatch.setattr(call_cache, "KEPT", 1)
    assert len(sent_in(policy, monkeypatch)) > 2
    assert torch.equal(policy.velocity(state, policy.sigmas[0], ROWS)[0], before)


@torch.no_grad()
def test_a_pipeline_that_overwrites_its_embeddings_changes_no_later_call(monkeypatch):
    policy = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"])
    state = policy.start(ROWS)
    before = policy.velocity(state, policy.sigmas[0], ROWS)[0]
    for part in policy.pipe.encode_prompt(prompt=[row.prompt for row in ROWS], prompt_2=None, prompt_3=None):
        if isinstance(part, torch.Tensor):
            part.zero_()
    assert torch.equal(policy.velocity(state, policy.sigmas[0], ROWS)[0], before)
