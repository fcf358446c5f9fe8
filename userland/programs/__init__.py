"""Programs over system calls only, to use and to copy from: docs/writing-a-program.md.  Also as `attnix.programs`."""

from .agent import Outcome, Step, by_generating, run_agent
from .at_once import together
from .batch import Batch
from .batch_line import BatchStopped
from .batch_output import BatchOutput, OutputError
from .beam import Hypothesis, beam_search
from .best_of_n import Ranked, best_of_n, mean_logprob
from .chat import Chat
from .child import child_of
from .choice import SamplingOptions
from .patience import patiently
from .prompts import read_prompts
from .samples import Sample
from .self_consistency import Vote, last_number, self_consistency
from .tools import CALCULATOR, Tool, ToolError, command_runner, file_search, http_get
from .turns import Turn

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
    "SamplingOptions",
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
    "together",
]
