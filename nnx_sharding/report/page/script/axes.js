// Mesh axes: each has a number, by which it has its colour, and is always named as well.

const axisNumbers = new Map();
function axisClass(axis) {
  if (!axisNumbers.has(axis)) return "";
  return `axis-${axisNumbers.get(axis) % 8}`;
}
const listOf = (value) => (Array.isArray(value) ? value : []);
const entryAxes = (entry) =>
  entry === null || entry === undefined ? [] : [entry].flat().map(String);
// With unreduced or reduced axes a spec is an object with these and its entries.
const specEntries = (spec) => listOf(spec?.partitions ?? spec);
const specAxes = (spec) => [...new Set(specEntries(spec).flatMap(entryAxes))];
const axisSet = (axes) => [...axes].sort((a, b) => axisNumbers.get(a) - axisNumbers.get(b));
const axisKey = (axes) => (axes === null ? "?" : axes.length ? axes.join(" + ") : "");
const axisSize = (mesh, axis) => mesh?.axes?.[axis];

function chip(axis, size) {
  const text = size ? `${axis}\u00a0÷${size}` : axis;
  return el("span", { class: `chip ${axisClass(axis)}` }, text);
}

/** A piece of a bar; one below the other the colours of its axes. */
function piece(axes, part) {
  const colours = axes?.length
    ? axes.map((axis) => el("span", { class: `axis ${axisClass(axis)}` }))
    : [el("span")];
  return width(el("span", { class: "piece" }, colours), part);
}
