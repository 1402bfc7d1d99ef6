// Sections, mesh axes and their colours, bars.

const NO_AXES_FIT = "no axes fit";

const listOf = (value) => (Array.isArray(value) ? value : []);
const note = (...text) => el("p.muted", el("small", text));

function section(id, title, ...content) {
  const heading = el("h2", { id: `${id}-title` }, title);
  return el("section", { id, "aria-labelledby": heading.id }, heading, content);
}

// An axis has a number, by which it has its colour, and is always named as well.
const axisNumbers = new Map();
const axisStyle = (axis) =>
  axisNumbers.has(axis) ? { "--axis": `var(--axis-${axisNumbers.get(axis) % 8})` } : {};

function numberAxes(report) {
  const axes = [
    ...Object.keys(report.mesh?.axes ?? {}),
    ...listOf(report.parameters).flatMap((row) => specAxes(row.spec)),
    ...listOf(report.collectives).flatMap((c) => axesOf(c) ?? []),
  ];
  for (const axis of axes) if (!axisNumbers.has(axis)) axisNumbers.set(axis, axisNumbers.size);
}

const entryAxes = (entry) => (isSet(entry) ? [entry].flat().map(String) : []);
const sortedAxes = (axes) =>
  [...new Set(axes)].sort((a, b) => axisNumbers.get(a) - axisNumbers.get(b));
const specAxes = (spec) => sortedAxes(listOf(spec).flatMap(entryAxes));
const axesOf = (collective) => collective.axes && sortedAxes(collective.axes.map(String));
const axesText = (axes) => (axes ? axes.join(" + ") || "none" : NO_AXES_FIT);

const chip = (axis, size) =>
  el("span.chip", { style: axisStyle(axis) }, size ? `${axis}\u00a0÷${size}` : axis);
const axesNode = (axes) =>
  axes?.length ? axes.map((axis) => [chip(axis), " "]) : el("span.muted", axesText(axes));

/** A bar of pieces [part, axes, kind]: a piece has, one below the other, the colours of its axes. */
const bar = (...pieces) =>
  el(
    "span.bar",
    { "aria-hidden": "true" },
    pieces.map(([part, axes, kind]) =>
      el(
        "span.piece",
        { class: kind, style: { width: `${100 * part}%` } },
        axes?.map((axis) => el("span", { style: axisStyle(axis) })),
      ),
    ),
  );

/** Bars below each other, of entries [label, number, kind]. */
function bars(entries, show) {
  const most = Math.max(...entries.map(([, n]) => n ?? 0), Number.MIN_VALUE);
  return el(
    "dl.bars",
    entries.map(([label, n, kind]) =>
      el("div", el("dt", label), el("dd", show(n)), el("dd", bar([(n ?? 0) / most, null, kind]))),
    ),
  );
}

const tiles = (...entries) =>
  el(
    "dl.tiles",
    entries.map(([label, value, text]) =>
      el("div", el("dt", label), el("dd", value), el("dd", el("small", text))),
    ),
  );
