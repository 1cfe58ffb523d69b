import pytest
import torch

import rewards


@pytest.mark.parametrize("name", ["jpeg_size", "shapes"])
@pytest.mark.parametrize("shape", [(2, 5, 3, 16, 16), (2, 2, 400), (2, 1, 16, 16)])
def test_other_modalities_are_refused_by_name(name, shape):
    function = rewards.load(name).function
    with pytest.raises(ValueError, match=rf"{name} takes images \(B, 3, H, W\), not shape"):
        function(torch.rand(shape), ["a red circle", "a blue square"])
