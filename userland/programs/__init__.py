"""Programs over system calls only, to use and to copy from: docs/writing-a-program.md.  Also as `attnix.programs`."""

from .agent import Outcome, Step, by_generating, run_agent
from .batch import Batch, BatchStopped, read_prompts
from .batch_output import BatchOutput, OutputError
from .beam import Hypothesis, beam_search
from .best_of_n import Ranked, best_of_n, mean_logprob
from .chat import Chat, Turn
from .child import child_of
from .patience import patiently
from .samples import Sample
from .self_consistency import Vote, last_number, self_consistency
from .tools import CALCULATOR, Tool, ToolError, command_runner, file_search, http_get

__all__ = [
    "CALCULATOR",
    "Batch",
    "BatchOutput",
    "BatchStopped",
    "Chat",
    "Hypothesis",
    "Outcome",
    "OutputError",
    "Ranked",
    "Sample",
    "Step",
    "Tool",
    "ToolError",
    "Turn",
    "Vote",
    "beam_search",
    "best_of_n",
    "by_generating",
    "child_of",
    "command_runner",
    "file_search",
    "http_get",
    "last_number",
    "mean_logprob",
    "patiently",
    "read_prompts",
    "run_agent",
    "self_consistency",
]
