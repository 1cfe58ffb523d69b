from itertools import pairwise

import pytest
import tiny
import torch
from in_checkpoints import taken
from peft import LoraConfig, inject_adapter_in_model
from transformers import LlamaConfig, LlamaForCausalLM

from flowgrpo.errors import InputError
from flowgrpo.schema.lora import Lora
from flowgrpo.schema.sections import Ema
from flowgrpo.training.checkpoints import checkpoint, snapshot
from flowgrpo.training.fitting.saved_tensor_meter import SavedTensorMeter
from flowgrpo.training.weights.old_policies import Bank, Decay
from flowgrpo.training.weights.trained_weights import Weights, adapter_size, lora_config

NAMES = {False: "net.0.weight", True: "net.0.lora_A.default.weight"}  # of the first tensor that is trained


def module():
    torch.manual_seed(0)
    return {"net": torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))}


def begun(with_lora, modules, **options):
    """Weights with new adapters on both layers, or all of them."""
    return Weights(modules, lora_config(2, 4, ["0", "2"], modules) if with_lora else None, **options)


def moved_on(weights, updates):
    """What the first tensor was after each of some updates, each of which added 1."""
    seen = []
    for _ in range(updates):
        with torch.no_grad():
            for p in weights.parameters:
                p.add_(1.0)
        weights.after_update()
        seen.append(weights.parameters[0].detach().clone())
    return seen


def above(weights, start, policy="live"):
    """By how much the first tensor of a policy is above its start, on average."""
    with weights.policy(policy):
        return round(float((weights.parameters[0].detach() - start).mean()), 5)


def test_the_average_follows_the_warm_up_formula():
    weights = Weights(module(), None, ema=Ema(decay=0.9, warmup=10))
    p = weights.parameters[0]
    slow = p.detach().clone()
    for t in range(30):
        (live,) = moved_on(weights, 1)
        decay = min((1 + t) / (10 + t), 0.9)
        slow = decay * slow + (1 - decay) * live
        torch.testing.assert_close(weights.ema[0], slow)
    with weights.averaged():
        torch.testing.assert_close(p.detach(), slow)
    assert torch.equal(p.detach(), live)


def test_the_average_moves_at_every_eighth_step_and_warms_up_by_steps():
    """min((1 + t) / (10 + t), 0.9) at t = 7 and t = 15 are 8 / 17 and 16 / 25; the weight is 1, 2, ... above its start."""
    weights = Weights(module(), None, ema=Ema(decay=0.9, warmup=10, every=8))
    start, heights = weights.ema[0].clone(), []
    for _ in range(17):
        moved_on(weights, 1)
        heights.append(float((weights.ema[0] - start).mean()))
    first = 8 * 9 / 17
    assert heights == pytest.approx([0.0] * 7 + [first] * 8 + [first * 16 / 25 + 16 * 9 / 25] * 2, abs=1e-5)


@torch.no_grad()
def test_the_reference_of_lora_is_the_adapter_switched_off():
    model, ids = llama(), torch.arange(8)[None]
    before = model(ids).logits
    weights = Weights({"model": model}, lora_config(2, 4, "auto", {"model": model}), reference="fixed")
    assert sum(p.numel() for p in weights.parameters) < 0.2 * sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(model(ids).logits, before)
    moved_on(weights, 1)
    assert not torch.allclose(model(ids).logits, before, atol=1e-4)
    with weights.reference():
        torch.testing.assert_close(model(ids).logits, before)
    assert all(p.requires_grad for p in weights.parameters)


def test_a_gradient_survives_a_reference_pass_taken_before_it():
    weights = Weights(module(), None, reference="fixed")
    net, x = weights.modules["net"], torch.randn(4, 3)
    first = torch.autograd.grad(net(x).sum(), weights.parameters)
    with torch.no_grad(), weights.reference():
        net(x)
    second = torch.autograd.grad(net(x).sum(), weights.parameters)
    assert all(torch.equal(*each) for each in zip(first, second, strict=True))


@pytest.mark.parametrize("with_lora", [False, True])
def test_what_is_trained_is_float32_on_any_base(with_lora):
    net = module()["net"].to(torch.bfloat16)
    weights = begun(with_lora, {"net": net})
    assert {p.dtype for p in weights.parameters} == {torch.float32}
    assert {p.dtype for p in net.parameters()} == {torch.float32, *[torch.bfloat16] * with_lora}


