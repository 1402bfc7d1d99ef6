// Numbers as people read them, with the exact one in the title.

const UNKNOWN = "–";

const isNumber = Number.isFinite;
const integer = (n) => Math.round(n).toLocaleString("en-US");
const plural = (noun) => (/[^aeiou]y$/.test(noun) ? `${noun.slice(0, -1)}ies` : `${noun}s`);
const many = (n, noun) => `${integer(n)} ${n === 1 ? noun : plural(noun)}`;
const sum = (items, value) => items.reduce((total, item) => total + (value(item) ?? 0), 0);
const digits = (n) => (n >= 99.95 ? n.toFixed(0) : n >= 9.995 ? n.toFixed(1) : n.toFixed(2));

const scaled = (base, units) => (n) => {
  let power = 0;
  while (Math.abs(n) >= base * 0.9995 && power < units.length - 1)
    [n, power] = [n / base, power + 1];
  return `${power || !Number.isInteger(n) ? digits(n) : n} ${units[power]}`.trim();
};
const byteText = scaled(1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const countText = scaled(1000, ["", "k", "M", "G", "T", "P", "E"]);
const nanosecondText = scaled(1000, ["ns", "µs", "ms", "s"]);

const figure =
  (text, unit = "") =>
  (n) => {
    if (!isNumber(n)) return el("span.muted", { title: "unknown" }, UNKNOWN);
    const exact = n.toLocaleString("en-US", { maximumFractionDigits: 20 });
    return el("data", { value: n, title: `${exact} ${unit}`.trim() }, text(n));
  };
const bytes = figure(byteText, "bytes");
const count = figure(countText);
const time = figure((seconds) => nanosecondText(seconds * 1e9), "seconds");
