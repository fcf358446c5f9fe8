// Contexts under those that they were forked from, with how much of each is shared.

import { count, make } from "./words.js";
import { hue, letter } from "./colours.js";

export function draw(element, state, choose) {
  const rows = state.processes.flatMap((process) => process.contexts.map((context) => ({ ...context, process })));
  const known = new Set(rows.map((row) => row.cid));
  const children = new Map();
  for (const row of rows) {
    const parent = known.has(row.parent) ? row.parent : 0;
    children.set(parent, [...(children.get(parent) ?? []), row]);
  }
  const kept = element.scrollTop;
  element.replaceChildren(rows.length ? list(children, 0, state.uname.block_tokens, choose) : make("p", { class: "quiet" }, "No contexts: nothing runs, and nothing is kept."));
  element.scrollTop = kept;
}

function list(children, parent, block, choose) {
  const made = make("ul");
  for (const row of children.get(parent) ?? []) {
    const shared = Math.min(row.tokens, row.shared_blocks * block);
    const part = (tokens) => `${(100 * tokens) / Math.max(1, row.tokens)}%`;
    const bar = make("div", { class: "share", title: `${count(shared)} of ${count(row.tokens)} tokens are in blocks that others map, too` },
      make("i", { style: { width: part(shared) } }), make("i", { style: { width: part(Math.max(0, row.cached_tokens - shared)) } }));
    const swatch = make("span", { class: "swatch", style: { background: hue(row.process.pid) } }, letter(row.process.pid));
    const orphan = row.parent && parent === 0 ? ` (forked from ${row.parent})` : "";
    const line = make("div", { "data-cid": row.cid }, make("span", { class: "who" }, swatch, `cid ${row.cid} ${row.process.name || ""}${orphan}`),
      bar, make("span", { class: "quiet" }, `${count(row.tokens)} tokens, ${row.tool || row.state.replace("_", " ")}`));
    line.addEventListener("click", () => choose(row.process.pid));
    const item = make("li", {}, line);
    if (children.has(row.cid)) item.append(list(children, row.cid, block, choose));
    made.append(item);
  }
  return made;
}
