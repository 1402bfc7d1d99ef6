// The most important figures: memory, cost, and the roofline.

const MEMORY = ["arguments", "outputs", "temporaries", "generated_code", "aliased"];

const titled = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

const NOT_READ = "The compiled program is not understood.";

// How often a collective runs is unknown in some loops; then it counts once.
const bytesSent = (collective) => (collective.bytes_sent ?? 0) * (collective.times ?? 1);
const totalSent = ({ collectives }) => collectives && sum(collectives, bytesSent);

/** A figure of several, unknown if one of them is. */
const combined = (combine, parts) => (parts.every(isNumber) ? combine(parts) : null);

const RESOURCES = ["compute", "memory", "interconnect"];
const rooflineSeconds = ({ roofline }) =>
  roofline && combined((times) => Math.max(...times), RESOURCES.map((kind) => roofline[`${kind}_s`]));

// The figures that matter most: key, label, format, and how they are read from a report.
const FIGURES = [
  ["peak", "Peak memory", bytes, ({ memory }) => memory?.peak],
  ["bytes_sent", "Bytes sent", bytes, totalSent],
  ["flops", "Flops", count, ({ cost }) => cost?.flops],
  ["roofline", "Roofline", time, rooflineSeconds],
];

function overview(report) {
  const { roofline, parameters, collectives } = report;
  const inLoop = collectives?.some(({ times }) => times === null);
  const inBranch = collectives?.some(({ conditional }) => conditional);
  const counted =
    (inLoop ? "; some in loops of unknown length, counted once" : "") +
    (inBranch ? "; of conditionals the branch that sends most" : "");
  const bound = roofline && `at peak rates of ${roofline.hardware}, set by ${roofline.bound_by ?? UNKNOWN}`;
  const notes = {
    bytes_sent: collectives ? many(collectives.length, "collective") + counted : NOT_READ,
    roofline: bound ?? "the hardware is not known",
  };
  const tile = (label, value, note) => el("div", el("dt", label), el("dd", value), el("dd", note));
  const total = [bytes(sum(parameters, (row) => row.bytes_total)), " in total"];
  const tiles = [tile("Argument arrays", integer(parameters.length), total)];
  for (const [key, label, show, of] of FIGURES)
    tiles.push(tile(label, show(of(report)), notes[key] ?? "of each device"));
  return el("dl.tiles", tiles);
}

function memorySection({ memory }) {
  const title = "Memory of each device";
  if (!memory) return section("memory", title, note("The backend does not report it."));
  const parts = (prefix) =>
    MEMORY.map((part) => [titled(part), memory[prefix + part], part === "aliased" && part]);
  const device = bars([...parts(""), ["Peak", memory.peak, "strong"]], bytes);
  const host = parts("host_");
  const onHost = [el("h3", "On its host"), bars(host, bytes)];
  const hasHost = host.some(([, size]) => size);
  return section("memory", title, device, hasHost ? onHost : note("Nothing on its host."));
}

function costSection({ cost }) {
  if (!cost) return section("cost", "Cost", note(NOT_READ));
  const rows = Object.entries({ flops: count, bytes_accessed: bytes, transcendentals: count });
  const columns = [
    { label: "", cell: ([figure]) => titled(figure) },
    { label: "One device", number: true, cell: ([figure, show]) => show(cost[figure]) },
  ];
  const table = tableOf({ name: "Cost", columns, rows });
  return section("cost", "Cost", table.node, note(`${cost.stage}.`));
}

/** What collectives send over which links. */
function trafficTable(rows) {
  const speed = figure((n) => `${countText(n)}B/s`, "bytes per second");
  const columns = [
    { label: "Links", cell: ({ links }) => links },
    { label: "Axes", cell: (row) => axesNode(axesOf(row)) },
    { label: "Bandwidth", value: (row) => row.bandwidth, number: speed },
    { label: "Bytes sent", value: (row) => row.bytes_sent, number: bytes },
    { label: "At least", value: (row) => row.seconds, number: time },
  ];
  return rows.length > 0 && tableOf({ name: "Traffic by links", columns, rows }).node;
}

function rooflineSection({ roofline, cost }) {
  if (!roofline) return null;
  const entries = RESOURCES.map((kind) => {
    const isBound = kind === roofline.bound_by;
    const label = isBound ? el("strong", `${titled(kind)} (the bound)`) : titled(kind);
    return [label, roofline[`${kind}_s`], isBound && "strong"];
  });
  const intensity = figure(digits, "flops per byte")(roofline.arithmetic_intensity);
  const { compute_s, memory_s, interconnect_s, traffic, sources, hardware } = roofline;
  const parts = [compute_s, memory_s, ...traffic.map((row) => row.seconds)];
  const total = (times) => sum(times, (time) => time);
  const most = isNumber(interconnect_s) ? combined(total, parts) : null;
  const overlap = note("Without overlap, one after another: ", time(most), ".");
  const own = cost?.optimal_seconds;
  const loops = ", with the bodies of loops counted once.";
  const estimate = isNumber(own) && note("The compiler's own estimate: ", time(own), loops);
  const links = [...new Set(Object.values(sources))].map((href) => {
    const link = el("a", { href, rel: "noopener noreferrer" }, href);
    return [" ", /^https?:\/\//i.test(href) ? link : href];
  });
  const words = note("Arithmetic intensity ", intensity, " flops per byte. ");
  const cited = links.length > 0 && note("Figures of the hardware:", links);
  const nodes = [bars(entries, time), trafficTable(traffic), overlap, estimate, words, cited];
  return section("roofline", `Roofline of ${hardware}`, nodes);
}
