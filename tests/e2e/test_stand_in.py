"""attnix.stand_in, which takes the model's place in `make gpu`: what these tests say is as many tokens for it as for the model.

The tests size their tiers by that, and some count tokens to the block.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attnix.stand_in import SHAPES, write_stand_in
from attnix.syscalls.text.loading import load_text

if TYPE_CHECKING:
    from tests.e2e.conftest import Script


@pytest.mark.model
def test_every_text_is_cut_as_the_model_cuts_it(
    smollm2: Path, conversations: dict[str, list[Script]], tmp_path: Path
) -> None:
    model, stand_in = load_text(smollm2), load_text(write_stand_in(tmp_path / "stand-in.gguf", SHAPES["small"]))
    texts = {
        text for scripts in conversations.values() for s in scripts for text in (s.prompt, *(t.text for t in s.turns))
    }
    assert len(texts) > 200 and len(model.prefix_ids) == len(stand_in.prefix_ids)
    for text in texts:
        pieces = [[m.token_bytes[token] for token in m.encode(text)] for m in (model, stand_in)]
        assert pieces[0] == pieces[1]


def test_no_word_is_there_twice_and_any_text_comes_back(tmp_path: Path) -> None:
    stand_in = load_text(write_stand_in(tmp_path / "stand-in.gguf", SHAPES["small"]))
    words = stand_in.token_bytes
    assert len(set(words)) == len(words) == SHAPES["small"].vocab
    assert stand_in.decode(stand_in.encode("Größe 12, naïve?\n")) == "Größe 12, naïve?\n"
