import pytest
import tiny
import torch
import transformers

import rewards
from rewards import RewardError
from rewards.objects.detectors import ColourNamer, Owlv2, load_detector

# CLIP looks at the end, which a model whose end is token 2 takes to be the largest number.
WORDS = [*(word for word in tiny.WORDS if word != "<end>"), "<end>"]
SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**SIZE, "vocab_size": len(WORDS), "max_position_embeddings": 8, "eos_token_id": WORDS.index("<end>")}
VISION = {**SIZE, "image_size": 32, "patch_size": 8}


def randomised(model, norms=True):
    """Weights large enough that predictions differ from picture to picture."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if norms or "norm" not in name):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="module")
def mask2former(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mask2former")
    stages = {"depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4], "out_features": [f"stage{i}" for i in range(1, 5)]}
    sizes = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_attention_heads": 2, "num_queries": 6}
    layers = {"encoder_feedforward_dim": 16, "encoder_layers": 1, "decoder_layers": 2, "dim_feedforward": 16}
    config = transformers.Mask2FormerConfig(
        backbone_config=transformers.SwinConfig(image_size=64, embed_dim=8, window_size=4, **stages),
        id2label={0: "person", 1: "motorbike", 2: "dog"},
        **sizes,
        **layers,
    )
    randomised(transformers.Mask2FormerForUniversalSegmentation(config)).save_pretrained(folder)
    transformers.Mask2FormerImageProcessor(size={"shortest_edge": 72, "longest_edge": 120}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def owlv2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("owlv2")
    config = transformers.Owlv2Config(text_config=TEXT, vision_config=VISION, projection_dim=16)
    randomised(transformers.Owlv2ForObjectDetection(config)).save_pretrained(folder)
    image_processor = transformers.Owlv2ImageProcessor(size={"height": 32, "width": 32})
    transformers.Owlv2Processor(image_processor, tiny.tokenizer(words=WORDS)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16))
    randomised(model, norms=False).save_pretrained(folder)  # random ones leave nothing of what differs
    image_processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    transformers.CLIPProcessor(image_processor, tiny.tokenizer(words=WORDS)).save_pretrained(folder)
    return folder


def pictures(count, height=48, width=64):
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(1))


def test_the_score_of_an_instance_is_that_of_transformers(mask2former):
    images = pictures(1, 384, 384)  # the size at which transformers takes masks, so that the masks are the same
    detector = load_detector(str(mask2former))
    detector.processor.size = {"height": 384, "width": 384}
    (found,) = detector(images, ["person", "motorcycle", "dog"], 0.05)
    with torch.no_grad():
        inputs = detector.processor(images=list(images), do_rescale=False, return_tensors="pt")
        outputs = detector.model(**inputs)
    (stock,) = detector.processor.post_process_instance_segmentation(
        outputs, threshold=0.05, target_sizes=[(384, 384)], return_binary_maps=True
    )
    expected = {
        (detector.model.config.id2label[segment["label_id"]], segment["score"], mask.bool().sum().item())
        for segment, mask in zip(stock["segments_info"], stock["segmentation"], strict=True)
    }
    names = {"motorcycle": "motorbike"}
    ours = [(names.get(n, n), round(o.score, 6), o.mask.sum().item()) for n, many in found.items() for o in many]
    assert len(expected) >= 3
    for name, score, pixels in expected:  # transformers keeps no more instances than queries
        assert any(n == name and s == pytest.approx(score, abs=2e-6) and p == pixels for n, s, p in ours)


@pytest.fixture(params=["mask2former", "owlv2"])
def detector(request):
    return load_detector(str(request.getfixturevalue(request.param)))


def test_what_is_found_does_not_depend_on_the_batch_and_may_be_nothing(detector):
    images = pictures(3)
    together = detector(images, ["dog", "person"], 0.0)
    alone = [detector(image[None], ["dog"], 0.0)[0] for image in images]
    assert sum(len(found["dog"]) for found in alone) >= 3
    for one, other in zip(together, alone, strict=True):
        assert set(one) == {"dog", "person"}
        for a, b in zip(one["dog"], other["dog"], strict=True):
            assert a.score == pytest.approx(b.score, abs=1e-5)
            assert a.box == pytest.approx(b.box, abs=1e-3)
    assert detector(images, ["dog"], 1.0) == [{"dog": []}] * 3


def test_boxes_lie_in_the_picture_and_masks_in_their_box(detector):
    for detection in (d for one in detector(pictures(3), ["dog"], 0.0) for d in one["dog"]):
        left, top, right, bottom = detection.box
        assert 0 <= left <= right <= 64
        assert 0 <= top <= bottom <= 48
        assert 0 < detection.score <= 1
        assert (detection.mask is None) == isinstance(detector, Owlv2)
        if detection.mask is not None:
            inside = torch.zeros(48, 64, dtype=torch.bool)
            inside[top:bottom, left:right] = True
            assert detection.mask.shape == (48, 64)
            assert not (detection.mask & ~inside).any()
            assert detection.mask[:, [left, right - 1]].any(0).all()
            assert detection.mask[[top, bottom - 1]].any(1).all()


def test_the_boxes_of_a_wide_picture_are_those_of_transformers(owlv2):
    images = pictures(1, 32, 64)
    detector = load_detector(str(owlv2))
    (found,) = detector(images, ["dog"], 0.0)
    with torch.no_grad():
        given = {"text": [["a photo of a dog"]], "images": list(images)}
        outputs = detector.model(**detector.processor(**given, do_rescale=False, return_tensors="pt"))
    (stock,) = detector.processor.post_process_grounded_object_detection(outputs, 0.0, target_sizes=[(32, 64)])
    expected = [
        (score, [min(max(edge, 0), most) for edge, most in zip(box, (64, 32, 64, 32), strict=True)])
        for score, box in zip(stock["scores"].tolist(), stock["boxes"].tolist(), strict=True)
    ]
    assert 1 <= len(found["dog"]) <= len(expected) == 16
    for one in found["dog"]:
        assert any(one.score == pytest.approx(s) and list(one.box) == pytest.approx(b, abs=1e-3) for s, b in expected)


def test_an_object_that_is_found_twice_counts_once(owlv2):
    detector = load_detector(str(owlv2))
    with torch.no_grad():  # every patch predicts one and the same box
        for layer in (detector.model.box_head.dense2, detector.model.class_head.dense0):
            layer.weight.zero_()
    detector.model.box_bias = torch.zeros_like(detector.model.box_bias)
    (found,) = detector(pictures(1), ["dog"], 0.0)
    assert len(found["dog"]) == 1


def test_a_detector_of_half_precision_finds_about_the_same(mask2former):
    images = pictures(1)
    full = load_detector(str(mask2former))(images, ["dog"], 0.0)[0]["dog"]
    half = load_detector(str(mask2former), torch.bfloat16)(images, ["dog"], 0.0)[0]["dog"]
    assert [o.score for o in half] == pytest.approx([o.score for o in full], abs=0.1)


def test_an_unknown_class_and_an_unknown_kind_of_model_are_explained(mask2former, clip):
    with pytest.raises(RewardError, match="knows no class 'dogs', it has dog"):
        load_detector(str(mask2former))(pictures(1), ["dogs"], 0.1)
    with pytest.raises(RewardError, match="is a clip, not one of mask2former, owlv2"):
        load_detector(str(clip))


@pytest.mark.parametrize("option", ["detector", "colours"])
def test_a_model_that_is_not_there_is_explained(mask2former, clip, option):
    options = {"detector": str(mask2former), "colours": str(clip), "threshold": 0.0, option: "/nowhere"}
    include = [{"class": "dog", "count": 1, "color": "red"}]
    with pytest.raises(RewardError, match=f"geneval's {option}: '/nowhere' is neither a folder with a model nor one"):
        rewards.load("geneval", options=options).check(pictures(1)[0], "a dog", {"include": include})


def test_a_colour_depends_neither_on_the_batch_nor_on_the_size_of_the_crop(clip):
    namer = ColourNamer(str(clip), ["red", "green", "blue"])
    picture = pictures(1)[0]
    crops = [picture[:, :20, :20], 1 - picture[:, :9, :40], picture[:, 30:, 60:]]
    names = ["circle", "square", "circle"]
    together = namer(crops, names)
    assert len(set(together)) > 1
    assert together == [namer([crop], [name])[0] for crop, name in zip(crops, names, strict=True)]
    middle = namer([picture[:, :9, 15:24]], ["square"])  # which is what CLIP sees
    assert namer([picture[:, :9, :40]], ["square"]) == middle


def test_the_reward_loads_its_models_when_it_is_first_called(mask2former, clip):
    options = {"detector": str(mask2former), "colours": str(clip), "threshold": 0.02, "batch_size": 2}
    reward = rewards.load("geneval", options=options)
    assert not {"_detect", "_name_colours"} & set(vars(reward.function))
    columns = {
        "include": [[{"class": "dog", "count": 1, "color": "red"}], None, [{"class": "motorcycle", "count": 2}]],
        "tag": ["colors", None, "counting"],
    }
    images = pictures(3)
    values = reward(images, ["a", "b", "c"], columns)
    assert values[1].isnan()
    assert (values[[0, 2]] <= 1).all()
    single = [reward(images[i : i + 1], ["a"], {k: [v[i]] for k, v in columns.items()}) for i in (0, 2)]
    assert torch.cat(single).tolist() == pytest.approx(values[[0, 2]].tolist())
    assert reward.function.to("cpu") is reward.function
    reward.function.to("meta")
    assert reward.function._detect.model.device.type == "meta"
