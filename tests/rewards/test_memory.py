import os
import re

import pytest

from rewards.memory import Memory, read

NAME = "flowgrpo-" + "0" * 32


def test_what_was_written_last_is_read():
    own = Memory()
    for data in (b"longer", b"short", b"x" * 100_000, b""):
        assert bytes(read(own.write([data[:2], data[2:]]), 100_000)) == data


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda place: "", "no place of shared memory"),
        (lambda place: re.sub(r"^[0-9]+", "self", place), "no place of shared memory"),
        (lambda place: re.sub(r"flowgrpo-.* ", "../passwd ", place), "no place of shared memory"),
        (lambda place: place.replace(place.split()[2], NAME), "there is no such shared memory"),
        (lambda place: place.replace(place.split()[1], "1000000", 1), "cannot be read here"),
        (lambda place: re.sub("4$", "5", place), "has 4 bytes, not 5"),
        (lambda place: re.sub("4$", "9", place), "may have 8 bytes at most"),
    ],
)
def test_no_other_place_is_read(changed, said):
    own = Memory()
    place = own.write([b"1234"])
    with pytest.raises(ValueError, match=said):
        read(changed(place), 8)


def test_a_file_is_not_read_whatever_it_is_called(tmp_path):
    for name in ("secret", f"memfd:{NAME}", f"memfd:{NAME} (deleted)"):
        (tmp_path / name).write_text("1234")
        with open(tmp_path / name) as file, pytest.raises(ValueError, match="there is no such shared memory"):
            read(f"{os.getpid()} {file.fileno()} {NAME} 4", 8)


def test_memory_ends_with_whoever_made_it():
    own = Memory()
    place = own.write([b"1234"])
    del own
    with pytest.raises(ValueError, match="shared memory"):
        read(place, 8)
