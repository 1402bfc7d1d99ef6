// What the devices exchange.

const axesKeyOf = (collective) => axesText(axesOf(collective));

function sumsTable(collectives) {
  const column = (label, chosen, head) => {
    const cell = (kinds) => {
      const some = chosen.filter(({ kind }) => kinds.includes(kind));
      const number = el("small.muted", `${integer(some.length)} ×`);
      return some.length ? [bytes(sum(some, bytesSent)), el("br"), number] : UNKNOWN;
    };
    return { label, head, number: true, cell: (kind) => cell([kind]), total: cell };
  };
  const columns = [{ label: "Kind", cell: (kind) => kind }];
  for (const [axes, chosen] of Map.groupBy(collectives, axesKeyOf))
    columns.push(column(axes, chosen, axesNode(axesOf(chosen[0]))));
  columns.push(column("All axes", collectives));
  const rows = [...new Set(collectives.map(({ kind }) => kind))];
  return tableOf({ name: "Bytes sent by kind and axes", columns, rows });
}

const shortened = (text) => (text.length > 60 ? `…${text.slice(-59)}` : text);

function origin({ source, operation }) {
  const words = operation && el("small.muted.path", { title: operation }, shortened(operation));
  return [source && [el("code", source), " "], words];
}

function runs({ times, in_loop }) {
  if (isSet(times)) return el("span", { title: in_loop && "in a loop" }, integer(times));
  return el("span", { title: "in a loop of unknown length" }, "loop");
}

function collectivesSection(report, showInProgram) {
  const collectives = listOf(report.collectives);
  if (!collectives.length) {
    const text = report.collectives ? "The devices exchange nothing." : "Unknown.";
    return section("collectives", "Collectives", note(text));
  }
  const link = (name) =>
    linkButton(el("code", name), () => showInProgram(name), "Find it in the program");
  const instruction = ({ name }) => (report.hlo ? link(name) : el("code", name));
  const groups = (c) => `${c.num_groups ?? UNKNOWN} of ${c.group_size ?? UNKNOWN}`;
  const columns = [
    { label: "Kind", value: (c) => c.kind },
    { label: "Instruction", value: (c) => c.name, cell: instruction },
    { label: "Axes", value: axesKeyOf, cell: (c) => axesNode(axesOf(c)) },
    { label: "Groups", value: (c) => c.group_size, cell: groups },
    { label: "Origin", value: (c) => c.source ?? c.operation, cell: origin },
    { label: "Runs", value: (c) => c.times ?? Infinity, number: integer, cell: runs },
    { label: "Bytes", value: (c) => c.bytes, number: bytes },
    summed("Bytes sent", bytesSent, bytes),
  ];
  const search = (c) => [axesKeyOf(c), ...Object.values(c)];
  const [name, noun] = ["Collectives", "collective"];
  const table = tableOf({ name, noun, columns, rows: collectives, search });
  const title = el("strong", `Each collective (${integer(collectives.length)})`);
  return section(
    "collectives",
    "Collectives",
    note("Bytes that one device sends in one call, and how many instructions send them"),
    sumsTable(collectives).node,
    el("details", { open: collectives.length <= 20 }, el("summary", title), table.node),
  );
}
