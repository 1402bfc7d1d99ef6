// The most important figures: memory, cost, and the roofline.

const MEMORY = {
  arguments: "what a call is given",
  outputs: "what it returns, aliased ones included",
  temporaries: "needed in between, such as activations kept for the backward pass",
  generated_code: "the program itself",
  aliased: "outputs in the memory of donated arguments, part of both",
};
const COST = [
  ["flops", flops, "additions and multiplications"],
  ["bytes_accessed", bytes, "read and written by operations, in the memory of the device"],
  ["transcendentals", count, "exponentials, logarithms, tanh and the like, which are no flops"],
];
const RESOURCES = ["compute", "memory", "interconnect"];
const NOT_READ = "The compiled program is not understood.";

const titled = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

/** A figure of several, unknown if one of them is. */
const combined = (combine, parts) => (parts.every(isNumber) ? combine(...parts) : null);
// How often a collective runs is unknown in some loops.
const bytesSentBy = ({ bytes_sent, times }) => (bytes_sent && times === null ? null : bytes_sent * times);
const bytesSent = (collectives) => combined((...sizes) => sum(sizes, (size) => size), collectives.map(bytesSentBy));
const timesOf = (roofline) => RESOURCES.map((kind) => roofline[`${kind}_s`]);
function estimateOf(roofline) {
  const { busy_s, compute_s, memory_s, exposed_s } = roofline;
  const least = combined(Math.max, timesOf(roofline));
  const isScheduled = isNumber(exposed_s) && isNumber(least);
  return isScheduled ? Math.max(least, Math.max(busy_s ?? 0, compute_s, memory_s) + exposed_s) : least;
}

// The figures that matter most: key, label, format, how they are read from a report, and what they are.
const FIGURES = [
  ["peak", "Peak memory", bytes, ({ memory }) => memory?.peak, "The most memory in use at any time"],
  ["bytes_sent", "Bytes sent", bytes, ({ collectives }) => collectives && bytesSent(collectives),
    "What collectives send; below, the part of it over each of the mesh axes"],
  ["flops", "Flops", flops, ({ cost }) => cost?.flops, "Additions and multiplications"],
  ["roofline", "Roofline", time, ({ roofline }) => roofline && estimateOf(roofline),
    "The estimated time of a call on the hardware; below, what takes longest in it"],
];

/** What is wrong with the roofline of a program for CPUs at the rates of other hardware. */
const caveatOf = ({ roofline, platform }) =>
  roofline && roofline.spread === null && platform === "cpu" &&
  "Estimated from the program compiled for CPU: bytes of memory, and so what it is bound by, come from the " +
  `fusions of that compiler; the one for ${roofline.hardware} makes others, which often access less memory.`;

function overview(report) {
  const { roofline, parameters, collectives } = report;
  const inLoop = collectives?.some(({ times }) => times === null);
  const inBranch = collectives?.some(({ conditional }) => conditional);
  const counted =
    (inLoop ? "; some in loops of unknown length" : "") +
    (inBranch ? "; of conditionals the branch that sends most" : "");
  const spread = roofline?.spread;
  const basis = spread == null ? "at peak rates of" : `estimate ± ${(100 * spread).toFixed(0)} % by the figures of`;
  const bound = roofline && `${basis} ${roofline.hardware}; ${roofline.bound_by ?? UNKNOWN} limits it`;
  const notes = {
    bytes_sent: collectives ? many(collectives.length, "collective") + counted : NOT_READ,
    roofline: bound ?? "the hardware is not known",
  };
  const tile = (label, value, ...note) => el("div", el("dt", label), el("dd", value), el("dd", note));
  const total = bytes(sum(parameters, (row) => row.bytes_total));
  const tiles = FIGURES.map(([key, label, show, of]) =>
    tile(label, show(of(report)), notes[key] ?? "of each device"));
  return el("dl.tiles", tile("Argument arrays", integer(parameters.length), total, " in total"), tiles);
}

function memorySection({ memory }) {
  const title = "Memory of each device";
  if (!memory) return section("memory", title, note("The backend does not report it."));
  const parts = (prefix) =>
    Object.entries(MEMORY).map(([part, words]) => [titled(part), words, memory[prefix + part], part]);
  const peak = ["Peak", "arguments + outputs − aliased + temporaries + code", memory.peak, "strong"];
  const host = parts("host_");
  const onHost = [el("h3", "On its host"), bars(host, bytes)];
  const hasHost = host.some(([, , size]) => size);
  const device = bars([...parts(""), peak], bytes);
  return section("memory", title, device, hasHost ? onHost : note("Host memory: 0 B"));
}

function costSection({ cost }) {
  if (!cost) return section("cost", "Cost", note(NOT_READ));
  const columns = [
    { label: "", cell: ([figure, , words]) => [titled(figure), " ", el("small.muted", words)] },
    { label: "One device", number: true, cell: ([figure, show]) => show(cost[figure]) },
  ];
  const table = tableOf({ name: "Cost", columns, rows: COST });
  return section("cost", "Cost", table.node, note(`Counted ${cost.stage}.${unknown(cost)}`));
}

const unknown = ({ why }) => (why ? ` Unknown: ${why}.` : "");

/** What collectives send over which links. */
function trafficTable(rows) {
  const columns = [
    { label: "Links", value: ({ links }) => links },
    { label: "Axes", cell: (row) => axesNode(sortedAxes(row.axes)) },
    { label: "Bandwidth", value: (row) => row.bandwidth, number: speed },
    { label: "Bytes sent", value: (row) => row.bytes_sent, number: bytes },
    { label: "Time", value: (row) => row.seconds, number: time },
  ];
  return rows.length > 0 && tableOf({ name: "Traffic by links", columns, rows }).node;
}

function rooflineSection(report) {
  const { roofline, cost } = report;
  if (!roofline) return null;
  const { compute_s, memory_s, interconnect_s, traffic, sources, hardware, bound_by } = roofline;
  const entries = RESOURCES.map((kind) => {
    const isBound = kind === bound_by;
    return [titled(kind), isBound && "the longest", roofline[`${kind}_s`], isBound && "strong"];
  });
  const intensity = figure(digits, "flops per byte")(roofline.arithmetic_intensity);
  const parts = [compute_s, memory_s, ...traffic.map((row) => row.seconds)];
  const total = (...times) => sum(times, (time) => time);
  const most = isNumber(interconnect_s) ? combined(total, parts) : null;
  const own = cost?.optimal_seconds;
  const links = [...new Set(Object.values(sources))].map((href) => {
    const link = el("a", { href, rel: "noopener noreferrer" }, href);
    return [" ", /^https?:\/\//i.test(href) ? link : href];
  });
  const nodes = [
    bars(entries, time),
    roofline.why && note(unknown(roofline)),
    caveatOf(report) && note(caveatOf(report)),
    trafficTable(traffic),
    note("If all of it overlaps ", time(combined(Math.max, timesOf(roofline))), ", if nothing does ", time(most), "."),
    isNumber(roofline.busy_s) && note("One operation after the other: ", time(roofline.busy_s), "."),
    isNumber(roofline.exposed_s) && note("Waits for communication, as scheduled: ", time(roofline.exposed_s), "."),
    isNumber(own) && note("The compiler's own estimate: ", time(own), ", with the bodies of loops counted once."),
    note("Arithmetic intensity ", intensity, " flops per byte."),
    links.length > 0 && note("Figures of the hardware:", links),
  ];
  return section("roofline", `Roofline of ${hardware}`, nodes);
}
