// What a cell is drawn as, by process, sharing or age.  The colours themselves are in style.css.

const LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
const HUES = 12; // and one for all others
const SHARING = [[1, "one context"], [2, "2"], [4, "3–4"], [8, "5–8"], [Infinity, "9 or more"]];
const AGES = [[1e3, "under 1 s"], [1e4, "1–10 s"], [6e4, "10–60 s"], [6e5, "1–10 min"], [Infinity, "longer"]];

let read = {};
export function refresh() {
  const style = getComputedStyle(document.documentElement);
  read = new Proxy({}, { get: (seen, name) => (seen[name] ??= style.getPropertyValue(`--${name}`).trim()) });
}
refresh();
export const named = (name) => read[name];

// Each process keeps its place for as long as it is there: its colour and letter do not jump.
const places = new Map();
export function keep(pids) {
  for (const pid of places.keys()) if (!pids.includes(pid)) places.delete(pid);
  for (const pid of pids) place(pid);
}
function place(pid) {
  if (!places.has(pid)) {
    const taken = new Set(places.values());
    let free = 0;
    while (taken.has(free)) free += 1;
    places.set(pid, free);
  }
  return places.get(pid);
}
export const letter = (pid) => LETTERS[place(pid) % LETTERS.length];
export const hue = (pid) => read[`p${Math.min(place(pid), HUES)}`];

const step = (steps, value) => steps.findIndex(([most]) => value <= most);

// {fill, text, dim} of a cell
export function cell(map, i, mode, chosen) {
  const state = map.states[i];
  if (state === 0) return { fill: null, text: "" };
  const pid = map.pids[i];
  const dim = chosen !== 0 && pid !== chosen;
  if (mode === "sharing") {
    const sharers = map.sharers[i];
    if (!pid && !sharers) return { fill: read.cache, text: "", dim };
    return { fill: read[`s${1 + step(SHARING, Math.max(1, sharers))}`], text: sharers > 1 ? (sharers < 10 ? String(sharers) : "+") : "", dim };
  }
  if (mode === "age") {
    const age = map.ages[i];
    return { fill: age < 0 ? read.a1 : read[`a${1 + step(AGES, age)}`], text: "", dim };
  }
  if (!pid) return { fill: read.cache, text: "", dim };
  return { fill: hue(pid), text: letter(pid), dim };
}

// [[colour, letter, words, pid]]
export function legend(mode, processes) {
  const rest = [[read.free, "", "free", 0]];
  if (mode === "sharing") return [...SHARING.map(([, words], i) => [read[`s${i + 1}`], "", words, 0]), [read.cache, "", "cache: nobody's now", 0], ...rest];
  if (mode === "age") return [...AGES.map(([, words], i) => [read[`a${i + 1}`], "", words, 0]), ...rest];
  return [...processes.map((row) => [hue(row.pid), letter(row.pid), `${row.name || "-"} ${row.pid}`, row.pid]), [read.cache, "", "cache: nobody's now", 0], ...rest];
}
