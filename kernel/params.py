"""Every limit of the kernel, one a line with its unit (the xv6 habit: one file to read before asking "how many?").

Values marked *sysctl* can be changed while the system runs; the others are fixed at boot or by the wire format.
"""

from __future__ import annotations

from typing import Final

BLOCK_TOKENS: Final = 16  # tokens per block, boot option
MAX_DEVICES: Final = 8  # compute devices and tiers together
MAX_CONTEXTS: Final = 4096  # context slots, boot option
MAX_PROCESSES: Final = 65536  # live processes, of which no uid has more than are left for others
MAX_GROUPS: Final = 1024  # groups with a process, a frame or a limit, nobody's included (also in csrc/state.h)
MAX_GROUP_NAME_BYTES: Final = 48  # bytes in the name of a group or domain: tags have room for it (tag.py)
MAX_FORK: Final = 1024  # contexts made by one fork
MAX_STOP_TOKENS: Final = 8  # stop token ids of one generation
MAX_STOP_STRINGS: Final = 16  # stop strings of one generation
MAX_STOP_CHARS: Final = 256  # characters of one stop string
MAX_LOGPROBS: Final = 128  # alternatives reported per token
MAX_MESSAGE_BYTES: Final = 16 << 20  # one wire message
MAX_UNREAD_BYTES: Final = 1 << 20  # bytes a client may leave unread before its generations pause
MAX_REQUESTS: Final = 4096  # requests outstanding on one connection
MAX_NAME_CHARS: Final = 128  # characters in a name: of a process, a context, a snapshot
MAX_WAIT_MS: Final = 10 * 365 * 86_400_000  # a tool's eta or deadline
MAX_SNAPSHOT_CONTEXTS: Final = 1024  # contexts in one snapshot
DMESG_ENTRIES: Final = 1024  # ring of kernel messages
FRAMES_TOLD: Final = 16384  # by one call of `frames`
HEADS: Final = 64  # prompts whose beginning is remembered
HEAD_TOKENS: Final = 1024  # tokens of each
SAMPLES: Final = 128  # of the machine's counters
SAMPLE_NS: Final = 1_000_000_000  # between two of them
LINK_SETTLES: Final = 16  # transfers after which a link that was not measured at its start counts as measured
MAX_TARGET_MS: Final = 86_400_000  # a target of a generation: a day
RETRY_MS: Final = 1000  # to come again after an EAGAIN, where nothing has been measured
OOM_ADJ_NEVER: Final = -1000  # oom_score_adj of a process that is never ended for memory ...
OOM_ADJ_FIRST: Final = 1000  # ... and of one that goes before all others
OOM_ADJ_AS_IS: Final = -1001  # setpriority: leave it
NICE_MIN: Final = -20
NICE_MAX: Final = 19
NICE_JOBS: Final = 64  # later jobs that may overtake a job, per step of nice between them: nobody waits for ever

STEP_TOKENS: Final = 512  # sysctl sched.step_tokens: token budget of one forward
MAX_RUNNING: Final = 256  # sysctl sched.max_running: sequences in one forward
MAX_ADMITTED: Final = 0  # sysctl sched.max_admitted: contexts that own frames and run, 0: as many as fit
WATERMARK_PERMILLE: Final = 10  # sysctl sched.watermark_permille: frames kept free for growth at admission
GROWTH_PERMILLE: Final = 500  # sysctl sched.growth_permille: quantile of what running generations still grow by
THRASH_HIGH_PERMILLE: Final = 400  # sysctl load.thrash_high_permille: of the work is done twice: fewer run at once
THRASH_LOW_PERMILLE: Final = 100  # sysctl load.thrash_low_permille: more run again
THRASH_WINDOW_MS: Final = 2000  # sysctl load.thrash_window_ms
OOM_AFTER_MS: Final = 60_000  # sysctl oom.after_ms: longer than a hung tier is given until its driver is killed

ABI_VERSION: Final = 4  # clients of any version from 1 are served
PAGE_TABLE_ALIGN_BYTES: Final = 4096
