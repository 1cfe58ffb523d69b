"""The table of what is read."""

import pytest
from PIL import Image, features

from rewards.files import media, suffixes


@pytest.mark.filterwarnings("ignore:Unknown feature")  # of a Pillow before 11.3
def test_the_table_has_what_pillow_opens_by_the_names_that_pillow_knows():
    Image.init()
    known = {suffix: kind for suffix, kind in Image.registered_extensions().items() if kind in media.FORMATS}
    own = suffixes.PICTURES | suffixes.ANIMATIONS
    rare = {".apng", ".jpe", ".dib", ".avifs"}
    assert {suffix: Image.MIME[kind] for suffix, kind in known.items() if suffix not in rare} == own
    assert (".avif" in own) == ("AVIF" in media.FORMATS) == bool(features.check("avif"))


def test_what_may_move_and_what_browsers_show_is_in_the_table():
    assert set(suffixes.MULTI_FRAME) - {".avif"} < set(suffixes.PICTURES)
    assert set(suffixes.PICTURES | suffixes.ANIMATIONS) - set(suffixes.BROWSER_PICTURES) == {".tif", ".tiff"}


def test_suffixes_are_compared_in_small_letters_and_companions_of_macos_are_known():
    assert suffixes.suffix_of("a.b/C.D.JPEG") == ".jpeg"
    assert [suffixes.is_apple_double(name) for name in ("._a.png", "_a.png", ".a.png", "a._png")] == [True] + [
        False
    ] * 3
