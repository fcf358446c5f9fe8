"""`attnix study`: questions about this design, answered with the system's own parts on this machine.

What measures lies below the system calls, so it is a process of its own (`python -m attnix.study_X`) that prints one JSON
document; this file makes tables of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from ..output import CommandError, JsonOption, show, table
from ..units import count, duration, size

study = typer.Typer(no_args_is_help=True, help="Studies of the design on this machine.  All take --json.")

_BASE_BLOCK: Final = 16  # tokens; costs of attention are shown beside this one's


def measured(module: str, *flags: str) -> str:
    """The document that a study printed.  Error: CommandError when it failed; it has said why on standard error."""
    done = subprocess.run([sys.executable, "-m", module, *flags], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise CommandError(f"{module} ended with status {done.returncode}")
    return done.stdout


@study.command("fragmentation")
def fragmentation(
    seed: Annotated[int, typer.Option(help="Of the request lengths.")] = 1,
    attention: Annotated[bool, typer.Option(help="Measure attention at each block size, too.")] = True,
    as_json: JsonOption = False,
) -> None:
    """How many requests fit into 32,768 token slots: reservation, exact first fit, and pages of 1 to 256 tokens."""
    printed = measured("attnix.study_fragmentation", "--seed", str(seed), *[] if attention else ["--no-attention"])
    if as_json:
        sys.stdout.write(printed)
        return
    found = json.loads(printed)
    show(
        f"{count(found['pool_tokens'])} token slots, window {count(found['window_tokens'])}, request lengths of seed {seed}"
    )
    show("\nFilled until a request does not fit; then with requests that leave (means; free while one is refused)")
    show(_placements(found["placements"], {row["block_tokens"]: row["token_ns"] for row in found["attention"]}))
    for line in _notes(found):
        show(line)
    show("\nPrefix sharing: requests in groups with a common prefix of random length")
    show(_sharing(found["sharing"]))


@study.command("swap")
def swap(
    model: Annotated[str, typer.Option(help="A pulled model, a GGUF file or a Hugging Face directory.")] = "smollm2",
    directory: Annotated[
        str, typer.Option("--dir", metavar="DIR", help="Where the nvme tier's file goes (default: the temporary one).")
    ] = "",
    rounds: Annotated[int, typer.Option(help="Repetitions behind each median.", min=1)] = 5,
    as_json: JsonOption = False,
) -> None:
    """Where loading a context's blocks beats computing them again on this machine: dram, nvme and the real model."""
    flags = ["--model", model, "--rounds", str(rounds), *(["--dir", directory] if directory else [])]
    printed = measured("attnix.study_swap", *flags)
    if as_json:
        sys.stdout.write(printed)
        return
    found = json.loads(printed)
    engines = ", ".join(f"{name} {engine}" for name, engine in found["engines"].items())
    show(f"{found['model']}; {engines}; medians of {found['rounds']}")
    show(_swap(found["rows"]))
    for line in _verdict(found):
        show(line)


