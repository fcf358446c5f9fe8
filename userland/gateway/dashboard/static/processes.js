// The table of processes with what each has been doing since the page was opened.

import { count, make, size } from "./words.js";
import { hue, letter } from "./colours.js";

const KEPT_MS = 120000;
const HEIGHTS = { running: 1, ready: 0.6, tool_wait: 0.4, stopped: 0.25, new: 0.25, zombie: 0.15 };
const LONGEST = 12; // characters of a tool's name, so that there is room for the time
const past = new Map(); // pid -> [{state, from, to}], ms of performance.now()

export function remember(rows, now) {
  for (const row of rows) {
    const spans = past.get(row.pid) ?? [];
    const last = spans.at(-1);
    if (last && last.state === row.state && now - last.to < 5000) last.to = now;
    else spans.push({ state: row.state, from: last && now - last.to < 5000 ? last.to : Math.max(0, now - Math.min(row.age_ns / 1e6, 500)), to: now });
    while (spans.length && spans[0].to < now - KEPT_MS) spans.shift();
    past.set(row.pid, spans);
  }
  for (const pid of past.keys()) if (!rows.some((row) => row.pid === pid)) past.delete(pid);
}

function timeline(pid, now) {
  const svg = make("svg", { viewBox: "0 0 240 14", preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const span of past.get(pid) ?? []) {
    const x = (1 - (now - span.from) / KEPT_MS) * 240, end = (1 - (now - span.to) / KEPT_MS) * 240;
    const height = 14 * (HEIGHTS[span.state] ?? 0.25);
    svg.append(make("rect", { class: span.state, x: Math.max(0, x).toFixed(2), y: (14 - height).toFixed(1), width: Math.max(0.6, end - Math.max(0, x)).toFixed(2), height: height.toFixed(1) }));
  }
  return svg;
}

// waits on which tool, and until when
function waiting(row) {
  const found = row.contexts.filter((context) => context.tool);
  if (!found.length) return row.state.replace("_", " ");
  const soonest = found.reduce((a, b) => ((b.due_ms >= 0 && b.due_ms < a.due_ms) || a.due_ms < 0 ? b : a));
  const tool = [...soonest.tool].length > LONGEST ? `${[...soonest.tool].slice(0, LONGEST - 1).join("")}…` : soonest.tool;
  return `${tool}${soonest.due_ms >= 0 ? ` ${(soonest.due_ms / 1000).toFixed(0)} s` : ""}`;
}

const lines = new Map(); // pid -> {line, cells}: rows are changed, not made anew, so that focus and selection stay

function build(row, choose) {
  const swatch = make("span", { class: "swatch" });
  const name = document.createTextNode("");
  const state = make("span");
  const stateCell = make("td", {}, state);
  const cells = { swatch, name, state, stateCell, pid: make("td", { class: "n" }), contexts: make("td", { class: "n" }), tokens: make("td", { class: "n" }), kv: make("td", { class: "n" }), past: make("td") };
  const line = make("tr", { "data-pid": row.pid, tabindex: 0 }, cells.pid, make("td", { title: row.name }, swatch, name), stateCell, cells.contexts, cells.tokens, cells.kv, cells.past);
  line.addEventListener("click", () => choose(row.pid));
  line.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(row.pid); }
    const to = event.key === "ArrowDown" ? line.nextElementSibling : event.key === "ArrowUp" ? line.previousElementSibling : null;
    if (to) { event.preventDefault(); to.focus(); }
  });
  return { line, cells };
}

export function draw(body, rows, chosen, choose) {
  const now = performance.now();
  for (const [pid, { line }] of lines) if (!rows.some((row) => row.pid === pid)) { line.remove(); lines.delete(pid); }
  rows.forEach((row, i) => {
    if (!lines.has(row.pid)) lines.set(row.pid, build(row, choose));
    const { line, cells } = lines.get(row.pid);
    if (body.children[i] !== line) body.insertBefore(line, body.children[i] ?? null);
    line.setAttribute("aria-selected", String(row.pid === chosen));
    cells.swatch.style.background = hue(row.pid);
    cells.state.className = `state ${row.state}`;
    cells.stateCell.title = row.contexts.map((context) => context.tool).filter(Boolean).join(", ");
    cells.past.replaceChildren(timeline(row.pid, now));
    const words = [[cells.swatch, letter(row.pid)], [cells.name, row.name || "-"], [cells.state, waiting(row)], [cells.pid, String(row.pid)], [cells.contexts, String(row.contexts.length)], [cells.tokens, count(row.tokens)], [cells.kv, size(row.kv_bytes)]];
    for (const [cell, said] of words) if (cell.textContent !== said) cell.textContent = said;
  });
}
