// The five numbers on top, each with its last two minutes.

import { count, make, percent } from "./words.js";

const W = 100, H = 28;
const BOOT = { hit_blocks: 0, fault_blocks: 0, missed_blocks: 0 };
export const tiles = [
  { id: "tokens", what: "Tokens computed", unit: "/s" }, { id: "hits", what: "Prefix hits", unit: "" },
  { id: "contexts", what: "Running", unit: "" }, { id: "short", what: "Waited for frames", unit: "" },
  { id: "used", what: "hbm in use", unit: "" },
];

export function build(element) {
  for (const tile of tiles) {
    tile.value = make("div", { class: "value", id: `value-${tile.id}` }, "–");
    tile.more = make("span", { class: "more", id: `more-${tile.id}` });
    tile.line = make("path", { class: "line" });
    tile.under = make("path", { class: "under" });
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", "aria-hidden": "true" }, tile.under, tile.line);
    element.append(make("div", { class: "card tile" }, make("div", { class: "what" }, make("span", {}, tile.what), tile.more), tile.value, svg));
  }
}

// Of the blocks that were looked for between two samples, the shares found in hbm and below it; null: none was looked for.
function hits(a, b) {
  const hbm = b.hit_blocks - a.hit_blocks, below = b.fault_blocks - a.fault_blocks, all = hbm + below + b.missed_blocks - a.missed_blocks;
  return all > 0 ? { hbm: hbm / all, below: below / all, found: (hbm + below) / all } : null;
}

// Rates between samples that lie about a second apart.
function series(samples, capacity) {
  const found = { tokens: [], hits: [], contexts: [], short: [], used: [] };
  for (let i = 1; i < samples.length; i += 1) {
    const a = samples[i - 1], b = samples[i], seconds = (b.at_ns - a.at_ns) / 1e9;
    if (seconds < 0.2 && i < samples.length - 1) continue;
    if (seconds <= 0.05) continue;
    found.tokens.push((b.computed_tokens - a.computed_tokens) / seconds);
    found.hits.push(hits(a, b)?.found ?? null);
    found.contexts.push(b.active);
    found.short.push(Math.min(1, (b.some_ns - a.some_ns) / 1e9 / seconds));
    found.used.push(capacity ? 1 - (b.free_frames + b.reclaimable_frames) / capacity : 0);
  }
  return found;
}

function spark(tile, values, most) {
  const known = values.map((v) => v ?? 0), top = Math.max(most, ...known) || 1;
  const points = known.map((v, i) => `${((i / Math.max(1, known.length - 1)) * W).toFixed(1)},${(H - 2 - (v / top) * (H - 4)).toFixed(1)}`);
  const path = points.length > 1 ? `M${points.join("L")}` : "";
  tile.line.setAttribute("d", path);
  tile.under.setAttribute("d", path && `${path}L${W},${H}L0,${H}Z`);
}

export function draw(state) {
  const hbm = state.tiers.filter((tier) => tier.tier === "hbm");
  const capacity = hbm.reduce((sum, tier) => sum + tier.capacity_frames, 0);
  const found = series(state.samples, capacity);
  const rate = (name) => { // over about three seconds
    const b = state.samples.at(-1), a = state.samples.findLast((s) => s.at_ns <= b.at_ns - 3e9) ?? state.samples[0];
    return b.at_ns > a.at_ns ? (b[name] - a[name]) / ((b.at_ns - a.at_ns) / 1e9) : 0;
  };
  const [tokens, prefix, contexts, short, used] = tiles;
  const first = state.samples[0], now = state.samples.at(-1);
  const said = (tile, value, more) => { tile.value.textContent = value; tile.more.textContent = more; };
  said(tokens, now ? count(rate("computed_tokens")) : "–", now ? `${count(rate("generated_tokens"))}/s generated` : "");
  const recent = now ? hits(first, now) : null, looked = recent ?? (now ? hits(BOOT, now) : null);
  const where = looked && hbm.length < state.tiers.length ? `${percent(looked.hbm)} hbm, ${percent(looked.below)} below` : "";
  said(prefix, looked ? percent(looked.found) : "–", where || (recent ? "of blocks, 2 min" : "since boot"));
  const rows = state.processes.flatMap((row) => row.contexts), waits = rows.filter((row) => row.state === "tool_wait").length;
  const running = rows.filter((row) => row.state === "running" || row.state === "prefill").length;
  const queued = rows.filter((row) => row.state === "waiting").length;
  said(contexts, count(running), `of ${count(rows.length)}; ${count(queued)} queued, ${count(waits)} in tools`);
  const pressure = state.pressure;
  said(short, pressure ? percent(pressure.some_permille[0] / 1000) : "–", pressure ? `10 s; ${percent(pressure.some_permille[2] / 1000)} in 5 min` : "");
  const mapped = hbm.reduce((sum, tier) => sum + tier.capacity_frames - tier.free_frames - tier.reclaimable_frames, 0);
  const cache = hbm.reduce((sum, tier) => sum + tier.reclaimable_frames, 0);
  said(used, capacity ? percent(mapped / capacity) : "–", capacity ? `and ${percent(cache / capacity)} cache` : "");
  spark(tokens, found.tokens, 1);
  spark(prefix, found.hits, 1);
  spark(contexts, found.contexts, 1);
  spark(short, found.short, 1);
  spark(used, found.used, 1);
}