@study.command("loop")
def loop(
    tokens: Annotated[int, typer.Option(help="Of the context before the first tool call.", min=1)] = 80_000,
    tools: Annotated[int, typer.Option(help="Tool calls.", min=1)] = 10,
    real: Annotated[
        bool, typer.Option("--real", help="For real: a daemon over a tiny random model with a window that long.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """An agent that calls ten tools on a long context: tokens computed here, and by a server that keeps nothing."""
    flags = ["--tokens", str(tokens), "--tools", str(tools), *(["--real"] if real else [])]
    printed = measured("attnix.study_loop", *flags)
    if as_json:
        sys.stdout.write(printed)
        return
    found = json.loads(printed)
    shape = found["loop"]
    show(
        f"{found['device']}: a context of {count(shape['tokens'])} tokens, {shape['tools']} tools that answer "
        f"{shape['result_tokens']} tokens each ({count(found['new_tokens'])} new), {shape['answer_tokens']} said before each"
    )
    made = table("SERVER", ">REQUESTS", ">COMPUTED", ">AFTER TOOLS", ">GENERATED", ">SECONDS AFTER TOOLS")
    for name, side in found["sides"].items():
        cells = [count(side[field]) for field in ("requests", "computed_tokens", "after_tools", "generated_tokens")]
        made.add_row(name, *cells, f"{side['seconds']:.2f}")
    show(made)
    ours, theirs = (found["sides"][name]["after_tools"] for name in ("attnix", "stateless"))
    show(
        f"after the tools attnix computes {count(ours)} tokens, the new and the said ones, and a stateless server "
        f"{count(theirs)}: {ours / theirs:.2%} of it"
    )


@study.command("agents")
def agents(
    agents: Annotated[int, typer.Option(help="How many.", min=1)] = 10_000,
    tokens: Annotated[int, typer.Option(help="Of an agent's first prompt.", min=1024)] = 50_000,
    calls: Annotated[int, typer.Option(help="Tool calls of each.", min=1)] = 2,
    tool_s: Annotated[float, typer.Option(help="Mean of a tool's time, simulated seconds.", min=1)] = 100_000.0,
    start_s: Annotated[float, typer.Option(help="Agents begin within so long.", min=0)] = 100_000.0,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.", min=16)] = 2048,
    eta: Annotated[str, typer.Option(help="What a wait says of it: nothing, exact or noisy.")] = "",
    policy: Annotated[str, typer.Option(help="wait.policy.")] = "",
    profile: Annotated[str, typer.Option(help="A machine of `attnix replay`.")] = "h100-8b",
    as_json: JsonOption = False,
) -> None:
    """Thousands of agents with long contexts, most of them in a tool wait, in simulation: tokens, times, the kernel's steps."""
    printed = measured(
        "attnix.study_agents", "--agents", str(agents), "--tokens", str(tokens), "--calls", str(calls), "--tool-s", str(tool_s),
        "--start-s", str(start_s), "--block-tokens", str(block_tokens), "--eta", eta, "--policy", policy, "--profile", profile,
    )  # fmt: skip
    if as_json:
        sys.stdout.write(printed)
        return
    found = json.loads(printed)
    spent, kernel, waiting = found["tokens"], found["kernel"], found["waiting"]
    show(
        f"{found['profile']}: {count(agents)} agents of {count(tokens)} tokens, {calls} tool calls each; "
        + ", ".join(f"{tier} {count(frames)} frames" for tier, frames in found["frames"].items())
        + f" of {found['block_tokens']} tokens"
    )
    show(
        f"finished {count(found['finished'])}; in a tool wait: {count(waiting['most'])} at most, {waiting['mean']:,.0f} on average"
    )
    loaded = ", ".join(f"{count(n)} from {tier}" for tier, n in spent["loaded"].items())
    show(f"tokens: {count(spent['new'])} new, {count(spent['recomputed'])} computed again, loaded {loaded}")
    show(
        f"a server that keeps nothing computes {count(spent['stateless'])}: {spent['computed'] / spent['stateless']:.1%} of it here"
    )
    job, ttft = found["job_s"], found["tool_ttft_s"]
    show(
        f"job without its waits: mean {job['mean']:.1f} s, p50 {job['p50']:.1f}, p95 {job['p95']:.1f}; after a tool, first token: "
        f"p50 {ttft['p50']:.2f} s, p95 {ttft['p95']:.2f}; device busy {found['busy']:.0%} of {found['makespan_s']:,.0f} s"
    )
    show(
        f"kernel: {count(kernel['steps'])} steps, mean {kernel['mean_us']:.0f} us, p99 {kernel['p99_us']:,.0f}, longest "
        f"{kernel['max_us']:,.0f}; {kernel['share_of_simulated_time']:.2%} of the simulated time; memory {size(kernel['peak_bytes'])}, "
        f"{size(kernel['log_bytes'])} of it token logs"
    )


@study.command("overload")
def overload(
    profile: Annotated[str, typer.Option(help="A machine of `attnix replay`.")] = "h100-8b",
    seconds: Annotated[float, typer.Option(help="Simulated, per load.", min=1)] = 600.0,
    prompt_tokens: Annotated[int, typer.Option(help="On average.", min=1)] = 1000,
    output_tokens: Annotated[int, typer.Option(help="On average.", min=1)] = 200,
    contexts: Annotated[int, typer.Option(help="Of average length that the frames hold.", min=1)] = 64,
    step_tokens: Annotated[int, typer.Option(help="Token budget of a pass.", min=1)] = 1024,
    ttft: Annotated[float, typer.Option(help="Target: seconds to the first token.", min=0)] = 10.0,
    tpot: Annotated[float, typer.Option(help="Target: seconds per token after it.", min=0)] = 0.2,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 1,
    control: Annotated[
        list[str], typer.Option(help="Only this way to set it up: target, boot or off.", metavar="NAME")
    ] = [],  # noqa: B006
    load: Annotated[list[float], typer.Option(help="Only this load, in capacities.", metavar="TIMES")] = [],  # noqa: B006
    sysctl: Annotated[
        list[str], typer.Option(help="A tunable, whatever the way to set it up.", metavar="NAME=VALUE")
    ] = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """What is still done at up to four times a machine's capacity (simulated clock): good requests, refusals, preemptions.

    Under three controls: as whoever promises a time to the first token sets it up, as `attnix boot` ships it, and without.
    """
    printed = measured(
        "attnix.study_overload", "--profile", profile, "--seconds", str(seconds), "--prompt-tokens", str(prompt_tokens),
        "--output-tokens", str(output_tokens), "--contexts", str(contexts), "--step-tokens", str(step_tokens),
        "--ttft-s", str(ttft), "--tpot-s", str(tpot), "--seed", str(seed), *_each("--control", control), *_each("--load", load),
        *_each("--sysctl", sysctl),
    )  # fmt: skip
    if as_json:
        sys.stdout.write(printed)
        return
    found = json.loads(printed)
    show(
        f"{profile} with {count(found['frames'])} frames: capacity {found['capacity_s']:.2f} requests/s of {prompt_tokens} + "
        f"{output_tokens} tokens; {seconds:.0f} s of each load\ngood: first token in {ttft:g} s, each later one in {tpot:g} s"
    )
    for name, title in found["controls"].items():
        rows = [row for row in found["rows"] if row["control"] == name]
        show(f"\n{name}: {title}")
        show(_overload(rows))
        best = max(row["good_s"] for row in rows) or 1.0
        show(f"at {rows[-1]['load']:g}x: {rows[-1]['good_s'] / best:.1%} of the best goodput")
    show(
        "TTFT, TPOT of what was served; TAKEN running contexts that lost their frames; RETRY median of what the refused were told"
    )


def _each(option: str, values: Sequence[object]) -> list[str]:
    return [part for value in values for part in (option, str(value))]


@study.command("doctor")
def doctor(
    requests: Annotated[int, typer.Option(help="In bursts of 64.", min=65)] = 192,
    seed: Annotated[int, typer.Option(help="Of lengths and ids.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """A machine with everything wrong at once, what `attnix doctor` says of it, and what its remedies are worth (simulated clock)."""
    printed = measured("attnix.study_doctor", "--requests", str(requests), "--seed", str(seed))
    if as_json:
        sys.stdout.write(printed)
        return
    found = json.loads(printed)
    show(f"{count(found['requests'])} requests in bursts of {found['burst']}; {found['profile']} (simulated)\n")
    for number, finding in enumerate(found["findings"], 1):
        show(f"{number}. {finding['title']}: {finding['damage']:.0%} of the {finding['costs']}")
        for line in finding["evidence"][:2]:
            show(f"   {line}")
    show("\nits remedies, one more each time")
    show(_treatment(found["rows"]))
    show(
        "TBT between two tokens of an answer; PAUSE the longest of them, per answer; TAKEN running contexts that lost their frames"
    )


def _treatment(rows: list[dict[str, Any]]) -> Table:
    made = table(
        "",
        ">TTFT50",
        ">TTFT99",
        ">TBT50",
        ">TBT99",
        ">PAUSE50",
        ">PAUSE90",
        ">PAUSE100",
        ">TAKEN",
        ">COMPUTED",
        ">USED",
    )
    for row in rows:
        made.add_row(
            row["what"], *(f"{row[f'ttft_{p}_s']:.2f} s" for p in ("p50", "p99")),
            *(f"{1e3 * row[f'tbt_{p}_s']:.0f} ms" for p in ("p50", "p99")),
            *(f"{row[f'pause_{p}_s']:.2f} s" for p in ("p50", "p90", "max")),
            count(row["preemptions"]), count(row["computed_tokens"]), f"{row['used']:.0%}",
        )  # fmt: skip
    return made


def _overload(rows: list[dict[str, Any]]) -> Table:
    made = table(
        ">LOAD", ">ASKED", ">REFUSED", ">GOOD", ">GOOD/s", ">TOK/s", ">TTFT50", ">TTFT99", ">TPOT99", ">TAKEN", ">RETRY"
    )
    for row in rows:
        made.add_row(
            f"{row['load']:g}x", *(count(row[name]) for name in ("offered", "refused", "good")), f"{row['good_s']:.2f}",
            count(round(row["good_tokens_s"])), f"{row['ttft_p50_s']:.1f} s", f"{row['ttft_p99_s']:.1f} s",
            f"{1e3 * row['tpot_p99_s']:.0f} ms", count(row["preemptions"]),
            f"{row['retry_after_p50_s']:.2f} s" if row["refused"] else "-",
        )  # fmt: skip
    return made


def _swap(rows: list[dict[str, Any]]) -> Table:
    made = table(
        ">TOKENS", ">BLOCKS", ">KV", ">DRAM", ">NVME", ">RECOMPUTE", ">MODEL", ">OFF", ">xDRAM", ">xNVME", "CHEAPEST"
    )
    for row in rows:
        prefill = row["prefill_ns"]
        times = [duration(round(row[name])) for name in ("dram_ns", "nvme_ns", "prefill_ns", "model_ns")]
        made.add_row(
            count(row["tokens"]),
            count(row["blocks"]),
            size(row["kv_bytes"]),
            *times,
            f"{row['model_ns'] / prefill - 1:+.0%}",
            f"{prefill / row['dram_ns']:.0f}",
            f"{prefill / row['nvme_ns']:.0f}",
            row["cheapest"],
        )
    return made


def _verdict(found: dict[str, Any]) -> list[str]:
    fit = found["fit"]
    lines = []
    for tier, lengths in found["recompute_wins"].items():
        won = f"at {', '.join(map(count, lengths))} tokens" if lengths else "nowhere, down to one block"
        lines.append(f"recompute beats loading from {tier}: {won}")
    lines.append(
        f"t_prefill(n, c) = a n + b n (c + n/2) + k: a {fit['a_ns'] / 1e3:.1f} us, b {fit['b_ns']:.2f} ns, "
        f"k {fit['k_ns'] / 1e6:.2f} ms"
    )
    lines.append(
        f"over {fit['passes']} passes it is off by {fit['mean_residual']:.1%} on average, {fit['worst_residual']:.1%} at most "
        f"({fit['worst_tokens']} tokens on {count(fit['worst_cached'])})"
    )
    return lines


def _placements(rows: list[dict[str, Any]], token_ns: dict[int, float]) -> Table:
    made = table(
        "METHOD", ">FIT", ">WASTE", ">SHARE", ">TABLE", ">MEAN", ">USED", ">FREE", ">STUCK", ">ns/TOKEN", ">COST"
    )
    base = token_ns.get(_BASE_BLOCK)
    for row in rows:
        cost = token_ns.get(row["block_tokens"])
        made.add_row(
            f"{row['method']} {row['block_tokens'] or ''}".rstrip(),
            count(row["admitted"]),
            count(row["waste"]),
            f"{row['waste_share']:.1%}",
            size(row["table_bytes"]) if row["block_tokens"] else "-",
            f"{row['mean_admitted']:.1f}",
            count(round(row["mean_used"])),
            count(round(row["mean_free"])),
            f"{row['refused_in_spite']}/{row['refused']}",
            f"{cost:.1f}" if cost else "-",
            f"{cost / base:.2f}" if cost and base else "-",
        )
    return made


def _notes(found: dict[str, Any]) -> list[str]:
    lines = [
        "FIT requests in the full pool; WASTE slots reserved and not used, SHARE of the reserved; TABLE page-table entries;",
        "MEAN requests and USED slots over the churn; STUCK refused though enough was free in total",
    ]
    if found["attention"]:
        row = found["attention"][0]
        lines.append(
            f"ns/TOKEN attention per cached token and layer, decoding {row['contexts']} contexts of "
            f"{count(row['tokens'])} tokens in scattered frames; COST beside blocks of {_BASE_BLOCK}"
        )
    return lines


def _sharing(rows: list[dict[str, Any]]) -> Table:
    made = table(">BLOCK", ">REQUESTS", ">TOKENS", ">SHAREABLE", ">HIT", ">SHARE", ">HELD")
    for row in rows:
        cells = [count(row[name]) for name in ("block_tokens", "requests", "tokens", "possible", "hit")]
        made.add_row(*cells, f"{row['hit_share']:.1%}", count(row["held"]))
    return made
