"""The one public trace whose numbers were known before replay was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnix.replay.engine import Frames, Replay
from attnix.replay.profile import PROFILES
from attnix.replay.workload import from_trace
from attnix.traces import load

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl.gz"


@pytest.mark.slow
@pytest.mark.skipif(not TRACE.exists(), reason=f"the public traces are not at {TRACE.parent}")
def test_lru_and_the_optimum_of_mooncake_conversation_at_5_percent() -> None:
    """Issue 3: at 5% of the distinct blocks LRU finds 19.8% of the tokens and the optimum 37.3%."""
    workload = from_trace(load(TRACE), rate=0.3)
    frames = Frames(round(workload.distinct_blocks * 0.05))
    result = Replay(workload, PROFILES["h100-8b"], frames, "lru").run()
    assert (result.requests, result.refused, result.prompt_tokens) == (12_031, 0, 144_793_823)
    assert result.hit_ratio == pytest.approx(0.198, abs=0.003)
    assert result.bound_hit_ratio == pytest.approx(0.373, abs=0.002)
