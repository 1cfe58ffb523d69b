"""A stand-in for an SGLang-Diffusion server, in a thread, backed by a tiny pipeline: its paths, fields and formulas.

They are those of sgl-project/sglang, python/sglang/multimodal_gen/runtime:

    entrypoints/post_training: rollout_api.py at 078e5e2a, io_struct.py at 00e1106f, utils.py at 067e8f42: rollouts
    entrypoints/post_training/weights_api.py, entrypoints/openai/common_api.py at 0730031c: checksums and adapters
    post_training: scheduler_rl_mixin.py at 1e7c5863, rollout_denoising_mixin.py at 0470d4fd: steps and returned states
    pipelines_core/lora/pipeline.py at 013aa626, layers/lora/linear.py at 012f278d: what an adapter's file means
"""

import base64
import hashlib
import json
import math
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path

import msgpack
import torch
from fakes import in_threads
from safetensors.torch import load_file, save

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.loading.load import load_policy
from flowgrpo.flow.pipeline.policy import DiffusersPolicy

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def generator_of(seed):
    return torch.Generator().manual_seed(seed)


def serialized(tensor, as_text=False):
    data = save({"t": tensor.contiguous()})
    if as_text:  # as states of the engine before the middle of 2026
        data = base64.b64encode(data).decode("ascii")
    return {"__tensor__": True, "data": data, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}


def step(kind, x, velocity, xi, *, sigma, sigma_next, sigma_max, level):
    dt = sigma_next - sigma
    if kind == "sde":
        near = sigma_max if abs(sigma - 1) <= 1e-8 + 1e-5 else sigma
        g = math.sqrt(sigma / (1 - near)) * level
        mean = x * (1 + g**2 / (2 * sigma) * dt) + velocity * (1 + g**2 * (1 - sigma) / (2 * sigma)) * dt
        std = g * math.sqrt(-dt)
    else:
        std = sigma_next * math.sin(level * math.pi / 2)
        kept = math.sqrt(sigma_next**2 - std**2)
        mean = (x - sigma * velocity) * (1 - sigma_next) + (x + velocity * (1 - sigma)) * kept
    return mean + std * xi, std


