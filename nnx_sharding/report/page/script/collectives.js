// What the devices exchange.

function sumsTable(collectives) {
  const column = (label, chosen, head) => {
    const cell = (kinds) => {
      const some = chosen.filter(({ kind }) => kinds.includes(kind));
      const number = el("small.muted", `${integer(some.length)} ×`);
      return some.length ? [bytes(sum(some, bytesSent)), el("br"), number] : UNKNOWN;
    };
    return { label, head, number: true, cell: (kind) => cell([kind]), total: cell };
  };
  const byAxes = [...Map.groupBy(collectives, (collective) => axesText(axesOf(collective)))];
  return tableOf({
    name: "Bytes sent by kind and axes",
    columns: [
      { label: "Kind", cell: (kind) => kind },
      ...byAxes.map(([axes, chosen]) => column(axes, chosen, axesNode(axesOf(chosen[0])))),
      column("All axes", collectives),
    ],
    rows: [...new Set(collectives.map(({ kind }) => kind))],
  });
}

const shortened = (text) => (text.length > 60 ? `…${text.slice(-59)}` : text);

function origin({ source, operation }) {
  return [
    source && [el("code", source), " "],
    operation && el("small.muted.path", { title: operation }, shortened(operation)),
  ];
}

function runs({ times, in_loop }) {
  if (isSet(times)) return el("span", { title: in_loop && "in a loop" }, integer(times));
  return el("span", { title: "in a loop of unknown length" }, "loop");
}

const collectiveColumns = (showInProgram) => [
  { label: "Kind", value: ({ kind }) => kind },
  {
    label: "Instruction",
    value: ({ name }) => name,
    cell: ({ name }) =>
      showInProgram
        ? linkButton(el("code", name), () => showInProgram(name), "Find it in the program")
        : el("code", name),
  },
  {
    label: "Axes",
    value: (collective) => axesText(axesOf(collective)),
    cell: (collective) => axesNode(axesOf(collective)),
  },
  {
    label: "Groups",
    value: ({ group_size }) => group_size,
    cell: ({ num_groups, group_size }) => `${num_groups ?? UNKNOWN} of ${group_size ?? UNKNOWN}`,
  },
  { label: "Origin", value: ({ source, operation }) => source ?? operation, cell: origin },
  { label: "Runs", value: ({ times }) => times ?? Infinity, number: true, cell: runs },
  { label: "Bytes", value: (collective) => collective.bytes, number: bytes },
  summed("Bytes sent", bytesSent, bytes),
];

function collectivesSection(report, showInProgram) {
  const collectives = listOf(report.collectives);
  if (!collectives.length) {
    const text = report.collectives ? "The devices exchange nothing." : "Unknown.";
    return section("collectives", "Collectives", note(text));
  }
  const table = tableOf({
    name: "Collectives",
    noun: "collective",
    columns: collectiveColumns(report.hlo && showInProgram),
    rows: collectives,
    search: (c) =>
      [c.kind, c.name, c.computation, c.dtype, axesText(axesOf(c)), c.operation, c.source].join(
        " ",
      ),
  });
  return section(
    "collectives",
    "Collectives",
    note("Bytes that one device sends in one call, and how many instructions send them"),
    sumsTable(collectives).node,
    el(
      "details",
      { open: collectives.length <= 20 },
      el("summary", el("strong", `Each collective (${integer(collectives.length)})`)),
      table.node,
    ),
  );
}
