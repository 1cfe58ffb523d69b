"""TIFF, which holds numbers of many kinds: pictures are read, of others is said why they are none."""

import struct

import numpy as np
import pytest
from PIL import Image

from rewards.files import media

COLOURS = np.array([[[0, 0, 0], [255, 255, 255]], [[200, 60, 30], [9, 9, 9]]], np.uint8)
WIDTH, HEIGHT, BITS, PHOTOMETRIC, STRIP, SAMPLES, BYTES = 256, 257, 258, 262, 273, 277, 279


def a_tiff(values, order="<", **tags):
    """An uncompressed TIFF of one strip, (H, W) or (H, W, C), written by hand; `tags` by their numbers, `t262=0`."""
    data = values.astype(values.dtype.newbyteorder(order)).tobytes()
    height, width, channels = (*values.shape, 1)[:3]
    depth = 8 * values.itemsize
    given = {WIDTH: width, HEIGHT: height, BITS: [depth] * channels, PHOTOMETRIC: 2 if channels == 3 else 1}
    given |= {STRIP: 8, SAMPLES: channels, BYTES: len(data)} | {int(name[1:]): value for name, value in tags.items()}
    bits = struct.pack(f"{order}3H", depth, depth, depth)  # of three channels, which do not fit into their tag
    entries = b""
    for tag, value in sorted(given.items()):
        many = value if isinstance(value, list) else [value]
        packed = struct.pack(f"{order}{len(many)}H", *many)
        packed = struct.pack(f"{order}I", 8 + len(data)) if len(packed) > 4 else packed.ljust(4, b"\0")
        entries += struct.pack(f"{order}HHI", tag, 3, len(many)) + packed
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(data) + len(bits))
    return head + data + bits + struct.pack(f"{order}H", len(given)) + entries + bytes(4)


def seen(path):
    return np.asarray(media.picture(path)).tolist()


@pytest.mark.parametrize("name", ["a.tiff", "a.tif", "A.TIF"])
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"])
def test_a_tiff_is_its_pixels_however_it_is_packed(tmp_path, name, compression):
    Image.fromarray(COLOURS).save(tmp_path / name, "TIFF", compression=compression)
    assert seen(tmp_path / name) == COLOURS.tolist()


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(("values", "tags", "expected"), [
    (COLOURS, {}, COLOURS.tolist()),
    (COLOURS.astype(np.uint16) * 257, {}, COLOURS.tolist()),
    (np.array([[0, 514, 32768, 65535]], np.uint16), {}, [[[value] * 3 for value in (0, 2, 128, 255)]]),
    (np.array([[0, 55, 255]], np.uint8), {"t262": 0}, [[[value] * 3 for value in (255, 200, 0)]]),  # white is 0
], ids=["8 bits", "16 bits", "grey", "white is 0"])  # fmt: skip
def test_of_8_and_16_bits_all_are_read_in_either_order(tmp_path, values, tags, expected, order):
    (tmp_path / "a.tiff").write_bytes(a_tiff(values, order, **tags))
    assert seen(tmp_path / "a.tiff") == expected


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_tiffs_of_other_modes_are_read(tmp_path, mode):
    Image.new("RGB", (2, 1), "white").convert(mode).save(tmp_path / "a.tiff")
    assert seen(tmp_path / "a.tiff") == [[[255, 255, 255]] * 2]


@pytest.mark.parametrize("orientation", [3, 6, 8])
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_a_tiff_is_turned_as_its_camera_says(tmp_path, orientation, compression):
    values = np.arange(18, dtype=np.uint8).reshape(2, 3, 3)
    Image.fromarray(values).save(tmp_path / "a.tiff", compression=compression, tiffinfo={274: orientation})
    turned = np.rot90(values, {3: 2, 6: -1, 8: 1}[orientation])
    assert seen(tmp_path / "a.tiff") == turned.tolist()
    assert np.asarray(media.frames(tmp_path / "a.tiff")[0]).tolist() == turned.tolist()


@pytest.mark.parametrize(("values", "tags"), [
    (np.full((2, 2), 0.5, np.float32), {"t339": 3}), (np.full((2, 2), 70000, np.int32), {"t339": 2}),
    (np.full((2, 2), 70000, np.uint32), {}), (np.full((2, 2), -5, np.int16), {"t339": 2}),
    (np.full((2, 2), -5, np.int8), {"t339": 2}), (np.full((2, 2), 5, np.uint16), {"t262": 0}),
    (np.full((2, 3), 0x5555, np.uint16), {"t258": 12, "t256": 4}),
], ids=["float", "int32", "uint32", "int16", "int8", "white is 0", "12 bits"])  # fmt: skip
def test_a_tiff_of_numbers_whose_white_nobody_knows_is_refused(tmp_path, values, tags):
    (tmp_path / "a.tiff").write_bytes(a_tiff(values, **tags))
    with pytest.raises(media.MediaError, match=r"a\.tiff cannot be read \(which of its values is white is not known"):
        media.picture(tmp_path / "a.tiff")


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "jpeg"])
def test_a_tiff_of_several_pages_is_refused(tmp_path, compression):
    pages = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "green")]
    pages[0].save(tmp_path / "a.tiff", save_all=True, append_images=pages[1:], compression=compression)
    for read in (media.picture, media.frames):
        with pytest.raises(media.MediaError, match=r"a\.tiff cannot be read \(it has several pages; save the one"):
            read(tmp_path / "a.tiff")


def test_the_tiles_of_a_tiff_are_bounded_as_its_picture_is(tmp_path):
    (tmp_path / "a.tiff").write_bytes(a_tiff(COLOURS, t322=8192, t323=4112))
    with pytest.raises(media.MediaError, match=r"a\.tiff has 8192 x 4112 pixels, at most 33554432 are read"):
        media.picture(tmp_path / "a.tiff")