class FakeEngine:
    """Hold what the server knows, and attributes that make it go wrong.

    Attributes:
        skips_pushes: `set_lora` says yes and does nothing.
        offset: added to each log-probability.
        answer: sent for a rollout in place of samples.
        edit: changes the list of samples before it is sent.
    """

    def __init__(self, model, **started):
        """Load a model's folder with the arguments that the server is started with, or take a policy."""
        if isinstance(model, DiffusersPolicy):
            self.policy = model
        else:
            self.policy = load_policy(str(model), "float32", started, torch.device("cpu"))
        (self.network,) = self.policy.modules.values()
        self.base = {name: p.detach().clone() for name, p in self.network.named_parameters()}
        self.lock = threading.Lock()
        self.as_started()

    def as_started(self):
        """Forget all requests and faults; keep the network as it is."""
        self.asked, self.loaded, self.merged, self.wrapped, self.held = [], {}, None, False, {}
        self.skips_pushes, self.offset, self.answer, self.delay, self.edit = False, 0.0, None, 0.0, None
        self.as_text, self.dtype = False, torch.float32

    @torch.no_grad()
    def rollout(self, body):
        call = {k: body[k] for k in ("num_inference_steps", "height", "width") if k in body}
        if not self.network.config.get("guidance_embeds"):  # of which the engine is told when it starts
            call["guidance_scale"] = body["guidance_scale"]
        if "negative_prompt" in body:
            call["negative_prompt"] = body["negative_prompt"]
        with self.policy.call_overrides(**call):
            return [self.sample(body, i) for i in range(body["num_outputs_per_prompt"])]

    def sample(self, body, i):
        row, generator = Row(body["prompt"], body["seed"] + i), generator_of(body["seed"] + i)
        (like,) = self.policy.start([row])
        sigmas = self.policy.sigmas
        x, returned, log_probs = torch.randn(like.shape, generator=generator), [], []
        kept = body["rollout_return_step_indices"]
        for index, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
            if index in kept:
                returned.append(x[0])
            (velocity,) = self.policy.velocity((x,), sigma, [row])
            if index not in body["rollout_sde_step_indices"]:
                x = x + (sigma_next - sigma) * velocity
                log_probs.append(torch.zeros(()))
                continue
            xi = torch.randn(x.shape, generator=generator)
            level, kind = body["rollout_noise_level"], body["rollout_sde_type"]
            scales = {"sigma": sigma, "sigma_next": sigma_next, "sigma_max": sigmas[1], "level": level}
            x, std = step(kind, x, velocity, xi, **scales)
            x = x.to(self.dtype).float()
            square = (xi * std) ** 2
            whole = -square / (2 * std**2) - math.log(std) - LOG_SQRT_2PI
            scored = -square if body["rollout_log_prob_no_const"] else whole
            log_probs.append(scored.mean() + self.offset)
        if len(sigmas) - 1 in kept:
            returned.append(x[0])

        def told(tensor):
            return serialized(tensor, self.as_text)

        return {
            "request_id": "fake", "prompt": body["prompt"], "seed": body["seed"],
            "generated_output": told(self.policy.decode((x,), [row])[0]),
            "rollout_log_probs": told(torch.stack(log_probs)), "rollout_debug_tensors": None, "denoising_env": None,
            "dit_trajectory": {
                "latents": told(torch.stack(returned).to(self.dtype)),
                "timesteps": told(torch.tensor(sigmas) * 1000), "sigmas": told(torch.tensor(sigmas)),
            },
            "inference_time_s": None, "peak_memory_mb": None,
        }  # fmt: skip

    @torch.no_grad()
    def set_lora(self, body):
        name, path = body["lora_nickname"], body["lora_path"]
        if self.skips_pushes:
            self.merged = name
            return
        if name not in self.loaded:
            self.loaded[name] = load_file(path)
        self.wrapped = True
        self.unmerge()
        parameters = dict(self.network.named_parameters())
        for key, down in self.loaded[name].items():
            layer, found, _ = key.removeprefix("transformer.").partition(".lora_A.")
            if found and f"{layer}.weight" in parameters:
                up = self.loaded[name][key.replace(".lora_A.", ".lora_B.")]
                parameters[f"{layer}.weight"] += up @ down
                self.held[layer] = (down, up)
        self.merged = name

    @torch.no_grad()
    def unmerge(self):
        for name, p in self.network.named_parameters():
            p.copy_(self.base[name])
        self.merged = None

    def checksum(self):
        digest = hashlib.sha256(b"base_layer" if self.wrapped else b"")
        for name, p in sorted(self.network.named_parameters()):
            digest.update(name.encode() + p.detach().numpy().tobytes())
        for layer, matrices in sorted(self.held.items()):
            digest.update(layer.encode() + b"".join(matrix.numpy().tobytes() for matrix in matrices))
        return digest.hexdigest()

    def answered(self, path, body):
        """Return the status, type and content of an answer."""
        self.asked.append((path, body))
        if path == "/rollout/generate":
            time.sleep(self.delay)
            if self.answer is not None:
                return 200, "application/msgpack", self.answer
            samples = self.rollout(body)
            if self.edit is not None:
                self.edit(samples)
            return 200, "application/msgpack", msgpack.packb(samples)
        known = {
            "/v1/list_loras": self.listed,
            "/v1/set_lora": lambda: self.set_lora(body) or {"status": "ok", "message": "Successfully set LoRA"},
            "/v1/unmerge_lora_weights": lambda: self.unmerge() or {"status": "ok", "message": "Successfully unmerged"},
            "/get_weights_checksum": lambda: dict.fromkeys(body["module_names"], self.checksum()),
        }
        if path not in known:
            return 404, "application/json", b'{"detail":"Not Found"}'
        return 200, "application/json", json.dumps(known[path]()).encode()

    def listed(self):
        one = {"nickname": self.merged, "path": "x", "merged": True, "mode": "merged", "strength": 1.0}
        return {"loaded_adapters": [], "active": {"transformer": [one]} if self.merged else {}}


def serving(engine):
    """Serve an engine from threads. Yield its address, and a function that ends it at once."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({})

        def do_POST(self):
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body):
            with engine.lock:
                status, kind, content = engine.answered(self.path, body)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words):
            pass

        def handle(self):
            try:
                super().handle()
            except OSError:  # the client did not wait
                self.close_connection = True

    return in_threads(Handler)


def write_exchanges(folder):
    """Write a request and its answers, in both forms of tensors, and one of each other path, into a folder."""
    import tiny

    from flowgrpo.schema.engine import Engine
    from flowgrpo_engine.flow.request import Steps, requests_of
    from samplers.kernels import Kernel
    from samplers.trees import Root

    call = {"num_inference_steps": 4, "guidance_scale": 1.0, "height": 16, "width": 16}
    steps = Steps(kernel=Kernel("flow_sde", 0.7), stochastic=[1, 2], trained=[1, 2])
    roots = [Root(0, i, Row("a red circle", 7 + i)) for i in range(2)]
    ((_, asked),) = requests_of(roots, steps, lambda row: call, Engine())
    with tempfile.TemporaryDirectory() as model:
        tiny.sd3().save_pretrained(model)
        engine = FakeEngine(model, max_sequence_length=1, **call)
    (folder / "rollout_request.json").write_text(json.dumps(asked, indent=1) + "\n")
    for name, as_text in (("rollout_answer", False), ("rollout_answer_base64", True)):
        engine.as_text = as_text
        (folder / f"{name}.msgpack").write_bytes(engine.answered("/rollout/generate", asked)[2])
    engine.merged = "t-transformer-0123456789abcdef"
    for name, path in (("list_loras", "/v1/list_loras"), ("checksum", "/get_weights_checksum")):
        said = json.loads(engine.answered(path, {"module_names": ["transformer"]})[2])
        (folder / f"{name}.json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    write_exchanges(Path(__file__).parent / "data" / "engine")
