// Asks once a second, draws what has changed, and says so when nobody answers.

import { count, make } from "./words.js";
import * as colours from "./colours.js";
import * as tiles from "./tiles.js";
import * as processes from "./processes.js";
import * as tree from "./tree.js";
import * as explain from "./explain.js";
import { TierMap } from "./map.js";

const $ = (id) => document.getElementById(id);
const EVERY_MS = 1000;
const maps = new Map(); // device -> TierMap
const seen = { state: null, frames: new Map(), mode: "process", chosen: 0, block: null, from: null, key: "" };

async function ask(path) {
  const answer = await fetch(path, { headers: seen.key ? { "x-api-key": seen.key } : {}, cache: "no-store" });
  if (answer.status === 401) { $("key-form").hidden = false; throw new Error("an API key is wanted"); }
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error?.message ?? `status ${answer.status}`);
  return told;
}

async function look() {
  try {
    const state = await ask("/dashboard/state");
    const { width, heights } = room(state);
    const frames = await Promise.all(state.tiers.map((tier, i) => ask(`/dashboard/frames?device=${encodeURIComponent(tier.device)}&cells=${Math.min(16384, TierMap.room(width, heights[i]))}`)));
    seen.state = state;
    seen.frames = new Map(frames.map((map) => [map.device, map]));
    processes.remember(state.processes, performance.now());
    state.processes.sort((a, b) => (a.state === "zombie") - (b.state === "zombie") || a.pid - b.pid);
    colours.keep(state.processes.map((row) => row.pid));
    live(true, "live");
    draw();
  } catch (error) {
    live(false, seen.state ? `not answering: ${error.message}` : error.message);
  }
}

function live(well, words) {
  $("live").className = well ? "live" : "lost";
  if ($("live-text").textContent !== words) $("live-text").textContent = words;
}

// Height for each tier's map: by the number of its frames, the small ones not too small.
function room(state) {
  const box = $("map").getBoundingClientRect();
  const left = Math.max(60, box.height - 32 * state.tiers.length);
  const parts = state.tiers.map((tier) => Math.pow(Math.max(16, tier.capacity_frames), 0.6));
  const sum = parts.reduce((a, b) => a + b, 0);
  return { width: Math.max(60, box.width - 2), heights: parts.map((part) => (left * part) / sum) };
}

function draw() {
  const { state } = seen;
  $("model").textContent = `${state.uname.model} · blocks of ${state.uname.block_tokens} tokens · window ${count(state.uname.window_tokens)}`;
  tiles.draw(state);
  drawMaps();
  const rows = state.processes;
  $("processes-sum").textContent = `${count(rows.length)} processes, ${count(rows.reduce((n, row) => n + row.contexts.length, 0))} contexts`;
  processes.draw($("process-rows"), rows, seen.chosen, choose);
  tree.draw($("tree"), state, choose);
}

function drawMaps() {
  const { state } = seen;
  const { width, heights } = room(state);
  for (const device of maps.keys()) if (!state.tiers.some((tier) => tier.device === device)) { maps.get(device).element.remove(); maps.delete(device); }
  state.tiers.forEach((tier, i) => {
    const map = seen.frames.get(tier.device);
    if (!map) return;
    if (!maps.has(tier.device)) {
      const made = new TierMap({ told: under, asked, left: close });
      made.canvas.dataset.device = tier.device;
      maps.set(tier.device, made);
      $("map").append(made.element);
    }
    maps.get(tier.device).draw(map, tier, seen.mode, seen.chosen, width, heights[i]);
  });
  drawLegend();
}

let legendWas = "";
function drawLegend() {
  const drawn = seen.state.processes.filter((row) => row.kv_bytes > 0 || row.contexts.length);
  const rows = colours.legend(seen.mode, drawn);
  const now = JSON.stringify([rows, seen.chosen]);
  if (now === legendWas) return; // what has the focus stays
  legendWas = now;
  $("legend").replaceChildren(...rows.map(([fill, letter, words, pid]) => {
    const swatch = make("span", { class: "swatch", style: { background: fill } }, letter);
    if (!pid) return make("li", {}, swatch, words);
    const button = make("button", { type: "button", "aria-pressed": pid === seen.chosen }, swatch, words);
    button.addEventListener("click", () => choose(pid));
    return make("li", {}, button);
  }));
}

const HINT = "Tab to a map, move with the arrow keys, Enter explains a block.";
function under(words) { $("under").textContent = words || HINT; }

function choose(pid) {
  seen.chosen = seen.chosen === pid ? 0 : pid;
  draw();
}

async function asked(map, i) {
  seen.from = document.activeElement;
  const [cid, block, logical] = [map.cids[i], map.blocks[i], map.logical[i]];
  const name = `${map.device} frame ${i * map.each}`;
  if (block < 0 && !cid) { show(`${name} is free`, make("p", { class: "quiet" }, "Nothing is in it.")); return; }
  try {
    const told = await ask(`/dashboard/explain?cid=${cid}&block=${block}&logical=${logical}`);
    const box = make("div");
    explain.draw(box, told, seen.state.tiers.map((tier) => tier.device), seen.state.at_ns);
    show(`${name}: block ${block}${cid ? `, ${logical} of cid ${cid}` : ", cache"}`, box);
  } catch (error) {
    show(name, make("p", { class: "quiet" }, error.message));
  }
}

function show(title, content) {
  $("lower-title").textContent = title;
  $("explain").replaceChildren(content);
  $("explain").hidden = $("close").hidden = false;
  $("tree").hidden = true;
}

function close() {
  if ($("explain").hidden) {
    if (seen.chosen) choose(seen.chosen);
    return;
  }
  $("explain").hidden = $("close").hidden = true;
  $("tree").hidden = false;
  $("lower-title").textContent = "Fork tree";
  seen.from?.focus?.();
}

$("close").addEventListener("click", close);
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && event.target.tagName !== "CANVAS") close(); });
$("colours").addEventListener("change", (event) => { seen.mode = event.target.value; if (seen.state) drawMaps(); });
$("key-form").addEventListener("submit", (event) => { event.preventDefault(); seen.key = $("key").value.trim(); $("key-form").hidden = true; look(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours.refresh(); legendWas = ""; if (seen.state) draw(); });
new ResizeObserver(() => { if (seen.state) drawMaps(); }).observe($("map"));

tiles.build($("tiles"));
async function forever() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}
forever();
