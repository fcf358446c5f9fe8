"""What is in userland/programs/, under the name that programs of your own import: docs/writing-a-program.md."""

from attnix.userland.programs import *  # noqa: F403
from attnix.userland.programs import __all__ as __all__
