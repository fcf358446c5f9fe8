// One tier as a map of its frames: a canvas, a cursor that the keyboard moves, and what is under it in words.

import { ago, count, make, size } from "./words.js";
import { cell, named } from "./colours.js";

const GAP = 1;
const SMALLEST = 6, LARGEST = 26; // pixels of a cell

export class TierMap {
  // told(text): what is under the cursor; asked(map, i): Enter or a click; left(): Escape
  constructor({ told, asked, left }) {
    this.told = told;
    this.title = make("p");
    this.canvas = make("canvas", { tabindex: 0, role: "img" });
    this.element = make("div", { class: "tier" }, this.title, this.canvas);
    this.at = -1;
    this.map = null;
    this.canvas.addEventListener("pointermove", (event) => this.point(this.under(event)));
    this.canvas.addEventListener("pointerleave", () => { if (document.activeElement !== this.canvas) this.point(-1); });
    this.canvas.addEventListener("click", (event) => { this.point(this.under(event)); if (this.at >= 0) asked(this.map, this.at); });
    this.canvas.addEventListener("focus", () => this.point(Math.max(0, this.at)));
    this.canvas.addEventListener("blur", () => this.point(-1));
    this.canvas.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { left(); return; }
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); if (this.at >= 0) asked(this.map, this.at); return; }
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns, Home: -Infinity, End: Infinity }[event.key];
      if (by === undefined || !this.map) return;
      event.preventDefault();
      const last = this.map.states.length - 1, to = this.at + by;
      this.point(Number.isFinite(by) ? (to < 0 || to > last ? this.at : to) : by < 0 ? 0 : last);
    });
  }

  // How many cells fit into this much room.
  static room(width, height) { return Math.max(1, Math.floor(width / SMALLEST)) * Math.max(1, Math.floor(height / SMALLEST)); }

  draw(map, tier, mode, chosen, width, height) {
    Object.assign(this, { map, tier, mode, chosen });
    const n = map.states.length;
    let side = LARGEST;
    while (side > SMALLEST && Math.ceil(n / Math.floor(width / side)) * side > height) side -= 1;
    this.side = side;
    this.columns = Math.max(1, Math.floor(width / side));
    const rows = Math.ceil(n / this.columns), scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(rows * side * scale);
    this.canvas.style.height = `${rows * side}px`;
    this.pen = this.canvas.getContext("2d");
    this.pen.scale(scale, scale);
    this.pen.textAlign = "center";
    this.pen.textBaseline = "middle";
    this.pen.font = `600 ${Math.min(12, side - 3)}px ui-monospace, "DejaVu Sans Mono", monospace`;
    for (let i = 0; i < n; i += 1) this.paint(i);
    this.at = Math.min(this.at, n - 1);
    this.ring();
    const mapped = tier.capacity_frames - tier.free_frames - tier.reclaimable_frames;
    const held = tier.tier === "hbm" ? `${count(mapped)} mapped, ${count(tier.reclaimable_frames)} cache` : `${count(mapped + tier.reclaimable_frames)} copies`;
    const words = `${held}, ${count(tier.free_frames)} free of ${count(tier.capacity_frames)} frames of ${size(tier.frame_bytes)}`;
    const each = map.each > 1 ? ` · ${map.each} frames a cell` : "";
    const speed = tier.read_bytes_s ? ` · reads ${size(tier.read_bytes_s)}/s` : "";
    this.title.replaceChildren(make("b", {}, tier.device), make("span", {}, words + each + speed + (tier.state === "up" ? "" : ` · ${tier.state}`)));
    this.canvas.setAttribute("aria-label", `${tier.device}: ${words}. Arrow keys move, Enter explains, Escape leaves.`);
  }

  paint(i) {
    const x = (i % this.columns) * this.side, y = Math.floor(i / this.columns) * this.side, inner = this.side - GAP;
    const { fill, text, dim } = cell(this.map, i, this.mode, this.chosen);
    const pen = this.pen;
    pen.globalAlpha = 1;
    pen.fillStyle = named("card");
    pen.fillRect(x - 1, y - 1, this.side + 2, this.side + 2);
    pen.fillStyle = named("free");
    pen.fillRect(x, y, inner, inner);
    if (!fill) return;
    pen.globalAlpha = dim ? 0.22 : 1;
    pen.fillStyle = fill;
    const full = this.map.each > 1 ? Math.max(0.2, this.map.used[i] / this.map.each) : this.map.states[i] === 1 ? 0.62 : 1;
    pen.fillRect(x, y + inner * (1 - full), inner, inner * full); // what is being filled, or filled in part, is lower
    if (text && this.side >= 11 && !dim) {
      pen.fillStyle = this.mode === "sharing" && ["s4", "s5"].some((s) => named(s) === fill) && named("card") === "#ffffff" ? "#ffffff" : "#10151c";
      pen.fillText(text, x + inner / 2, y + inner / 2 + 0.5);
    }
    pen.globalAlpha = 1;
  }

  ring() {
    if (this.at < 0 || !this.pen) return;
    const x = (this.at % this.columns) * this.side, y = Math.floor(this.at / this.columns) * this.side;
    this.pen.globalAlpha = 1;
    this.pen.strokeStyle = named("focus");
    this.pen.lineWidth = 2;
    this.pen.strokeRect(x, y, this.side - GAP, this.side - GAP);
  }

  under(event) {
    if (!this.map) return -1;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.side), row = Math.floor((event.clientY - box.top) / this.side);
    const i = row * this.columns + column;
    return column >= 0 && column < this.columns && i >= 0 && i < this.map.states.length ? i : -1;
  }

  point(i) {
    if (i === this.at || !this.map) return;
    const before = this.at;
    this.at = i;
    if (before >= 0 && before < this.map.states.length) this.repaint(before);
    this.ring();
    this.told(i < 0 ? "" : this.words(i));
  }

  repaint(i) { // its ring reached into its neighbours
    for (const j of [i, i - 1, i + 1, i - this.columns, i + this.columns, i - this.columns - 1, i - this.columns + 1, i + this.columns - 1, i + this.columns + 1]) {
      if (j >= 0 && j < this.map.states.length) this.paint(j);
    }
  }

  words(i) {
    const { map } = this, first = i * map.each;
    const where = map.each === 1 ? `${map.device} frame ${first}` : `${map.device} frames ${first}–${Math.min(first + map.each, map.capacity_frames) - 1}, ${map.used[i]} in use`;
    const state = map.states[i];
    if (state === 0) return `${where}: free`;
    if (state === 4) return `${where}: another group's`;
    if (!map.cids[i]) return `${where}: cache, block ${map.blocks[i]}, wanted ${ago(map.ages[i])}`;
    const sharers = map.sharers[i] > 1 ? `, shared by ${map.sharers[i]}` : "";
    const filling = state === 1 ? ", not full yet" : state === 3 ? ", being loaded" : "";
    return `${where}: pid ${map.pids[i]}, cid ${map.cids[i]}, block ${map.logical[i]} of it${sharers}${filling}${map.ages[i] >= 0 ? `, wanted ${ago(map.ages[i])}` : ""}`;
  }
}
