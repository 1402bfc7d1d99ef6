// Numbers as people read them, with the exact one in the title.

const UNKNOWN = "–";

const integer = (n) => Math.round(n).toLocaleString("en-US");
const plural = (noun) => (/[^aeiou]y$/.test(noun) ? `${noun.slice(0, -1)}ies` : `${noun}s`);
const many = (n, noun) => `${integer(n)} ${n === 1 ? noun : plural(noun)}`;
const digits = (n) => (n >= 99.95 ? n.toFixed(0) : n >= 9.995 ? n.toFixed(1) : n.toFixed(2));
const isNumber = (n) => typeof n === "number" && Number.isFinite(n);

function scaled(n, units, base) {
  let power = 0;
  while (Math.abs(n) >= base * 0.9995 && power < units.length - 1)
    [n, power] = [n / base, power + 1];
  return `${power || !Number.isInteger(n) ? digits(n) : n} ${units[power]}`;
}
const byteText = (n) => scaled(n, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024);
const countText = (n) => scaled(n, ["", "k", "M", "G", "T", "P", "E"], 1000).trim();
function timeText(s) {
  if (s === 0) return "0 s";
  if (s >= 1) return `${digits(s)} s`;
  const [factor, unit] = s >= 1e-3 ? [1e3, "ms"] : s >= 1e-6 ? [1e6, "µs"] : [1e9, "ns"];
  return `${digits(s * factor)} ${unit}`;
}

function figure(n, text, exact) {
  if (!isNumber(n)) return el("span", { class: "muted", title: "not known" }, UNKNOWN);
  return el("data", { value: n, title: exact(n) }, text(n));
}
const bytes = (n) => figure(n, byteText, (n) => `${integer(n)} bytes`);
const count = (n) => figure(n, countText, integer);
const time = (n) => figure(n, timeText, (n) => `${n} seconds`);

const sum = (items, value) => items.reduce((total, item) => total + (value(item) ?? 0), 0);
