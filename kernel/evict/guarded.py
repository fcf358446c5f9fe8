"""A third party's policy, which may raise what it likes: that costs it its place, and the daemon nothing.

A policy is called in the middle of an admission, where what escapes stops the kernel.  Ours are called as they are: a
fault of theirs is the kernel's own, and ought to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .protocol import BlockView, EvictionPolicy

Failed = Callable[[str, str, Exception], None]  # the policy's name, when, what


class Guarded:
    """`factory` makes the policy that was registered as `name`.  At its first fault `failed` is told, and from then on it
    is asked for nothing: the kernel's own order fills in."""

    def __init__(self, name: str, factory: Callable[[], EvictionPolicy], failed: Failed) -> None:
        self.name = name  # as it was registered, whatever it calls itself: it is made again by that name
        self.listens = False
        self._failed = failed
        self._policy: EvictionPolicy | None = None
        try:
            policy = factory()
            self.listens = bool(policy.listens)
            self._policy = policy
        except Exception as error:
            self._fail("when it was made", error)

    def _fail(self, when: str, error: Exception) -> None:
        self._policy, self.listens = None, False
        self._failed(self.name, when, error)

    def victims(self, view: BlockView, device: int, want: int) -> Sequence[int]:
        if self._policy is None:
            return ()
        try:
            found = list(self._policy.victims(view, device, want))
            view.keys(found)  # refuses what is no block's number
            return found
        except Exception as error:
            self._fail("in victims", error)
            return ()

    def inserted(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        self._tell("inserted", view, device, blocks)

    def used(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        self._tell("used", view, device, blocks)

    def ended(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        self._tell("ended", view, device, blocks)

    def removed(self, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        self._tell("removed", view, device, blocks)

    def _tell(self, what: str, view: BlockView, device: int, blocks: Sequence[int]) -> None:
        if self._policy is None:
            return
        try:
            getattr(self._policy, what)(view, device, blocks)
        except Exception as error:
            self._fail(f"in {what}", error)
