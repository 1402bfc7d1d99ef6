// The most important figures: memory, cost, and the roofline.

const MEMORY = ["arguments", "outputs", "temporaries", "generated_code", "aliased"];

const titled = (name) => name[0].toUpperCase() + name.slice(1).replaceAll("_", " ");

// How often a collective runs is unknown in some loops; then it counts once.
const bytesSent = (collective) => (collective.bytes_sent ?? 0) * (collective.times ?? 1);
const totalSent = (report) => report.collectives && sum(report.collectives, bytesSent);

function rooflineTimes({ roofline }) {
  const kinds = roofline ? ["compute", "memory", "interconnect"] : [];
  return kinds.map((kind) => [kind, roofline[`${kind}_s`]]);
}
function rooflineSeconds(report) {
  const times = rooflineTimes(report).map(([, seconds]) => seconds);
  return times.some(isNumber) ? Math.max(...times.filter(isNumber)) : null;
}

function overview(report) {
  const { memory, roofline, cost } = report;
  const [parameters, collectives] = [listOf(report.parameters), listOf(report.collectives)];
  const inLoop = collectives.some(({ times }) => times === null);
  const counted = inLoop ? "; some in loops of unknown length, counted once" : "";
  return tiles(
    [
      "Argument arrays",
      integer(parameters.length),
      [bytes(sum(parameters, (row) => row.bytes_total)), " in total"],
    ],
    ["Peak memory", bytes(memory?.peak), "of each device"],
    ["Flops", count(cost?.executed?.flops), "of each device"],
    ["Bytes sent", bytes(totalSent(report)), many(collectives.length, "collective") + counted],
    [
      "Roofline",
      time(rooflineSeconds(report)),
      roofline
        ? `lower bound on ${roofline.device}, set by ${roofline.bound_by}`
        : "no device was given",
    ],
  );
}

function memorySection({ memory }) {
  if (!memory) return section("memory", "Memory", note("The backend does not report it."));
  const parts = (prefix) =>
    MEMORY.map((part) => [titled(part), memory[prefix + part], part === "aliased" && "aliased"]);
  const host = parts("host_");
  return section(
    "memory",
    "Memory of each device",
    bars([...parts(""), ["Peak", memory.peak, "strong"]], bytes),
    host.some(([, size]) => size)
      ? [el("h3", "On its host"), bars(host, bytes)]
      : note("Nothing in host memory."),
  );
}

function costSection(report) {
  const cost = report.cost ?? {};
  const column = (stage) => ({
    label: titled(stage),
    number: true,
    cell: ([figure, show]) => show(cost[stage]?.[figure]),
  });
  const table = tableOf({
    name: "Cost by stage",
    columns: [
      { label: "", cell: ([figure]) => titled(figure) },
      column("lowered"),
      column("executed"),
    ],
    rows: [
      ["flops", count],
      ["bytes_accessed", bytes],
      ["transcendentals", count],
    ],
  });
  const stages = ["lowered", "executed"].filter((stage) => cost[stage]?.stage);
  const notes = stages.map((stage) => `${titled(stage)}: ${cost[stage].stage}.`);
  return section("cost", "Cost", table.node, note(notes.join(" ")));
}

function rooflineSection(report) {
  const { roofline } = report;
  if (!roofline) return null;
  const source = String(roofline.source ?? "");
  const entries = rooflineTimes(report).map(([kind, seconds]) =>
    kind === roofline.bound_by
      ? [el("strong", `${titled(kind)} (the bound)`), seconds, "strong"]
      : [titled(kind), seconds],
  );
  return section(
    "roofline",
    `Roofline of ${roofline.device}`,
    bars(entries, time),
    note(
      "Arithmetic intensity ",
      figure(digits, "flops per byte")(roofline.arithmetic_intensity),
      " flops per byte. ",
      /^https?:\/\//i.test(source)
        ? el("a", { href: source, rel: "noopener noreferrer" }, "Figures of the device")
        : source && `Figures of the device: ${source}`,
    ),
  );
}
