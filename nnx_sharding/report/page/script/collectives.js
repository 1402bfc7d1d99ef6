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

function origin({ source, operation }) {
  const shown = operation?.length > 60 ? `…${operation.slice(-59)}` : operation;
  const words = operation && el("small.muted.path", { title: operation }, shown);
  return [source && [el("code", source), " "], words];
}

/** What a collective is for, with the parameters, or else the module that it is in. */
function purpose({ purpose, parameters, module }) {
  const [first, ...rest] = parameters;
  const words = first ? first + (rest.length ? ` and ${rest.length} more` : "") : module;
  const all = { title: parameters.join("\n") };
  return [purpose, words && [el("br"), el("small.muted.path", all, words)]];
}

function runs({ times, in_loop, conditional }) {
  const title = conditional ? "in a branch, at most" : in_loop && "in a loop";
  if (isSet(times)) return el("span", { title }, conditional && "≤ ", integer(times));
  return el("span", { title: "in a loop of unknown length" }, "loop");
}

function collectivesSection(report, showInProgram) {
  const { collectives } = report;
  const [id, name, noun] = ["collectives", "Collectives", "collective"];
  if (!collectives) return section(id, name, note(NOT_READ));
  if (!collectives.length) return section(id, name, note("The devices exchange nothing."));
  const link = (code, find) => linkButton(code, find, "Find it in the program");
  const instruction = ({ name }) =>
    report.hlo ? link(el("code", name), () => showInProgram(name)) : el("code", name);
  const groups = (c) => `${c.num_groups} of ${c.group_size}`;
  const columns = [
    { label: "Kind", value: (c) => c.kind },
    { label: "Instruction", value: (c) => c.name, cell: instruction },
    { label: "Axes", value: axesKeyOf, cell: (c) => axesNode(axesOf(c)) },
    { label: "Groups", value: (c) => c.group_size, cell: groups },
    { label: "Purpose", value: (c) => c.purpose, cell: purpose },
    { label: "Origin", value: (c) => c.source ?? c.operation, cell: origin },
    { label: "Runs", value: (c) => c.times ?? Infinity, number: integer, cell: runs },
    { label: "Bytes", value: (c) => c.bytes, number: bytes },
    summed("Bytes sent", bytesSent, bytes),
  ];
  const search = (c) => [axesKeyOf(c), ...Object.values(c)];
  const table = tableOf({ name, noun, columns, rows: collectives, search });
  const title = el("strong", `Each collective (${integer(collectives.length)})`);
  const all = el("details", { open: collectives.length <= 20 }, el("summary", title), table.node);
  const words = note("Bytes that one device sends in one call, and how many instructions send them");
  return section(id, name, words, sumsTable(collectives).node, all);
}
