// Sections, mesh axes and their colours, bars.

const note = (...text) => el("p.muted", el("small", text));

function section(id, title, ...content) {
  const heading = el("h2", { id: `${id}-title` }, title);
  return el("section", { id, "aria-labelledby": heading.id }, heading, content);
}

// Each axis has a number, which gives its colour; its name is always shown as well.
const axisNumbers = new Map();
const numberOf = (axis) =>
  axisNumbers.get(axis) ?? axisNumbers.set(axis, axisNumbers.size).size - 1;
const axisStyle = (axis) => ({ "--axis": `var(--axis-${numberOf(axis) % 8})` });

const entryAxes = (entry) => (isSet(entry) ? [entry].flat() : []);
const sortedAxes = (axes) => [...new Set(axes)].sort((a, b) => numberOf(a) - numberOf(b));
// With unreduced or reduced axes a spec is an object, else its entries, or a text.
const isNamed = (spec) => isSet(spec) && typeof spec !== "string";
const specEntries = (spec) => (isNamed(spec) ? (spec.partitions ?? spec) : []);
const specAxes = (spec) => sortedAxes(specEntries(spec).flatMap(entryAxes));
const axesOf = (collective) => collective.axes && sortedAxes(collective.axes);
const axesText = (axes) => (axes ? axes.join(" + ") || "none" : "no axes fit");

const chip = (axis, size) =>
  el("span.chip", { style: axisStyle(axis) }, size ? `${axis}\u00a0÷${size}` : axis);
const axesNode = (axes) =>
  axes?.length ? axes.map((axis) => [chip(axis), " "]) : el("span.muted", axesText(axes));

/** A bar of pieces [fraction, axes, kind]; each piece shows the colours of its axes as stripes. */
function bar(...pieces) {
  const piece = ([fraction, axes, kind]) => {
    const colours = axes?.map((axis) => el("span", { style: axisStyle(axis) }));
    return el("span.piece", { class: kind, style: { width: `${100 * fraction}%` } }, colours);
  };
  const shown = pieces.filter(([fraction]) => fraction > 0);
  return el("span.bar", { "aria-hidden": "true" }, shown.map(piece));
}

/** A list of labelled bars; an entry is [label, number, kind]. */
function bars(entries, show) {
  const most = Math.max(...entries.map(([, n]) => n ?? 0), Number.MIN_VALUE);
  const entry = ([label, n, kind]) =>
    el("div", el("dt", label), el("dd", show(n)), el("dd", bar([n / most, null, kind])));
  return el("dl.bars", entries.map(entry));
}
