// Why a block is where it is.

import { ago, count, make } from "./words.js";

const FLAGS = [[1, "full"], [2, "findable by its key"], [4, "computed"], [8, "wired"]];

export function draw(element, told, devices, now_ns) {
  const { entry } = told;
  const facts = [];
  if (entry.frame !== undefined) facts.push(["frame", entry.frame < 0 ? "none in hbm" : `${entry.device} ${entry.frame}`]);
  if (entry.tokens !== undefined) facts.push(["tokens", `${count(entry.tokens_from)}–${count(entry.tokens_from + entry.tokens - 1)} of its log`]);
  if (entry.sharers !== undefined) facts.push(["shared by", entry.sharers > 1 ? `${entry.sharers} contexts` : "nobody else"]);
  if (entry.hits !== undefined) facts.push(["found", ["never yet", "once"][entry.hits] ?? `${count(entry.hits)} times`]);
  if (entry.flags !== undefined) facts.push(["is", FLAGS.filter(([bit]) => entry.flags & bit).map(([, words]) => words).join(", ") || "being filled"]);
  if (entry.copies) facts.push(["copies", devices.filter((_, i) => entry.copies & (1 << i)).join(", ") || "none"]);
  const rows = [...told.rows].reverse();
  const parts = [
    make("dl", {}, ...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])),
    told.about === "context" && rows.length ? make("p", { class: "quiet about" }, `Nothing was decided about this block alone. About cid ${told.cid}:`) : null,
    rows.length
      ? make("ol", {}, ...rows.map((row) => make("li", {}, make("span", { class: "quiet" }, ago(Math.max(0, now_ns - row.at_ns) / 1e6)), make("b", {}, row.what), make("span", {}, `${row.device}${row.cid ? ` cid ${row.cid}` : ""}: ${row.why}`))))
      : make("p", { class: "quiet" }, "Nothing was decided about it: it has been where it is since it was computed."),
  ];
  element.replaceChildren(...parts.filter((part) => part !== null));
}
