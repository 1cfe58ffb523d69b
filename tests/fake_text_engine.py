"""A stand-in for an engine of texts, in a thread, backed by one of our decoders: the paths and fields of SGLang.

They are those of sgl-project/sglang, python/sglang/srt, that `flowgrpo_engine.text.client` names: the step maps of its pull
request 27943, and log-probabilities, seeds and adapters as its autoregressive models have them. It is not that program.
`flowgrpo.mdlm` decodes; files of adapters are read here, and merged into the weights.
"""

import json
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from flowgrpo.mdlm.config import TextModel
from flowgrpo.mdlm.decoding.decode import decode
from flowgrpo.mdlm.decoding.decoders import build
from flowgrpo.mdlm.policy import padded
from flowgrpo.mdlm.setup import load_text_policy


class FakeTextEngine:
    """Hold what the server knows, and attributes that make it go wrong.

    Attributes:
        over_all: steps are counted over the whole completion, not anew in each block.
        cuts: what stands behind the end token does not come back.
        skips_pushes: a load says yes and does nothing.
        ignores_adapters: they are loaded, and nothing is computed with them.
        offset: added to each log-probability.
        edit: changes the list of answers before it is sent.
    """

    def __init__(self, decoder, path="digits", **options):
        self.policy = load_text_policy(TextModel(path=str(path), **options), torch.device("cpu"))
        self.predictor, self.decoder = self.policy.predictor, decoder
        self.base = {name: p.detach().clone() for name, p in self.predictor.model.named_parameters()}
        self.asked, self.loaded, self.edit, self.delay = [], {}, None, 0.0
        self.over_all = self.cuts = self.skips_pushes = self.ignores_adapters = False
        self.offset = 0.0
        self.lock = threading.Lock()

    @torch.no_grad()
    def compute_with(self, name):
        """Merge an adapter's matrices into the weights, in place of those before."""
        parameters = dict(self.predictor.model.named_parameters())
        for key, p in parameters.items():
            p.copy_(self.base[key])
        if name is None or self.ignores_adapters:
            return
        tensors, about = self.loaded[name]
        scale = about["lora_alpha"] / about["r"]
        for key, down in tensors.items():
            layer, is_down, _ = key.removeprefix("base_model.model.").partition(".lora_A.")
            if is_down:
                parameters[f"{layer}.weight"] += scale * tensors[key.replace(".lora_A.", ".lora_B.")] @ down

    def complete(self, body):
        drawn = body["sampling_params"][0]
        proposal = {"temperature": drawn["temperature"], "top_p": drawn["top_p"]}
        proposal |= {"top_k": drawn["top_k"]} if drawn["top_k"] > 0 else {}
        spec = self.decoder | {"proposal": proposal, "eos_early_stop": not drawn["ignore_eos"]}
        decoder = build(spec, drawn["max_new_tokens"], self.policy.eos_id, self.predictor)
        (adapter,) = set(body.get("lora_path", [None]))
        self.compute_with(adapter)
        ids, seen = padded(self.predictor, body["input_ids"])
        seeds = [(each["sampling_seed"],) for each in body["sampling_params"]]
        rollout = decode(self.predictor, ids, decoder, seeds, attention_mask=seen)
        parts = decoder.region.parts(seen.sum(1))
        return [self.answer(body, row, rollout, parts) for row in range(len(ids))]

    def answer(self, body, row, rollout, parts):
        committed = rollout.step_map[row] < rollout.steps[row]
        tokens = rollout.completion[row][committed].tolist()
        if self.cuts and self.policy.eos_id in tokens:
            tokens = tokens[: tokens.index(self.policy.eos_id) + 1]
        steps = []
        for starts, ends in parts:
            every = rollout.step_map[row, starts[row] : ends[row]].tolist()
            own = [step for step in every if step < rollout.steps[row]]
            first = 1 + (max(steps, default=0) if self.over_all else 0)
            steps += [first + sorted(set(own)).index(step) for step in own]
        about = {
            "id": body["rid"][row], "prompt_tokens": len(body["input_ids"][row]), "completion_tokens": len(tokens),
            "finish_reason": {"type": "length", "length": len(tokens)}, "weight_version": "default",
            "step_maps": steps[: len(tokens)],
        }  # fmt: skip
        if body.get("return_logprob"):
            logp = rollout.commit_logp[row].tolist()
            about["output_token_logprobs"] = [[logp[i] + self.offset, token, None] for i, token in enumerate(tokens)]
        return {"text": self.policy.tokenizer.decode(tokens), "output_ids": tokens, "meta_info": about}

    def load(self, body):
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.loaded:
            return {"success": False, "error_message": f"LoRA with name {name} already exists"}
        if not self.skips_pushes:
            about = json.loads((folder / "adapter_config.json").read_text())
            self.loaded[name] = load_file(folder / "adapter_model.safetensors"), about | {"path": str(folder)}
        return {"success": True, "error_message": "", "loaded_adapters": self.paths()}

    def unload(self, body):
        if self.loaded.pop(body["lora_name"], None) is None:
            return {"success": False, "error_message": f"LoRA with name {body['lora_name']} does not exist"}
        return {"success": True, "error_message": "", "loaded_adapters": self.paths()}

    def paths(self):
        return {name: about["path"] for name, (_, about) in self.loaded.items()}

    def models(self):
        base = {"id": "digits", "object": "model", "root": "digits", "parent": None}
        adapters = [{"id": name, "root": path, "parent": "digits"} for name, path in self.paths().items()]
        return {"object": "list", "data": [base, *adapters]}

    def answered(self, path, body):
        """Return the status, type and content of an answer."""
        self.asked.append((path, body))
        status, said = 200, None
        if path == "/generate":
            time.sleep(self.delay)
            unknown = {*body.get("lora_path", [])} - self.loaded.keys()
            if unknown:
                status, said = 400, {"error": {"message": f"LoRA adapter {unknown.pop()} is not loaded"}}
            else:
                said = self.complete(body)
                if self.edit is not None:
                    said = self.edit(said) or said
        elif path == "/v1/models":
            said = self.models()
        elif path in ("/load_lora_adapter", "/unload_lora_adapter"):
            said = self.load(body) if path.startswith("/load") else self.unload(body)
            status = 200 if said["success"] else 400
        else:
            status, said = 404, {"detail": "Not Found"}
        return status, "application/json", json.dumps(said).encode()