def half_precision(dtype, masters=True):
    """A Llama in a dtype with adapters that are not 0; float32 ones in our way, or ones in the dtype of the base."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes)).to(dtype).requires_grad_(False)
    lora = lora_config(2, 4, "auto", {"model": model})
    if masters:
        Weights({"model": model}, lora)
    else:
        inject_adapter_in_model(lora, model)
        model.to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_adapters_keep_the_activations_of_a_half_precision_base_only(dtype):
    ids, kept, logits, gradients = torch.arange(256).view(4, 64) % 11, [], [], []
    for masters in (True, False):
        model = half_precision(dtype, masters)
        with SavedTensorMeter(model.parameters()) as meter:
            out = model(ids, use_cache=False).logits
        kept.append(meter.peak)
        out.float().square().mean().backward()
        with torch.no_grad():
            assert torch.equal(model(ids, use_cache=False).logits, out)  # rollout and update compute the same numbers
        trained = [p for p in model.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32 if masters else dtype}
        logits.append(out)
        gradients.append(torch.cat([p.grad.float().flatten() for p in trained]))
    assert kept[0] < 1.05 * kept[1]  # peft's own casts: 1.5
    near = 4 * torch.finfo(dtype).eps
    assert (logits[0] - logits[1]).norm() < near * logits[1].norm()
    assert (gradients[0] - gradients[1]).norm() < 4 * near * gradients[1].norm()


def test_float32_adapters_on_a_float32_base_are_peft_s_own():
    ids = torch.arange(16).view(2, 8) % 11
    ours, theirs = (half_precision(torch.float32, masters)(ids).logits for masters in (True, False))
    assert torch.equal(ours, theirs)


def test_targets_that_name_nothing_are_refused():
    modules = {"transformer": tiny.sd3().transformer}
    with pytest.raises(InputError, match="no linear layer is named 'to_w', there are"):
        lora_config(2, 4, ["to_q", "to_w"], modules)
    assert set(lora_config(2, 4, "auto", modules).target_modules) >= {"to_q", "to_k", "to_v", "to_out.0", "add_q_proj"}


def test_projections_that_stand_in_no_module_of_attention_are_found():
    """As in the blocks of the released LLaDA."""
    names = ("q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "ff_out")
    block = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in names})
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block]), "ff_out": torch.nn.Linear(4, 9)})
    found = lora_config(2, 4, "auto", {"model": model}).target_modules
    assert set(found) == {f"blocks.0.{name}" for name in names[:4]}
    assert adapter_size(shapes_of(model), Lora(rank=2)) == 4 * 2 * (4 + 4)
    with pytest.raises(InputError, match="auto finds no attention"):
        lora_config(2, 4, "auto", {"model": torch.nn.Sequential(torch.nn.Linear(4, 4))})


def shapes_of(network):
    return {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes))


@pytest.mark.parametrize(
    ("build", "layers"),
    [
        (llama, 2 * 7),  # of a layer four projections and three of the MLP; the head is left out
        (lambda: tiny.sd3().transformer, None),
    ],
)
def test_all_linear_layers_are_those_that_peft_takes(build, layers):
    network = build()
    shapes = shapes_of(network)
    modules = {"network": network}
    weights = Weights(modules, lora_config(2, 4, "all-linear", modules))
    theirs = inject_adapter_in_model(LoraConfig(r=2, target_modules="all-linear"), build())
    expected = {name for name, p in theirs.named_parameters() if "lora_A" in name}
    assert {name.removeprefix("network.") for name in weights.named if "lora_A" in name} == expected
    assert layers is None or len(expected) == layers
    assert sum(p.numel() for p in weights.parameters) == adapter_size(shapes, Lora(rank=2, targets="all-linear"))


def of_reference(weights):
    with weights.reference():
        return weights.parameters[0].detach().clone()


@torch.no_grad()
@pytest.mark.parametrize("with_lora", [False, True])
def test_a_moving_reference_is_the_live_weights_of_every_third_update(with_lora):
    net, x = module()["net"], torch.randn(4, 3)
    base = net(x)
    weights = begun(with_lora, {"net": net}, reference="moving", refresh=3)
    seen, outputs = [weights.parameters[0].clone()], []
    for update in range(8):
        assert torch.equal(of_reference(weights), seen[update // 3 * 3])
        assert torch.equal(weights.parameters[0], seen[update])
        outputs.append(net(x))
        with weights.reference():
            assert torch.equal(net(x), outputs[update // 3 * 3])
        seen += moved_on(weights, 1)
    torch.testing.assert_close(outputs[0], base)  # an adapter starts as nothing
    assert not any(torch.allclose(one, other, atol=1e-2) for one, other in pairwise(outputs))
    assert all(p.requires_grad for p in weights.parameters)


@pytest.mark.parametrize("with_lora", [False, True])
def test_a_moving_reference_is_kept_and_loads_back(with_lora, tmp_path):
    def fresh(reference="moving"):
        return begun(with_lora, module(), ema=Ema(decay=0.9), reference=reference, refresh=3)

    weights = fresh()
    moved_on(weights, 4)
    names = list(weights.named)
    tensors = {name: tensor.clone() for name, tensor in weights.tensors().items()}
    assert set(tensors) == {*names, *(f"average.{name}" for name in names), *(f"reference.{name}" for name in names)}
    for name in names:
        torch.testing.assert_close(tensors[f"reference.{name}"], tensors[name] - 1)  # as it was after the third
    optimizer = torch.optim.AdamW(weights.parameters)
    place = snapshot.write(tmp_path, taken(weights, optimizer, None), keep=1)
    loaded = fresh()
    checkpoint.load_weights(place, loaded)
    assert loaded.updates == 4
    assert torch.equal(of_reference(loaded), tensors[f"reference.{names[0]}"])
    _, sixth, _ = moved_on(loaded, 3)  # the fifth, the sixth, which refreshes, and the seventh
    assert torch.equal(of_reference(loaded), sixth)
    assert not any(name.startswith("reference.") for name in fresh("fixed").tensors())
    with pytest.raises(InputError, match="not of this model"):
        checkpoint.load_weights(place, fresh("fixed"))


def test_an_old_policy_slows_with_the_optimizer_steps_that_were_taken():
    """d is 0.25 + 0.1 (updates - 3): 0.25, 0.35 and 0.5 after 2, 4 and 6 of them, each of which adds 1."""
    weights = Weights(module(), None, old=Decay(flat=3, start=0.25, slope=0.1, most=0.5))
    start, heights = weights.parameters[0].detach().clone(), []
    for _ in range(3):
        moved_on(weights, 2)
        weights.after_iteration()
        heights.append(above(weights, start, "old"))
    first = 0.75 * 2
    second = 0.35 * first + 0.65 * 4
    assert heights == pytest.approx([first, second, 0.5 * second + 0.5 * 6], abs=1e-5)


@pytest.mark.parametrize("adapters", [False, True])
def test_the_bank_keeps_the_policy_as_it_stood_where_iterations_ended(adapters):
    """Two optimizer steps an iteration, each of which adds 1; a snapshot is due at every third step."""
    weights = begun(adapters, module(), bank=Bank(every=3, keep=2))
    start, kept = weights.parameters[0].detach().clone(), []
    for _ in range(6):
        moved_on(weights, 2)
        weights.after_iteration()
        tensors = weights.tensors()
        names = [name for name in tensors if name.startswith("bank.") and name.endswith(NAMES[adapters])]
        kept.append({int(name.split(".")[1]): round(float((tensors[name] - start).mean()), 5) for name in names})
    assert kept == [{0: 0}, {0: 0, 1: 4}, {1: 4, 2: 6}, {1: 4, 2: 6}, {2: 6, 3: 10}, {3: 10, 4: 12}]
    seen = set()
    for iteration in range(20):
        weights.draw_snapshot(0, "bank", iteration)
        seen.add(above(weights, start, "bank"))
        assert above(weights, start) == 12
    assert seen == {10, 12}


@torch.no_grad()
@pytest.mark.parametrize("reference", ["fixed", "base"])
def test_full_weights_without_their_training_and_as_reference_are_those_that_they_began_with(reference):
    net, x = module()["net"], torch.randn(4, 3)
    weights = Weights({"net": net}, None, reference=reference, ema=Ema())
    before = net(x)
    for p in weights.parameters:
        p.add_(0.1)
    after = net(x)
    with weights.averaged():
        averaged = net(x)
        weights.enable_training(False)
        assert torch.equal(net(x), before)
        weights.enable_training(True)
        assert torch.equal(net(x), averaged)
    with weights.reference():
        assert torch.equal(net(x), before)
    assert torch.equal(net(x), after)
    assert not torch.equal(after, before)


@pytest.mark.parametrize("reference", [None, "moving"])
def test_full_weights_whose_beginning_is_not_kept_cannot_be_without_training(reference):
    with pytest.raises(RuntimeError, match="no copy of the weights is kept"):
        Weights(module(), None, reference=reference).enable_training(False)


def test_the_old_policy_and_the_bank_s_are_two():
    weights = Weights(module(), None, old=Decay(), bank=Bank(every=2, keep=1))
    start = weights.parameters[0].detach().clone()
    for _ in range(3):  # the old policy is at 3, and the bank's at 2
        moved_on(weights, 1)
        weights.after_iteration()
    weights.draw_snapshot(0)
    assert [above(weights, start, policy) for policy in ("old", "bank", "live")] == [3, 2, 3]
