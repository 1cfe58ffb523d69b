"""Every pipeline of the zoo keeps its certificate; a plain run of the tests measures a representative part of them."""

import json
import runpy
from pathlib import Path

import pytest
from zoo import REPRESENTATIVE, SPECIMENS
from zoo.second import OTHERWISE, second

import flowgrpo
from flowgrpo.errors import InputError
from flowgrpo.flow.diagnostics import certificate
from flowgrpo.flow.diagnostics.certificate import certify
from flowgrpo.flow.pipeline.networks.traits import TRAITS
from flowgrpo.flow.pipeline.policy import DiffusersPolicy

ROOT = Path(__file__).parents[4]
TABLE = json.loads((Path(flowgrpo.__file__).parent / "data" / "models.json").read_text())
# Whose ways through the checks others of the representative ones go, too: pictures, one row a call, a call for each branch
# of guidance, one text encoder.
ALIKE = ("FluxControlPipeline", "FluxPipeline", "LTXImageToVideoPipeline", "OmniGenPipeline", "QwenImagePipeline")
ALIKE += ("SanaPipeline", "HiDreamImagePipeline", "MochiPipeline", "StableAudio3Pipeline", "ZImagePipeline")
ROWS = {r["class"] + (f" ({r['variant']})" if r["variant"] else ""): r for r in TABLE}
CERTIFIED = [name for name, row in ROWS.items() if row["certified"]]


@pytest.fixture
def learning(monkeypatch):
    """Whether each weight learns while what is replayed is rolled out, as in a run: some layers round otherwise if not."""
    real, seen = certificate.roll_out_stochastic, []

    def roll_out(policy, rows):
        seen.extend(p.requires_grad for module in policy.modules.values() for p in module.parameters())
        return real(policy, rows)

    monkeypatch.setattr(certificate, "roll_out_stochastic", roll_out)
    return seen


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in REPRESENTATIVE and n not in ALIKE else pytest.mark.zoo)
        for n in sorted(CERTIFIED)
    ],
)
def test_a_certified_pipeline_keeps_its_certificate(name, learning):
    specimen = SPECIMENS[name]
    few = {"num_inference_steps": 3} if name in REPRESENTATIVE else {}  # the fewest of which two can learn
    checks = certify(specimen.build, {**specimen.call, **few}, specimen.rows)
    held(checks)
    (shares,) = (check.value.partition(", ")[2] for check in checks if check.name == "any_micro_batch")
    assert shares == ROWS[name]["checks"]["any_micro_batch"].partition(", ")[2]
    assert learning
    assert all(learning)


@pytest.mark.zoo
@pytest.mark.parametrize("name", sorted(CERTIFIED))
def test_a_certified_pipeline_keeps_its_certificate_on_other_inputs(name, learning):
    specimen = second(name, SPECIMENS[name])
    held(certify(specimen.build, specimen.call, specimen.rows), but={"ZImageOmniPipeline": "equals_stock"}.get(name))
    assert all(learning)


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name, call in OTHERWISE.items() if "num_frames" in call])
def test_videos_of_several_chunks_are_refused(name):
    specimen = SPECIMENS[name]
    with pytest.raises(InputError, match=f"^model.call.*: {name.partition(' ')[0]} counts its own steps"):
        DiffusersPolicy(specimen.build(), {**specimen.call, "num_frames": 9}).check(specimen.rows)


def held(checks, but=None):
    assert [f"{c.name}: {c.value} {c.advice}" for c in checks if not c.ok and c.name != but] == []
    names = "encoded_once equals_stock decoded any_micro_batch drift gradients drift_bfloat16 lora_reload"
    assert [c.name for c in checks] == names.split()


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_certified_pipeline_keeps_its_certificate_on_a_real_gpu(name, exact_convolutions):
    specimen = SPECIMENS[name]
    checks = certify(lambda: specimen.build().to("cuda"), {**specimen.call, "num_inference_steps": 3}, specimen.rows)
    assert [f"{c.name}: {c.value} {c.advice}" for c in checks if not c.ok] == []


def test_the_table_lists_every_specimen_and_enough_certified_classes():
    listed = {r["class"] + (f" ({r['variant']})" if r["variant"] else "") for r in TABLE}
    assert listed == set(SPECIMENS)
    assert len({r["class"] for r in TABLE if r["certified"]}) >= 100
    assert all(r["drift"] == 0 for r in TABLE if r["certified"])
    assert all(r["note"] for r in TABLE if not r["certified"])
    assert set(REPRESENTATIVE) <= set(CERTIFIED)


def test_the_families_that_people_train_are_certified():
    named = """StableDiffusion3 Flux FluxKontext FluxControl Flux2 Flux2Klein QwenImage QwenImageEdit QwenImageEditPlus
        QwenImageControlNet ZImage Sana SanaControlNet Lumina2 AuraFlow Chroma CogView4 BriaFibo HunyuanImage HiDreamImage
        GlmImage OvisImage LongCatImage Kandinsky5T2I Kandinsky5T2V Krea2 PRX OmniGen Wan WanImageToVideo WanVACE WanAnimate
        HunyuanVideo HunyuanVideoImageToVideo HunyuanVideo15 SkyReelsV2 LTX LTXImageToVideo LTXCondition LTX2 Mochi
        Cosmos2_5_PredictBase SanaVideo MotifVideo StableAudio3"""
    assert {f"{name}Pipeline" for name in named.split()} <= {r["class"] for r in TABLE if r["certified"]}
    assert {"WanPipeline (2.2)", "WanPipeline (5B)", "WanImageToVideoPipeline (first and last frame)"} <= set(CERTIFIED)


def test_the_page_has_the_tables():
    written = runpy.run_path(str(ROOT / "scripts/certify_models.py"))
    text = written["PAGE"].read_text()
    tables = [[line for line in page.splitlines() if "|" in line] for page in (text, written["page"](TABLE, text))]
    assert tables[0] == tables[1]
    assert text.splitlines()[2] == written["page"](TABLE, text).splitlines()[2]
    shares = [written["calls_of"](row) for row in TABLE if row["certified"]]
    together = [how for how in shares if how != "alone"]
    mixed = [how for how in together if "mixed" in how]
    assert f"{len(mixed)} of the {len(together)} pipelines below that share calls are mixed." in text


def test_the_policy_knows_no_pipeline_by_name():
    files = [f for f in (Path(flowgrpo.__file__).parent / "flow/pipeline").rglob("*.py") if f.name != "traits.py"]
    assert {"policy.py", "denoising_loop.py", "slice_probe.py", "batching.py"} <= {f.name for f in files}
    assert not [(f.name, r["class"]) for f in files for r in TABLE if r["class"] in f.read_text()]
    assert len(TRAITS) <= 15
