"""The licence and the name of a base model are what its own card and index say, and nothing is made up."""

import json

import pytest

from flowgrpo.training.reports import model_card as card

PAGE = "https://huggingface.co/black-forest-labs/FLUX.1-dev"
FLUX = """---
license: other
license_name: flux-1-dev-non-commercial-license
license_link: LICENSE.md
---
# FLUX
"""


@pytest.fixture
def folder(tmp_path):
    def made(card=None, named=None):
        if card is not None:
            (tmp_path / "README.md").write_text(card)
        index = {"_class_name": "X"} | ({"_name_or_path": named} if named else {})
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        return str(tmp_path)

    return made


def test_a_card_in_the_folder_says_the_licence(folder):
    assert card.licence(folder("---\nlicense: apache-2.0\n---\n")) == {"license": "apache-2.0"}
    assert card.licence("shapes") == {"license": "apache-2.0"}  # of this package


def test_a_licence_of_its_own_is_linked_to_the_models_page(folder):
    assert card.licence(folder(FLUX, "black-forest-labs/FLUX.1-dev")) == {
        "license": "other",
        "license_name": "flux-1-dev-non-commercial-license",
        "license_link": f"{PAGE}/blob/main/LICENSE.md",
    }


@pytest.mark.parametrize("front", [None, "", "[broken: ", "license: [a, b]", "- a"])
def test_what_nobody_says_is_other(folder, front):
    place = folder(front and f"---\n{front}\n---\n", "black-forest-labs/FLUX.1-dev")
    assert card.licence(place) == {"license": "other", "license_name": "as-the-base-model", "license_link": PAGE}


def test_names_at_the_hub(folder):
    assert card.hub_name("stabilityai/stable-diffusion-3.5-medium") == "stabilityai/stable-diffusion-3.5-medium"
    assert card.hub_name("shapes") is None
    for named in (None, "/data/models/flux", "black-forest-labs/FLUX.1-dev"):
        assert card.hub_name(folder(named=named)) == (named if named and not named.startswith("/") else None)


def test_without_the_hub_a_model_of_it_keeps_its_page():
    assert card.licence("black-forest-labs/FLUX.1-dev")["license_link"] == PAGE
