import pytest

from flowgrpo.errors import InputError
from flowgrpo.training.planning.gpu_types import find_gpu


def test_a_gpu_is_found_by_its_name():
    assert find_gpu("H100").half == 989
    assert find_gpu("a100").peak("bfloat16") == 312e12
    assert find_gpu("a100").peak("float16") == 312e12
    assert find_gpu("a100").peak("float32") == 19.5e12


def test_one_that_is_not_known_is_refused_with_the_nearest():
    with pytest.raises(InputError, match=r"--gpu-type: no numbers of 'h1000' are known here, did you mean 'h100'\?"):
        find_gpu("h1000")
    with pytest.raises(InputError, match="choose one of a100, h100"):
        find_gpu("abacus")
