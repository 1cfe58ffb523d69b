import pytest
import torch

import rewards


@pytest.mark.parametrize("name", ["jpeg_size", "shapes"])
@pytest.mark.parametrize("shape", [(2, 5, 3, 16, 16), (2, 2, 400), (2, 1, 16, 16)])
def test_other_modalities_are_refused_by_name(name, shape):
    function = rewards.load(name).function
    with pytest.raises(ValueError, match=rf"{name} takes images \(B, 3, H, W\), not shape"):
        function(torch.rand(shape), ["a red circle", "a blue square"])


def test_jpeg_size_prefers_what_compresses():
    flat, noise = torch.full((1, 3, 32, 32), 0.5), torch.rand(1, 3, 32, 32)
    sizes = rewards.load("jpeg_size")(torch.cat([flat, noise]), ["a", "b"], {})
    assert 0 > sizes[0] > sizes[1]
