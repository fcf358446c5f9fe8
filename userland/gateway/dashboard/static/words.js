// Numbers as people read them, and elements in one line.

export const count = (n) => Math.round(n).toLocaleString("en");

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return `${bytes >= 10 || unit === 0 ? bytes.toFixed(0) : bytes.toFixed(1)} ${units[unit]}`;
}

export function ago(ms) {
  if (ms < 0) return "never since it was filled";
  if (ms < 1000) return `${Math.round(ms)} ms ago`;
  for (const [step, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (ms >= 1000 * step) return `${Math.floor(ms / 1000 / step)} ${name} ago`;
  }
  return `${(ms / 1000).toFixed(ms < 10000 ? 1 : 0)} s ago`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;

// An element with attributes and children; text is always text, never markup.
export function make(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "rect"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.assign(made.style, value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null) made.setAttribute(key, String(value));
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}
