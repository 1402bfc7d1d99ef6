// Sections, the most important figures, and bars.

function section(id, title, ...content) {
  const heading = uniqueId(id);
  const name = id[0].toUpperCase() + id.slice(1);
  return el(
    "section",
    { id, "data-name": name, "aria-labelledby": heading },
    el("h2", { id: heading }, title),
    content,
  );
}

function tiles(entries) {
  return el(
    "dl",
    { class: "tiles" },
    entries.map(([label, value, note]) =>
      el(
        "div",
        {},
        el("dt", {}, label),
        el("dd", {}, value),
        el("dd", { class: "note" }, note ?? ""),
      ),
    ),
  );
}

function bars(entries) {
  const most = Math.max(...entries.map(([, n]) => n ?? 0), Number.MIN_VALUE);
  return el(
    "dl",
    { class: "bars" },
    entries.map(([label, n, show, kind]) =>
      el(
        "div",
        {},
        el("dt", {}, label),
        el(
          "dd",
          { class: "bar", "aria-hidden": "true" },
          n ? width(el("span", { class: kind }), n / most) : null,
        ),
        el("dd", { class: "amount" }, show(n)),
      ),
    ),
  );
}

function width(node, part) {
  node.style.width = `${100 * part}%`;
  return node;
}

// How often a collective runs is not known in some loops; then it counts once.
const moved = (c) => (c.bytes_sent ?? 0) * (c.times ?? 1);
const totalMoved = (report) => (report.collectives ? sum(report.collectives, moved) : null);
const axesOf = (c) => (Array.isArray(c.axes) ? axisSet(c.axes.map(String)) : null);

function boundTimes(roofline) {
  if (!roofline) return [];
  return ["compute", "memory", "interconnect"].map((kind) => [kind, roofline[`${kind}_s`]]);
}
function boundTime(report) {
  const known = boundTimes(report.roofline)
    .map(([, s]) => s)
    .filter(isNumber);
  return known.length ? Math.max(...known) : null;
}

function overview(report) {
  const { memory, roofline } = report;
  const parameters = listOf(report.parameters);
  const inLoop = listOf(report.collectives).some((c) => c.times === null);
  const flops = report.cost?.executed?.flops ?? null;
  return tiles([
    [
      "Argument arrays",
      integer(parameters.length),
      [bytes(sum(parameters, (p) => p.bytes_total)), " in all"],
    ],
    ["Peak memory", bytes(memory?.peak), "on each device"],
    ["Operations", count(flops), "floating point, on each device"],
    [
      "Sent by each device",
      bytes(totalMoved(report)),
      many(listOf(report.collectives).length, "collective") +
        (inLoop ? "; some in loops of unknown length, counted once" : ""),
    ],
    [
      "Takes at least",
      time(boundTime(report)),
      roofline ? `${roofline.device}, bound by ${roofline.bound_by}` : "no device was given",
    ],
  ]);
}
